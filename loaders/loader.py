"""A tuned `torch.utils.data.DataLoader` over a converted data set."""

import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader

from shardwright.datasets.base import SampleBatch, ShardedDataset
from shardwright.datasets.reader import Reader
from shardwright.datasets.seeds import SeededIndices, kept_generators
from shardwright.errors import UsageError
from shardwright.loaders.batches import EpochBatches, RankSampler
from shardwright.loaders.collating import collate
from shardwright.loaders.cropping import CroppingReader
from shardwright.loaders.descriptors import descriptor_shortage
from shardwright.loaders.handover import OnCpu, Weighing, free_shared_bytes, shortage
from shardwright.loaders.memory import WorkerMemory, memory_of
from shardwright.loaders.options import LoaderOptions
from shardwright.loaders.plan import LoaderPlan
from shardwright.loaders.pool import Pool
from shardwright.loaders.position import Position
from shardwright.loaders.threads import ReadAhead
from shardwright.loaders.transform import BatchTransform
from shardwright.loaders.workers import WatchedWorkers


class Loader(DataLoader[Any]):
    """A `torch.utils.data.DataLoader` whose batches are read whole. Made by `make_loader`.

    Each iteration is the next epoch. With threads several may be under way at once; with processes, which
    persist, a new one ends the one before, as in any DataLoader.
    """

    def __init__(
        self,
        dataset: ShardedDataset,
        batches: EpochBatches,
        collate_fn: Callable[[Any], Any],
        options: LoaderOptions,
    ) -> None:
        plan = batches.plan
        processes = plan.workers if plan.engine == "processes" else 0
        super().__init__(
            dataset,
            batch_sampler=batches,
            num_workers=processes,
            collate_fn=OnCpu(collate_fn) if processes else collate_fn,
            pin_memory=plan.pin_memory and plan.engine == "processes",
            prefetch_factor=options.prefetch_batches if processes else None,
            persistent_workers=processes > 0,
            multiprocessing_context=options.start_method if processes else None,
            # Workers are given a seed, drawn from this: not from the caller's generator. They seed for each sample.
            generator=torch.Generator(),
        )
        if batches.ranks is not None:
            # Frameworks look here for `set_epoch`, and whether sharding is done. DataLoader lets nobody set it.
            object.__setattr__(self, "sampler", RankSampler(batches))
            self._is_accelerate_prepared = True  # Accelerate would deal out again what is a share already
        self.batches = batches
        self._options = options
        # What is read ahead, what the user looks at and what comes back meanwhile: no more is kept.
        spare = options.prefetch_batches + 2
        if plan.order != "exact":
            group_rows = plan.mixed_chunks * dataset.manifest.chunk_rows
            spare += 2 * -(-group_rows // batches.batch_size)
        self.transform = options.transform or BatchTransform()
        #: (height, width, channels) and dtype of the images.
        self.image_shape = self.transform.shape(dataset.manifest.image_shape)
        self.image_dtype = self.transform.dtype
        image_bytes = math.prod(self.image_shape) * self.image_dtype.itemsize
        largest = batches.batch_size if batches.uneven == "pad" else min(batches.batch_size, len(dataset))
        self._pool = Pool(largest * image_bytes, spare, pinned=plan.pin_memory)
        beside = 8 * (len(dataset.columns) - 1)
        self._stored_bytes = largest * (image_bytes + beside) if dataset.has_images else 0
        self._warned = False
        self.newest: object = None  # the key of the epoch begun last
        self._announced = options.quiet or plan.order == "sequential"

    @property
    def plan(self) -> LoaderPlan:
        """The order and the engine that were chosen, and why."""
        return self.batches.plan

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return EpochIterator(self, self.begin)

    def begin(self) -> tuple[Position, Iterator[Any]]:
        """Begin the next epoch, or what is left of it: where that is, and its batches, which are not counted yet."""
        if not self._announced:
            print(f"shardwright: {self.plan}", file=sys.stderr)
            self._announced = True
        dataset: ShardedDataset = self.dataset  # type: ignore[assignment]
        position = self.batches.next_position
        if self.plan.engine == "processes" or not dataset.has_images or dataset.makes_samples:
            if not self.num_workers:
                return position, _undisturbed(super().__iter__())
            if isinstance(self._iterator, WatchedWorkers) and self._iterator.ended:
                self._iterator = None  # they died, or were killed; others are started
            return position, super().__iter__()
        self._check_descriptors(stacklevel=5)
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
            patience_seconds=self._options.timeout_seconds,
        )
        if not dataset.per_sample and self.collate_fn is collate:
            return position, self._pool.watched(collate(batch) for _, batch in ahead)
        collated = (
            self._collated(self.batches.seeded(indices, position.epoch), batch) for indices, batch in ahead
        )
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

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of what a batch holds, in that order."""
        dataset: ShardedDataset = self.dataset  # type: ignore[assignment]
        return dataset.columns

    def _reader(self, epoch: int) -> Reader | CroppingReader:
        dataset: ShardedDataset = self.dataset  # type: ignore[assignment]
        if self.transform == BatchTransform():
            return dataset.reader
        drawing = self.batches.drawing(self.transform, epoch, dataset.manifest.image_shape)
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


class EpochIterator(Iterator[Any]):
    """The batches of an epoch, and in the loader's state how many of them were handed out.

    It begins when its first batch is asked for: Lightning sets the epoch after iter(). After an error it raises that
    again: whoever would go on would take the epoch for shorter than it is.
    """

    def __init__(self, loader: Loader, begin: Callable[[], tuple[Position, Iterator[Any]]]) -> None:
        self._loader, self._sampler, self._begin = loader, loader.batches, begin
        self._key = object()  # stands for this one, and does not keep it
        self._position = Position()
        self._batches: Iterator[Any] | None = None
        self._ended = False
        self._error: BaseException | None = None

    def __next__(self) -> Any:
        if self._error is not None:
            raise self._error.with_traceback(None)
        if self._ended:
            raise StopIteration
        try:
            batch = next(self._begun() if self._batches is None else self._going_on(self._batches))
        except StopIteration:
            self._ended = True
            self._count(self._sampler.after(self._position))
            raise
        except BaseException as error:
            self._error = error
            raise
        self._count(replace(self._position, batch=self._position.batch + 1))
        return batch

    def _begun(self) -> Iterator[Any]:
        self._position, self._batches = self._begin()
        self._sampler.counting = self._loader.newest = self._key
        self._count(self._position)
        return self._batches

    def _going_on(self, batches: Iterator[Any]) -> Iterator[Any]:
        if self._loader.num_workers and self._loader.newest is not self._key:
            raise UsageError(
                "another epoch of this loader was begun, which ended this one: worker processes work for one at a time"
            )
        return batches

    def _count(self, position: Position) -> None:
        self._position = position
        if self._sampler.counting is self._key:
            self._sampler.position = position


def _undisturbed(batches: Iterator[Any]) -> Iterator[Any]:
    """``batches`` that are made in this process, without leaving its generators of random numbers seeded."""
    ended = object()  # a collate function may return None
    while True:
        with kept_generators():
            batch = next(batches, ended)
        if batch is ended:
            return
        yield batch
