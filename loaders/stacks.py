"""Where a worker stands: what its Python code is doing, in a few words."""

import faulthandler
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

# Of the real-time signals the last but few: libraries take them from either end. Ends a process that does not expect
# it, so that it is sent only to those that said that they do.
_SIGNAL: int | None = signal.SIGRTMAX - 5 if hasattr(signal, "SIGRTMAX") else None
_PATIENCE_SECONDS = 2.0
_FRAMES = 6

_DUMPED = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.M)


class StackFiles:
    """A private folder in which worker processes write where they stand, when they are asked; removed with this."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="shardwright-stacks-")
        self.remove = weakref.finalize(self, _remove, self.folder, os.getpid())

    def of(self, worker: int, pid: int) -> str | None:
        """The stack of the process ``pid``, innermost function first; None if it does not answer."""
        path = Path(self.folder) / str(worker)
        if _SIGNAL is None or not path.exists():
            return None
        before = path.stat().st_size
        with suppress(ProcessLookupError):
            os.kill(pid, _SIGNAL)
        end = time.monotonic() + _PATIENCE_SECONDS
        size = before
        while time.monotonic() < end:
            time.sleep(0.02)
            grown = path.stat().st_size
            if grown > before and grown == size:  # no longer being written
                break
            size = grown
        with path.open(errors="replace") as file:
            file.seek(before)
            frames = [(name, where, int(line)) for where, line, name in _DUMPED.findall(file.read())]
        return _in_words(frames) if frames else None


def answer_with_stack(folder: str, worker: int) -> None:
    """In a worker: write where it stands into ``folder`` whenever it is asked to."""
    if _SIGNAL is None:
        return
    path = Path(folder) / str(worker)
    # Open as long as the process lives: the handler writes to its number.
    file = path.with_suffix(".new").open("a")
    faulthandler.register(_SIGNAL, file=file, all_threads=False, chain=False)
    path.with_suffix(".new").rename(path)  # from now on it may be asked
    _kept.append(file)


_kept: list[Any] = []


def state_of(pid: int) -> str:
    """What the system says that the process ``pid`` does, such as sleeping."""
    try:
        return str(psutil.Process(pid).status())
    except psutil.Error:
        return "gone"


def stacks_of_threads(threads: Iterable[threading.Thread]) -> list[str]:
    """Name and stack of each of ``threads``."""
    frames = sys._current_frames()
    found = []
    for thread in threads:
        frame = frames.get(thread.ident or 0)
        stack = [] if frame is None else traceback.extract_stack(frame)[::-1]
        where = _in_words([(entry.name, entry.filename, entry.lineno or 0) for entry in stack])
        found.append(f"{thread.name}: {where or 'ended'}")
    return found


def _in_words(frames: list[tuple[str, str, int]]) -> str:
    shown = [f"{name} ({os.path.basename(path)}:{line})" for name, path, line in frames[:_FRAMES]]
    return " in ".join(shown) + (" in ..." if len(frames) > _FRAMES else "")


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # a forked process has a copy of this finalizer
        shutil.rmtree(folder, ignore_errors=True)
