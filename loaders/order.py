"""In which order samples come: pure functions of (seed, epoch) and of where chunks begin.

An order is an array of indices. The block order is the online half of CorgiPile (Xu et al., "In-Database
Machine Learning with CorgiPile", SIGMOD 2022): chunks in random order, several of them mixed in a buffer;
the converter's permutation of all rows is the offline half.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

Order = Literal["sequential", "exact", "block"]
Indices = npt.NDArray[np.int64] | npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Epoch:
    """The samples of one epoch, in order.

    Attributes
    ----------
    indices
        (rows,): the index at each position.
    groups
        Positions at which a group begins, and the end: the rows of one group are read together. In block
        order a group is the chunks that are mixed, and no chunk is in two of them.
    """

    indices: Indices
    groups: npt.NDArray[np.int64]


def sequential(blocks: npt.NDArray[np.int64], mixed: int) -> Epoch:
    """All samples in the order of the data set, ``mixed`` chunks a group."""
    return Epoch(_range(blocks), np.append(blocks[:-1][::mixed], blocks[-1]))


def exact_shuffle(blocks: npt.NDArray[np.int64], seed: int, epoch: int) -> Epoch:
    """A uniform permutation of all samples, another one each epoch; one group, whose rows are read one by one."""
    indices = _range(blocks)
    _generator(seed, epoch).shuffle(indices)
    return Epoch(indices, np.array([0, len(indices)]))


def block_shuffle(blocks: npt.NDArray[np.int64], mixed: int, seed: int, epoch: int, lanes: int = 1) -> Epoch:
    """Chunks in random order, the rows of each ``mixed`` of them permuted; another order each epoch.

    Parameters
    ----------
    blocks
        Where chunks begin: chunk k holds the indices ``[blocks[k], blocks[k + 1])``.
    lanes
        The chunks, laid end to end, are cut by rows into so many equal parts, and none is mixed with another.
    """
    generator = _generator(seed, epoch)
    order = generator.permutation(len(blocks) - 1)
    sizes = np.diff(blocks)[order]
    ends = np.cumsum(sizes)
    # Each index of the shuffled chunks, laid end to end: its place in the chunk, and where the chunk begins.
    indices = _range(blocks)
    indices += np.repeat(blocks[:-1][order] - (ends - sizes), sizes).astype(indices.dtype)
    rows = int(ends[-1])
    groups = np.unique(np.concatenate([_lane_groups(ends, mixed, k * rows // lanes, (k + 1) * rows // lanes)
                                       for k in range(lanes)]))  # fmt: skip
    for start, end in pairwise(groups.tolist()):
        generator.shuffle(indices[start:end])
    return Epoch(indices, groups)


def _lane_groups(ends: npt.NDArray[np.int64], mixed: int, start: int, stop: int) -> npt.NDArray[np.int64]:
    """Where the groups of the lane ``[start, stop)`` begin and end; ``ends`` are the ends of the chunks."""
    inner = ends[(ends > start) & (ends < stop)]
    return np.concatenate([[start], inner[mixed - 1 :: mixed], [stop]])


def _generator(seed: int, epoch: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64([seed, epoch]))


def _range(blocks: npt.NDArray[np.int64]) -> Indices:
    if blocks[-1] < 1 << 31:
        return np.arange(blocks[-1], dtype=np.int32)  # half the memory
    return np.arange(blocks[-1], dtype=np.int64)
