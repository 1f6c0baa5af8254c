"""What many tests share: the command line in this process, and workers that are none."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from shardwright.cli import main
from shardwright.convert import workers

# The same examples in every run, on machines of any speed.
settings.register_profile("steady", derandomize=True, deadline=None, database=None)
settings.register_profile("soak", deadline=None, database=None, max_examples=5000)
settings.load_profile("steady")

REPOSITORY = Path(__file__).parents[1]


@dataclass(frozen=True)
class Ran:
    """What a command came to."""

    code: int
    out: str
    err: str


def pytest_configure() -> None:
    """A shell starts what it runs in the background with interrupts ignored, and so would all that tests start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kills", type=int, default=20, help="kills of a conversion, for each format")


@pytest.fixture
def kills(request: pytest.FixtureRequest) -> int:
    """How often a conversion is killed."""
    return int(request.config.getoption("--kills"))


class _Here:
    """Stands in for loky's executor: tasks run where they are submitted."""

    def __init__(self, **_: Any) -> None:
        pass

    def submit(self, work: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        future.set_result(work(*arguments))
        return future

    def shutdown(self, **_: Any) -> None:
        pass


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """The command line leaves signals ignored where it was interrupted, as its process is about to end."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversions without worker processes, which take seconds to start."""
    monkeypatch.setattr(workers, "ProcessPoolExecutor", _Here)
    monkeypatch.setattr(workers, "starting_processes", nullcontext)


@pytest.fixture
def command(
    here: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Ran]:
    """Runs ``shardwright`` with the given arguments in this process, without worker processes."""

    def shardwright(*arguments: object) -> Ran:
        argv = ["shardwright", *map(str, arguments)]
        monkeypatch.setattr(sys, "argv", argv)
        capsys.readouterr()
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        with pytest.raises(SystemExit) as end:
            main(argv[1:], prog_name="shardwright")
        for number, handler in before.items():  # it leaves them ignored, as its process is about to end
            signal.signal(number, handler)
        return Ran(int(end.value.code or 0), *capsys.readouterr())

    return shardwright


@pytest.fixture(scope="session")
def python() -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """Runs code in a fresh interpreter that takes nothing from the folder it starts in."""

    def run_python(code: str, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-P", "-W", "error", "-c", code, *arguments],
            env={**os.environ, **environment},
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=False,
        )

    return run_python
