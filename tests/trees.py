"""A tree of pictures whose pixels after conversion are known: PNGs of the target size, which no resize touches."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawing import Pixels, encoded, noise, put

from shardwright.convert import write
from shardwright.errors import PictureError

CLASSES = ("cat", "dög", "owl")
SIZE = 32
#: Two shards of two chunks. In each, one chunk is packed and one raw, and the last one is padded; the broken
#: picture leaves the first shard a row short of what was planned.
STORE = {"chunk_rows": 8, "shard_mib": 16 * SIZE * SIZE * 3 / 2**20, "min_saving": 0.5}

Pictures = dict[str, tuple[int, Pixels]]


def draw_tree(root: Path) -> Pictures:
    """Draw 27 pictures, every other one of a single grey level, and one that is broken; id -> (label, pixels)."""
    pictures: Pictures = {}
    for number in range(27):
        label = number % 3
        pixels = noise(SIZE, SIZE, number) if number % 2 else np.full((SIZE, SIZE, 3), 9 * number, np.uint8)
        pictures[f"{CLASSES[label]}/ü {number}.png"] = label, pixels
    put(root, {id: encoded(pixels, "PNG") for id, (_, pixels) in pictures.items()})
    put(root, {f"{CLASSES[0]}/broken.jpg": b"\xff\xd8\xff\xe0 and no more"})
    return pictures


def make_unreadable(patch: pytest.MonkeyPatch, which: Callable[[str], bool]) -> None:
    """Have no picture read whose name is one of ``which``, as without the right to, or by a failing disk."""
    real = write._read

    def read(path: Path) -> Any:
        if which(path.name):
            raise PictureError("unreadable: Permission denied")
        return real(path)

    patch.setattr(write, "_read", read)
