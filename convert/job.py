"""What runs on an output, since when and how far: told in its ``job.json``, for who looks from outside.

It is there while the output is held. A killed process leaves it; whether that still runs is known by the lock.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

JOB_FILE = "job.json"
_PARTIAL = "job.partial"
#: All that lies in the work folder of an output while somebody holds it, or when its holder was killed.
JOB_FILES = frozenset((JOB_FILE, _PARTIAL))
_PRESENT: "ContextVar[Job | None]" = ContextVar("shardwright_job", default=None)


class Job:
    """What this process does, told while and where it holds an output; a maker of progress.

    Parameters
    ----------
    told
        What stands in the file besides: JSON values.
    """

    #: At most once in that time is an output told.
    seconds = 1.0

    def __init__(self, told: Mapping[str, Any]) -> None:
        self._told = {**told, "pid": os.getpid(), "host": socket.gethostname(), "since": _now()}
        self._stage: dict[str, Any] = {"stage": None, "done": 0, "total": None, "unit": None}
        self._held: list[Path] = []
        self._written = float("-inf")
        self._lock = threading.Lock()

    @contextmanager
    def present(self) -> Iterator[None]:
        """Outputs that are held in this context are told of it."""
        token = _PRESENT.set(self)
        try:
            yield
        finally:
            _PRESENT.reset(token)

    def __call__(self, stage: str, total: int | None, unit: str, done: int = 0) -> "_Stage":
        """The progress of a stage."""
        return _Stage(self, stage, total, unit, done)

    def begin(self, stage: str, total: int | None, unit: str, done: int) -> None:
        """Another stage begins."""
        self._stage = {"stage": stage, "done": done, "total": total, "unit": unit}
        self._tell()

    def update(self, more: int) -> None:
        """So much more of the stage is done."""
        self._stage["done"] += more
        self._tell()

    def hold(self, state: Path) -> None:
        """From now on it is told in the folder ``state`` too."""
        with self._lock:
            self._held.append(state)
            self._write([state])

    def let_go(self, state: Path) -> None:
        """No longer there."""
        with self._lock, suppress(ValueError):  # it was interrupted before that
            self._held.remove(state)

    def _tell(self) -> None:
        with self._lock:
            if time.monotonic() - self._written >= self.seconds:
                self._write(self._held)

    def _write(self, states: Sequence[Path]) -> None:
        self._written = time.monotonic()
        text = json.dumps({**self._told, **self._stage, "updated": _now()})
        for state in states:
            # Nothing fails for want of it: the disk may be full.
            with suppress(OSError):
                (state / _PARTIAL).write_text(text)
                os.replace(state / _PARTIAL, state / JOB_FILE)


class _Stage:
    def __init__(self, job: Job, stage: str, total: int | None, unit: str, done: int) -> None:
        self._job, self._begins = job, (stage, total, unit, done)

    def __enter__(self) -> Self:
        self._job.begin(*self._begins)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def update(self, more: int) -> None:
        self._job.update(more)


@contextmanager
def told_in(state: Path) -> Iterator[None]:
    """Tell in the work folder of an output, which is held, what the present job does, if there is one."""
    _remove(state)  # that of a killed process
    job = _PRESENT.get()
    try:
        if job is not None:
            job.hold(state)
        yield
    finally:
        if job is not None:
            job.let_go(state)
        _remove(state)


def read_job(state: Path) -> dict[str, Any] | None:
    """What was told in the work folder ``state``; None where there is nothing, or nothing that can be read."""
    try:
        found = json.loads((state / JOB_FILE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _remove(state: Path) -> None:
    for name in JOB_FILES:
        if os.path.lexists(state / name):
            with suppress(OSError):
                (state / name).unlink()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
