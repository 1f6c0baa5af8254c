"""Mean and standard deviation of each channel, from exact integer sums."""

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from shardwright.datasets.buffers import Pixels
from shardwright.datasets.layout import Stats

#: Squares of so many grey levels of 255 are below 2**53: up to that a float64 is exact.
EXACT_ROWS = 2**53 // 255**2


@dataclass(slots=True)
class Sums:
    """Sums of the grey levels of each channel, and of their squares, over ``pixels`` pixels."""

    pixels: int = 0
    total: list[int] = field(default_factory=list)
    squares: list[int] = field(default_factory=list)

    def merge(self, other: "Sums") -> None:
        """Add the sums over other pixels."""
        none = [0] * len(other.total or self.total)
        self.pixels += other.pixels
        self.total = [a + b for a, b in zip(self.total or none, other.total or none, strict=True)]
        self.squares = [a + b for a, b in zip(self.squares or none, other.squares or none, strict=True)]

    def stats(self) -> Stats:
        """Mean and (population) standard deviation of each channel."""
        n = self.pixels
        variances = [n * q - t * t for t, q in zip(self.total, self.squares, strict=True)]  # times n**2
        mean, std = tuple(t / n for t in self.total), tuple(math.sqrt(v) / n for v in variances)
        return Stats(mean, std, n, tuple(self.total), tuple(self.squares))

    @classmethod
    def of(cls, stats: Stats) -> "Sums | None":
        """The sums that ``stats`` were made of; None where they do not say."""
        return cls(stats.pixels, list(stats.total), list(stats.squares)) if stats.pixels else None

    def less(self, other: "Sums") -> "Sums":
        """The sums without those over pixels that were among these."""
        none = [0] * len(self.total)
        total = [a - b for a, b in zip(self.total, other.total or none, strict=True)]
        squares = [a - b for a, b in zip(self.squares, other.squares or none, strict=True)]
        return Sums(self.pixels - other.pixels, total, squares)


class Summing:
    """Adds up images of one shape, uint8 (H, W, C), in memory that is taken again for each."""

    def __init__(self, shape: tuple[int, int, int]) -> None:
        height, width, self._channels = shape
        # 256 squares of 255 stay below 2**24, so the float32 sums of a column of 256 rows are exact; BLAS
        # does them ten times faster than NumPy adds integers up over the last axis.
        self._block = np.empty((min(height, 256), width * self._channels), np.float32)
        self._ones = np.ones(len(self._block), np.float32)
        self._total, self._squares = np.zeros((2, width * self._channels))  # of each column
        self._rows = 0  # that they are sums of
        self._sums = Sums(0, [0] * self._channels, [0] * self._channels)  # what they no longer hold

    def add(self, image: Pixels) -> None:
        """Add one image."""
        rows = image.reshape(len(image), -1)
        for top in range(0, len(rows), 256):
            part = rows[top : top + 256]
            if self._rows + len(part) > EXACT_ROWS:
                self._carry()
            block, ones = self._block[: len(part)], self._ones[: len(part)]
            np.copyto(block, part)
            self._total += ones @ block
            np.multiply(block, block, out=block)
            self._squares += ones @ block
            self._rows += len(part)
        self._sums.pixels += image.shape[0] * image.shape[1]

    def sums(self) -> Sums:
        """The sums so far."""
        self._carry()
        return Sums(self._sums.pixels, list(self._sums.total), list(self._sums.squares))

    def _carry(self) -> None:
        """Take the sums of the columns over into whole numbers: theirs may be beyond what a float64 tells exactly."""
        total, squares = (self._by_channel(columns) for columns in (self._total, self._squares))
        self._sums.merge(Sums(0, total, squares))
        self._total.fill(0)
        self._squares.fill(0)
        self._rows = 0

    def _by_channel(self, columns: npt.NDArray[np.float64]) -> list[int]:
        whole = columns.astype(np.int64).reshape(-1, self._channels)
        return [sum(whole[:, channel].tolist()) for channel in range(self._channels)]
