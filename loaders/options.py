"""What a loader may be told beyond batch size and order."""

from dataclasses import dataclass

from shardwright.errors import UsageError


@dataclass(frozen=True, slots=True)
class LoaderOptions:
    """Options of `make_loader`.

    Parameters
    ----------
    workers
        Worker processes; 0 reads in the process of the training loop.
    prefetch_batches
        Batches that each worker reads ahead; without meaning for 0 workers.
    """

    workers: int = 0
    prefetch_batches: int = 2

    def __post_init__(self) -> None:
        if not 0 <= self.workers <= 1024:
            raise UsageError(f"workers is {self.workers}, expected 0 to 1024")
        if not 1 <= self.prefetch_batches <= 1024:
            raise UsageError(f"prefetch_batches is {self.prefetch_batches}, expected 1 to 1024")
