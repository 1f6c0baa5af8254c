"""What was known of the source's files when a version was made: then only those that changed since need be read.

Never needed to read the data set. Where they are lost, a `sync` reads all pictures once, and knows it again.
"""

import io
import os
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
#: Size, mtime, ctime in ns and inode of one file, as `os.stat` gives them.
Stamp = tuple[int, int, int, int]
_KEYS = ("fingerprint", "of", "rows", "ids", "sizes", "mtimes", "ctimes", "inodes", "labels", "hashes")


def stamp_of(status: os.stat_result) -> Stamp:
    """The stamp of a file; inodes beyond 2**63 are folded."""
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino & 0x7FFFFFFFFFFFFFFF


@dataclass(frozen=True, slots=True)
class Stamps:
    """By what a file is taken for unchanged, n of them.

    Attributes
    ----------
    sizes, mtimes, ctimes, inodes
        int64 (n,): bytes, -1 where not known; times of the last modification of its content, `UNKNOWN_TIME` where not
        known, and of the last change of any kind, in ns; number of the inode, by which files are told apart that have
        changed places with their folders.
    """

    sizes: Int64
    mtimes: Int64
    ctimes: Int64
    inodes: Int64

    @classmethod
    def unknown(cls, n: int) -> "Stamps":
        """Those of ``n`` files that are to be looked at again."""
        return cls(*(np.full(n, value) for value in (-1, UNKNOWN_TIME, UNKNOWN_TIME, -1)))

    @classmethod
    def of(cls, stamps: Sequence[Stamp | None]) -> "Stamps":
        """Those of several files; None for one that is to be looked at again."""
        values = [(-1, UNKNOWN_TIME, UNKNOWN_TIME, -1) if stamp is None else stamp for stamp in stamps]
        return cls(*np.array(values, np.int64).reshape(-1, 4).T.copy())

    def arrays(self) -> tuple[Int64, Int64, Int64, Int64]:
        """All four."""
        return self.sizes, self.mtimes, self.ctimes, self.inodes

    def taking(self, index: Index) -> "Stamps":
        """Those at ``index``."""
        return Stamps(*(array[index] for array in self.arrays()))

    def at(self, k: int) -> Stamp:
        """That of the file ``k``."""
        size, mtime, ctime, inode = (int(array[k]) for array in self.arrays())
        return size, mtime, ctime, inode

    def put(self, index: Index, other: "Stamps") -> "Stamps":
        """These, with those of ``other`` at ``index``."""
        changed = [array.copy() for array in self.arrays()]
        for array, values in zip(changed, other.arrays(), strict=True):
            array[index] = values
        return Stamps(*changed)

    def followed_by(self, other: "Stamps") -> "Stamps":
        """These, then those of ``other``."""
        pairs = zip(self.arrays(), other.arrays(), strict=True)
        return Stamps(*(np.concatenate(pair) for pair in pairs))

    def at_rest(self, began_ns: int) -> npt.NDArray[np.bool_]:
        """(n,): whether each file had not been changed for a while when they were taken.

        One that had may change again within the same tick of its clock.
        """
        at_rest: npt.NDArray[np.bool_] = np.maximum(self.mtimes, self.ctimes) < began_ns - _REST_NS
        return at_rest

    def same(self, other: "Stamps") -> npt.NDArray[np.bool_]:
        """(n,): whether each file is what ``other`` says of it."""
        pairs = zip(self.arrays(), other.arrays(), strict=True)
        same: npt.NDArray[np.bool_] = np.logical_and.reduce([a == b for a, b in pairs])
        return same


@dataclass(frozen=True, slots=True)
class Hints:
    """What the files of one version were: those of its living rows by index, then those that were rejected.

    Attributes
    ----------
    fingerprint
        Of the scan of the whole source, see `Scan.fingerprint`; empty where rows are not what it found.
    rows
        How many of them are rows.
    began_ns
        Before any of the stamps was taken, in ns since the epoch; 0 where that is not known. It is the time of the file
        that they are in, whose content does not depend on it.
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
        return cls("", 0, 0, (), Stamps.unknown(0), np.zeros(0, np.int64), np.zeros((0, 32), np.uint8))

    def is_certain(self) -> npt.NDArray[np.bool_]:
        """(n,): whether a file of the same stamps is the same."""
        return self.stamps.at_rest(self.began_ns)

    def says_no_less(self, other: "Hints") -> bool:
        """Whether there is nothing in ``other`` that these do not say for certain."""
        return (
            (self.fingerprint, self.rows, list(self.ids)) == (other.fingerprint, other.rows, list(other.ids))
            and bool((self.is_certain() & self.stamps.same(other.stamps)).all())
            and bool((self.labels == other.labels).all() and (self.hashes == other.hashes).all())
        )

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
            inodes=self.stamps.inodes,
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
                Stamps(found["sizes"], found["mtimes"], found["ctimes"], found["inodes"]),
                found["labels"],
                found["hashes"],
            )
            of = found["of"].tobytes().decode()
        except Exception:  # whatever NumPy and zipfile make of damage: it is only a hint
            return None
        return hints if of == _of(manifest) and hints._is_whole(manifest) else None

    def _is_whole(self, manifest: Manifest) -> bool:
        n = len(self.ids)
        expected: tuple[tuple[npt.NDArray[Any], tuple[int, ...], type], ...] = (
            *((array, (n,), np.int64) for array in self.stamps.arrays()),
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
