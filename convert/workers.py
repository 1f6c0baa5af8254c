"""The worker processes of a conversion: one shard each at a time, and what becomes of it when one of them dies."""

import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from joblib.externals.loky import ProcessPoolExecutor

from shardwright.convert.jobs import Need, decoding, jobs_allowed
from shardwright.convert.orphan import end_with_parent
from shardwright.convert.records import ShardRecord
from shardwright.convert.starting import starting_processes
from shardwright.convert.write import ShardTask, try_picture
from shardwright.errors import ShardError, ShardwrightError

# A worker decodes one picture at a time: more threads a worker would only get in each other's way. And a json.py in
# the folder that the command is run in is not Python's.
_ENVIRONMENT = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    "PYTHONSAFEPATH": "1",
}
Result = TypeVar("Result")
_TRIES = 2
_PATIENCE_SECONDS = 1.0
_LOOK_EVERY_SECONDS = 0.5


class Task(Protocol):
    """A shard to write, under names from ``partial``."""

    @property
    def number(self) -> int: ...

    @property
    def stem(self) -> str: ...

    @property
    def partial(self) -> Path: ...

    def write(self) -> ShardRecord:
        """Write it, in a worker process."""


class Workers:
    """Processes of joblib's loky that write shards; a context, with which they end, whatever ended it.

    Each is a pool of its own with a thread of this process that hands it its work: when one dies, it is known
    which shard it had, and the others go on. A process starts when the first shard comes to it.

    Parameters
    ----------
    jobs
        How many. None: as many as the CPUs and the memory allow that this process may use.
    need
        The memory that they take, where their number follows from it. None: that of workers that decode.
    """

    def __init__(self, jobs: int | None = None, need: Need | None = None) -> None:
        self._workers = [_Worker() for _ in range(jobs or jobs_allowed(need or decoding()))]
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.take_no_more()
        for worker in self._workers:
            worker.end()
        for thread in self._threads:
            thread.join()

    def call(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """What ``work`` returns in one of the processes.

        Raises
        ------
        ShardwrightError
            The process died.
        """
        for _ in range(_TRIES):
            with suppress(_Died):
                return self._workers[0].call(work, *arguments)
        raise ShardwrightError(f"a worker process was killed or crashed {_TRIES} times")

    def write(self, tasks: Iterable[Task]) -> Iterator[ShardRecord | None]:
        """Write all shards; their records as they come, and None twice a second while none does.

        Raises
        ------
        OSError
            A shard could not be written.
        ShardError
            What its rows are copied from is damaged or gone.
        ShardwrightError
            A worker died again and again, and no picture alone was the cause.
        """
        found: queue.SimpleQueue[ShardRecord | BaseException | None] = queue.SimpleQueue()
        todo, lock = iter(tasks), threading.Lock()

        def drive(worker: _Worker) -> None:
            try:
                while True:
                    with lock:
                        task = next(todo, None)
                    if task is None:
                        break
                    found.put(worker.write(task))
                found.put(None)
            except BaseException as error:  # it is raised where the records are handed out
                found.put(error)

        for worker in self._workers:
            # Daemons: where even the ending of the workers is interrupted, they must not keep the process.
            thread = threading.Thread(target=drive, args=(worker,), daemon=True)
            thread.start()
            self._threads.append(thread)
        running = len(self._workers)
        while running:
            try:
                record = found.get(timeout=_LOOK_EVERY_SECONDS)
            except queue.Empty:
                yield None
                continue
            if record is None:
                running -= 1
            elif isinstance(record, BaseException):
                raise record
            elif record.error is not None:
                raise OSError(*record.error)
            elif record.damage:
                raise ShardError(record.damage)
            else:
                yield record


class _Worker:
    """One process at a time, for one thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._executor: ProcessPoolExecutor | None = None
        self._future: Future[Any] | None = None
        self._ended = False

    def write(self, task: Task) -> ShardRecord:
        """Write one shard. If the process dies, try again; then once more, without pictures that it dies of."""
        for _ in range(_TRIES):
            try:
                return self._written(task)
            except _Died:
                continue
        if not isinstance(task, ShardTask):
            raise ShardwrightError(
                f"the process that writes shard '{task.stem}' was killed or crashed {_TRIES} times: is there memory "
                "for so many --jobs? Finished shards are kept: the same command goes on from there"
            )
        poison = frozenset(path for path in task.paths if self._dies_of(path, task))
        with suppress(_Died):
            return self._written(replace(task, poison=poison))
        raise ShardwrightError(
            f"the process that writes shard '{task.stem}' was killed or crashed {_TRIES + 1} times, and none "
            f"of its {len(task.paths)} pictures does that by itself: is there memory for so many --jobs? "
            "Finished shards are kept: the same command goes on from there"
        )

    def _written(self, task: Task) -> ShardRecord:
        for left in task.partial.parent.glob(task.partial.name + ".*"):  # by one that died
            left.unlink()
        return self.call(task.write)

    def _dies_of(self, path: str, task: ShardTask) -> bool:
        """Whether a new process dies of the picture each time: once may be for want of memory that others took."""
        for _ in range(_TRIES + 1):
            try:
                self.call(try_picture, task.root / path, task.options.pixels)
            except _Died:
                continue
            return False
        return True

    def call(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """What ``work`` returns in the process; raises _Died if that ended."""
        with self._lock:
            if self._ended:
                raise RuntimeError("the workers have been ended")
            with starting_processes():
                if self._executor is None:
                    self._executor = ProcessPoolExecutor(
                        max_workers=1, env=_ENVIRONMENT, initializer=end_with_parent, initargs=(os.getpid(),)
                    )
                future: Future[Result] = self._executor.submit(work, *arguments)
            self._future = future
        try:
            return self._result(future)
        except BrokenProcessPool as error:  # loky's TerminatedWorkerError among them
            self._drop()
            raise _Died(str(error)) from error

    def _result(self, future: "Future[Result]") -> Result:
        while True:
            try:
                return future.result(_PATIENCE_SECONDS)
            except TimeoutError:
                # Without memory or threads for it, loky's own thread ends, and nobody would ever answer.
                manager = getattr(self._executor, "_executor_manager_thread", None)
                if manager is not None and not manager.is_alive() and not future.done():
                    raise BrokenProcessPool("no thread to speak to the process") from None

    def take_no_more(self) -> None:
        """From now on `call` raises."""
        self._ended = True

    def end(self) -> None:
        """End the process, in the middle of its work too."""
        with self._lock:
            self._ended = True
        # loky's own thread fails, and leaves the process alive, where a pool is shut down before that thread has
        # seen what was handed in last.
        end = time.monotonic() + _PATIENCE_SECONDS
        while self._future is not None and time.monotonic() < end:
            if self._future.running() or self._future.done():
                break
            time.sleep(0.001)
        self._drop()

    def _drop(self) -> None:
        with self._lock:
            executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=True, kill_workers=True)


class _Died(Exception):
    """A process ended in the middle of its work."""
