"""One unit of an export: pictures of a folder, or one tar for WebDataset. The work of one process.

As in `write`, a record comes back for whatever a disk does, and for damage in what is read.
"""

import errno
import hashlib
import json
import os
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from shardwright.convert.picturefile import PictureFile
from shardwright.convert.records import ShardRecord
from shardwright.convert.rowsource import RowSource, SourceRows
from shardwright.datasets.buffers import aligned
from shardwright.datasets.layout import Shard, ShardFile
from shardwright.errors import ShardwrightError

#: Bytes of pixels that are read together.
TOGETHER_BYTES = 32 << 20
_BLOCK = tarfile.BLOCKSIZE


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a unit: the half-open range ``[start, stop)`` of indices of ``source``, and how they are encoded."""

    source: RowSource
    start: int
    stop: int
    file: PictureFile

    def pictures(self, run: Path) -> Iterator[bytes]:
        """The file of each row, in order; ``run`` is told apart from other runs."""
        rows = opened(run, self.source)
        shape = rows.manifests[0].image_shape
        row_bytes = int(np.prod(shape))
        chunk_rows = rows.manifests[0].chunk_rows
        at_once = max(1, TOGETHER_BYTES // (row_bytes * chunk_rows)) * chunk_rows
        at_once = min(at_once, self.stop - self.start)
        pixels = aligned(at_once * row_bytes).reshape(at_once, row_bytes)
        for start in range(self.start, self.stop, at_once):
            count = min(at_once, self.stop - start)
            rows.images(np.arange(start, start + count), pixels[:count])
            for row in range(count):
                yield self.file.encode(pixels[row].reshape(shape))


@lru_cache(maxsize=1)
def opened(run: Path, source: RowSource) -> SourceRows:
    """The source, opened once a process and ``run``: what an earlier run had open may be other files by now."""
    return SourceRows([source])


@dataclass(frozen=True, slots=True)
class PicturesTask:
    """Pictures of a folder: row ``start + k`` goes to ``tree / paths[k]``, whose folder is there."""

    number: int
    stem: str
    partial: Path
    rows: Rows
    tree: Path
    paths: tuple[str, ...]

    def write(self) -> ShardRecord:
        """Write each under a temporary name, then give it its own: a file of that name is whole."""
        return _recorded(self.number, self._write)

    def _write(self) -> Shard:
        digest, size = hashlib.sha256(), 0
        temporary = f"{self.partial}.picture"
        for path, data in zip(self.paths, self.rows.pictures(self.partial.parent), strict=True):
            with open(temporary, "wb") as file:
                file.write(data)
            os.replace(temporary, os.path.join(self.tree, path))
            digest.update(data)
            size += len(data)
        return _shard(len(self.paths), self.stem, size, digest.hexdigest())


@dataclass(frozen=True, slots=True)
class TarTask:
    """One tar for WebDataset, ``tree / stem``."""

    number: int
    stem: str
    partial: Path
    rows: Rows
    tree: Path

    def write(self) -> ShardRecord:
        """Write it under a temporary name, then give it its own."""
        return _recorded(self.number, self._write)

    def _write(self) -> Shard:
        index = np.arange(self.rows.start, self.rows.stop)
        described = describe(opened(self.partial.parent, self.rows.source), index)
        temporary = f"{self.partial}.tar"
        with open(temporary, "xb") as file:
            tar = _Tar(file)
            pictures = self.rows.pictures(self.partial.parent)
            for number, about, data in zip(index.tolist(), described, pictures, strict=True):
                for name, content in sample(number, self.rows.file.ending, data, about):
                    tar.add(name, content)
            tar.end()
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.tree / self.stem)
        return _shard(len(index), self.stem, tar.size, tar.digest.hexdigest())


def describe(rows: SourceRows, index: Any) -> list[dict[str, Any]]:
    """What is known of each row at ``index``, as JSON values."""
    manifest = rows.manifests[0]
    known = {column.name: column.kind for column in manifest.columns}
    columns = {name: rows.column(name, index).tolist() for name in ("id", "label", "crc32")}
    columns["class"] = [manifest.classes[label] for label in columns["label"]]
    if known.get("source_sha256") == "sha256":
        columns["source_sha256"] = [bytes(row).hex() for row in rows.column("source_sha256", index)]
    if known.get("source_shape") == "shape":
        columns["source_shape"] = rows.column("source_shape", index).tolist()
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def sample(number: int, ending: str, picture: bytes, about: dict[str, Any]) -> list[tuple[str, bytes]]:
    """The members of a row in a tar, name and content.

    WebDataset takes what stands before the first dot as the key of a sample, and members of the same key that follow
    on one another as one sample: so the key is the row's number in the data set, and not its id.
    """
    key = f"{number:09d}"
    text = json.dumps(about, ensure_ascii=True, separators=(",", ":"))
    return [
        (key + ending, picture),
        (f"{key}.cls", str(about["label"]).encode()),
        (f"{key}.json", text.encode()),
    ]


def tar_bytes(members: list[tuple[str, bytes]]) -> int:
    """Bytes that ``members`` take in a tar."""
    return sum(_BLOCK + -(-len(content) // _BLOCK) * _BLOCK for _, content in members)


def _shard(rows: int, stem: str, size: int, sha256: str) -> Shard:
    return Shard(rows, (ShardFile(stem, size, sha256),))


def _recorded(number: int, write: Callable[[], Shard]) -> ShardRecord:
    try:
        return ShardRecord(number, write())
    except ShardwrightError as error:
        return ShardRecord(number, damage=str(error))
    except (OSError, MemoryError) as error:
        code = getattr(error, "errno", None) or errno.EIO
        text = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return ShardRecord(number, error=(code, text))


class _Tar:
    """A POSIX tar without times and owners, hashed and counted while it is written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.digest, self.size = file, hashlib.sha256(), 0

    def add(self, name: str, content: bytes) -> None:
        """Add a file."""
        entry = tarfile.TarInfo(name)
        entry.size = len(content)
        self._put(entry.tobuf(tarfile.USTAR_FORMAT))
        self._put(content)
        self._put(bytes(-len(content) % _BLOCK))

    def end(self) -> None:
        """Two empty blocks, and as many as fill the record, as tar does."""
        self._put(bytes(2 * _BLOCK))
        self._put(bytes(-self.size % tarfile.RECORDSIZE))

    def _put(self, data: bytes) -> None:
        self._file.write(data)
        self.digest.update(data)
        self.size += len(data)
