"""`make_loader`: a tuned `torch.utils.data.DataLoader` over a converted data set."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Sampler, default_collate

from shardwright.datasets.base import SampleBatch, ShardedDataset
from shardwright.errors import UsageError
from shardwright.loaders.options import LoaderOptions
from shardwright.loaders.order import batches, exact_shuffle, sequential


class EpochBatches(Sampler[Any]):
    """Yields the batches of one epoch as arrays of indices; the next epoch's when iterated again."""

    def __init__(self, rows: int, batch_size: int, *, shuffle: bool, seed: int, drop_last: bool) -> None:
        self.rows, self.batch_size, self.drop_last = rows, batch_size, drop_last
        self.shuffle, self.seed = shuffle, seed
        self.next_epoch = 0

    def __iter__(self) -> Iterator[Any]:
        epoch, self.next_epoch = self.next_epoch, self.next_epoch + 1
        order = exact_shuffle(self.rows, self.seed, epoch) if self.shuffle else sequential(self.rows)
        return iter(batches(order, self.batch_size, self.drop_last))

    def __len__(self) -> int:
        whole, rest = divmod(self.rows, self.batch_size)
        return whole + (rest > 0 and not self.drop_last)


class Loader(DataLoader[Any]):
    """A `torch.utils.data.DataLoader` whose batches are read whole. Made by `make_loader`.

    Each iteration is the next epoch.
    """

    def __init__(
        self,
        dataset: ShardedDataset,
        sampler: EpochBatches,
        collate_fn: Callable[[Any], Any],
        options: LoaderOptions,
    ) -> None:
        super().__init__(
            dataset,
            batch_sampler=sampler,
            num_workers=options.workers,
            collate_fn=collate_fn,
            prefetch_factor=options.prefetch_batches if options.workers else None,
            persistent_workers=options.workers > 0,
        )
        self.order = sampler

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be epoch ``epoch``, counted from 0."""
        if epoch < 0:
            raise UsageError(f"epoch is {epoch}, expected 0 or more")
        self.order.next_epoch = epoch


def make_loader(
    dataset: ShardedDataset,
    batch_size: int,
    shuffle: bool = False,
    *,
    seed: int = 0,
    drop_last: bool = False,
    collate_fn: Callable[[Any], Any] | None = None,
    options: LoaderOptions | None = None,
) -> Loader:
    """Make a loader of whole batches over ``dataset``.

    Parameters
    ----------
    dataset
        An `H5Dataset`, an `NpyDataset`, or a subclass of one.
    batch_size
        Samples of a batch.
    shuffle
        Whether each epoch is a permutation of all samples, another one each epoch, the same for the same
        ``seed``; else they come in the order of the data set.
    drop_last
        Whether a last batch that is shorter is left out.
    collate_fn
        Makes a batch of the samples; is given a list, or a `SampleBatch`. None: `collate`.

    Returns
    -------
    Loader
        Yields ``(images, labels)``: uint8 (batch_size, C, H, W), channels-last in memory, and int64
        (batch_size,); one tensor a column where other ``columns`` were asked for. A batch is yours to keep.

    Raises
    ------
    UsageError
        A parameter out of range, or ``dataset`` is of another kind.
    """
    if not isinstance(dataset, ShardedDataset):
        raise UsageError(
            f"dataset is {type(dataset).__name__}, expected an H5Dataset or NpyDataset; for Subset and others "
            "use torch.utils.data.DataLoader with collate_fn=shardwright.loaders.collate"
        )
    if isinstance(batch_size, bool) or not isinstance(batch_size, int | np.integer) or batch_size < 1:
        raise UsageError(f"batch_size is {batch_size!r}, expected a whole number of at least 1")
    if not 0 <= seed < 1 << 63:
        raise UsageError(f"seed is {seed}, expected 0 to 2**63 - 1")
    sampler = EpochBatches(len(dataset), int(batch_size), shuffle=shuffle, seed=seed, drop_last=drop_last)
    return Loader(dataset, sampler, collate_fn or collate, options or LoaderOptions())


def collate(samples: Any) -> Any:
    """Make a batch: a `SampleBatch` gives its columns as they are, a list goes to torch's default_collate.

    For a stock DataLoader too: ``DataLoader(dataset, batch_size, collate_fn=shardwright.loaders.collate)``.
    """
    if isinstance(samples, SampleBatch):
        return samples.columns
    return default_collate(samples)
