"""Batches read ahead by threads of this process, into pooled buffers.

The unit of work is a *task*: rows to read, and the place of each in some batch. In exact order a task is a
batch, or a part of it; in block order it is a chunk, which is read once and whose rows go to several batches.
"""

import queue
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from shardwright.datasets.base import SampleBatch, ShardedDataset
from shardwright.datasets.buffers import Pixels, RowBuffers
from shardwright.datasets.reader import Reader
from shardwright.errors import WorkerError
from shardwright.loaders.cropping import CroppingReader
from shardwright.loaders.pool import Pool
from shardwright.loaders.ranks import Share
from shardwright.loaders.stacks import stacks_of_threads

Index = npt.NDArray[np.int64]

# A task has at least that much to read, so that what it costs beside reading is small.
_TASK_ROWS = 64
_TASK_BYTES = 1 << 20
# Reading slower than that is a disk at work, so that reading ahead is worth asking for.
_COLD_BYTES_PER_SECOND = 400e6
_WARM_TASKS = 16
_PATIENCE_SECONDS = 1.0


@dataclass(slots=True, eq=False)
class _Batch:
    """A batch under way: ``missing`` of its ``rows`` (n, row_bytes), which are the ``tensor``, are still to be read."""

    indices: Index
    missing: int
    tensor: torch.Tensor
    rows: Pixels
    error: BaseException | None = None
    _counting: threading.Lock = field(default_factory=threading.Lock)
    # Held until all rows are there: to wait for a lock takes a tenth of what a threading.Event takes.
    _coming: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        if self.missing:
            self._coming.acquire()

    def arrived(self, rows: int, error: BaseException | None) -> None:
        """Count ``rows`` as read, or failed."""
        with self._counting:
            self.missing -= rows
            self.error = self.error or error
            if not self.missing:
                self._coming.release()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until all rows are there, or raise what kept one of them away; False if they did not come in time."""
        if not self._coming.acquire(timeout=-1 if seconds is None else seconds):
            return False
        if self.error is not None:
            raise self.error
        return True


@dataclass(frozen=True, slots=True)
class _Task:
    """Rows to read: ``indices[i]`` into ``out[i]``; ``parts`` says how many of them are whose."""

    indices: Index
    out: RowBuffers
    parts: list[tuple[_Batch, int]]


class _Crew:
    """Threads that do tasks. Knows no iterator, so that an iterator can be forgotten while they run."""

    def __init__(self, reader: Reader | CroppingReader, read_bytes: int, threads: int) -> None:
        self.reader, self.read_bytes = reader, read_bytes  # of a row as it is stored, whatever becomes of it
        self.cold = True  # until a number of tasks found their bytes in memory
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._torch_threads = torch.get_num_threads()
        self._settled = threading.Semaphore(0)
        self._threads = [
            threading.Thread(target=self._work, name=f"shardwright-read-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()
        for _ in self._threads:  # else threads that others begin meanwhile would have what ours have
            self._settled.acquire()

    def do(self, task: _Task) -> None:
        """Have some thread do ``task``; without threads, do it now."""
        if self._threads:
            self._tasks.put(task)
        else:
            self._do(task)

    def stop(self) -> None:
        """Forget what was not begun, end the threads, and wait for them, though not for ever.

        The garbage collector may call this anywhere, in one of these threads or where a lock is held that
        one of them waits for: then it ends once that is over.
        """
        with suppress(queue.Empty):
            while True:
                self._tasks.get_nowait()
        for _ in self._threads:
            self._tasks.put(None)
        end = time.monotonic() + _PATIENCE_SECONDS
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))

    def where_they_stand(self) -> str:
        """What each thread is doing."""
        return "; ".join(stacks_of_threads(self._threads))

    def _work(self) -> None:
        try:
            _stay_in_this_thread(self._torch_threads)
        finally:
            self._settled.release()
        while (task := self._tasks.get()) is not None:
            try:
                self._do(task)
            except BaseException as error:  # it is raised where the batch is handed out
                for batch, rows in task.parts:
                    batch.arrived(rows, error)
            del task  # or its buffers would live until the next one comes

    def _do(self, task: _Task) -> None:
        start = time.perf_counter()
        self.reader.images(task.indices, task.out, keep=False)
        seconds = time.perf_counter() - start
        self.cold |= seconds * _COLD_BYTES_PER_SECOND > len(task.out) * self.read_bytes
        for batch, rows in task.parts:
            batch.arrived(rows, None)


_settling = threading.Lock()


def _stay_in_this_thread(others: int) -> None:
    """Let torch's operators in this thread start no threads of OpenMP's, which would fight with ours for the cores.

    That is a setting of each thread. But it also becomes what threads that begin later get: for them it is set to
    ``others`` again, from a thread that does nothing else.
    """
    with _settling:
        torch.get_num_threads()  # else the first operator would set it anew
        torch.set_num_threads(1)
        restoring = threading.Thread(target=torch.set_num_threads, args=(others,))
        restoring.start()
        restoring.join()


class ReadAhead:
    """Iterates over (indices, samples) of the batches of one epoch.

    Its threads end when it is exhausted, closed or forgotten.

    Parameters
    ----------
    dataset
        Its columns are used, its transforms are not.
    reader, dtype
        Reads the images, which are of that dtype then.
    share, first
        What to read, from its batch ``first`` on.
    blocks
        Where chunks begin, in indices: the rows of a chunk in a group are one task. None: rows are read one
        by one, and tasks are batches.
    threads
        Reading threads; 0 reads in the calling one.
    ahead
        Batches that are read, or being read, beside the one handed out. In block order it is no less than the
        rest of a group and the next: no batch is whole before all chunks of its group are read, and threads
        that would wait there have the next group to begin with.
    patience_seconds
        How long threads are waited for; None: for ever.
    """

    def __init__(
        self,
        dataset: ShardedDataset,
        reader: Reader | CroppingReader,
        share: Share,
        pool: Pool,
        *,
        dtype: torch.dtype = torch.uint8,
        first: int = 0,
        blocks: Index | None,
        threads: int,
        ahead: int,
        patience_seconds: float | None = None,
    ) -> None:
        self._patience = patience_seconds
        self._dataset, self._share, self._pool, self._blocks = dataset, share, pool, blocks
        self._dtype = dtype
        self._ahead = ahead if threads else 0
        self._batches: dict[int, _Batch] = {}
        self._next = first
        self._planned = int(share.bounds[first])  # the tasks of positions before this were handed to the crew
        self._found_warm = 0
        self._crew = _Crew(reader, dataset.reader.row_bytes, threads)
        self._stop = weakref.finalize(self, self._crew.stop)

    def close(self) -> None:
        """End the threads; no batch comes after this."""
        self._next = len(self._share)
        self._batches.clear()
        self._stop()

    def __iter__(self) -> Iterator[tuple[Index, SampleBatch]]:
        return self

    def __next__(self) -> tuple[Index, SampleBatch]:
        if self._next == len(self._share):
            self.close()
            raise StopIteration
        try:
            self._plan()
            batch = self._batch(self._next)  # planned, unless it is empty
            del self._batches[self._next]
            if not batch.wait(self._patience):
                raise WorkerError(
                    f"no batch within timeout_seconds={self._patience:g}: {self._crew.where_they_stand()}"
                )
            self._next += 1
            return batch.indices, self._dataset.assembled(batch.indices, batch.tensor)
        except BaseException:
            self.close()
            raise

    def _plan(self) -> None:
        """Hand out tasks so that ``ahead`` batches beside the next are read or being read."""
        bounds = self._share.bounds
        wanted = int(bounds[min(self._next + 1 + self._ahead, len(self._share))])
        if self._blocks is not None and self._ahead:
            wanted = max(wanted, self._after_next_group())
        while self._planned < wanted:
            start = self._planned
            borders = bounds if self._blocks is None else self._share.groups
            end = min(int(bounds[-1]), int(borders[np.searchsorted(borders, start, side="right")]))
            self._planned = end
            tasks = self._tasks(start, end)
            for task in tasks:
                self._ask_ahead(task)
            for task in tasks:
                self._crew.do(task)

    def _after_next_group(self) -> int:
        """Where the group ends that comes after the one in which the next batch ends."""
        bounds, groups = self._share.bounds, self._share.groups
        group = int(np.searchsorted(groups, bounds[self._next + 1] - 1, side="right"))
        return min(int(bounds[-1]), int(groups[min(group + 1, len(groups) - 1)]))

    def _tasks(self, start: int, end: int) -> list[_Task]:
        """What is to be read for the positions ``[start, end)``."""
        indices, bounds = self._share.indices[start:end].astype(np.int64), self._share.bounds
        first = int(np.searchsorted(bounds, start, side="right")) - 1
        last = int(np.searchsorted(bounds, end, side="left"))
        positions = np.arange(start, end)
        number = np.searchsorted(bounds[first : last + 1], positions, side="right") - 1
        place = positions - bounds[first + number]
        batches = [self._batch(k) for k in range(first, last)]
        out = RowBuffers([batch.rows for batch in batches], number, place)
        least = max(_TASK_ROWS, _TASK_BYTES // self._crew.read_bytes)
        if self._blocks is not None:
            pieces = _by_chunk(indices, self._blocks, least)
        elif len(indices) < 2 * least:
            return [_Task(indices, out, [(batches[0], len(indices))])]
        else:
            pieces = np.split(np.arange(len(indices)), range(least, len(indices) - least + 1, least))
        tasks = []
        for piece in pieces:
            counts = np.bincount(number[piece]).tolist()
            parts = [(batch, count) for batch, count in zip(batches, counts, strict=False) if count]
            tasks.append(_Task(indices[piece], out.part(piece), parts))
        return tasks

    def _batch(self, number: int) -> _Batch:
        batch = self._batches.get(number)
        if batch is None:
            start, end = self._share.bounds[number : number + 2]
            indices = self._share.indices[start:end].astype(np.int64)
            reader = self._crew.reader
            tensor, array = self._pool.take((len(indices), *reader.image_shape), self._dtype)
            rows = array.reshape(len(indices), reader.row_bytes)
            batch = self._batches[number] = _Batch(indices, len(indices), tensor, rows)
        return batch

    def _ask_ahead(self, task: _Task) -> None:
        """Where the disk is at work, have the system read what ``task`` will need."""
        if not self._crew.cold:
            return
        if self._crew.reader.will_need(task.indices):
            self._found_warm = 0
        else:
            self._found_warm += 1
            self._crew.cold = self._found_warm < _WARM_TASKS


def _by_chunk(indices: Index, blocks: Index, least: int) -> Sequence[Index]:
    """Which ``indices`` to read together: in the order of the data set, cut where a chunk begins, ``least`` rows on."""
    order = np.argsort(indices)
    borders = np.flatnonzero(np.diff(np.searchsorted(blocks, indices[order], side="right"))) + 1
    cuts, last = [], 0
    for border in borders.tolist():
        if border - last >= least:
            cuts.append(border)
            last = border
    return np.split(order, cuts)
