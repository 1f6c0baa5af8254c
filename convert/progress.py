"""How far a conversion is, for a person at a terminal or for a log."""

import sys
import time
from types import TracebackType
from typing import Protocol, Self

from tqdm import tqdm


class Progress(Protocol):
    """Told how far one stage is; used as a context."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def update(self, more: int) -> None:
        """That much more is done."""


class ProgressMaker(Protocol):
    """Makes the progress of a stage: its name, the total if it is known, what is counted, and what is done already."""

    def __call__(self, stage: str, total: int | None, unit: str, done: int = 0) -> Progress: ...


class Silent:
    """No progress."""

    def __init__(self, stage: str = "", total: int | None = None, unit: str = "", done: int = 0) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, more: int) -> None:
        """Say nothing."""


class Lines:
    """A line on stderr now and then, for logs: no control characters."""

    seconds = 15.0

    def __init__(self, stage: str, total: int | None, unit: str, done: int = 0) -> None:
        self._stage, self._total, self._unit = stage, total, unit
        self._done = self._before = done
        self._start = self._said = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._say()

    def update(self, more: int) -> None:
        """Count, and say so every quarter of a minute."""
        self._done += more
        if time.monotonic() - self._said >= self.seconds:
            self._say()

    def _say(self) -> None:
        self._said = time.monotonic()
        rate = (self._done - self._before) / max(self._said - self._start, 1e-9)
        of = f" of {self._total}" if self._total is not None else ""
        print(f"{self._stage}: {self._done}{of} {self._unit}, {rate:.0f} {self._unit}/s", file=sys.stderr)


class Bar:
    """A tqdm bar on stderr."""

    def __init__(self, stage: str, total: int | None, unit: str, done: int = 0) -> None:
        self._bar = tqdm(desc=stage, total=total, initial=done, unit=unit, unit_scale=False, file=sys.stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def update(self, more: int) -> None:
        """Move the bar."""
        self._bar.update(more)


def for_stream() -> ProgressMaker:
    """A bar where stderr is a terminal, else lines."""
    return Bar if sys.stderr.isatty() else Lines
