"""What all commands share: errors and signals to exit codes, lines that any terminal takes, options."""

import json
import locale
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import click

from shardwright.errors import ShardwrightError

FAILED, WITH_REJECTS, LOCKED, INTERRUPTED, TERMINATED = 1, 3, 4, 130, 143
#: Nothing was wrong, and the same command goes on: out of time, interrupted, terminated.
STOPPED = (5, INTERRUPTED, TERMINATED)
# More files are never open at once, and a program that closes all it may have would be slow.
MOST_OPEN_FILES = 1 << 16
_AGAIN_SECONDS = 0.01
#: Commands that go on where a run of them was stopped.
GOES_ON = frozenset(("convert", "export", "gc", "merge", "repair", "reshard", "split", "sync"))


class Group(click.Group):
    """Maps errors to exit codes and one line each; ``--debug`` adds the traceback."""

    def main(self, *arguments: Any, **options: Any) -> Any:
        try:
            return super().main(*arguments, **options)
        except OSError as error:  # of printing: all others are said below
            with suppress(OSError):
                click.echo(f"shardwright: cannot write the output: {error.strerror}", err=True)
            sys.exit(FAILED)

    def invoke(self, ctx: click.Context) -> Any:
        ctx.obj = {"debug": False, "log_json": False, "quiet": False}
        try:
            with _terminable():
                return super().invoke(ctx)
        except (ShardwrightError, OSError) as error:
            if _is_of_printing(error):
                raise
            if not ctx.obj["log_json"]:  # where it is an event
                if ctx.obj["debug"]:
                    traceback.print_exc()
                click.echo(f"shardwright: {printable(str(error))}{_nowhere()}", err=True)
            ctx.exit(code_of(error))
        except (KeyboardInterrupt, Terminated) as error:
            what = "terminated" if isinstance(error, Terminated) else "interrupted"
            goes_on = ctx.invoked_subcommand in GOES_ON
            how = "; the same command goes on where this one was" if goes_on else ""
            if not ctx.obj["log_json"]:
                click.echo(f"shardwright: {what}{how}", err=True)
            ctx.exit(code_of(error))


def code_of(error: BaseException) -> int:
    """The exit code of a command that ends with ``error``."""
    if isinstance(error, ShardwrightError | click.ClickException | click.exceptions.Exit):
        return error.exit_code
    if isinstance(error, Terminated):
        return TERMINATED
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED


def _is_of_printing(error: Exception) -> bool:
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_code is click.echo.__code__


def _nowhere() -> str:
    """That relative paths lead nowhere, where the current folder was removed."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return ". The current folder was removed, so relative paths lead nowhere: change into another"
    return ""


class Terminated(BaseException):
    """SIGTERM came; by default it would end the process with its workers alive and its files in place."""


@contextmanager
def _terminable() -> Iterator[None]:
    """Raise `Terminated` at SIGTERM, and KeyboardInterrupt at the first SIGINT alone; never in a library call."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough; cleaning up is not to be cut short
        raise Terminated

    def interrupt(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, terminate)}
    # Ignored, as in the background, it stays so.
    if signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, None):
        before[signal.SIGINT] = signal.signal(signal.SIGINT, interrupt)
    try:
        with _heard_everywhere({Terminated: terminate, KeyboardInterrupt: interrupt}):
            yield
    except (KeyboardInterrupt, Terminated):
        raise  # the process is about to end, and is not to be disturbed again: nothing is restored
    except BaseException:
        _restore(before)
        raise
    _restore(before)


@contextmanager
def _heard_everywhere(handlers: Mapping[type[BaseException], Any]) -> Iterator[None]:
    """Send a signal again whose exception nobody got, as it was raised in a destructor or a callback."""
    number_of = {Terminated: signal.SIGTERM, KeyboardInterrupt: signal.SIGINT}
    before = sys.unraisablehook

    def again(unraisable: Any) -> None:
        kind = unraisable.exc_type
        if kind not in number_of:
            before(unraisable)
            return
        signal.signal(number_of[kind], handlers[kind])
        later = threading.Timer(_AGAIN_SECONDS, os.kill, (os.getpid(), number_of[kind]))
        later.daemon = True
        later.start()

    sys.unraisablehook = again
    try:
        yield
    finally:
        sys.unraisablehook = before


def settle() -> None:
    """From now on neither SIGINT nor SIGTERM changes what the process ends with, which is about to."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


def _restore(handlers: Mapping[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        if signal.getsignal(number) is not signal.SIG_IGN:  # else it is settled
            signal.signal(number, handler)


def printable(text: str) -> str:
    """``text`` in one line that any terminal or log takes."""
    encoding = getattr(sys.stderr, "encoding", None) or "ascii"
    if locale.setlocale(locale.LC_CTYPE) == "C":  # where Python writes UTF-8 all the same
        encoding = "ascii"
    flat = "".join(
        c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text
    )
    return flat.encode(encoding, "backslashreplace").decode(encoding)


FOLDER = click.Path(path_type=Path)
AS_JSON = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object on stdout, and nothing else."
)
DEBUG = click.option(
    "--debug",
    is_flag=True,
    expose_value=False,
    callback=lambda ctx, _, value: ctx.obj.update(debug=value),
    help="Show a traceback with an error.",
)


GRACE = click.option(
    "--newer-than-grace",
    type=float,
    default=0.0,
    metavar="SECONDS",
    help="Leave pictures that were changed within the last SECONDS for the next run.",
)


def show(found: Mapping[str, Any], as_json: bool, in_words: Callable[[Any], list[str]]) -> None:
    """One JSON object, keyed by split where there are splits; or lines, but for ``--quiet``."""
    if as_json:
        click.echo(json.dumps(found[""] if list(found) == [""] else found, ensure_ascii=True))
        return
    if click.get_current_context().obj["quiet"]:
        return
    for split, entry in found.items():
        if split and len(found) > 1 and isinstance(entry, dict):
            click.echo(f"[{split}]")
        for line in in_words(entry):
            click.echo(printable(line))


def open_closed_streams() -> None:
    """Open the null device where stdin, stdout or stderr was closed: else a shard would get that number.

    And loky starts no process without a stderr.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:  # the lowest that is free
        os.set_inheritable(fd, True)  # for workers
    os.close(fd)
    for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


class Shown(Protocol):
    """What became of one data set."""

    def as_json(self) -> dict[str, Any]: ...

    def in_words(self) -> list[str]: ...


def show_each(found: Mapping[str, Shown], as_json: bool) -> None:
    """`show` what says itself how it is shown."""
    if as_json:
        show({split: each.as_json() for split, each in found.items()}, True, list)
    else:
        show(found, False, lambda each: each.in_words())


def allow_open_files() -> None:
    """Raise the limit of open files as far as the system lets a user: a library does not, a command may."""
    import resource  # not on Windows, where it is to be said that this does not run

    with suppress(OSError, ValueError):  # macOS allows less than it says
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_OPEN_FILES)
        if soft != resource.RLIM_INFINITY and soft < most:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
