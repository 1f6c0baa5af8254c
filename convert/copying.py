"""One shard of rows that other shards hold: the work of one process. What is stored as it is to be is not decoded.

As in `write`, a record comes back for whatever a disk does, and for damage in what is read.
"""

import errno
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwright.convert.encode import checksummed
from shardwright.convert.environment import environment_of
from shardwright.convert.options import StoreOptions
from shardwright.convert.records import ShardRecord
from shardwright.convert.rowsource import Known, RowSource, SourceRows
from shardwright.convert.stats import Summing, Sums
from shardwright.convert.store import H5Writer, ShardWriter, shard_file, shard_writer
from shardwright.datasets.buffers import aligned
from shardwright.datasets.codecs import CHECKSUM_BYTES
from shardwright.datasets.fit import Resample, fitted
from shardwright.datasets.layout import Shard
from shardwright.datasets.reader import StoredChunk
from shardwright.datasets.rows import Index
from shardwright.errors import ShardwrightError

#: Bytes of pixels that are read together: the rows of one compressed chunk that are wanted are then decoded once.
_TOGETHER_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class CopyTask:
    """All that a worker needs to write one shard from rows of others.

    Attributes
    ----------
    number, stem, partial
        As in `ShardTask`.
    sources, index
        Which rows, in which order.
    columns
        Names of the columns beside the image, in order.
    store
        How the shard is laid out. ``same_saving``: a chunk that LZF was tried on is as ``store`` wants it.
    size, resample
        Height and width that the images are resized to; None: they stay as they are.
    sums
        Whether the sums of the pixels are wanted.
    decodes
        Whether the version that it is for makes pixels too: its environment is then that of all its shards.
    given
        Columns of the rows that are not read from the sources, by name.
    known
        What is known of their ids.
    """

    number: int
    stem: str
    partial: Path
    sources: tuple[RowSource, ...]
    index: Index
    columns: tuple[str, ...]
    store: StoreOptions
    same_saving: bool
    size: int | None
    resample: Resample
    sums: bool
    decodes: bool = False
    given: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    known: Known | None = None

    def write(self) -> ShardRecord:
        """See `copy_shard`."""
        return copy_shard(self)


def copy_shard(task: CopyTask) -> ShardRecord:
    """Write one shard, chunk by chunk: memory is that of a few chunks."""
    try:
        rows = _opened(task.partial.parent, task.sources)
        height, width, channels = rows.manifests[0].image_shape
        shape = (task.size or height, task.size or width, channels)
        writer = shard_writer(task.partial, len(task.index), shape, task.store)
        try:
            return _Copy(task, rows, writer, shape).record()
        except BaseException:
            writer.discard()
            raise
    except ShardwrightError as error:
        return ShardRecord(task.number, damage=str(error))
    except (OSError, MemoryError) as error:
        code = getattr(error, "errno", None) or errno.EIO
        text = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return ShardRecord(task.number, error=(code, text))


@lru_cache(maxsize=1)
def _opened(run: Path, sources: tuple[RowSource, ...]) -> SourceRows:
    """The sources, opened once a process and ``run``: what an earlier run had open may be other files by now."""
    return SourceRows(sources)


class _Copy:
    def __init__(
        self, task: CopyTask, rows: SourceRows, writer: ShardWriter, shape: tuple[int, int, int]
    ) -> None:
        self._task, self._rows, self._writer, self._shape = task, rows, writer, shape
        self._read_shape = rows.manifests[0].image_shape
        self._chunk_rows = min(task.store.chunk_rows, len(task.index))
        self._row_bytes = int(np.prod(self._read_shape))
        together = max(1, _TOGETHER_BYTES // (self._chunk_rows * self._row_bytes)) * self._chunk_rows
        self._together = min(together, -(-len(task.index) // self._chunk_rows) * self._chunk_rows)
        self._pixels: npt.NDArray[np.uint8] | None = None
        self._summing = Summing(shape) if task.sums else None
        self._crcs: list[int] = []

    def record(self) -> ShardRecord:
        task = self._task
        waiting: list[slice] = []
        for start in range(0, len(task.index), self._chunk_rows):
            span = slice(start, min(start + self._chunk_rows, len(task.index)))
            if not task.sums and not task.size and (stored := self._stored(span)) is not None:
                self._recut(waiting)
                self._move(stored, span)
                continue
            waiting.append(span)
            if len(waiting) * self._chunk_rows == self._together:
                self._recut(waiting)
        self._recut(waiting)
        self._pixels = None
        temporary = self._writer.finish(self._columns())
        files = tuple(shard_file(path, task.stem + ending) for ending, path in temporary.items())
        return ShardRecord(
            number=task.number,
            shard=Shard(len(task.index), files, (), self._writer.chunks, self._writer.compressed_chunks),
            temporary=tuple(temporary.values()),
            sums=self._summing.sums() if self._summing else Sums(),
            saved_bytes=self._writer.saved_bytes,
            environment=environment_of(task.decodes),
            copied=dict(zip(task.given["id"].tolist(), task.index.tolist(), strict=True))
            if "id" in task.given
            else {},
        )

    def _stored(self, span: slice) -> tuple[int, StoredChunk] | None:
        """The chunk that holds these rows as they are to be stored; None where they must be decoded and encoded."""
        store = self._task.store
        if store.format != "hdf5":
            return None
        found = self._rows.stored_chunk(self._task.index[span])
        if found is None or found[1].chunk_rows != self._chunk_rows:
            return None
        stored = found[1]
        match store.codec:
            case "lzf":
                return found if stored.codec == "lzf" and self._task.same_saving else None
            case "gzip":
                return found if stored.codec == "gzip" and stored.compressed else None
            case _:
                return None if stored.compressed else found

    def _move(self, found: tuple[int, StoredChunk], span: slice) -> None:
        if not isinstance(self._writer, H5Writer):
            raise RuntimeError("chunks go to HDF5 alone")
        mask = int(self._task.store.codec == "lzf" and not found[1].compressed)
        data = self._rows.read_stored(*found)
        # That of zeros is zero: they may be what a disk lost.
        if found[1].compressed and not data[-CHECKSUM_BYTES:].any():
            pixels = np.empty((span.stop - span.start, self._row_bytes), np.uint8)
            self._rows.images(self._task.index[span], pixels)
            data = self._rows.read_stored(*found)  # again: its memory was taken to decode
        self._writer.append(data, mask, span.stop - span.start)

    def _recut(self, spans: list[slice]) -> None:
        """Read the rows of these chunks, which follow on one another, and write them."""
        if not spans:
            return
        start, count = spans[0].start, spans[-1].stop - spans[0].start
        if self._pixels is None:  # new pages cost as much as to copy into them
            self._pixels = aligned(self._together * self._row_bytes).reshape(
                self._together, *self._read_shape
            )
        self._rows.images(
            self._task.index[start : start + count], self._pixels[:count].reshape(count, self._row_bytes)
        )
        whole = len(spans) * self._chunk_rows
        self._pixels[count:whole] = 0
        for first in range(0, whole, self._chunk_rows):
            rows = min(self._chunk_rows, count - first)
            self._write(self._pixels[first : first + self._chunk_rows], rows)
        spans.clear()

    def _write(self, pixels: npt.NDArray[np.uint8], rows: int) -> None:
        if self._task.size is not None:
            resized = np.zeros((len(pixels), *self._shape), np.uint8)
            for row in range(rows):
                resized[row] = fitted(pixels[row], self._task.size, "stretch", self._task.resample)
                self._crcs.append(zlib.crc32(resized[row]))
            pixels = resized
        found = self._moved(rows)
        if self._summing is not None:
            for row in range(rows):
                self._summing.add(pixels[row])
        if found is not None:
            self._move(*found)
        elif self._stays_raw(rows) and isinstance(self._writer, H5Writer):
            self._writer.append(checksummed(pixels), 1, rows)
        else:
            self._writer.write(pixels, rows)

    def _stays_raw(self, rows: int) -> bool:
        """Whether LZF was tried on all of these rows and did not pay: then it is not tried again."""
        task = self._task
        if task.store.codec != "lzf" or not task.same_saving or task.size is not None:
            return False
        start = self._writer.chunks * self._chunk_rows
        return self._rows.raw_under("lzf", task.index[start : start + rows])

    def _moved(self, rows: int) -> tuple[tuple[int, StoredChunk], slice] | None:
        """Where the sums are wanted of a chunk that is stored as it is to be: it, and its rows."""
        if self._summing is None or self._task.size is not None:
            return None
        start = self._writer.chunks * self._chunk_rows
        span = slice(start, start + rows)
        found = self._stored(span)
        return None if found is None else (found, span)

    def _columns(self) -> dict[str, npt.NDArray[Any]]:
        task = self._task
        columns: dict[str, npt.NDArray[Any]] = {}
        for name in task.columns:  # in their order, which the bytes depend on
            if name in task.given:
                columns[name] = task.given[name]
            elif name == "id":
                columns[name] = self._rows.ids_like(task.known, task.index)
            else:
                columns[name] = self._rows.column(name, task.index)
        if self._task.size is not None:
            columns["crc32"] = np.array(self._crcs, np.uint32)
        return columns
