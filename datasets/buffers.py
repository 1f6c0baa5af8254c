"""Memory for rows: where a reader puts each of them."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shardwright.datasets.rows import Index
from shardwright.errors import UsageError

Pixels = npt.NDArray[np.uint8]


#: Bytes of a line of the processor's cache. The kernel copies to and from addresses that are multiples of it up to
#: twice as fast as to others.
ALIGNMENT = 64


def aligned(size: int) -> Pixels:
    """``size`` bytes of memory that begins at a multiple of `ALIGNMENT`, of undefined content."""
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size]


class RowBuffers:
    """Places for n rows of pixels, in the rows of one or more arrays.

    ``buffers[i]`` is the place of the i-th row, a flat uint8 array. ``addresses[i]`` is where in memory it lies,
    good as long as this object lives.

    Parameters
    ----------
    arrays
        uint8 (k, row_bytes), in C order and writable, all of one ``row_bytes``.
    array, row
        (n,) which array each row goes to, and which row of it. None: the first array, from its beginning.
    """

    __slots__ = ("addresses", "array", "arrays", "row", "row_bytes")

    def __init__(
        self, arrays: Sequence[Pixels], array: Index | None = None, row: Index | None = None
    ) -> None:
        self.arrays, self.row_bytes = arrays, arrays[0].shape[-1]
        self.array = np.zeros(len(arrays[0]), np.int64) if array is None else array
        self.row = np.arange(len(arrays[0])) if row is None else row
        for rows in arrays:
            # Addresses know no bounds: what does not fit would be written over something else.
            if rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != self.row_bytes:
                raise UsageError(
                    f"a buffer is {rows.dtype} {rows.shape}, expected uint8 (k, {self.row_bytes})"
                )
            if not (rows.flags.c_contiguous and rows.flags.writeable):
                raise UsageError("a buffer is not writable, or not in C order")
        if array is not None or row is not None:
            lengths = np.array([len(rows) for rows in arrays])
            if len(self.row) != len(self.array) or not ((self.array >= 0) & (self.array < len(arrays))).all():
                raise UsageError("rows and their arrays do not go together")
            if not ((self.row >= 0) & (self.row < lengths[self.array])).all():
                raise UsageError("a row is outside its buffer")
        starts = np.array([rows.ctypes.data for rows in arrays], np.int64)
        self.addresses: Index = starts[self.array] + self.row * self.row_bytes

    def part(self, which: Index) -> "RowBuffers":
        """The places of the rows ``which`` alone, in that order."""
        part = object.__new__(RowBuffers)
        part.arrays, part.row_bytes = self.arrays, self.row_bytes
        part.array, part.row, part.addresses = self.array[which], self.row[which], self.addresses[which]
        return part

    def __len__(self) -> int:
        return len(self.row)

    def __getitem__(self, i: int) -> Pixels:
        place: Pixels = self.arrays[self.array[i]][self.row[i]]
        return place
