"""Pictures of a data set that are the same file under several ids, by the SHA-256 of their bytes."""

from pathlib import Path

import numpy as np

from shardwright.convert.records import Finding
from shardwright.datasets.layout import Manifest
from shardwright.datasets.reader import Reader


def duplicates(folder: Path, manifest: Manifest) -> list[Finding]:
    """A finding for each picture but the first of those of the same bytes, by id.

    Reads hashes and labels of all, and the ids of those that are the same.

    Raises
    ------
    ShardError
        A shard cannot be read.
    """
    reader, rows = Reader(folder, manifest), np.arange(manifest.rows)
    hashes = reader.column("source_sha256", rows)
    start = np.ascontiguousarray(hashes[:, :8]).view(np.uint64)[:, 0]
    _, inverse, counts = np.unique(start, return_inverse=True, return_counts=True)
    several = np.flatnonzero(
        counts[inverse] > 1
    )  # or those of which eight bytes are the same, once in an age
    ids, labels = reader.column("id", several).tolist(), reader.labels(several).tolist()
    same: dict[bytes, list[tuple[str, int]]] = {}
    for row, id, label in zip(several.tolist(), ids, labels, strict=True):
        same.setdefault(hashes[row].tobytes(), []).append((id, label))
    found = []
    for copies in same.values():
        (first, label), *others = sorted(copies)
        for id, other in others:
            reason = "same-class" if other == label else "other-class"
            found.append(Finding(id, "duplicate", reason, f"the same bytes as '{first}'", 0))
    return found
