"""`make_loader`: a tuned `torch.utils.data.DataLoader` over a converted data set."""

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, default_collate

from shardwright.datasets.base import SampleBatch, ShardedDataset
from shardwright.datasets.reader import Reader
from shardwright.datasets.seeds import SeededIndices, kept_generators
from shardwright.errors import UsageError
from shardwright.loaders.batches import EpochBatches, RankSampler
from shardwright.loaders.cropping import CroppingReader, resizer_of
from shardwright.loaders.options import LoaderOptions
from shardwright.loaders.plan import LoaderPlan, plan
from shardwright.loaders.pool import Pool
from shardwright.loaders.position import Position
from shardwright.loaders.threads import ReadAhead
from shardwright.loaders.transform import BatchTransform
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
        self._transform = options.transform or BatchTransform()
        #: (height, width, channels) and dtype of the images.
        self.image_shape = self._transform.shape(dataset.manifest.image_shape)
        self.image_dtype = self._transform.dtype
        image_bytes = math.prod(self.image_shape) * self.image_dtype.itemsize
        largest = batches.batch_size if batches.uneven == "pad" else min(batches.batch_size, len(dataset))
        self._pool = Pool(largest * image_bytes, spare, pinned=self.plan.pin_memory)
        self._announced = options.quiet or self.plan.order == "sequential"

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # As a generator it begins when the first batch is asked for: Lightning sets the epoch after iter().
        yield from self.counted(*self.begin())

    def begin(self) -> tuple["Position", Iterator[Any]]:
        """Begin the next epoch, or what is left of it: where that is, and its batches, which are not counted yet."""
        if not self._announced:
            print(f"shardwright: {self.plan}", file=sys.stderr)
            self._announced = True
        dataset: ShardedDataset = self.dataset  # type: ignore[assignment]
        position = self.batches.next_position
        if self.plan.engine == "processes" or not dataset.has_images or dataset.makes_samples:
            batches = super().__iter__()
            return position, batches if self.num_workers else _undisturbed(batches)
        share = self.batches.take_share()
        ahead = ReadAhead(
            dataset,
            self._reader(position.epoch),
            share,
            self._pool,
            dtype=self.image_dtype,
            first=min(position.batch, len(share)),
            blocks=None if self.plan.order == "exact" else self.batches.blocks,
            threads=self.plan.workers,
            ahead=self._options.prefetch_batches,
        )
        if not dataset.per_sample and self.collate_fn is collate:
            return position, (collate(batch) for _, batch in ahead)
        return position, _undisturbed(
            self._collated(self.batches.seeded(indices, position.epoch), batch) for indices, batch in ahead
        )

    def counted(self, position: "Position", batches: Iterator[Any]) -> Iterator[Any]:
        """``batches``, which begin at ``position``, counted as they are handed out."""
        return _Counted(self.batches, position, batches)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of what a batch holds, in that order."""
        dataset: ShardedDataset = self.dataset  # type: ignore[assignment]
        return dataset.columns

    def _reader(self, epoch: int) -> Reader | CroppingReader:
        dataset: ShardedDataset = self.dataset  # type: ignore[assignment]
        if self._transform == BatchTransform():
            return dataset.reader
        drawing = self.batches.drawing(self._transform, epoch, dataset.manifest.image_shape)
        packed = any(shard.compressed_chunks for shard in dataset.manifest.shards)
        return CroppingReader(dataset.reader, drawing, packed=packed)

    def _collated(self, indices: SeededIndices, batch: SampleBatch) -> Any:
        dataset: ShardedDataset = self.dataset  # type: ignore[assignment]
        indices.seed_batch()
        return self.collate_fn(dataset.samples(batch, indices))  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be epoch ``epoch``, counted from 0.

        After `load_state_dict` of a state in the middle of that epoch it is what is left of it.
        """
        self.batches.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where training is, as JSON values, the same on every rank: saved by one, restored by all.

        Counts the batches that were handed out, not those that were read ahead. Of the loop begun last, if there are
        several.
        """
        return self.batches.described(self.batches.position)

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

    def __init__(self, sampler: EpochBatches, position: Position, batches: Iterator[Any]) -> None:
        self._sampler, self._batches, self._position = sampler, batches, position
        sampler.position = position

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except StopIteration:
            self._sampler.position = self._sampler.after(self._position)
            raise
        self._position = replace(self._position, batch=self._position.batch + 1)
        self._sampler.position = self._position
        return batch


def _undisturbed(batches: Iterator[Any]) -> Iterator[Any]:
    """``batches`` that are made in this process, without leaving its generators of random numbers seeded."""
    ended = object()  # a collate function may return None
    while True:
        with kept_generators():
            batch = next(batches, ended)
        if batch is ended:
            return
        yield batch


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
    if options.transform:
        _check_transform(dataset, chosen, options.transform)
    uneven = options.uneven or ("drop" if drop_last else "spread" if not shuffle else None)
    if uneven is None:  # alone, there is nobody to keep step with
        uneven = "pad" if resolved(ranks)[1] > 1 else "spread"
    batches = EpochBatches(dataset, chosen, int(batch_size), seed=seed, uneven=uneven, ranks=ranks)
    return Loader(dataset, batches, collate_fn or collate, options)


def _check_transform(dataset: ShardedDataset, plan: LoaderPlan, transform: BatchTransform) -> None:
    transform.shape(dataset.manifest.image_shape)
    resizer_of(transform.crop)  # what it needs may not be there
    if plan.engine != "threads" or dataset.makes_samples:
        raise UsageError(
            f"LoaderOptions(transform=...) is for the reading threads, and here are {plan.engine} ({plan.why_engine}): "
            "transform batches there, or samples by the Dataset's transform, not both"
        )
    if not dataset.has_images:
        raise UsageError(
            f"transform is given, and no images are among the columns {', '.join(dataset.columns)}"
        )


def collate(samples: Any) -> Any:
    """Make a batch: a `SampleBatch` gives its columns as they are, a list goes to torch's default_collate.

    For a stock DataLoader too: ``DataLoader(dataset, batch_size, collate_fn=shardwright.loaders.collate)``.
    """
    if isinstance(samples, SampleBatch):
        return samples.columns
    return default_collate(samples)
