"""Whose turn a sample is: the order of a job, dealt out over ranks and batches. Pure functions.

The order is defined for the job as a sequence of *global batches*; each rank takes its slice of each of them. In
block order the shuffled chunks are cut by rows into equal *lanes*, one for each rank there was at the start of the
epoch, so that only a chunk at a cut is read by two ranks: a global batch is then a part of each lane, laid end to end.
In the other orders there is one lane.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from shardwright.loaders.order import Epoch, Indices

Uneven = Literal["drop", "pad", "spread"]
Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Dealing:
    """How an epoch is dealt out.

    Parameters
    ----------
    global_batch
        Samples of a batch over all ranks.
    uneven
        ``drop``: what does not fill a global batch is left out. ``pad``: the last one is filled up with samples from
        the beginning. ``spread``: every sample exactly once; what is left is spread over the ranks.
    lanes
        Lanes of the order.
    batches
        How many there are to be, where others have more or fewer samples; None: as many as there are samples for. More
        are only made of ``spread``, fewer only of the others.
    """

    global_batch: int
    uneven: Uneven
    lanes: int = 1
    batches: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """What one rank reads in one epoch.

    Batch k holds ``indices[bounds[k]:bounds[k + 1]]``. Positions ``[groups[j], groups[j + 1])`` are read together.
    """

    indices: Indices
    bounds: Positions
    groups: Positions

    def __len__(self) -> int:
        return len(self.bounds) - 1


def batch_count(rows: int, dealing: Dealing) -> int:
    """Batches of one epoch, the same on every rank."""
    if dealing.batches is not None:
        return dealing.batches
    batch = dealing.global_batch // dealing.lanes
    lengths = np.diff(_cuts(rows, dealing.lanes))
    if dealing.uneven == "drop":
        return int(lengths.min()) // batch
    return -(-int(lengths.max()) // batch)


def in_step(parts: Sequence[int], dealing: Dealing) -> Dealing:
    """``dealing`` with as many batches for each of ``parts``, which have so many rows each.

    Those of the smallest, so that what the others have more is left out; with ``spread``, where nothing is, those of
    the largest.
    """
    counts = [batch_count(rows, dealing) for rows in parts]
    return replace(dealing, batches=max(counts) if dealing.uneven == "spread" else min(counts))


def share_of(epoch: Epoch, dealing: Dealing, rank: int, world: int) -> Share:
    """What ``rank`` of ``world`` reads of ``epoch``; all ranks together read each global batch once."""
    rows = len(epoch.indices)
    count = batch_count(rows, dealing)
    cuts = _cuts(rows, dealing.lanes)
    bounds = [_lane_bounds(int(n), count, dealing, world) for n in np.diff(cuts)]
    if dealing.lanes == world and dealing.uneven != "spread":
        # Its own lane, whose groups are read whole.
        start, length = int(cuts[rank]), int(cuts[rank + 1] - cuts[rank])
        end = int(bounds[rank][-1])
        inner = epoch.groups[(epoch.groups > start) & (epoch.groups < start + min(end, length))] - start
        groups = np.unique(np.concatenate([[0], inner, [min(end, length), end]]))
        return Share(epoch.indices[start + np.arange(end) % max(1, length)], bounds[rank], groups)
    if world == 1 and dealing.lanes == 1:
        return Share(epoch.indices, bounds[0], epoch.groups)
    if dealing.lanes == 1 and dealing.uneven != "spread" and dealing.global_batch % world == 0:
        batch = dealing.global_batch // world
        starts = np.arange(count)[:, None] * dealing.global_batch + rank * batch
        ends = np.arange(count + 1) * batch
        mine = ((starts + np.arange(batch)) % rows).ravel()
        return Share(epoch.indices[mine], ends, _groups_of(ends, epoch))
    positions, lengths = [], []
    for k in range(count):
        parts = [
            start + np.arange(b[k], b[k + 1]) % max(1, length)
            for start, length, b in zip(cuts[:-1], np.diff(cuts), bounds, strict=True)
        ]
        whole = np.concatenate(parts)
        positions.append(whole[rank * len(whole) // world : (rank + 1) * len(whole) // world])
        lengths.append(len(positions[-1]))
    mine = np.concatenate(positions) if positions else np.empty(0, np.int64)
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return Share(epoch.indices[mine], ends, _groups_of(ends, epoch))


def _cuts(rows: int, lanes: int) -> Positions:
    return np.arange(lanes + 1) * rows // lanes


def _lane_bounds(length: int, count: int, dealing: Dealing, world: int) -> Positions:
    """Where the batches of a lane begin and end, ``count`` of them; beyond ``length`` it begins again."""
    batch = dealing.global_batch // dealing.lanes
    whole = np.arange(count + 1) * batch
    if dealing.uneven != "spread" or not count:
        return whole
    least = -(-world // dealing.lanes)  # so that no rank goes without in the last batch, if there are so many
    if length - whole[-2] < least:
        return np.arange(count + 1) * length // count
    return np.minimum(whole, length)


def _groups_of(ends: Positions, epoch: Epoch) -> Positions:
    """Groups of whole batches, about as long as those of ``epoch``."""
    if len(epoch.groups) <= 2 or ends[-1] == 0:
        return np.unique(np.array([0, ends[-1]]))
    length = int(np.diff(epoch.groups).max())
    marks = np.searchsorted(ends, np.arange(length, ends[-1], length))
    return np.unique(np.concatenate([[0], ends[marks], [ends[-1]]]))
