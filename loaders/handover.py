"""What worker processes hand over: batches of tensors on the CPU, through shared memory."""

import errno
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.queues import Queue
from typing import Any

import torch

_SHARED_MEMORY = "/dev/shm"

DEVICE_CURE = (
    "return CPU tensors from transforms and collate_fn, and move batches to the device in the training loop"
)
ROOM_CURE = (
    "give it more (docker run --shm-size=..., or an emptyDir of medium Memory), or take fewer workers, a smaller "
    "prefetch_batches or batch_size"
)
DESCRIPTOR_CURE = "raise the limit (`ulimit -n`), or take fewer workers or a smaller prefetch_batches"


@dataclass(frozen=True, slots=True)
class Refused:
    """Stands for a batch that cannot be handed over; says why."""

    why: str


@dataclass(frozen=True, slots=True)
class OnCpu:
    """A collate function whose batches are looked at: what is not on the CPU is refused, where it was made."""

    collate_fn: Callable[[Any], Any]

    def __call__(self, samples: Any) -> Any:
        batch = self.collate_fn(samples)
        for tensor in _tensors(batch):
            if tensor.device.type != "cpu":
                return Refused(
                    f"worker process {os.getpid()} made a tensor on the device '{tensor.device}', and a device belongs "
                    f"to the training process: {DEVICE_CURE}"
                )
        return batch


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, tuple | list):
        for value in batch:
            yield from _tensors(value)


def report_lost_batches() -> None:
    """In a worker process: let a batch that cannot be sent be said to the training process.

    multiprocessing sends from a thread, prints what fails there, and forgets the batch; it would be waited for, for
    ever. Its hook for that is the one that concurrent.futures uses.
    """
    plain = Queue._on_queue_feeder_error  # type: ignore[attr-defined]

    def say(queue: Any, error: BaseException, message: Any) -> None:
        match message:
            case (int(number), _):
                queue.put((number, Refused(f"worker process {os.getpid()} {_why_not_sent(error)}")))
            case _:
                plain(error, message)

    Queue._on_queue_feeder_error = say  # type: ignore[attr-defined]


def _why_not_sent(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"
    if is_about_descriptors(error):
        return f"cannot hand over a batch, as too many files are open ({text}): {DESCRIPTOR_CURE}"
    if "shared memory" in text or os.strerror(errno.ENOSPC) in text or "torch_" in text:
        return f"cannot hand over a batch through {_SHARED_MEMORY}{_room()} ({text}): {ROOM_CURE}"
    return f"cannot hand over a batch ({text}): let collate_fn return what can be pickled"


def is_about_descriptors(error: BaseException) -> bool:
    """Whether ``error`` is one of those that end a hand-over when no more files may be open."""
    return (
        getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE)
        or os.strerror(errno.EMFILE) in str(error)
        or "items of ancdata" in str(error)  # what the socket module says of descriptors that did not arrive
    )


def _room() -> str:
    free = free_shared_bytes()
    return "" if free is None else f", where {mb(free)} are free"


def free_shared_bytes() -> int | None:
    """What is free of the memory through which batches are handed over; None where that cannot be told."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        found = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def shared_bytes(workers: int, prefetch_batches: int, batch_bytes: int) -> int:
    """What batches take at most between being made and being handed out: those ahead, and one more a worker."""
    return workers * (prefetch_batches + 1) * batch_bytes


def shortage(workers: int, prefetch_batches: int, batch_bytes: int, free_bytes: int | None) -> str | None:
    """What is missing for so many batches, in words; None where there is room, or nobody knows."""
    needed = shared_bytes(workers, prefetch_batches, batch_bytes)
    if free_bytes is None or needed <= free_bytes:
        return None
    return (
        f"{workers} workers with {prefetch_batches} batches ahead, and one being made, each of {mb(batch_bytes)}, need "
        f"{mb(needed)} of {_SHARED_MEMORY}, and {mb(free_bytes)} are free: {ROOM_CURE}"
    )


@dataclass(frozen=True, slots=True)
class Weighing:
    """Looks at the first batch that was handed over, as the samples that transforms make are of any size.

    ``free_bytes`` were free before workers were started, and batches were estimated at ``estimated_bytes``.
    """

    estimated_bytes: int
    workers: int
    prefetch_batches: int
    free_bytes: int | None

    def __call__(self, batch: Any) -> None:
        """Warn if batches are larger than estimated, and there is no room for them."""
        found = batch_bytes(batch)
        if found > self.estimated_bytes and (
            short := shortage(self.workers, self.prefetch_batches, found, self.free_bytes)
        ):
            warnings.warn(f"batches are larger than the images stored: {short}", stacklevel=4)


def batch_bytes(batch: Any) -> int:
    """Bytes of the tensors of ``batch``."""
    return sum(tensor.nbytes for tensor in _tensors(batch) if tensor.layout == torch.strided)


def mb(size: int) -> str:
    """``size`` in megabytes."""
    return f"{size / 1e6:,.1f} MB"
