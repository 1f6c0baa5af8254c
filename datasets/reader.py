"""Rows of a whole data set into the caller's buffers: the one reading path of every Dataset and loader.

One reader belongs to one process. It may be used by many threads at once: bytes are read with
``os.preadv`` and decoded by codecs that release the GIL, so that they run in parallel.
"""

import itertools
import threading
import zlib
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from shardwright.datasets import codecs
from shardwright.datasets.files import CURE, FileCache, read_into
from shardwright.datasets.layout import Manifest, ShardFile
from shardwright.datasets.rows import Index, RowMap
from shardwright.datasets.shards import FinishedShard, finished_shard
from shardwright.errors import FormatError, ShardError

Verify = Literal["off", "first", "read"]
Pixels = npt.NDArray[np.uint8]


class Reader:
    """Reads images and columns by index.

    Memory beside the buffers: 13 bytes a row that was touched (label, CRC-32, seen once), 17 bytes a chunk.
    Shards are opened when a row of theirs is first asked for.

    Parameters
    ----------
    folder, manifest
        The data set and the version of it.
    verify
        ``first``: the CRC-32 of each row is checked when it is first read; ``read``: whenever it is read;
        ``off``: never.
    """

    def __init__(self, folder: Path, manifest: Manifest, verify: Verify = "first") -> None:
        if verify not in ("off", "first", "read"):
            raise ValueError(f"verify is {verify!r}, expected 'off', 'first' or 'read'")
        self.folder, self.manifest, self.verify = folder, manifest, verify
        self.rows = RowMap(manifest.shards)
        self.row_bytes = int(np.prod(manifest.image_shape))
        self.files = FileCache()
        shards = len(manifest.shards)
        chunks = np.array([shard.chunks for shard in manifest.shards], np.int64)
        if shards and chunks.min() < 1:
            raise FormatError(f"the manifest of '{folder}' says that a shard has no chunks")
        self._first_chunk = np.concatenate([[0], np.cumsum(chunks)]).astype(np.int64)
        self._opening = threading.Lock()
        self._opened = np.zeros(shards, np.bool_)
        self._chunk_rows = np.ones(shards, np.int64)
        self._image_file: list[ShardFile | None] = [None] * shards
        self._codec: list[str | None] = [None] * shards
        # Filled as shards are opened; pages that nobody touched take no memory.
        self._offset = np.empty(self._first_chunk[-1], np.int64)
        self._size = np.empty(self._first_chunk[-1], np.int64)
        self._compressed = np.empty(self._first_chunk[-1], np.bool_)
        self._label = np.empty(self.rows.slots, np.int64)
        self._crc = np.empty(self.rows.slots, np.uint32)
        self._seen = np.zeros(self.rows.slots if verify == "first" else 0, np.bool_)

    def shard(self, number: int) -> FinishedShard:
        """The shard ``number``, for its columns."""
        return finished_shard(self.folder, self.manifest, number)

    def labels(self, index: Index) -> npt.NDArray[np.int64]:
        """Labels of the rows at ``index``, int64 of the same shape."""
        slot = self.rows.slot_of(index)
        self._open(self.rows.shard_of(slot))
        return self._label[slot]

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
                found = np.empty((len(index), *values.shape[1:]), values.dtype)
            found[at] = values
        return np.empty(0, object) if found is None else found

    def images(self, index: Index, out: Pixels) -> None:
        """Read the images at ``index`` (n,) into ``out``, uint8 (n, H, W, C), C-contiguous.

        Each compressed chunk is decoded once a call, each run of neighbouring raw rows is one read.

        Raises
        ------
        ShardError
            A file is missing, replaced or too short, or the pixels read are not those written.
        """
        flat = out.reshape(len(index), self.row_bytes)
        slot = self.rows.slot_of(index)
        shard = self.rows.shard_of(slot)
        self._open(shard)
        row = slot - self.rows.first_slot[shard]
        chunk_rows = self._chunk_rows[shard]
        chunk = self._first_chunk[shard] + row // chunk_rows
        row_in_chunk = row % chunk_rows
        compressed = self._compressed[chunk]
        if not compressed.all():
            raw = np.flatnonzero(~compressed)
            self._read_raw(
                shard[raw], self._offset[chunk[raw]] + row_in_chunk[raw] * self.row_bytes, raw, flat
            )
        for number in np.unique(chunk[compressed]).tolist():
            at = np.flatnonzero(chunk == number)
            decoded = self._decoded_chunk(int(shard[at[0]]), number)
            flat[at] = decoded[row_in_chunk[at]]
        self._check(slot, flat)

    def _open(self, shard: Index) -> None:
        if self._opened[shard].all():
            return
        with self._opening:
            for number in np.unique(shard[~self._opened[shard]]).tolist():
                self._open_shard(number)

    def _open_shard(self, number: int) -> None:
        shard = self.shard(number)
        index = shard.index()
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
        self._image_file[number], self._codec[number] = index.file, index.codec
        self._label[slots] = shard.labels()
        if self.verify != "off":
            self._crc[slots] = shard.column("crc32")
        self._opened[number] = True  # last: other threads look at nothing but this

    def _file(self, shard: int) -> tuple[Path, int]:
        file = self._image_file[shard]
        assert file is not None  # _open was called
        return self.folder / file.name, file.bytes

    def _read_raw(self, shard: Index, offset: Index, at: Index, flat: Pixels) -> None:
        order = np.lexsort((offset, shard))
        shard, offset, at = shard[order], offset[order], at[order]
        follows = (np.diff(offset) == self.row_bytes) & (np.diff(shard) == 0)
        starts = np.concatenate([[0], np.flatnonzero(~follows) + 1, [len(order)]]).tolist()
        view = memoryview(flat.reshape(-1))
        for start, end in itertools.pairwise(starts):
            path, size = self._file(int(shard[start]))
            buffers = [view[i * self.row_bytes : (i + 1) * self.row_bytes] for i in at[start:end].tolist()]
            with self.files.reading(path, size) as fd:
                if not read_into(fd, buffers, int(offset[start])):
                    raise ShardError(f"'{path}' ends before row data at byte {offset[start]}. {CURE}")

    def _decoded_chunk(self, shard: int, chunk: int) -> Pixels:
        path, size = self._file(shard)
        rows = int(self._chunk_rows[shard])
        data = np.empty(self._size[chunk], np.uint8)
        out = np.empty((rows, self.row_bytes), np.uint8)
        with self.files.reading(path, size) as fd:
            whole = read_into(fd, [memoryview(data)], int(self._offset[chunk]))
        try:
            if not whole:
                raise ShardError("the file ends before")
            codecs.decode(self._codec[shard] or "", data, out.reshape(-1))
        except ShardError as error:
            first = (chunk - int(self._first_chunk[shard])) * rows
            raise ShardError(
                f"'{path}': the chunk of rows {first} to {first + rows - 1} cannot be read: {error}. {CURE}"
            ) from error
        return out

    def _check(self, slot: Index, flat: Pixels) -> None:
        if self.verify == "off":
            return
        unchecked = range(len(slot)) if self.verify == "read" else np.flatnonzero(~self._seen[slot]).tolist()
        for i in unchecked:
            if zlib.crc32(flat[i]) != self._crc[slot[i]]:
                shard = int(self.rows.shard_of(slot[i]))
                raise ShardError(
                    f"'{self._file(shard)[0]}': the pixels of row {slot[i] - self.rows.first_slot[shard]} "
                    f"are not those that were written (CRC-32). {CURE}"
                )
        if self.verify == "first":
            self._seen[slot] = True
