"""Many reads in one system call, by Linux's asynchronous I/O (`io_submit(2)`).

A row of 256x256x3 is copied from the page cache in 25 us. Where each is a call of its own, Python stands between
two of them, and a thread that comes back from one waits until another lets go of the interpreter's lock. With a
list of reads a thread is away for a whole batch. On files opened without O_DIRECT, `io_submit` has as a rule done all
of them when it returns, so that they come one after the other, as with `preadv`; where it has not, they are waited for.
"""

import ctypes
import errno
import os
import platform
import struct
import sys
from functools import cache
from typing import Any

import numpy as np

from shardwright.datasets.rows import Index

#: Reads in one call: from memory they take some milliseconds.
MOST = 128

# struct iocb and struct io_event of linux/aio_abi.h, on a little-endian machine of 64 bits.
_IOCB = np.dtype(
    [
        ("data", "<u8"), ("key", "<u4"), ("rw_flags", "<i4"), ("opcode", "<u2"), ("reqprio", "<i2"),
        ("fd", "<u4"), ("buffer", "<u8"), ("bytes", "<u8"), ("offset", "<i8"), ("reserved", "<u8"),
        ("flags", "<u4"), ("result_fd", "<u4"),
    ]
)  # fmt: skip
_EVENT = np.dtype([("data", "<u8"), ("iocb", "<u8"), ("result", "<i8"), ("result2", "<i8")])
_PREAD = 0
# io_setup, io_destroy, io_getevents, io_submit
_NUMBERS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}


class ReadList:
    """Reads lists of rows for one thread; raises OSError where the system does not offer it."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._context = ctypes.c_ulong(0)
        self._under_way = False
        self._setup, self._destroy, self._getevents, self._submit = _system_calls()
        self._iocbs, self._events = np.zeros(MOST, _IOCB), np.zeros(MOST, _EVENT)
        self._iocbs["data"], self._iocbs["opcode"] = np.arange(MOST), _PREAD
        self._list = self._iocbs.ctypes.data + np.arange(MOST) * _IOCB.itemsize
        self._renew()

    def read(self, fds: Index, offsets: Index, addresses: Index, size: int) -> Index:
        """Read ``size`` bytes at each offset of each file to each address.

        Returns
        -------
        Index
            (n,) bytes read of each; less than ``size``, or negative, where that read ended early or failed:
            do it again by `os.preadv`, which says why.
        """
        done = np.full(len(fds), -1, np.int64)
        for start in range(0, len(fds), MOST):
            part = slice(start, start + MOST)
            self._read(fds[part], offsets[part], addresses[part], size, done[part])
        return done

    def _read(self, fds: Index, offsets: Index, addresses: Index, size: int, done: Index) -> None:
        count = len(fds)
        iocbs = self._iocbs[:count]
        iocbs["fd"], iocbs["offset"], iocbs["buffer"], iocbs["bytes"] = fds, offsets, addresses, size
        if self._under_way:  # an interrupt came between the call and its results
            self._renew()
        self._under_way = True
        try:
            self._submit_and_collect(count, done)
        except BaseException:
            self._end()  # waits for what is under way: the caller's memory may be gone after this
            raise
        self._under_way = False

    def _submit_and_collect(self, count: int, done: Index) -> None:
        submitted = self._submit(self._context, ctypes.c_long(count), ctypes.c_void_p(self._list.ctypes.data))
        collected = 0
        while collected < submitted:
            wanted = ctypes.c_long(submitted - collected)
            place = ctypes.c_void_p(self._events.ctypes.data + collected * _EVENT.itemsize)
            got = self._getevents(self._context, wanted, wanted, place, None)
            if got < 0 and ctypes.get_errno() != errno.EINTR:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            collected += max(0, got)
        events = self._events[:collected]
        done[events["data"].astype(np.int64)] = events["result"]

    def _renew(self) -> None:
        self._end()
        context = ctypes.c_ulong(0)
        if self._setup(ctypes.c_long(MOST), ctypes.byref(context)):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._context, self._under_way = context, False

    def _end(self) -> None:
        # A forked child has a copy of the number, and its own process has no such context.
        if self._context.value and self._process == os.getpid():
            self._destroy(self._context)  # waits for reads that are under way
            self._context = ctypes.c_ulong(0)

    def __del__(self) -> None:
        self._end()


@cache
def _system_calls() -> tuple[Any, Any, Any, Any]:
    numbers = _NUMBERS.get(platform.machine())
    if sys.platform != "linux" or numbers is None or struct.calcsize("P") != 8 or sys.byteorder != "little":
        raise OSError(errno.ENOSYS, f"no io_submit on {sys.platform} {platform.machine()}")
    syscall = ctypes.CDLL(None, use_errno=True).syscall  # without the interpreter's lock
    syscall.restype = ctypes.c_long

    def call(number: int) -> Any:
        return lambda *arguments: syscall(ctypes.c_long(number), *arguments)

    setup, destroy, getevents, submit = map(call, numbers)
    return setup, destroy, getevents, submit
