"""`make_loader`: a tuned `torch.utils.data.DataLoader` over a converted data set."""

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

import numpy as np
import torch
from torch.utils.data import DataLoader, default_collate

from shardwright.datasets.base import SampleBatch, ShardedDataset
from shardwright.datasets.seeds import SeededIndices, kept_generators
from shardwright.errors import UsageError
from shardwright.loaders.batches import EpochBatches
from shardwright.loaders.descriptors import descriptor_shortage
from shardwright.loaders.handover import OnCpu, Weighing, free_shared_bytes, shortage
from shardwright.loaders.memory import WorkerMemory, memory_of
from shardwright.loaders.options import LoaderOptions
from shardwright.loaders.order import Order
from shardwright.loaders.plan import plan
from shardwright.loaders.pool import Pool
from shardwright.loaders.threads import ReadAhead
from shardwright.loaders.workers import WatchedWorkers
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
            collate_fn=OnCpu(collate_fn) if processes else collate_fn,
            pin_memory=self.plan.pin_memory and self.plan.engine == "processes",
            prefetch_factor=options.prefetch_batches if processes else None,
            persistent_workers=processes > 0,
            multiprocessing_context=options.start_method if processes else None,
            # Workers are given a seed, drawn from this: not from the caller's generator. They seed for each sample.
            generator=torch.Generator(),
        )
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
        beside = 8 * (len(dataset.columns) - 1)
        self._stored_bytes = largest * (image_bytes + beside) if dataset.has_images else 0
        self._warned = False
        self._announced = options.quiet or self.plan.order == "sequential"
        self._position = Position(lanes=self._lanes())

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        position, batches = self.begin()
        return _Counted(self, position, batches)

    def begin(self) -> tuple["Position", Iterator[Any]]:
        """Begin the next epoch, or what is left of it: where that is, and its batches, which are not counted yet."""
        if not self._announced:
            print(f"shardwright: {self.plan}", file=sys.stderr)
            self._announced = True
        dataset: ShardedDataset = self.dataset  # type: ignore[assignment]
        epoch, first = self.batches.next_epoch, self.batches.next_batch
        position = Position(epoch, first, self._position.lanes if first else self._lanes())
        if self.plan.engine == "processes" or not dataset.has_images or dataset.makes_samples:
            if not self.num_workers:
                return position, _undisturbed(super().__iter__())
            if isinstance(self._iterator, WatchedWorkers) and self._iterator.ended:
                self._iterator = None  # they died, or were killed; others are started
            return position, super().__iter__()
        self._check_descriptors(stacklevel=4)
        share = self.batches.take_share()
        ahead = ReadAhead(
            dataset,
            share,
            self._pool,
            first=min(first, len(share)),
            blocks=None if self.plan.order == "exact" else self.batches.blocks,
            threads=self.plan.workers,
            ahead=self._options.prefetch_batches,
            patience_seconds=self._options.timeout_seconds,
        )
        if not dataset.per_sample and self.collate_fn is collate:
            return position, self._pool.watched(collate(batch) for _, batch in ahead)
        collated = (self._collated(self.batches.seeded(indices, epoch), batch) for indices, batch in ahead)
        return position, self._pool.watched(_undisturbed(collated))

    def _check_room(self) -> Weighing | None:
        """Say before workers are started what they will run out of; how to look at the first batch."""
        dataset: ShardedDataset = self.dataset  # type: ignore[assignment]
        free = free_shared_bytes()
        short = shortage(self.num_workers, self._options.prefetch_batches, self._stored_bytes, free)
        if short and not dataset.per_sample and self.collate_fn == OnCpu(collate):
            raise UsageError(short)
        if short:  # nobody knows how large the samples are that other code makes
            warnings.warn(f"if batches are as large as the images stored: {short}", stacklevel=6)
        self._check_descriptors(stacklevel=7)
        if short or not dataset.has_images:
            return None
        return Weighing(self._stored_bytes, self.num_workers, self._options.prefetch_batches, free)

    def _check_descriptors(self, stacklevel: int) -> None:
        dataset: ShardedDataset = self.dataset  # type: ignore[assignment]
        ahead = self._options.prefetch_batches
        short = descriptor_shortage(dataset, workers=self.num_workers, prefetch_batches=ahead)
        if short and not self._warned:
            self._warned = True
            warnings.warn(short, stacklevel=stacklevel)

    def _get_iterator(self) -> Any:
        if not self.num_workers:
            return super()._get_iterator()
        weighing = self._check_room()
        self.check_worker_number_rationality()
        return WatchedWorkers(self, self._options.timeout_seconds, weighing)

    def worker_memory(self) -> list[WorkerMemory]:
        """Memory of each worker process there is now; with threads, of this process."""
        if not self.num_workers:
            return memory_of([os.getpid()])
        return memory_of(self._iterator.pids if isinstance(self._iterator, WatchedWorkers) else [])

    def _collated(self, indices: SeededIndices, batch: SampleBatch) -> Any:
        dataset: ShardedDataset = self.dataset  # type: ignore[assignment]
        indices.seed_batch()
        return self.collate_fn(dataset.samples(batch, indices))  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be epoch ``epoch``, counted from 0."""
        if epoch < 0:
            raise UsageError(f"epoch is {epoch}, expected 0 or more")
        self.batches.next_epoch, self.batches.next_batch = epoch, 0
        self._position = Position(epoch, 0, self.batches.dealing.lanes)

    def _lanes(self) -> int:
        return self.batches.dealing.lanes

    def state_dict(self) -> dict[str, Any]:
        """Where training is, as JSON values, the same on every rank: saved by one, restored by all.

        Counts the batches that were handed out, not those that were read ahead. Of the loop begun last, if there are
        several.
        """
        return {**self._identity(), **asdict(self._position)}

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
        chosen = {key: state.get(key) for key in ("order", "mixed_chunks")}
        if chosen["order"] in get_args(Order) and isinstance(chosen["mixed_chunks"], int):
            # The choice may have been another one on another machine; it is kept.
            self.plan = self.batches.plan = replace(self.plan, **chosen)  # type: ignore[arg-type]
        wrong = [
            f"{key} is {state.get(key)!r} there, {value!r} here"
            for key, value in self._identity().items()
            if state.get(key) != value
        ]
        numbers = [state.get(key) for key in ("epoch", "batch", "lanes")]
        if not all(isinstance(n, int) and n >= 0 for n in numbers):
            wrong.append(f"epoch, batch and lanes are {numbers}")
        if wrong:
            raise UsageError(f"the state is not of this loader: {'; '.join(wrong)}")
        self._position = Position(*numbers)  # type: ignore[arg-type]
        self.batches.resume(self._position.epoch, self._position.batch, self._position.lanes)

    def _identity(self) -> dict[str, Any]:
        """What must be the same for the order to be the same."""
        dataset: ShardedDataset = self.dataset  # type: ignore[assignment]
        return {
            "dataset": dataset.manifest.fingerprint(),
            "version": dataset.version,
            "rows": len(dataset),
            "seed": self.batches.seed,
            "order": self.plan.order,
            "mixed_chunks": self.plan.mixed_chunks,
            "global_batch": self.batches.dealing.global_batch,
            "uneven": self.batches.uneven,
        }


@dataclass(frozen=True, slots=True)
class Position:
    """Batches of ``epoch`` that were handed out, of an order in so many ``lanes``."""

    epoch: int = 0
    batch: int = 0
    lanes: int = 1


class _Counted(Iterator[Any]):
    """Batches, and in the loader's state how many of them were handed out."""

    def __init__(self, loader: Loader, position: Position, batches: Iterator[Any]) -> None:
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
