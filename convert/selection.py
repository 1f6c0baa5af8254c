"""Pure: which rows of a data set, in which order, and on which side of a split."""

import hashlib
import itertools
import re
from collections.abc import Container, Mapping, Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np

from shardwright.datasets.layout import SPLIT_NAMES, path_to_id
from shardwright.datasets.rows import Index
from shardwright.errors import UsageError, named

_SIDES = 1 << 64


def read_ids(path: Path) -> tuple[str, ...]:
    """The ids in the file ``path``, one a line; empty lines are passed over, ids that stand twice count once.

    Raises
    ------
    UsageError
        It cannot be read, is not UTF-8, or has no ids.
    """
    try:
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except OSError as error:
        raise UsageError(f"cannot read the ids in '{path}': {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"the ids in '{path}' are not UTF-8: {error}") from error
    ids = tuple(dict.fromkeys(line.removesuffix("\r") for line in lines if line.strip()))
    if not ids:
        raise UsageError(f"'{path}' holds no ids: expected one a line")
    return ids


def class_numbers(names: Sequence[str], classes: Sequence[str]) -> list[int]:
    """Numbers of the classes ``names``, of which each may be several with commas between.

    A name may also be that of the folder, as the operating system takes it, where its id has escapes.

    Raises
    ------
    UsageError
        There is no such class.
    """
    number = {name: k for k, name in enumerate(classes)}
    given = [one for name in names for one in ([name] if _id(name, number) in number else name.split(","))]
    wanted = [_id(name, number) for name in given]
    if unknown := [name for name in wanted if name not in number]:
        raise UsageError(
            f"no class is called {named(unknown)}; there are {len(classes)} classes, such as {named(classes)}"
        )
    return sorted({number[name] for name in wanted})


def _id(name: str, known: Container[str]) -> str:
    return name if name in known else path_to_id(name)


def canonical(ids: Sequence[str], index: Index, seed: int) -> Index:
    """``index``, whose rows have the ``ids``, in the order that ids and ``seed`` alone decide, as in `convert`."""
    by_id = np.array(sorted(range(len(ids)), key=ids.__getitem__), np.int64)
    order = np.random.Generator(np.random.PCG64(seed)).permutation(len(ids))
    return index[by_id[order]]


def parse_shares(text: str) -> dict[str, Fraction]:
    """``train=0.9,val=0.1`` as part -> share, in the order train, val, ..., test.

    Raises
    ------
    UsageError
        It is something else, a part has another name than a split, or the shares do not sum to 1.
    """
    shares: dict[str, Fraction] = {}
    for entry in text.split(","):
        found = re.fullmatch(r"\s*(\w+)\s*=\s*([0-9]*\.?[0-9]+|[0-9]+/[1-9][0-9]*)\s*", entry)
        if not found or len(entry) > 100:
            raise UsageError(f"by is {text!r}, expected parts and their shares, such as train=0.9,val=0.1")
        name = found[1]
        if name not in SPLIT_NAMES:
            raise UsageError(f"by: {name!r} is no name of a part, expected {', '.join(SPLIT_NAMES)}")
        if name in shares:
            raise UsageError(f"by: {name!r} stands twice")
        shares[name] = Fraction(found[2])
        if not 0 < shares[name] < 1:
            raise UsageError(f"by: the share of {name!r} is {found[2]}, expected more than 0 and less than 1")
    total = sum(shares.values(), Fraction(0))
    if abs(total - 1) > Fraction(1, 10**6):
        raise UsageError(f"by: the shares sum to {float(total):g}, expected 1")
    return {name: shares[name] for name in SPLIT_NAMES if name in shares}


def sides(ids: Sequence[str], seed: int, shares: Mapping[str, Fraction]) -> dict[str, Index]:
    """Part -> places in ``ids`` of those that belong to it, by a hash of seed and id alone.

    So an id stays on its side whatever else there is, and of every class each part gets its share, by expectation.
    """
    limits = itertools.accumulate(shares.values())
    ends = [int(limit * _SIDES) for limit in limits]
    ends[-1] = _SIDES
    found: dict[str, list[int]] = {name: [] for name in shares}
    names = list(shares)
    for place, id in enumerate(ids):
        digest = hashlib.sha256(f"{seed}/{id}".encode("utf-8", "surrogatepass")).digest()
        value = int.from_bytes(digest[:8], "big")
        found[next(name for name, end in zip(names, ends, strict=True) if value < end)].append(place)
    return {name: np.array(places, np.int64) for name, places in found.items()}
