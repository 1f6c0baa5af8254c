"""A file for HDF5 to write into, whose errors are not lost.

On a full disk HDF5 may end the process with a segmentation fault at exit, or lose the error where a
Dataset object dies before the file is closed, and leave zeros. So it never sees one: the guard keeps the
first error, lets HDF5 think that later writes succeed, and the writer asks after each chunk and after close.
"""

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Buffer

#: Bytes of one call: 6 MB in one take several times as long as six calls of 1 MiB (ext4, Linux 6.18).
_AT_ONCE_BYTES = 1 << 20


class GuardedFile(io.RawIOBase):
    """A new file, open for reading and writing, that keeps its first error instead of raising it."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "xb+", buffering=0)  # noqa: SIM115 (closed by close)
        self._error: OSError | None = None

    def check(self) -> None:
        """Raise the first error that writing met, if it met one."""
        if self._error is not None:
            raise self._error

    def sync(self) -> None:
        """Make what was written durable."""
        os.fsync(self._file.fileno())

    def write(self, data: "Buffer") -> int:
        """Write all of ``data``; after an error, only move on as if it were written."""
        view = memoryview(data).cast("B")
        try:
            done = 0
            while self._error is None and done < len(view):
                done += self._file.write(view[done : done + _AT_ONCE_BYTES]) or 0
        except OSError as error:
            self._error = error
        return len(view)

    def readinto(self, buffer: "Buffer") -> int:
        """Fill ``buffer``: with zeros where nothing was written, as behind the first error.

        Never less: h5py does not look at how much was read, and HDF5 would take what the memory held
        before for its own structures.
        """
        view = memoryview(buffer).cast("B")
        done = 0
        try:
            while done < len(view) and (got := self._file.readinto(view[done:])):
                done += got
        except OSError as error:
            self._error = self._error or error
        view[done:] = bytes(len(view) - done)
        return len(view)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move, as a file does."""
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        """Position, as of a file."""
        return self._file.tell()

    def truncate(self, size: int | None = None) -> int:
        """Set the size; errors are kept."""
        try:
            return self._file.truncate(size)
        except OSError as error:
            self._error = self._error or error
            return size or 0

    def seekable(self) -> bool:
        """A file is."""
        return True

    def readable(self) -> bool:
        """It is open for both."""
        return True

    def writable(self) -> bool:
        """It is open for both."""
        return True

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()
