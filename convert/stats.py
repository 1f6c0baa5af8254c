"""Mean and standard deviation of each channel, from exact integer sums."""

import math
from dataclasses import dataclass, field

import numpy as np

from shardwright.datasets.layout import Stats
from shardwright.datasets.pixels import Pixels


@dataclass(slots=True)
class Sums:
    """Sums of the grey levels of each channel, and of their squares, over ``pixels`` pixels."""

    pixels: int = 0
    total: list[int] = field(default_factory=list)
    squares: list[int] = field(default_factory=list)

    def add(self, image: Pixels) -> None:
        """Add one image, uint8 (H, W, C)."""
        height, width, channels = image.shape
        for top in range(0, height, 256):
            # 256 squares of 255 stay below 2**24, so the float32 sums of a column are exact; BLAS does
            # them ten times faster than NumPy sums integers over the last axis.
            block = image[top : top + 256].reshape(-1, width * channels).astype(np.float32)
            ones = np.ones(len(block), np.float32)
            total = ones @ block
            np.multiply(block, block, out=block)
            squares = ones @ block
            self.merge(Sums(len(block) * width, _by_channel(total, channels), _by_channel(squares, channels)))

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
        return Stats(tuple(t / n for t in self.total), tuple(math.sqrt(v) / n for v in variances))


def _by_channel(columns: np.ndarray[tuple[int], np.dtype[np.float32]], channels: int) -> list[int]:
    sums: list[int] = columns.reshape(-1, channels).sum(0, dtype=np.float64).astype(np.int64).tolist()
    return sums
