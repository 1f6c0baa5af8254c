"""Files of shards, kept open in a bounded number, and whole reads from them."""

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardwright.errors import ShardError

_IOV_MAX = 1024


class FileCache:
    """At most ``limit`` files open at once for reading; the one unused longest is closed first.

    A file in use by some thread is never closed under it (its number could be taken by another file,
    and wrong pixels be read). More threads than ``limit`` reading different files go above it for as
    long as they read.
    """

    def __init__(self, limit: int = 64) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._open: OrderedDict[Path, list[int]] = OrderedDict()  # path -> [fd, users]

    @contextmanager
    def reading(self, path: Path, expected_bytes: int) -> Iterator[int]:
        """A file descriptor of ``path``, open for reading while in the context.

        Raises
        ------
        ShardError
            The file is missing, cannot be opened, or has not ``expected_bytes``.
        """
        with self._lock:
            entry = self._open.get(path)
            if entry is None:
                entry = self._open[path] = [open_checked(path, expected_bytes), 0]
            else:
                self._open.move_to_end(path)
            entry[1] += 1
            if len(self._open) > self.limit:
                self._close_idle()
        try:
            yield entry[0]
        finally:
            with self._lock:
                entry[1] -= 1

    def _close_idle(self) -> None:
        for path in [p for p, (_, users) in self._open.items() if not users][: len(self._open) - self.limit]:
            os.close(self._open.pop(path)[0])

    def close(self) -> None:
        """Close every file that nobody reads."""
        with self._lock:
            for path in [p for p, (_, users) in self._open.items() if not users]:
                os.close(self._open.pop(path)[0])

    def __del__(self) -> None:
        self.close()


def open_checked(path: Path, expected_bytes: int) -> int:
    """Open ``path`` for reading and return its file descriptor; ShardError where it is not as expected."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ShardError(f"cannot open '{path}': {error.strerror}. {CURE}") from error
    if (found := os.fstat(fd).st_size) != expected_bytes:
        os.close(fd)
        raise ShardError(f"'{path}' has {found} bytes, its manifest says {expected_bytes}. {CURE}")
    return fd


def read_into(fd: int, buffers: list[memoryview], offset: int) -> bool:
    """Fill ``buffers``, one after the other, from ``offset`` on; False where the file ends before."""
    for start in range(0, len(buffers), _IOV_MAX):
        part = buffers[start : start + _IOV_MAX]
        wanted = sum(map(len, part))
        got = os.preadv(fd, part, offset)
        while got < wanted:  # a signal, or more than the kernel moves at once
            done = got
            rest = []
            for buffer in part:
                rest.append(buffer[done:] if done > 0 else buffer)
                done = max(0, done - len(buffer))
            more = os.preadv(fd, [buffer for buffer in rest if len(buffer)], offset + got)
            if not more:
                return False
            got += more
        offset += wanted
    return True


CURE = "`shardwright verify` lists all that is damaged; restore the file or convert again"
