"""Buffers for batches, taken again once nobody looks at them any more.

New memory costs as much as reading into it: the kernel clears every page. A buffer comes back when the last
tensor or view on it is gone, however long the user keeps it.
"""

import math
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from shardwright.datasets.buffers import Pixels, aligned
from shardwright.loaders.handover import mb


class Pool:
    """Gives out arrays of at most ``buffer_bytes``; keeps up to ``spare`` buffers that came back.

    With ``pinned`` every batch comes from torch's own pinned allocator instead: that one knows which copies
    to the device are still under way when a tensor dies, and this pool does not. What it holds is bounded by what
    is read ahead, and by the batches that the user keeps: `watched` says so if those are many.
    """

    def __init__(
        self,
        buffer_bytes: int,
        spare: int,
        *,
        pinned: bool = False,
        pinned_stats: Callable[[], Mapping[str, Any]] = torch.cuda.host_memory_stats,
    ) -> None:
        self.buffer_bytes, self.pinned = buffer_bytes, pinned
        # torch's allocator rounds up to a power of two.
        self.expected_pinned_bytes = (spare << max(0, buffer_bytes - 1).bit_length()) if pinned else 0
        self._pinned_stats, self._warned = pinned_stats, False
        # No lock: a buffer can come back in the middle of `take`, when the garbage collector runs there.
        self._free: deque[Pixels] = deque(maxlen=spare)

    def take(
        self, shape: tuple[int, int, int, int], dtype: torch.dtype = torch.uint8
    ) -> tuple[torch.Tensor, Pixels]:
        """A tensor (N, H, W, C), and its bytes, an array that shares its memory; of undefined content."""
        size = math.prod(shape) * dtype.itemsize
        if self.pinned:
            memory = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
            return memory.view(dtype).view(shape), memory.numpy()
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = aligned(self.buffer_bytes)
        array = buffer[:size]
        # The tensor, and all that is made of it, hold this array; the pool holds the memory behind it.
        weakref.finalize(array, self._free.append, buffer).atexit = False
        return torch.from_numpy(array).view(dtype).view(shape), array

    def watched(self, batches: Iterator[Any]) -> Iterator[Any]:
        """``batches``, and once they are exhausted a look at how much pinned memory is held, which warns once."""
        return self._watching(batches) if self.pinned and not self._warned else batches

    def _watching(self, batches: Iterator[Any]) -> Iterator[Any]:
        yield from batches
        held = int(self._pinned_stats().get("active_bytes.current", 0))
        if held > 2 * self.expected_pinned_bytes and not self._warned:
            self._warned = True
            warnings.warn(
                f"at the end of an epoch {mb(held)} of page-locked memory are held, this loader needs "
                f"{mb(self.expected_pinned_bytes)} at most: batches are kept, and such memory is never swapped out. "
                "Keep images.clone(), which is not page-locked, or what was copied to the device; or take "
                "pin_memory=False",
                stacklevel=3,
            )
