"""`make_loader`: a tuned `torch.utils.data.DataLoader` over a converted data set."""

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, default_collate

from shardwright.datasets.base import SampleBatch, ShardedDataset
from shardwright.errors import UsageError
from shardwright.loaders.batches import EpochBatches, RankSampler
from shardwright.loaders.options import LoaderOptions
from shardwright.loaders.plan import plan
from shardwright.loaders.pool import Pool
from shardwright.loaders.position import Position
from shardwright.loaders.threads import ReadAhead
from shardwright.loaders.world import Ranks, check_ranks, resolved


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
        if batches.ranks is not None:
            # Frameworks look here for `set_epoch`, and whether sharding is done. DataLoader lets nobody set it.
            object.__setattr__(self, "sampler", RankSampler(batches))
            self._is_accelerate_prepared = True  # Accelerate would deal out again what is a share already
        self.batches = batches
        self._options = options
        # What is read ahead, what the user looks at and what comes back meanwhile: no more is kept.
        spare = options.prefetch_batches + 2
        if self.plan.order != "exact":
            group_rows = self.plan.mixed_chunks * dataset.manifest.chunk_rows
            spare += 2 * -(-group_rows // batches.batch_size)
        image_bytes = int(np.prod(dataset.manifest.image_shape))
        largest = batches.batch_size if batches.uneven == "pad" else min(batches.batch_size, len(dataset))
        self._pool = Pool(largest * image_bytes, spare, pinned=self.plan.pin_memory)
        self._announced = options.quiet or self.plan.order == "sequential"
        self._position = Position(lanes=self._lanes())

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # As a generator it begins when the first batch is asked for: Lightning sets the epoch after iter().
        yield from self._begun()

    def _begun(self) -> Iterator[Any]:
        if not self._announced:
            print(f"shardwright: {self.plan}", file=sys.stderr)
            self._announced = True
        dataset: ShardedDataset = self.dataset  # type: ignore[assignment]
        if self.plan.engine == "processes" or not dataset.has_images or dataset.makes_samples:
            epoch, first = self.batches.next_epoch, self.batches.next_batch
            return self._counted(super().__iter__(), epoch, first)
        share, epoch, first = self.batches.take_share()
        ahead = ReadAhead(
            dataset,
            share,
            self._pool,
            first=first,
            blocks=None if self.plan.order == "exact" else self.batches.blocks,
            threads=self.plan.workers,
            ahead=self._options.prefetch_batches,
        )
        return self._counted(map(self._collated, ahead), epoch, first)

    def _collated(self, read: tuple[Any, SampleBatch]) -> Any:
        dataset: ShardedDataset = self.dataset  # type: ignore[assignment]
        indices, batch = read
        return self.collate_fn(dataset.samples(batch, indices))  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be epoch ``epoch``, counted from 0.

        After `load_state_dict` of a state in the middle of that epoch it is what is left of it.
        """
        self.batches.set_epoch(epoch)

    @property
    def _position(self) -> Position:
        return self.batches.position  # which frameworks change too, by the sampler's set_epoch

    @_position.setter
    def _position(self, position: Position) -> None:
        self.batches.position = position

    def _counted(self, batches: Iterator[Any], epoch: int, first: int) -> Iterator[Any]:
        return _Counted(
            self, batches, Position(epoch, first, self._position.lanes if first else self._lanes())
        )

    def _lanes(self) -> int:
        return self.batches.dealing.lanes

    def state_dict(self) -> dict[str, Any]:
        """Where training is, as JSON values, the same on every rank: saved by one, restored by all.

        Counts the batches that were handed out, not those that were read ahead. Of the loop begun last, if there are
        several.
        """
        return self.batches.described(self._position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on where ``state`` was taken.

        Workers, prefetching and the number of ranks may be others; the data set, its version, the seed and the
        global batch may not. On another number of ranks what is left of that epoch is dealt out anew over them, and
        a chunk may be read by several.

        Raises
        ------
        UsageError
            The state is of something else: names what.
        """
        self.batches.load_state_dict(state)
        self.plan = self.batches.plan


class _Counted(Iterator[Any]):
    """Batches, and in the loader's state how many of them were handed out."""

    def __init__(self, loader: Loader, batches: Iterator[Any], position: Position) -> None:
        self._loader, self._batches, self._position = loader, batches, position
        loader._position = position

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except StopIteration:
            self._loader._position = Position(self._position.epoch + 1, 0, self._loader._lanes())
            raise
        self._position = replace(self._position, batch=self._position.batch + 1)
        self._loader._position = self._position
        return batch


def make_loader(
    dataset: ShardedDataset,
    batch_size: int,
    shuffle: bool = False,
    *,
    seed: int = 0,
    drop_last: bool = False,
    collate_fn: Callable[[Any], Any] | None = None,
    ranks: Ranks = "auto",
    options: LoaderOptions | None = None,
) -> Loader:
    """Make a loader of whole batches over ``dataset``.

    Parameters
    ----------
    dataset
        An `H5Dataset`, an `NpyDataset`, or a subclass of one.
    batch_size
        Samples of a batch on each rank; the global batch is that times the ranks.
    shuffle
        Whether samples come in another random order each epoch, the same for the same ``seed``; else they
        come in the order of the data set. ``LoaderOptions.shuffle_by`` says what random means; which it
        is, is printed once.
    drop_last
        Whether a last batch that is shorter is left out.
    collate_fn
        Makes a batch of the samples; is given a `SampleBatch`, or a list where there are transforms.
        None: `collate`.
    ranks
        ``"auto"``: this process's rank in torch.distributed where that is initialised when an epoch begins.
        ``(rank, world)``: given. None: all samples come here; sharding is left to a framework.

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
    check_ranks(ranks)
    uneven = options.uneven or ("drop" if drop_last else "spread" if not shuffle else None)
    if uneven is None:  # alone, there is nobody to keep step with
        uneven = "pad" if resolved(ranks)[1] > 1 else "spread"
    batches = EpochBatches(dataset, chosen, int(batch_size), seed=seed, uneven=uneven, ranks=ranks)
    return Loader(dataset, batches, collate_fn or collate, options)


def collate(samples: Any) -> Any:
    """Make a batch: a `SampleBatch` gives its columns as they are, a list goes to torch's default_collate.

    For a stock DataLoader too: ``DataLoader(dataset, batch_size, collate_fn=shardwright.loaders.collate)``.
    """
    if isinstance(samples, SampleBatch):
        return samples.columns
    return default_collate(samples)
