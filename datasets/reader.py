"""Rows of a whole data set into the caller's buffers: the one reading path of every Dataset and loader.

One reader belongs to one process. It may be used by many threads at once: bytes are read by system calls and
decoded by codecs that release the GIL, so that they run in parallel.
"""

import itertools
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from shardwright.datasets import codecs
from shardwright.datasets.aio import ReadList
from shardwright.datasets.buffers import Pixels, RowBuffers
from shardwright.datasets.files import CURE, FileCache, is_cached, read_into, will_need
from shardwright.datasets.kept import KeptChunks, Scratch
from shardwright.datasets.layout import Manifest
from shardwright.datasets.manifest import if_removed
from shardwright.datasets.rows import Index, RowMap
from shardwright.datasets.shards import FinishedShard, finished_shard
from shardwright.errors import FormatError, ShardError, UsageError

Verify = Literal["off", "first", "read"]
#: Decoded chunks that a reader keeps, for callers that ask for the rows of a chunk one by one.
KEPT_BYTES = 64 << 20
#: Rows from which on a list of reads is worth its making.
LEAST_LISTED = 4


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """One chunk of an HDF5 shard: its numbers, the ``rows`` from ``row`` of the shard on that it holds, and how.

    ``codec`` is what the shard declares, ``compressed`` whether the chunk is.
    """

    shard: int
    chunk: int
    row: int
    rows: int
    chunk_rows: int
    codec: str | None
    compressed: bool


class Reader:
    """Reads images and columns by index.

    Memory beside the caller's buffers: 9 bytes a row (label, CRC-32, seen once), 17 bytes a chunk, and
    decoded chunks up to 64 MiB or one chunk. Shards are opened when a row of theirs is first asked for.

    Parameters
    ----------
    folder, manifest
        The data set and the version of it.
    verify
        ``first``: the CRC-32 of each row is checked when it is first read; ``read``: whenever it is read;
        ``off``: never.
    """

    def __init__(self, folder: Path, manifest: Manifest, verify: Verify = "first") -> None:
        self.folder, self.manifest, self.verify = folder, manifest, verify
        self.rows = RowMap(manifest.shards)
        self.image_shape = manifest.image_shape
        self.row_bytes = int(np.prod(self.image_shape))
        self._files = FileCache()
        self._lists: deque[ReadList | None] = deque()  # of threads that are not reading now
        self._kept, self._scratch = KeptChunks(KEPT_BYTES), Scratch()
        shards = len(manifest.shards)
        chunks = np.array([shard.chunks for shard in manifest.shards], np.int64)
        if shards and chunks.min() < 1:
            raise FormatError(f"the manifest of '{folder}' says that a shard has no chunks")
        self._first_chunk = np.concatenate([[0], np.cumsum(chunks)]).astype(np.int64)
        self._opening = threading.Lock()
        self._opened = np.zeros(shards, np.bool_)
        self._chunk_rows = np.ones(shards, np.int64)
        self._image_file: list[tuple[Path, int] | None] = [None] * shards
        self._codec: list[str | None] = [None] * shards
        # File descriptors that are open to the end, where all shards may be open at once; else -1.
        self._held = np.full(shards, -1, np.int64)
        # Filled as shards are opened; pages that nobody touched take no memory.
        self._offset = np.empty(self._first_chunk[-1], np.int64)
        self._size = np.empty(self._first_chunk[-1], np.int64)
        self._compressed = np.empty(self._first_chunk[-1], np.bool_)
        self._label = np.empty(self.rows.slots, np.int32)
        self._crc = np.empty(self.rows.slots, np.uint32)
        self._seen = np.zeros(self.rows.slots if verify == "first" else 0, np.bool_)

    def shard(self, number: int) -> FinishedShard:
        """The shard ``number``, for its columns."""
        return finished_shard(self.folder, self.manifest, number)

    def labels(self, index: Index) -> npt.NDArray[np.int64]:
        """Labels of the rows at ``index``, int64 of the same shape."""
        slot = self.rows.slot_of(index)
        self._open(self.rows.shard_of(slot))
        return self._label[slot].astype(np.int64)

    def column(self, name: str, index: Index) -> npt.NDArray[Any]:
        """A small column of the rows at ``index`` (n,): (n, ...) in the dtype of the column, str for ids."""
        slot = self.rows.slot_of(index)
        shard = self.rows.shard_of(slot)
        found: npt.NDArray[Any] | None = None
        for number in np.unique(shard).tolist():
            at = np.flatnonzero(shard == number)
            rows, inverse = np.unique(slot[at] - self.rows.first_slot[number], return_inverse=True)
            values = self.shard(number).column(name, rows)[inverse]
            if found is None:
                # Text in npy is as wide as the longest of its shard, and would be cut to that of the first one.
                dtype = np.dtype(object) if values.dtype.kind == "S" else values.dtype
                found = np.empty((len(index), *values.shape[1:]), dtype)
            found[at] = values
        return np.empty(0, object) if found is None else found

    def images(self, index: Index, out: RowBuffers, *, keep: bool = True) -> None:
        """Read the images at ``index`` (n,), each to its place in ``out``.

        Raw rows are read by themselves, in as few calls as the system allows; each compressed chunk is decoded
        once. With ``keep`` the chunks decoded last are kept for later calls, which may ask for other rows of
        theirs.

        Raises
        ------
        ShardError
            A file is missing, replaced or too short, cannot be read, or the pixels read are not those written.
        UsageError
            ``out`` has not the places that ``index`` needs.
        """
        if len(out) != len(index) or out.row_bytes != self.row_bytes:
            raise UsageError(
                f"buffers of {len(out)} rows of {out.row_bytes} bytes, expected {len(index)} of {self.row_bytes}"
            )
        self._fill(self._locate(index), out, keep)

    def groups(self, index: Index, out: RowBuffers, *, keep: bool = True) -> Iterator[tuple[int, int]]:
        """Read the images at ``index`` as many at a time as ``out`` has places, which are taken again and again.

        Yields
        ------
        (int, int)
            Half-open range of ``index`` that lies in the first places of ``out`` now.

        Raises as `images` does.
        """
        if not len(out) or out.row_bytes != self.row_bytes:
            raise UsageError(
                f"buffers of {len(out)} rows of {out.row_bytes} bytes, expected some of {self.row_bytes}"
            )
        places = self._locate(index)
        for start in range(0, len(index), len(out)):
            end = min(start + len(out), len(index))
            here = out if end - start == len(out) else out.part(np.arange(end - start))
            self._fill(places.part(start, end), here, keep)
            yield start, end

    def _fill(self, places: "_Places", out: RowBuffers, keep: bool) -> None:
        if places.compressed.any():
            at = np.flatnonzero(places.compressed)
            self._read_compressed(places.shard, places.chunk, places.row_in_chunk, at, out, keep)
            if not places.compressed.all():
                raw = np.flatnonzero(~places.compressed)
                self._read_raw(places.shard[raw], places.offset[raw], raw, out)
        elif len(places.slot):
            self._read_raw(places.shard, places.offset, np.arange(len(places.slot)), out)
        self._check(places.slot, out)

    def stored_chunk(self, index: Index) -> StoredChunk | None:
        """The chunk of which all rows stand at ``index`` (n,), in order; None where there is none, or in npy.

        None too where it says that LZF packed it, and is not smaller: a bit of the file flipped, which nothing but its
        decoding tells.
        """
        if self.manifest.storage != "hdf5":
            return None
        places = self._locate(index)
        number, first = int(places.shard[0]), int(places.chunk[0])
        chunk_rows = int(self._chunk_rows[number])
        row = int(places.slot[0] - self.rows.first_slot[number])
        rows = min(chunk_rows, self.manifest.shards[number].rows - row)
        together = len(index) == rows and (places.chunk == first).all()
        if not together or (places.row_in_chunk != np.arange(rows)).any():
            return None
        is_smaller = self._size[first] < chunk_rows * self.row_bytes
        if self._compressed[first] and self._codec[number] == "lzf" and not is_smaller:
            return None
        return StoredChunk(
            number, first, row, rows, chunk_rows, self._codec[number], bool(self._compressed[first])
        )

    def raw_under(self, codec: str, index: Index) -> bool:
        """Whether all rows at ``index`` (n,) lie in raw chunks of shards that declare ``codec``."""
        places = self._locate(index)
        declared = all(self._codec[number] == codec for number in np.unique(places.shard).tolist())
        return declared and not places.compressed.any()

    def read_stored(self, stored: StoredChunk) -> Pixels:
        """The bytes of a chunk as they are stored, its fletcher32 behind them, which they are checked by.

        Rows of a raw one are checked by their CRC-32 too: white that became black, as a disk that loses a block makes
        it, has the same fletcher32, for which 0xFFFF is 0. They are good until this thread reads the next.

        Raises
        ------
        ShardError
            They cannot be read, or are not those that were written. Names the rows.
        """
        data = self._scratch.take("stored", int(self._size[stored.chunk]) + codecs.CHECKSUM_BYTES)
        with self._image(stored.shard) as fd:
            self._read_exactly(stored.shard, fd, data, int(self._offset[stored.chunk]), "a chunk")
        if codecs.fletcher32(data[: -codecs.CHECKSUM_BYTES]) != data[-codecs.CHECKSUM_BYTES :].tobytes():
            raise ShardError(
                f"'{self._file(stored.shard)[0]}': rows {stored.row} to {stored.row + stored.rows - 1}: wrong "
                f"fletcher32 of their chunk. {CURE}"
            )
        if not stored.compressed:
            first = int(self.rows.first_slot[stored.shard]) + stored.row
            rows = data[: -codecs.CHECKSUM_BYTES].reshape(stored.chunk_rows, self.row_bytes)[: stored.rows]
            self._check(np.arange(first, first + stored.rows), RowBuffers([rows]))
        return data

    def will_need(self, index: Index) -> bool:
        """Have the system read ahead for `images` of ``index``; False where it seems to be in memory already.

        To ask for pages that are there costs a sixth of reading them, so the first and the last row stand
        for all.
        """
        places = self._locate(index)
        size = np.where(places.compressed, self._size[places.chunk], self.row_bytes)
        ranges = np.unique(np.stack([places.shard, places.offset, size], axis=1), axis=0).tolist()
        ends = (ranges[0], ranges[-1])
        if all(self._ask(is_cached, number, place) for number, place, _ in ends):
            return False
        for number, place, count in ranges:
            self._ask(will_need, number, place, count)
        return True

    def _ask(self, question: Callable[..., Any], shard: int, *place: int) -> Any:
        with self._image(shard) as fd:
            return question(fd, *place)

    def _locate(self, index: Index) -> "_Places":
        """Where the row at each index lies; opens their shards."""
        slot = self.rows.slot_of(index)
        shard = self.rows.shard_of(slot)
        self._open(shard)
        row = slot - self.rows.first_slot[shard]
        chunk, row_in_chunk = np.divmod(row, self._chunk_rows[shard])
        chunk += self._first_chunk[shard]
        compressed = self._compressed[chunk]
        offset = self._offset[chunk] + np.where(compressed, 0, row_in_chunk * self.row_bytes)
        return _Places(slot, shard, chunk, row_in_chunk, compressed, offset)

    def _open(self, shard: Index) -> None:
        if self._opened[shard].all():
            return
        with self._opening:
            for number in np.unique(shard[~self._opened[shard]]).tolist():
                self._open_shard(number)

    def _open_shard(self, number: int) -> None:
        shard = self.shard(number)
        opened = shard.opened()
        index = opened.index
        chunks = slice(self._first_chunk[number], self._first_chunk[number + 1])
        slots = slice(self.rows.first_slot[number], self.rows.first_slot[number + 1])
        if len(index.offsets) != chunks.stop - chunks.start:
            raise ShardError(
                f"'{shard.path(0)}' has {len(index.offsets)} chunks, "
                f"its manifest says {chunks.stop - chunks.start}. {CURE}"
            )
        self._offset[chunks], self._size[chunks] = index.offsets, index.sizes
        self._compressed[chunks] = index.compressed
        self._chunk_rows[number] = index.chunk_rows
        self._image_file[number] = self.folder / index.file.name, index.file.bytes
        self._codec[number] = index.codec
        if len(self._held) <= self._files.limit:
            self._held[number] = self._acquire(number)
        self._label[slots], self._crc[slots] = opened.labels, opened.crc32
        self._opened[number] = True  # last: other threads look at nothing but this

    @contextmanager
    def _image(self, shard: int) -> Iterator[int]:
        """A file descriptor of the file that holds the images of ``shard``."""
        fd = self._acquire(shard)
        try:
            yield fd
        finally:
            self._files.release(shard)

    def _acquire(self, shard: int) -> int:
        try:
            return self._files.acquire(shard, *self._file(shard))
        except ShardError as error:
            raise if_removed(error, self.folder, self.manifest.version) from error.__cause__

    def _file(self, shard: int) -> tuple[Path, int]:
        file = self._image_file[shard]
        if file is None:
            raise RuntimeError(f"shard {shard} was not opened")
        return file

    def _read_raw(self, shard: Index, offset: Index, at: Index, out: RowBuffers) -> None:
        """Read the rows that lie at ``offset`` of their shards' files to the places ``at`` in ``out``."""
        fds = self._held[shard]
        if (fds >= 0).all():
            self._read_rows(fds, shard, offset, at, out)
            return
        few = max(1, self._files.limit // 8)  # other threads want files too
        numbers = np.unique(shard)
        for some in np.split(numbers, range(few, len(numbers), few)):
            with ExitStack() as files:
                fd_of = {number: files.enter_context(self._image(number)) for number in some.tolist()}
                here = np.flatnonzero(np.isin(shard, some))
                fds = np.array([fd_of[number] for number in shard[here].tolist()])
                self._read_rows(fds, shard[here], offset[here], at[here], out)

    def _read_rows(self, fds: Index, shard: Index, offset: Index, at: Index, out: RowBuffers) -> None:
        whole = np.zeros(len(at), np.bool_)
        if len(at) >= LEAST_LISTED:
            if (reads := self._take_list()) is not None:
                whole = reads.read(fds, offset, out.addresses[at], self.row_bytes) == self.row_bytes
            self._lists.append(reads)
        for i in np.flatnonzero(~whole).tolist():
            self._read_exactly(int(shard[i]), int(fds[i]), out[at[i]], int(offset[i]), "a row")

    def _take_list(self) -> ReadList | None:
        """A list of reads for this thread alone; None where the system has none."""
        try:
            return self._lists.pop()
        except IndexError:
            try:
                return ReadList()
            except OSError:
                return None

    def _read_exactly(self, shard: int, fd: int, buffer: Pixels, offset: int, what: str) -> None:
        try:
            found = "it ends before" if not read_into(fd, buffer, offset) else None
        except OSError as error:
            found = error.strerror or str(error)
        if found:
            path = self._file(shard)[0]
            raise ShardError(f"'{path}': {what} at byte {offset} cannot be read: {found}. {CURE}")

    def _read_compressed(
        self, shard: Index, chunk: Index, row_in_chunk: Index, at: Index, out: RowBuffers, keep: bool
    ) -> None:
        at = at[np.argsort(chunk[at], kind="stable")]
        starts = np.flatnonzero(np.diff(chunk[at], prepend=-1)).tolist()
        for start, end in itertools.pairwise([*starts, len(at)]):
            here = at[start:end]
            rows = self._decoded(int(shard[here[0]]), int(chunk[here[0]]), keep)
            for i, row in zip(here.tolist(), row_in_chunk[here].tolist(), strict=True):
                out[i][:] = rows[row]

    def _decoded(self, shard: int, chunk: int, keep: bool) -> Pixels:
        """The rows of a compressed chunk, (chunk_rows, row_bytes); not to be written to.

        Unless ``keep``, they stand in memory that this thread's next call takes again.
        """
        if (kept := self._kept.get(chunk)) is not None:
            return kept
        chunk_rows = int(self._chunk_rows[shard])
        size = chunk_rows * self.row_bytes
        rows = np.empty(size, np.uint8) if keep else self._scratch.take("rows", size)
        data = self._scratch.take("data", int(self._size[chunk]))
        with self._image(shard) as fd:
            self._read_exactly(shard, fd, data, int(self._offset[chunk]), "a chunk")
        try:
            codecs.decode(self._codec[shard] or "", data, rows)
        except ShardError as error:
            first = (chunk - int(self._first_chunk[shard])) * chunk_rows
            raise ShardError(
                f"'{self._file(shard)[0]}': the chunk of rows {first} to {first + chunk_rows - 1} "
                f"cannot be read: {error}. {CURE}"
            ) from error
        rows = rows.reshape(chunk_rows, self.row_bytes)
        if keep:
            self._kept.put(chunk, rows)
        return rows

    def _check(self, slot: Index, out: RowBuffers) -> None:
        if self.verify == "off":
            return
        unchecked = range(len(slot)) if self.verify == "read" else np.flatnonzero(~self._seen[slot]).tolist()
        for i in unchecked:
            if zlib.crc32(out[i]) != self._crc[slot[i]]:
                shard = int(self.rows.shard_of(slot[i]))
                raise ShardError(
                    f"'{self._file(shard)[0]}': the pixels of row {slot[i] - self.rows.first_slot[shard]} "
                    f"are not those that were written (CRC-32). {CURE}"
                )
        if self.verify == "first" and len(unchecked):
            self._seen[slot] = True


class _Places(NamedTuple):
    """Where rows lie: slot, shard, chunk of the data set, row in that chunk; whether the chunk is compressed; and the
    byte of the shard's file at which the row begins, or its compressed chunk."""

    slot: Index
    shard: Index
    chunk: Index
    row_in_chunk: Index
    compressed: npt.NDArray[np.bool_]
    offset: Index

    def part(self, start: int, end: int) -> "_Places":
        here = slice(start, end)
        return _Places(
            self.slot[here],
            self.shard[here],
            self.chunk[here],
            self.row_in_chunk[here],
            self.compressed[here],
            self.offset[here],
        )
