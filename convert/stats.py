"""Mean and standard deviation of each channel, from exact integer sums."""

import math
from dataclasses import dataclass, field

import numpy as np

from shardwright.datasets.buffers import Pixels
from shardwright.datasets.layout import Stats


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
        self._total, self._squares = np.zeros((2, width * self._channels))  # float64: exact to 2**53
        self._pixels = 0

    def add(self, image: Pixels) -> None:
        """Add one image."""
        rows = image.reshape(len(image), -1)
        for top in range(0, len(rows), 256):
            part = rows[top : top + 256]
            block, ones = self._block[: len(part)], self._ones[: len(part)]
            np.copyto(block, part)
            self._total += ones @ block
            np.multiply(block, block, out=block)
            self._squares += ones @ block
        self._pixels += image.shape[0] * image.shape[1]

    def sums(self) -> Sums:
        """The sums so far."""
        by_channel = (s.reshape(-1, self._channels).sum(0) for s in (self._total, self._squares))
        total, squares = ([int(value) for value in sums] for sums in by_channel)
        return Sums(self._pixels, total, squares)
