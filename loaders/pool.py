"""Buffers for batches, taken again once nobody looks at them any more.

New memory costs as much as reading into it: the kernel clears every page. A buffer comes back when the last
tensor or view on it is gone, however long the user keeps it.
"""

import math
import weakref
from collections import deque

import torch

from shardwright.datasets.buffers import Pixels, aligned


class Pool:
    """Gives out arrays of at most ``buffer_bytes``; keeps up to ``spare`` buffers that came back.

    With ``pinned`` every batch comes from torch's own pinned allocator instead: that one knows which copies
    to the device are still under way when a tensor dies, and this pool does not.
    """

    def __init__(self, buffer_bytes: int, spare: int, *, pinned: bool = False) -> None:
        self.buffer_bytes, self.pinned = buffer_bytes, pinned
        # No lock: a buffer can come back in the middle of `take`, when the garbage collector runs there.
        self._free: deque[Pixels] = deque(maxlen=spare)

    def take(
        self, shape: tuple[int, int, int, int], dtype: torch.dtype = torch.uint8
    ) -> tuple[torch.Tensor, Pixels]:
        """A tensor (N, H, W, C), and its bytes, an array that shares its memory; of undefined content."""
        size = math.prod(shape) * dtype.itemsize
        if self.pinned:
            memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            return memory.view(dtype).view(shape), memory.numpy()
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = aligned(self.buffer_bytes)
        array = buffer[:size]
        # The tensor, and all that is made of it, hold this array; the pool holds the memory behind it.
        weakref.finalize(array, self._free.append, buffer).atexit = False
        return torch.from_numpy(array).view(dtype).view(shape), array
