"""`make_loader`: a tuned `torch.utils.data.DataLoader` over a converted data set."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Sampler, default_collate

from shardwright.datasets.base import SampleBatch, ShardedDataset
from shardwright.errors import UsageError
from shardwright.loaders.options import LoaderOptions
from shardwright.loaders.order import Epoch, batch_starts, block_shuffle, exact_shuffle, sequential
from shardwright.loaders.plan import LoaderPlan, plan
from shardwright.loaders.pool import Pool
from shardwright.loaders.threads import ReadAhead


class EpochBatches(Sampler[Any]):
    """The batches of one epoch as arrays of indices; iterated again, those of the next epoch."""

    def __init__(
        self, dataset: ShardedDataset, plan: LoaderPlan, batch_size: int, *, seed: int, drop_last: bool
    ) -> None:
        self.plan, self.batch_size, self.seed, self.drop_last = plan, batch_size, seed, drop_last
        #: Where chunks begin, in indices.
        self.blocks = dataset.reader.rows.blocks(dataset.manifest.chunk_rows)
        self.next_epoch = 0

    def take_epoch(self) -> Epoch:
        """The samples of the next epoch, in order."""
        epoch, self.next_epoch = self.next_epoch, self.next_epoch + 1
        match self.plan.order:
            case "sequential":
                return sequential(self.blocks, self.plan.mixed_chunks)
            case "exact":
                return exact_shuffle(self.blocks, self.seed, epoch)
            case "block":
                return block_shuffle(self.blocks, self.plan.mixed_chunks, self.seed, epoch)

    def __iter__(self) -> Iterator[Any]:
        # A generator: DataLoader makes two iterators of its first epoch, and draws from one.
        indices = self.take_epoch().indices
        for start in batch_starts(len(indices), self.batch_size, self.drop_last):
            yield indices[start : start + self.batch_size]

    def __len__(self) -> int:
        return len(batch_starts(int(self.blocks[-1]), self.batch_size, self.drop_last))


class Loader(DataLoader[Any]):
    """A `torch.utils.data.DataLoader` whose batches are read whole. Made by `make_loader`.

    Each iteration is the next epoch. With threads several may be under way at once; with processes, which
    persist, a new one ends the one before, as in any DataLoader.

    Attributes
    ----------
    plan : LoaderPlan
        The order and the engine that were chosen, and why.
    """

    def __init__(
        self,
        dataset: ShardedDataset,
        batches: EpochBatches,
        collate_fn: Callable[[Any], Any],
        options: LoaderOptions,
    ) -> None:
        self.plan = batches.plan
        processes = self.plan.workers if self.plan.engine == "processes" else 0
        super().__init__(
            dataset,
            batch_sampler=batches,
            num_workers=processes,
            collate_fn=collate_fn,
            pin_memory=self.plan.pin_memory and self.plan.engine == "processes",
            prefetch_factor=options.prefetch_batches if processes else None,
            persistent_workers=processes > 0,
            multiprocessing_context=options.start_method if processes else None,
        )
        self.batches = batches
        self._options = options
        # What is read ahead, what the user looks at and what comes back meanwhile: no more is kept.
        spare = options.prefetch_batches + 2
        if self.plan.order != "exact":
            group_rows = self.plan.mixed_chunks * dataset.manifest.chunk_rows
            spare += 2 * -(-group_rows // batches.batch_size)
        image_bytes = int(np.prod(dataset.manifest.image_shape))
        self._pool = Pool(
            min(batches.batch_size, len(dataset)) * image_bytes, spare, pinned=self.plan.pin_memory
        )
        self._announced = options.quiet or self.plan.order == "sequential"

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if not self._announced:
            print(f"shardwright: {self.plan}", file=sys.stderr)
            self._announced = True
        dataset: ShardedDataset = self.dataset  # type: ignore[assignment]
        if self.plan.engine == "processes" or not dataset.has_images or dataset.makes_samples:
            return super().__iter__()
        batches = self.batches
        ahead = ReadAhead(
            dataset,
            batches.take_epoch(),
            self._pool,
            batch_size=batches.batch_size,
            drop_last=batches.drop_last,
            blocks=None if self.plan.order == "exact" else batches.blocks,
            threads=self.plan.workers,
            ahead=self._options.prefetch_batches,
        )
        return map(self._collated, ahead)

    def _collated(self, read: tuple[Any, SampleBatch]) -> Any:
        dataset: ShardedDataset = self.dataset  # type: ignore[assignment]
        indices, batch = read
        return self.collate_fn(dataset.samples(batch, indices))  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be epoch ``epoch``, counted from 0."""
        if epoch < 0:
            raise UsageError(f"epoch is {epoch}, expected 0 or more")
        self.batches.next_epoch = epoch


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
        Whether samples come in another random order each epoch, the same for the same ``seed``; else they
        come in the order of the data set. ``LoaderOptions.shuffle_by`` says what random means; which it
        is, is printed once.
    drop_last
        Whether a last batch that is shorter is left out.
    collate_fn
        Makes a batch of the samples; is given a `SampleBatch`, or a list where there are transforms.
        None: `collate`.

    Returns
    -------
    Loader
        Yields ``(images, labels)``: uint8 (batch_size, C, H, W), channels-last in memory, and int64
        (batch_size,); one entry a column where other ``columns`` were asked for. A batch is yours to keep.

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
    options = options or LoaderOptions()
    chosen = plan(dataset, int(batch_size), shuffle, options)
    batches = EpochBatches(dataset, chosen, int(batch_size), seed=seed, drop_last=drop_last)
    return Loader(dataset, batches, collate_fn or collate, options)


def collate(samples: Any) -> Any:
    """Make a batch: a `SampleBatch` gives its columns as they are, a list goes to torch's default_collate.

    For a stock DataLoader too: ``DataLoader(dataset, batch_size, collate_fn=shardwright.loaders.collate)``.
    """
    if isinstance(samples, SampleBatch):
        return samples.columns
    return default_collate(samples)
