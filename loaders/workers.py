"""Worker processes, watched: one that dies or hangs is an error that names it, the cause and the cure."""

import os
import queue
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from shardwright.errors import WorkerError
from shardwright.loaders.handover import (
    DESCRIPTOR_CURE,
    DEVICE_CURE,
    ROOM_CURE,
    Refused,
    is_about_descriptors,
    report_lost_batches,
)
from shardwright.loaders.stacks import StackFiles, answer_with_stack, state_of

if TYPE_CHECKING:
    from shardwright.loaders.loader import Loader

_LOOK_SECONDS = 0.5
_END_SECONDS = 5.0
_IN_FORKED = "Cannot re-initialize CUDA in forked subprocess"


class WatchedWorkers(_MultiProcessingDataLoaderIter):
    """The iterator of a DataLoader over worker processes, and what becomes of them.

    A worker that died is an error where a batch is next waited for: torch's own comes by a signal in the middle of
    whatever the training loop does, or waits. After any `WorkerError` all workers are gone, and `ended` is true.

    Parameters
    ----------
    loader
        Of which it is an iterator.
    patience_seconds
        How long a batch is waited for; None: for ever.
    look
        Called once, with the first batch.
    """

    def __init__(
        self, loader: "Loader", patience_seconds: float | None, look: Callable[[Any], None] | None = None
    ) -> None:
        self._owner, self._look = os.getpid(), look
        self._patience, self._due = patience_seconds, float("inf")
        self._hung: str | None = None
        self._stacks = None if patience_seconds is None else StackFiles()
        theirs = loader.worker_init_fn
        loader.worker_init_fn = partial(begin_worker, self._stacks.folder if self._stacks else None, theirs)
        try:
            super().__init__(loader)
        finally:
            loader.worker_init_fn = theirs
        if self._worker_pids_set:
            _forget(self)
            self._worker_pids_set = False

    @property
    def ended(self) -> bool:
        """Whether there are no workers any more."""
        return bool(self._shutdown)

    @property
    def pids(self) -> list[int]:
        """The worker processes."""
        return [] if self._shutdown else [worker.pid for worker in self._workers if worker.pid]

    def _reset(self, loader: "Loader", first_iter: bool = False) -> None:
        self._begin_waiting()
        super()._reset(loader, first_iter)

    def __next__(self) -> Any:
        batch = super().__next__()
        if self._look is not None:
            look, self._look = self._look, None
            look(batch)
        return batch

    def _next_data(self) -> Any:
        if self._shutdown:
            raise WorkerError(
                "the worker processes of this epoch ended: begin another, for which others are started"
            )
        self._begin_waiting()
        return super()._next_data()  # type: ignore[no-untyped-call]

    def _begin_waiting(self) -> None:
        if self._patience is not None:
            self._due = time.monotonic() + self._patience

    def _get_data(self) -> Any:
        try:
            with _signalled(self), self._watched():
                return self._arrived()
        except WorkerError:
            self._end_at_once()
            raise
        except Exception as error:
            # What was being received breaks off an instant before its sender is known to be dead.
            with suppress(RuntimeError):
                self._dead(wait_seconds=1.0)
            why = self._hung or self._why_dead()
            if not why and is_about_descriptors(error):
                why = f"too many files are open to receive a batch ({error}): {DESCRIPTOR_CURE}"
            if not why:
                raise
            self._end_at_once()
            raise WorkerError(why) from error

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Kill workers that hang in the middle of sending: to receive the rest knows no timeout."""
        if self._patience is None:
            yield
            return
        # The timer is not to keep the workers: its thread ends some time after it is cancelled.
        seconds = max(0.0, self._due - time.monotonic()) + _LOOK_SECONDS
        timer = threading.Timer(seconds, _kill_hung, [weakref.ref(self)])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _too_late(self) -> str:
        return f"no batch within timeout_seconds={self._patience:g}: {self._where_they_stand()}"

    def _arrived(self) -> Any:
        while True:
            if self._dead():
                raise WorkerError(self._hung or self._why_dead())
            left = self._due - time.monotonic()
            try:
                return self._data_queue.get(timeout=max(0.0, min(_LOOK_SECONDS, left)))
            except queue.Empty:
                pass
            if left <= 0:
                raise WorkerError(self._too_late())
            if self._pin_memory and not self._pin_memory_thread.is_alive():
                raise WorkerError(
                    "the thread that copies batches to pinned memory ended: take pin_memory=False"
                )

    def _process_data(self, data: Any, worker_idx: int) -> Any:
        try:
            batch = super()._process_data(data, worker_idx)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if _IN_FORKED not in str(error):
                raise
            self._end_at_once()
            raise WorkerError(
                f"worker process {self._workers[worker_idx].pid} used CUDA: {DEVICE_CURE}; or, where a transform must "
                "compute there, take start_method='spawn'"
            ) from error
        if isinstance(batch, Refused):
            self._end_at_once()
            raise WorkerError(batch.why)
        return batch

    def _dead(self, wait_seconds: float = 0.0) -> list[Any]:
        """Workers that ended, which none does by itself before it is told to."""
        end = time.monotonic() + wait_seconds
        while not (dead := [worker for worker in self._workers if not worker.is_alive()]):
            if time.monotonic() >= end:
                break
            time.sleep(0.05)
        return dead

    def _why_dead(self) -> str:
        return "; ".join(self._why(worker.pid, worker.exitcode) for worker in self._dead())

    def _why(self, pid: int, code: int | None) -> str:
        if code is None or code >= 0:
            return (
                f"worker process {pid} ended by itself with exit code {code}: code of a transform or the data set "
                "ended it, or was ended by a library; with workers=0 it runs in this process, where that can be seen"
            )
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = "unknown"
        what = f"worker process {pid} was killed by signal {-code} ({name})"
        fewer = (
            f"take fewer workers (here {len(self._workers)}) or a smaller prefetch_batches "
            f"(here {self._prefetch_factor})"
        )
        match name:
            case "SIGKILL":
                return f"{what}, most likely by the system because memory ran out: {fewer}, or give the job more memory"
            case "SIGBUS":
                return f"{what}, most likely because /dev/shm is full: {ROOM_CURE}"
            case "SIGSEGV" | "SIGABRT" | "SIGFPE" | "SIGILL":
                return (
                    f"{what}: native code that a transform calls crashed; with workers=0 and `python -X faulthandler` "
                    "it is seen where"
                )
        return f"{what}, which somebody sent: a scheduler, or a user"

    def _where_they_stand(self) -> str:
        found = []
        for number, pid in enumerate(self.pids):
            # The state first: to be asked for its stack wakes a process.
            state = state_of(pid)
            stack = self._stacks.of(number, pid) if self._stacks and state != "stopped" else None
            found.append(f"worker process {pid} is {state}" + (f", at {stack}" if stack else ""))
        return "; ".join(found)

    def _shutdown_workers(self) -> None:
        if os.getpid() != self._owner:  # a copy of this in a forked process: the workers are not its own
            return
        try:
            if not self._shutdown and hasattr(self, "_workers") and self._dead():
                # What they shared may be locked for ever.
                self._end_at_once()
            else:
                with _signalled(self):
                    super()._shutdown_workers()
        except RuntimeError:  # killed while it ended
            self._end_at_once()
        if self._stacks is not None:
            self._stacks.remove()

    def __del__(self) -> None:
        # The garbage collector may have ended the queues before, over which workers are told to end: torch then waits
        # 5 s for each. Nobody wants their batches any more.
        if not sys.is_finalizing() and os.getpid() == self._owner and not getattr(self, "_shutdown", True):
            self._end_at_once()

    def _end_at_once(self) -> None:
        """Kill all workers, and touch nothing that a dead one may hold."""
        self._shutdown = True
        for worker in self._workers:
            worker.kill()
        end = time.monotonic() + _END_SECONDS
        for worker in self._workers:
            worker.join(max(0.0, end - time.monotonic()))
        for each in (*self._index_queues, self._worker_result_queue):
            each.cancel_join_thread()
        if self._pin_memory:
            self._pin_memory_thread_done_event.set()  # it looks within seconds
        else:
            self._worker_result_queue.close()
        for each in self._index_queues:
            each.close()
        if self._stacks is not None:
            self._stacks.remove()


def begin_worker(stacks: str | None, then: Callable[[int], None] | None, worker: int) -> None:
    """What a worker process does first, and ``then`` what the loader's own `worker_init_fn` says."""
    report_lost_batches()
    if stacks is not None:
        answer_with_stack(stacks, worker)
    if then is not None:
        then(worker)


def _kill_hung(waiting: "weakref.ref[WatchedWorkers]") -> None:
    if (workers := waiting()) is not None:
        workers._hung = workers._too_late()
        for worker in workers._workers:
            worker.kill()


@contextmanager
def _signalled(workers: WatchedWorkers) -> Iterator[None]:
    """Let torch's handler of SIGCHLD raise RuntimeError if a worker fails meanwhile: it ends a wait for the rest of
    what a killed worker was sending, or for a lock that it holds, where nothing else would."""
    if threading.current_thread() is not threading.main_thread() or workers._shutdown or not workers._workers:
        yield
        return
    torch._C._set_worker_pids(id(workers), tuple(workers.pids))
    try:
        yield
    finally:
        _forget(workers)


def _forget(workers: WatchedWorkers) -> None:
    torch._C._remove_worker_pids(id(workers))
