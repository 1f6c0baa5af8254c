"""What a loader may be told beyond batch size and order."""

from dataclasses import dataclass
from typing import Literal, get_args

from shardwright.errors import UsageError
from shardwright.loaders.ranks import Uneven
from shardwright.loaders.transform import BatchTransform

Engine = Literal["auto", "threads", "processes"]
ShuffleBy = Literal["auto", "exact", "block"]
StartMethod = Literal["fork", "spawn", "forkserver"]


@dataclass(frozen=True, slots=True)
class LoaderOptions:
    """Options of `make_loader`. Every default is a choice by the loader, which `Loader.plan` explains.

    Parameters
    ----------
    engine
        ``threads`` read whole batches ahead in this process: five to ten times as fast as handing batches
        over from other processes. ``processes`` are the workers of `torch.utils.data.DataLoader`: for
        Python code a sample, which one process cannot run in parallel. ``auto``: processes if the data set
        has a transform or its own ``__getitem__``, else threads.
    workers
        Threads or processes; 0: all is done by the training loop itself. None: the CPUs that may be used,
        at most 8; for processes, at most a quarter of the batch size too, and two CPUs are left free.
    prefetch_batches
        Batches read ahead, by the threads together or by each process. In block order the threads hold two groups of
        ``mixed_chunks`` whatever is asked for here.
    shuffle_by
        ``exact``: a uniform permutation of all rows, each read by itself. ``block``: chunks in random
        order, ``mixed_chunks`` of them mixed, each chunk read once an epoch. ``auto``: exact where no chunk
        is compressed, and the pixels fit half the memory of the machine or container, or
        ``fast_random_storage``; else block. Name one for an order that is the same on every machine.
    mixed_chunks
        Chunks that are mixed in block order. None: as many as have 64 MiB of pixels, 4 to 64.
    fast_random_storage
        Storage that reads single rows as fast as long runs, such as a local NVMe disk.
    pin_memory
        Images in page-locked memory, for copies to a CUDA device. None: where CUDA is available.
    start_method
        How processes are started; None: Python's default.
    uneven
        What becomes of samples that do not fill a global batch, the batches of all ranks: ``drop`` leaves them out,
        ``pad`` fills up with samples from the beginning of the epoch, ``spread`` hands out each sample exactly once, in
        as many batches on every rank. None: drop with ``drop_last``; else spread without ``shuffle`` or on one rank,
        where the last batch is just shorter; else pad.
    transform
        What the reading threads do to the images of a batch, such as
        ``BatchTransform(crop=RandomCrop(224), flip=0.5)``.
    quiet
        Do not print which order was chosen.
    """

    engine: Engine = "auto"
    workers: int | None = None
    prefetch_batches: int = 3
    shuffle_by: ShuffleBy = "auto"
    mixed_chunks: int | None = None
    fast_random_storage: bool = False
    pin_memory: bool | None = None
    start_method: StartMethod | None = None
    uneven: Uneven | None = None
    transform: BatchTransform | None = None
    quiet: bool = False

    def __post_init__(self) -> None:
        kinds = {"engine": Engine, "shuffle_by": ShuffleBy, "start_method": StartMethod, "uneven": Uneven}
        for name, kind in kinds.items():
            value = getattr(self, name)
            if value not in get_args(kind) and not (name in ("start_method", "uneven") and value is None):
                raise UsageError(f"{name} is {value!r}, expected one of {', '.join(get_args(kind))}")
        if self.workers is not None and not 0 <= self.workers <= 1024:
            raise UsageError(f"workers is {self.workers}, expected 0 to 1024")
        if not 1 <= self.prefetch_batches <= 1024:
            raise UsageError(f"prefetch_batches is {self.prefetch_batches}, expected 1 to 1024")
        if self.mixed_chunks is not None and self.mixed_chunks < 1:
            raise UsageError(f"mixed_chunks is {self.mixed_chunks}, expected at least 1")
