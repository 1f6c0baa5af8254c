"""What the loader is measured against: bare reads, bare decoding, h5py, and what users have.

Each returns images a second over its part of the data, by the clock, without what is done once (opening
files, starting workers).
"""

import mmap
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from shardwright.datasets import codecs, open_dataset
from shardwright.datasets.base import ShardedDataset
from shardwright.datasets.buffers import aligned

BATCH = 64


class Places:
    """Where chunks and rows of a data set lie, and its files, all open."""

    def __init__(self, folder: Path) -> None:
        dataset = open_dataset(folder)
        self.row_bytes = dataset.reader.row_bytes
        self.fds: list[int] = []
        #: (file descriptor, offset, stored bytes, rows) of each chunk, in the order of the data set.
        self.chunks: list[tuple[int, int, int, int]] = []
        self.codec: str | None = None
        self.chunk_rows = dataset.manifest.chunk_rows
        for number, shard in enumerate(dataset.manifest.shards):
            index = dataset.reader.shard(number).opened().index
            fd = os.open(folder / index.file.name, os.O_RDONLY)
            self.fds.append(fd)
            self.codec = index.codec or self.codec
            for k, (offset, size) in enumerate(
                zip(index.offsets.tolist(), index.sizes.tolist(), strict=True)
            ):
                rows = min(index.chunk_rows, shard.rows - k * index.chunk_rows)
                self.chunks.append((fd, offset, size, rows))
        self.maps = {fd: np.frombuffer(mmap.mmap(fd, 0, prot=mmap.PROT_READ), np.uint8) for fd in self.fds}
        self.rows = [
            (fd, offset + i * self.row_bytes) for fd, offset, _, rows in self.chunks for i in range(rows)
        ]

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


def in_threads(threads: int, work: Callable[[int], int]) -> float:
    """Images a second of ``work(thread)`` -> images, run by all threads at once."""
    done = [0] * threads

    def run(i: int) -> None:
        done[i] = work(i)

    crew = [threading.Thread(target=run, args=(i,)) for i in range(threads)]
    start = time.perf_counter()
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join()
    return sum(done) / (time.perf_counter() - start)


def bare_rows(places: Places, threads: int, epoch: int) -> float:
    """Random rows, one `preadv` each, into a few batch buffers a thread."""
    order = np.random.default_rng(epoch).permutation(len(places.rows)).tolist()
    buffers = [_buffers(BATCH * places.row_bytes) for _ in range(threads)]

    def work(thread: int) -> int:
        mine = order[thread::threads]
        for number, (start, end) in enumerate(pairwise([*range(0, len(mine), BATCH), len(mine)])):
            rows = list(buffers[thread][number % 4].reshape(BATCH, -1))
            for row, i in zip(rows, mine[start:end], strict=False):
                os.preadv(places.rows[i][0], [row], places.rows[i][1])
        return len(mine)

    return in_threads(threads, work)


def bare_mapped_rows(places: Places, threads: int, epoch: int) -> float:
    """Random rows, copied one by one from memory maps that stay, into a few batch buffers a thread."""
    order = np.random.default_rng(epoch).permutation(len(places.rows)).tolist()
    buffers = [_buffers(BATCH * places.row_bytes) for _ in range(threads)]
    size = places.row_bytes

    def work(thread: int) -> int:
        mine = order[thread::threads]
        for number, (start, end) in enumerate(pairwise([*range(0, len(mine), BATCH), len(mine)])):
            rows = list(buffers[thread][number % 4].reshape(BATCH, -1))
            for row, i in zip(rows, mine[start:end], strict=False):
                fd, offset = places.rows[i]
                np.copyto(row, places.maps[fd][offset : offset + size])
        return len(mine)

    return in_threads(threads, work)


def bare_chunks(places: Places, threads: int, epoch: int, buffers_each: int = 4) -> float:
    """Raw chunks in random order, one `preadv` each, into ``buffers_each`` buffers a thread, in turn.

    A few buffers stay in the processor's cache. Batches that several chunks are mixed into do not.
    """
    order = np.random.default_rng(epoch).permutation(len(places.chunks)).tolist()
    buffers = [_buffers(places.chunk_rows * places.row_bytes, buffers_each) for _ in range(threads)]

    def work(thread: int) -> int:
        images = 0
        for number, k in enumerate(order[thread::threads]):
            fd, offset, size, rows = places.chunks[k]
            os.preadv(fd, [buffers[thread][number % buffers_each][:size]], offset)
            images += rows
        return images

    return in_threads(threads, work)


def bare_decoding(places: Places, threads: int, epoch: int) -> float:
    """Compressed chunks in random order: one `preadv` and one decoding each, into a few buffers a thread."""
    order = np.random.default_rng(epoch).permutation(len(places.chunks)).tolist()
    size = places.chunk_rows * places.row_bytes
    buffers = [_buffers(size) for _ in range(threads)]
    packed = [np.empty(2 * size, np.uint8) for _ in range(threads)]

    def work(thread: int) -> int:
        images = 0
        for number, k in enumerate(order[thread::threads]):
            fd, offset, stored, rows = places.chunks[k]
            data = packed[thread][:stored]
            os.preadv(fd, [data], offset)
            codecs.decode(places.codec or "", data, buffers[thread][number % 4])
            images += rows
        return images

    return in_threads(threads, work)


def sequential_bytes(paths: Sequence[Path]) -> float:
    """Bytes a second of reading whole files, 8 MiB at a time, the system's read-ahead at its largest."""
    buffer = np.empty(8 << 20, np.uint8)
    total, start = 0, time.perf_counter()
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while got := os.preadv(fd, [buffer], os.lseek(fd, 0, os.SEEK_CUR)):
            os.lseek(fd, got, os.SEEK_CUR)
            total += got
        os.close(fd)
    return total / (time.perf_counter() - start)


def drop_from_cache(paths: Sequence[Path]) -> None:
    """Have the system forget the pages of these files."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def h5py_processes(files: Sequence[Path], processes: int) -> float:
    """Whole chunks with h5py's `read_direct`, each process its share of the files."""
    context = multiprocessing.get_context("fork")
    barrier, queue = context.Barrier(processes), context.Queue()
    crew = [
        context.Process(target=_read_with_h5py, args=(files[i::processes], barrier, queue))
        for i in range(processes)
    ]
    for process in crew:
        process.start()
    found = [queue.get() for _ in crew]
    for process in crew:
        process.join()
    images: int = sum(count for count, _, _ in found)
    seconds: float = max(end for _, _, end in found) - min(start for _, start, _ in found)
    return images / seconds


def _read_with_h5py(files: Sequence[Path], barrier: Any, queue: Any) -> None:
    open_files = [h5py.File(path, "r") for path in files]
    buffer = np.empty(open_files[0]["image"].chunks, np.uint8)
    barrier.wait()
    images, start = 0, time.monotonic()
    for file in open_files:
        image = file["image"]
        for first in range(0, len(image), image.chunks[0]):
            last = min(first + image.chunks[0], len(image))
            image.read_direct(buffer, np.s_[first:last], np.s_[: last - first])
            images += last - first
    queue.put((images, start, time.monotonic()))


class ObviousDataset(Dataset[Any]):
    """The recipe found everywhere: one h5py file a worker, ``d[i]`` in ``__getitem__``."""

    def __init__(self, file: Path, rows: int) -> None:
        self.file, self.rows = file, rows
        self.h5: h5py.File | None = None

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        if self.h5 is None:
            self.h5 = h5py.File(self.file, "r")
        return torch.from_numpy(self.h5["image"][i]).permute(2, 0, 1), int(self.h5["label"][i])


class MemmapDataset(Dataset[Any]):
    """One .npy of all images, mapped, a row a sample."""

    def __init__(self, file: Path, labels: Any) -> None:
        self.file, self.labels = file, labels
        self.images: Any = None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        if self.images is None:
            self.images = np.load(self.file, mmap_mode="r")
        return torch.from_numpy(self.images[i].copy()).permute(2, 0, 1), int(self.labels[i])


class ReadyDataset(Dataset[Any]):
    """Batches that are there already: what remains is handing them over from worker processes."""

    def __init__(self, rows: int, shape: tuple[int, int, int]) -> None:
        self.rows = rows
        channels, height, width = shape
        self.images = torch.randint(0, 255, (BATCH, height, width, channels), dtype=torch.uint8).permute(
            0, 3, 1, 2
        )
        self.labels = torch.zeros(BATCH, dtype=torch.int64)

    def __len__(self) -> int:
        return self.rows

    def __getitems__(self, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images.clone(memory_format=torch.preserve_format), self.labels


def taken_as_it_is(batch: Any) -> Any:
    """A collate function for batches that are batches already."""
    return batch


def stock(
    dataset: Dataset[Any], rows: int, collate: Callable[[Any], Any] | None = None
) -> Callable[[], float]:
    """Images a second of one epoch of a stock DataLoader with 2 workers, shuffled, over ``rows`` of a data set.

    The workers persist, and the first call, which starts them, is not to be counted.
    """
    sampler = torch.utils.data.RandomSampler(dataset, num_samples=rows)  # type: ignore[arg-type]
    loader = DataLoader(
        dataset,
        BATCH,
        sampler=sampler,
        num_workers=2,
        collate_fn=collate,
        drop_last=True,
        persistent_workers=True,
    )

    def epoch() -> float:
        images, start = 0, time.perf_counter()
        for _, labels in loader:
            images += len(labels)
        return images / (time.perf_counter() - start)

    return epoch


def over(loader: Any) -> float:
    """Images a second of one epoch of ``loader``, nothing done with the batches."""
    images, start = 0, time.perf_counter()
    for _, labels in loader:
        images += len(labels)
    return images / (time.perf_counter() - start)


def _buffers(size: int, count: int = 4) -> list[Any]:
    buffers = [aligned(size) for _ in range(count)]
    for buffer in buffers:
        buffer.fill(0)  # pages that are there
    return buffers


def files_of(dataset: ShardedDataset) -> list[Path]:
    """The files that hold the images of a data set."""
    return [
        dataset.path / dataset.reader.shard(n).opened().index.file.name
        for n in range(len(dataset.manifest.shards))
    ]
