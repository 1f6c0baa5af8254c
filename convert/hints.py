"""What was known of the source's files when a version was made: then only those that changed since need be read.

Never needed to read the data set. Where they are lost, a `sync` reads all pictures once, and knows it again.
"""

import io
import zipfile
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwright.datasets.layout import Manifest
from shardwright.datasets.rows import Index

Int64 = npt.NDArray[np.int64]
#: A time that no file has: it is to be looked at again, whatever its times are.
UNKNOWN_TIME = -(1 << 63)
#: Clocks of files tick in up to two seconds (FAT).
_REST_NS = 2_000_000_000
_KEYS = ("fingerprint", "of", "rows", "ids", "sizes", "mtimes", "ctimes", "labels", "hashes")


@dataclass(frozen=True, slots=True)
class Stamps:
    """By what a file is taken for unchanged, n of them.

    Attributes
    ----------
    sizes, mtimes, ctimes
        int64 (n,): bytes, -1 where not known; times of the last modification of its content, and of the last change of
        any kind, in ns.
    """

    sizes: Int64
    mtimes: Int64
    ctimes: Int64

    def taking(self, index: Index) -> "Stamps":
        """Those at ``index``."""
        return Stamps(self.sizes[index], self.mtimes[index], self.ctimes[index])

    def at_rest(self, began_ns: int) -> npt.NDArray[np.bool_]:
        """(n,): whether each file had not been changed for a while when they were taken.

        One that had may change again within the same tick of its clock.
        """
        at_rest: npt.NDArray[np.bool_] = np.maximum(self.mtimes, self.ctimes) < began_ns - _REST_NS
        return at_rest

    def same(self, other: "Stamps") -> npt.NDArray[np.bool_]:
        """(n,): whether each file is what ``other`` says of it."""
        same: npt.NDArray[np.bool_] = (
            (self.sizes == other.sizes) & (self.mtimes == other.mtimes) & (self.ctimes == other.ctimes)
        )
        return same


@dataclass(frozen=True, slots=True)
class Hints:
    """What the files of one version were: those of its living rows by index, then those that were rejected.

    Attributes
    ----------
    fingerprint
        Of the scan of the whole source, see `Scan.fingerprint`; empty where it does not hold.
    rows
        How many of them are rows.
    began_ns
        When the scan began, in ns since the epoch. It is the time of the file that they are in, whose content does not
        depend on it.
    ids, stamps
        Of all n of them.
    labels, hashes
        int64 (rows,), and uint8 (rows, 32): class number of each row, and SHA-256 of its picture's file.
    """

    fingerprint: str
    began_ns: int
    rows: int
    ids: Sequence[str]
    stamps: Stamps
    labels: Int64
    hashes: npt.NDArray[np.uint8]

    @classmethod
    def nothing(cls) -> "Hints":
        """Where nothing is known: no version has such ones."""
        none = np.zeros(0, np.int64)
        return cls("", 0, 0, (), Stamps(none, none, none), none, np.zeros((0, 32), np.uint8))

    def is_certain(self) -> npt.NDArray[np.bool_]:
        """(n,): whether a file of the same stamps is the same."""
        return self.stamps.at_rest(self.began_ns)

    def permuted(self, index: Index) -> "Hints":
        """Those of a data set whose row k is the row ``index[k]`` of this one, all of them."""
        everything = np.append(index, np.arange(self.rows, len(self.ids)))
        return replace(
            self,
            ids=[self.ids[k] for k in everything.tolist()],
            stamps=self.stamps.taking(everything),
            labels=self.labels[index],
            hashes=self.hashes[index],
        )

    def with_rejects(self, ids: Container[str]) -> "Hints":
        """The same without what was known of pictures that were rejected, but for those with ``ids``."""
        index = [k for k, id in enumerate(self.ids) if k < self.rows or id in ids]
        if len(index) == len(self.ids):
            return self
        return replace(
            self, ids=[self.ids[k] for k in index], stamps=self.stamps.taking(np.array(index, np.int64))
        )

    def to_bytes(self, manifest: Manifest) -> bytes:
        """The content of their file, for the version ``manifest``: an archive of NumPy arrays, with checksums."""
        file = io.BytesIO()
        np.savez(
            file,
            fingerprint=_text(self.fingerprint),
            of=_text(_of(manifest)),
            rows=np.array(self.rows),
            ids=_text("\0".join(self.ids)),  # no name of a file holds a zero
            sizes=self.stamps.sizes,
            mtimes=self.stamps.mtimes,
            ctimes=self.stamps.ctimes,
            labels=self.labels,
            hashes=self.hashes,
        )
        return file.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes, began_ns: int, manifest: Manifest) -> "Hints | None":
        """What `to_bytes` wrote for the same version; None for anything else."""
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as archive:
                found: dict[str, Any] = {key: archive[key] for key in _KEYS}
            ids = found["ids"].tobytes().decode().split("\0") if found["ids"].size else []
            hints = cls(
                found["fingerprint"].tobytes().decode(),
                began_ns,
                int(found["rows"]),
                ids,
                Stamps(found["sizes"], found["mtimes"], found["ctimes"]),
                found["labels"],
                found["hashes"],
            )
            of = found["of"].tobytes().decode()
        except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, MemoryError):
            return None
        return hints if of == _of(manifest) and hints._is_whole(manifest) else None

    def _is_whole(self, manifest: Manifest) -> bool:
        n = len(self.ids)
        expected = (
            (self.stamps.sizes, (n,), np.int64),
            (self.stamps.mtimes, (n,), np.int64),
            (self.stamps.ctimes, (n,), np.int64),
            (self.labels, (self.rows,), np.int64),
            (self.hashes, (self.rows, 32), np.uint8),
        )
        return (
            self.rows == manifest.rows <= n
            and all(array.shape == shape and array.dtype == dtype for array, shape, dtype in expected)
            and bool(((self.labels >= 0) & (self.labels < len(manifest.classes))).all())
        )


def _of(manifest: Manifest) -> str:
    return f"{manifest.version} {manifest.rows} {manifest.fingerprint()}"


def _text(text: str) -> npt.NDArray[np.uint8]:
    return np.frombuffer(text.encode(), np.uint8)
