"""Files of shards, kept open in a bounded number, and whole reads from them."""

import os
import resource
import stat
import threading
from collections import OrderedDict
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardwright.errors import ShardError

Bytes = npt.NDArray[np.uint8]

#: Files that are kept open at most.
MOST_OPEN = 128

_NOWAIT = getattr(os, "RWF_NOWAIT", 0)  # Linux


class FileCache:
    """At most ``limit`` files open at once for reading; the one unused longest is closed first.

    A file in use by some thread is never closed under it (its number could be taken by another file,
    and wrong pixels be read). More threads than ``limit`` reading different files go above it for as
    long as they read.

    Parameters
    ----------
    limit
        None: a quarter of the files that this process may open, at most 128.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit or self.limit_of(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        self._lock = threading.Lock()
        self._open: OrderedDict[int, list[int]] = OrderedDict()  # key -> [fd, users]

    @staticmethod
    def limit_of(allowed: int) -> int:
        """How many files are kept open in a process that may open so many."""
        return MOST_OPEN if allowed == resource.RLIM_INFINITY else max(1, min(MOST_OPEN, allowed // 4))

    def acquire(self, key: int, path: Path, expected_bytes: int) -> int:
        """A file descriptor of ``path``, open for reading until `release` of its ``key``.

        Raises
        ------
        ShardError
            The file is missing, cannot be opened, or has not ``expected_bytes``.
        """
        with self._lock:
            entry = self._open.get(key)
            if entry is None:
                while len(self._open) >= self.limit and self._close_one():
                    pass
                entry = self._open[key] = [open_checked(path, expected_bytes), 0]
            else:
                self._open.move_to_end(key)
            entry[1] += 1
            return entry[0]

    def release(self, key: int) -> None:
        """End a use of the file; it stays open as long as there is room."""
        with self._lock:
            self._open[key][1] -= 1

    def _close_one(self) -> bool:
        for key, (fd, users) in self._open.items():
            if not users:
                del self._open[key]
                os.close(fd)
                return True
        return False

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            while self._open:
                os.close(self._open.popitem()[1][0])

    def __del__(self) -> None:
        self.close()


def open_checked(path: Path, expected_bytes: int) -> int:
    """Open the plain file ``path`` for reading and return its file descriptor.

    Raises
    ------
    ShardError
        It is missing, a link, cannot be opened, or has not ``expected_bytes``.
    """
    try:
        # A link could lead out of the data set; and without NONBLOCK a pipe would wait for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        why = "it is a link, and a shard is a file of its own" if path.is_symlink() else error.strerror
        raise ShardError(f"cannot open '{path}': {why}. {CURE}") from error
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_size != expected_bytes:
        os.close(fd)
        raise ShardError(f"'{path}' has {status.st_size} bytes, its manifest says {expected_bytes}. {CURE}")
    return fd


def read_into(fd: int, buffer: Bytes, offset: int) -> bool:
    """Fill ``buffer`` from ``offset`` on; False where the file ends before."""
    filled = 0
    while filled < len(buffer):  # a signal, or more than the kernel moves at once
        got = os.preadv(fd, [buffer[filled:]], offset + filled)
        if not got:
            return False
        filled += got
    return True


def is_cached(fd: int, offset: int) -> bool:
    """Whether the byte at ``offset`` lies in the page cache; True where the system cannot tell."""
    try:
        os.preadv(fd, [bytearray(1)], offset, _NOWAIT)
    except BlockingIOError:
        return False
    except OSError:  # a file system that does not know the question
        return True
    return True


def will_need(fd: int, offset: int, size: int) -> None:
    """Tell the system that ``size`` bytes at ``offset`` will be read soon; does not wait for them."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, offset, size, os.POSIX_FADV_WILLNEED)


CURE = "`shardwright verify` lists all that is damaged, `shardwright repair` makes it again from the pictures"
