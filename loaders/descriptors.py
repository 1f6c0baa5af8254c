"""How many files this process may open, and whether a loader can do with that."""

import resource

from shardwright.datasets.base import ShardedDataset
from shardwright.datasets.files import MOST_OPEN, FileCache

# Of a worker process, in the training process: the pipe to it, and the end that is seen when it dies.
_PER_WORKER = 4
# Python, its libraries, a log, connections of a training.
_OTHERS = 64


def descriptor_shortage(
    dataset: ShardedDataset, *, workers: int, prefetch_batches: int, allowed: int | None = None
) -> str | None:
    """What is short of, in words, where so few files may be open that reading or handing over suffers.

    Parameters
    ----------
    dataset
        What is read.
    workers
        Worker processes; 0: threads read.
    prefetch_batches
        Batches ahead of each.
    allowed
        Files that a process may open. None: as it is here.
    """
    if allowed is None:
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if allowed == resource.RLIM_INFINITY:
        return None
    cure = f"raise the limit of {allowed} (`ulimit -n`)"
    if workers:
        # Each tensor is handed over as a descriptor, which is open until its batch is forgotten.
        tensors = workers * (prefetch_batches + 1) * len(dataset.columns)
        needed = tensors + workers * _PER_WORKER + _OTHERS
        if needed > allowed:
            return (
                f"{workers} workers with {prefetch_batches} batches ahead hand over {tensors} tensors, which takes "
                f"some {needed} open files: {cure}, or take fewer workers or a smaller prefetch_batches"
            )
    shards, kept = len(dataset.manifest.shards), FileCache.limit_of(allowed)
    if dataset.has_images and kept < min(shards, MOST_OPEN):
        return (
            f"only {kept} of {shards} shards are kept open at once, the others are opened again and again: "
            f"{cure} to {4 * min(shards, MOST_OPEN)}"
        )
    return None
