"""Pure: pictures of a data set that are the same file under several ids, by the SHA-256 of their bytes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwright.convert.records import Finding


def duplicates(
    ids: Sequence[str], labels: npt.NDArray[np.int64], hashes: npt.NDArray[np.uint8]
) -> list[Finding]:
    """A finding for each picture but the first of those of the same bytes, by id.

    Parameters
    ----------
    ids, labels, hashes
        Of all n rows: ids; int64 (n,) class numbers; uint8 (n, 32) SHA-256 of the pictures' files.
    """
    start = np.ascontiguousarray(hashes[:, :8]).view(np.uint64)[:, 0]
    _, inverse, counts = np.unique(start, return_inverse=True, return_counts=True)
    several: npt.NDArray[Any] = np.flatnonzero(
        counts[inverse] > 1
    )  # or those of which eight bytes are the same, once in an age
    same: dict[bytes, list[tuple[str, int]]] = {}
    for row, label in zip(several.tolist(), labels[several].tolist(), strict=True):
        same.setdefault(hashes[row].tobytes(), []).append((ids[row], label))
    found = []
    for copies in same.values():
        (first, label), *others = sorted(copies)
        for id, other in others:
            reason = "same-class" if other == label else "other-class"
            found.append(Finding(id, "duplicate", reason, f"the same bytes as '{first}'", 0))
    return found
