"""From an index into the data set to (shard, row): pure arithmetic over the living rows."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shardwright.datasets.layout import Shard

Index = npt.NDArray[np.int64]


class RowMap:
    """Where each index of a data set lies.

    *index* counts the living rows over all shards, *row* counts the rows of one shard as stored, and
    *slot* counts the stored rows over all shards, dead ones included: slot = first_slot[shard] + row.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        counts = np.array([shard.rows for shard in shards], np.int64)
        #: (shards + 1,) slot of the first row of each shard; the last is the number of slots.
        self.first_slot: Index = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        dead = [
            first + np.asarray(shard.dead_rows, np.int64)
            for first, shard in zip(self.first_slot[:-1], shards, strict=True)
            if shard.dead_rows
        ]
        dead_slots = np.concatenate(dead) if dead else np.empty(0, np.int64)
        # How many living rows stand before each dead one: one search then tells how many dead rows stand
        # before a living one.
        self._living_before: Index = dead_slots - np.arange(len(dead_slots))
        self._length = int(self.first_slot[-1]) - len(dead_slots)

    def __len__(self) -> int:
        return self._length

    @property
    def slots(self) -> int:
        """Stored rows over all shards, dead ones included."""
        return int(self.first_slot[-1])

    def slot_of(self, index: Index) -> Index:
        """Slot of each index in ``[0, len)``, int64 of the same shape."""
        if not len(self._living_before):
            return index
        return index + np.searchsorted(self._living_before, index, side="right")

    def shard_of(self, slot: Index) -> Index:
        """Shard that each slot lies in, int64 of the same shape."""
        return np.searchsorted(self.first_slot, slot, side="right") - 1

    def blocks(self, chunk_rows: int) -> Index:
        """Where chunks begin, in indices: block k holds the indices ``[blocks[k], blocks[k + 1])``.

        Every shard begins a block; a chunk of which no row lives has none.
        """
        rows = np.diff(self.first_slot)
        chunks = -(-rows // chunk_rows)
        shard = np.repeat(np.arange(len(rows)), chunks)
        chunk = np.arange(len(shard)) - np.repeat(np.cumsum(chunks) - chunks, chunks)
        first_slots = self.first_slot[shard] + chunk * chunk_rows
        dead_slots = self._living_before + np.arange(len(self._living_before))
        starts = first_slots - np.searchsorted(dead_slots, first_slots)
        return np.unique(np.append(starts, len(self)))
