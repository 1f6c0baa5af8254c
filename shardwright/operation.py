"""A command that does work, seen from outside: its log, its ``job.json``, its niceness, and how many workers it has.

`operation` is all that a command needs: it adds the options, and hands over an `Operation` as ``job``.
"""

import functools
import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import click

from shardwright import __version__
from shardwright.group import LOCKED, STOPPED, code_of, printable, settle
from shardwright.log import Level, Log, plain
from shardwright.outcome import Event

if TYPE_CHECKING:
    from shardwright.convert.progress import ProgressMaker

Command = Callable[..., Any]
#: What the workers of a command do, which says how much memory they take.
Work = Literal["decode", "copy"]

_OPTIONS = (
    click.option(
        "--log-json", is_flag=True, help="Log as one JSON object a line on stderr, and nothing else there."
    ),
    click.option(
        "--quiet", is_flag=True, help="Only warnings and errors, on stderr; of stdout only --json's."
    ),
    click.option(
        "--nice",
        type=click.IntRange(0, 19),
        metavar="N",
        help="Run with a niceness of N at least, 0 to 19, the workers too: others go first.",
    ),
)


def _seconds(_: click.Context, __: click.Parameter, value: str | None) -> float | None:
    from shardwright.convert.options import seconds_of

    return None if value is None else seconds_of(value, "max_runtime")


MAX_RUNTIME = click.option(
    "--max-runtime",
    metavar="TIME",
    callback=_seconds,
    help="Begin no shard after TIME, such as 8h, 90m or 30s. Exit code 5: run again to go on.",
)


def operation(work: Work | None = None) -> Callable[[Command], Command]:
    """Make a command an operation: it gets ``job``, an `Operation`, and options of what is said of it.

    Parameters
    ----------
    work
        What its workers do: ``jobs`` that were not given are as many as may be used. None: it has none.
    """

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def run(*, log_json: bool, quiet: bool, nice: int | None, **values: Any) -> Any:
            from shardwright.convert.progress import on_terminal

            context = click.get_current_context()
            context.obj |= {"log_json": log_json, "quiet": quiet}
            least = Level.WARNING if quiet else Level.INFO
            log = Log(log_json, least if log_json or quiet or not on_terminal() else None)
            found = {} if work is None else _workers(work, values)
            told = _told(context.info_name or "", values)
            job = Operation(log, told, quiet, context.obj["debug"])
            with job.running({**told, "version": __version__, "pid": os.getpid(), **found, "nice": nice}):
                _be_nice(nice, log)
                return command(job=job, **values)

        for option in reversed(_OPTIONS):
            run = option(run)
        return run

    return decorate


class Operation:
    """One run of a command: what it is told, and who is told of it.

    Attributes
    ----------
    progress
        For the library's call: a bar or the log, and ``job.json`` of the output while that is held.
    """

    progress: "ProgressMaker"

    def __init__(self, log: Log, told: Mapping[str, Any], quiet: bool, debug: bool) -> None:
        from shardwright.convert.job import Job
        from shardwright.convert.progress import Bar, on_terminal, together

        self._log, self._quiet, self._debug = log, quiet, debug
        self._job: Job = Job(plain({key: value for key, value in told.items() if value is not None}))
        bar = on_terminal() and not quiet and not log.in_json
        self.progress = together(Bar if bar else functools.partial(LoggedStage, log), self._job)

    def log(self, events: Iterable[Event]) -> None:
        """What became of it."""
        for event in events:
            self._log.event(event.name, event.level, **event.values)

    @contextmanager
    def running(self, start: Mapping[str, Any]) -> Iterator[None]:
        """Log its start, its error if it has one, and its end; meanwhile outputs that are held say that it runs."""
        began = time.monotonic()
        self._log.start(start)
        code = 0
        try:
            with self._job.present():
                yield
        except BaseException as error:
            code = code_of(error)
            if not isinstance(error, click.exceptions.Exit):
                self._failed(error, code)
            raise
        finally:
            settle()  # what is said of the end is not to be untrue by a signal that comes behind it
            if code == 0 or self._log.begun:
                self._log.event("end", code=code, seconds=round(time.monotonic() - began, 1))

    def _failed(self, error: BaseException, code: int) -> None:
        """The error's event. People have a line beside it, which is all where nothing had begun, or in quiet."""
        if not self._log.in_json and (self._quiet or not self._log.begun):
            return
        name, level = {LOCKED: ("locked", Level.WARNING)}.get(code, ("error", Level.ERROR))
        if code in STOPPED:
            name, level = "stopped", Level.WARNING
        self._log.event(
            name,
            level,
            code=code,
            kind=type(error).__name__.lstrip("_"),
            message=str(error) or None,
            traceback=traceback.format_exc() if self._debug and self._log.in_json else None,
        )


class LoggedStage:
    """The progress of a stage, as events: its begin, its end, and how far it is now and then."""

    seconds = 60.0

    def __init__(self, log: Log, stage: str, total: int | None, unit: str, done: int = 0) -> None:
        self._log = log
        self._what: dict[str, Any] = {"stage": stage, "unit": unit, "total": total}
        self._done = self._before = done
        self._began = self._said = time.monotonic()

    def __enter__(self) -> Self:
        self._log.event("stage", state="begin", **self._what, done=self._done or None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        state = "end" if kind is None else "broken-off"
        seconds = time.monotonic() - self._began
        self._log.event("stage", state=state, **self._what, done=self._done, seconds=round(seconds, 1))

    def update(self, more: int) -> None:
        """Count, and say so every minute."""
        self._done += more
        now = time.monotonic()
        if now - self._said < self.seconds:
            return
        self._said = now
        rate = (self._done - self._before) / (now - self._began)
        total = self._what["total"]
        left = round((total - self._done) / rate) if isinstance(total, int) and rate else None
        self._log.event(
            "progress", **self._what, done=self._done, per_second=round(rate, 1), seconds_left=left
        )


def _told(command: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """What all that is told of it says: the command, and what it works on."""
    source = values.get("source", values.get("folders"))
    out = values.get("out") or source  # in place
    return {"command": command, "source": source, "out": out, "dry_run": values.get("dry_run") or None}


def _workers(work: Work, values: dict[str, Any]) -> dict[str, Any]:
    """Say in ``values`` how many workers there are, where nobody did; what is known of that, for the log."""
    from shardwright.convert.jobs import COPYING, allowance, decoding

    if values["jobs"] is not None:
        return {"jobs": values["jobs"]}
    large = {"max_pixels": values["max_pixels"]} if "max_pixels" in values else {}
    allowed = allowance(COPYING if work == "copy" else decoding(**large))
    values["jobs"] = allowed.jobs
    if not allowed.short_of_memory:
        return {"jobs": allowed.jobs}
    return {
        "jobs": allowed.jobs,
        "jobs_limited_by": "memory",
        "cpus": allowed.cpus,
        "memory_bytes": allowed.memory_bytes,
        "worker_bytes": allowed.need.worker_bytes,
    }


def _be_nice(nice: int | None, log: Log) -> None:
    """Set the niceness of this thread and of all that it starts, which is before there are others."""
    if nice is None:
        return
    try:
        os.setpriority(os.PRIO_PROCESS, 0, max(nice, os.getpriority(os.PRIO_PROCESS, 0)))
    except OSError as error:
        why = f"--nice {nice} cannot be set: {error.strerror}"
        if log.silent:
            click.echo(printable(f"shardwright: {why}"), err=True)
        log.event("warning", Level.WARNING, message=why)
