"""The log of a command on stderr: one line an event, as ``key=value`` or as JSON, in printable ASCII alone."""

import io
import json
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from enum import IntEnum
from typing import Any

#: Values that stand as they are; others are quoted, as JSON strings are, which is what readers of logfmt take.
_BARE = re.compile(r"[A-Za-z0-9_./:+@%,~-]+")


class Level(IntEnum):
    """How much an event asks for a person."""

    INFO = 1
    WARNING = 2
    ERROR = 3


def plain(value: Any) -> Any:
    """``value`` with texts that every reader of JSON takes: bytes of names that are not UTF-8 become ``\\xhh``."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, str):
        try:
            data = value.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:  # surrogates that are no bytes of a name
            data = value.encode("utf-8", "surrogatepass")
        return data.decode("utf-8", "backslashreplace")
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return value


def as_json(values: Mapping[str, Any]) -> str:
    """One event as a JSON object."""
    return _ascii({key: value for key, value in values.items() if value is not None})


def as_pairs(values: Mapping[str, Any]) -> str:
    """One event as ``key=value`` pairs. Lists and tables are JSON, quoted as any other text."""
    return " ".join(f"{key}={_word(plain(value))}" for key, value in values.items() if value is not None)


def _word(value: Any) -> str:
    text = value if isinstance(value, str) else _ascii(value)
    return text if _BARE.fullmatch(text) else _ascii(text)


def _ascii(value: Any) -> str:
    # JSON leaves DEL as it is, which a terminal takes for a command.
    return json.dumps(plain(value), ensure_ascii=True, default=str).replace("\x7f", "\\u007f")


class Log:
    """Writes events of at least the level ``least``; None writes none.

    The first one waits until another comes: what fails before any work has one line to say, and that is the error.
    Not in JSON, where every line is an event.
    """

    def __init__(self, in_json: bool, least: Level | None) -> None:
        self.in_json = in_json
        self._least = least
        self._waiting: str | None = None

    @property
    def silent(self) -> bool:
        """Whether it writes nothing."""
        return self._least is None

    def start(self, values: Mapping[str, Any]) -> None:
        """What is to begin."""
        self._waiting = self._line("start", Level.INFO, values)
        if self.in_json:
            self._begin()

    def _begin(self) -> None:
        line, self._waiting = self._waiting, None
        if line is not None and self._wants(Level.INFO):
            _write(line)

    @property
    def begun(self) -> bool:
        """Whether the first event is out."""
        return self._waiting is None

    def event(self, event: str, level: Level = Level.INFO, **values: Any) -> None:
        """Write one event; ``values`` that are None are left out."""
        self._begin()
        if self._wants(level):
            _write(self._line(event, level, values))

    def _wants(self, level: Level) -> bool:
        return self._least is not None and level >= self._least

    def _line(self, event: str, level: Level, values: Mapping[str, Any]) -> str:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        form = as_json if self.in_json else as_pairs
        return form({"time": now, "level": level.name.lower(), "event": event, **values}) + "\n"


def _write(line: str) -> None:
    """One line by one write, so that lines of several processes stay whole. A log that is full or gone ends no job."""
    stream = sys.stderr
    if stream is None:
        return
    with suppress(OSError, ValueError):
        stream.flush()
        try:
            fd = stream.fileno()
        except io.UnsupportedOperation:  # a test's
            stream.write(line)
            return
        data = line.encode()
        while data:
            data = data[os.write(fd, data) :]
