"""How far a conversion is: what is told of it, a bar for a person at a terminal, and several of them in one."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
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


class _Several:
    """The progress of one stage, told to several."""

    def __init__(self, parts: Sequence[Progress]) -> None:
        self._parts = parts
        self._open = ExitStack()

    def __enter__(self) -> Self:
        for part in self._parts:
            self._open.enter_context(part)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, trace)

    def update(self, more: int) -> None:
        for part in self._parts:
            part.update(more)


def together(*makers: ProgressMaker) -> ProgressMaker:
    """Makes the progress of all ``makers`` in one."""

    def make(stage: str, total: int | None, unit: str, done: int = 0) -> Progress:
        return _Several([maker(stage, total, unit, done) for maker in makers])

    return make


def on_terminal() -> bool:
    """Whether stderr is a terminal; it may be closed."""
    return sys.stderr is not None and sys.stderr.isatty()
