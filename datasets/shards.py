"""One finished shard: what its files hold and where, read once and kept small.

An HDF5 shard is opened with h5py for its chunk index and small columns, then closed: a thousand open h5py
files hold half a gigabyte. From then on pixels are read by offset, outside h5py's lock.
"""

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from shardwright.datasets.codecs import CHECKSUM_BYTES
from shardwright.datasets.files import CURE, open_checked
from shardwright.datasets.layout import COLUMN_KINDS, Column, Manifest, Shard, ShardFile
from shardwright.datasets.manifest import if_removed
from shardwright.errors import ShardError

#: HDF5's numbers of the filters that a shard may use.
FILTERS = {1: "gzip", 3: "fletcher32", 32000: "lzf"}

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class ChunkIndex:
    """Where the chunks of the image column lie in ``file``.

    Chunk k holds the rows ``[k * chunk_rows, (k + 1) * chunk_rows)``; it is ``sizes[k]`` bytes at
    ``offsets[k]``, behind which ``checksum_bytes`` of fletcher32 may follow. The last one is stored whole,
    zero-padded, in HDF5, and ends with the rows in npy.
    """

    file: ShardFile
    chunk_rows: int
    offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    compressed: npt.NDArray[np.bool_]
    codec: str | None
    checksum_bytes: int


@dataclass(frozen=True, slots=True)
class OpenedShard:
    """What reading the rows of a shard takes: the chunk index, and label and CRC-32 of each row."""

    index: ChunkIndex
    labels: npt.NDArray[np.int64]
    crc32: npt.NDArray[np.uint32]


class FinishedShard(ABC):
    """A shard as ``manifest`` describes it. Nothing stays open between two calls."""

    def __init__(self, folder: Path, manifest: Manifest, number: int) -> None:
        self.folder, self.version = folder, manifest.version
        self.shard: Shard = manifest.shards[number]
        self.columns = {column.name: column for column in manifest.columns}
        self.image = next(column for column in manifest.columns if column.kind == "image")
        self.chunk_rows = manifest.chunk_rows
        self.class_count = len(manifest.classes)

    @abstractmethod
    def opened(self) -> "OpenedShard":
        """Read what reading rows takes, checked against the manifest and the file's size."""

    @abstractmethod
    def column(self, name: str, rows: Array | None = None) -> Array:
        """Read a small column, or the given rows of it: (rows, ...) in its dtype; ids as objects of str."""

    def labels(self) -> npt.NDArray[np.int64]:
        """The label of each row, checked to be a class of the data set."""
        return self._checked(self.column("label"))

    def _checked(self, labels: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        if len(labels) and not (labels.min() >= 0 and labels.max() < self.class_count):
            raise ShardError(
                f"'{self.path(0)}' holds labels {labels.min()} to {labels.max()}, "
                f"the data set has {self.class_count} classes. {CURE}"
            )
        return labels

    def path(self, file: int) -> Path:
        """Path of the shard's n-th file."""
        return self.folder / self.shard.files[file].name

    def _checked_file(self, file: ShardFile) -> int:
        """A file descriptor of ``file``, whose folder must not be a link that leaves the data set."""
        path = self.folder / file.name
        if os.path.realpath(path.parent) != os.path.join(
            os.path.realpath(self.folder), os.path.dirname(file.name)
        ):
            raise ShardError(f"'{path.parent}' is a link out of the data set: refused. Put the files there")
        try:
            return open_checked(path, file.bytes)
        except ShardError as error:
            raise if_removed(error, self.folder, self.version) from error.__cause__

    def _expect(self, what: str, found: object, expected: object, path: Path) -> None:
        if found != expected:
            raise ShardError(f"'{path}': {what} is {found}, expected {expected}. {CURE}")


class H5Shard(FinishedShard):
    """A shard in one HDF5 file."""

    def opened(self) -> OpenedShard:
        with self._open() as h5:  # once for all three: to open costs more than to read
            return OpenedShard(self._index(h5), self._labels(h5), self._column(h5, "crc32", None))

    def labels(self) -> npt.NDArray[np.int64]:
        with self._open() as h5:
            return self._labels(h5)

    def _labels(self, h5: h5py.File) -> npt.NDArray[np.int64]:
        labels = self._checked(self._column(h5, "label", None))
        rows = (h5["label"].chunks or labels.shape)[0]
        if self.class_count > 1 and any(not labels[k : k + rows].any() for k in range(0, len(labels), rows)):
            # All of the first class: or what a disk lost, whose fletcher32 is right, or a chunk that is not found.
            self._refuse_other_bytes()
        return labels

    def _refuse_other_bytes(self) -> None:
        file = self.shard.files[0]
        with os.fdopen(self._checked_file(file), "rb", buffering=0) as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        self._expect("SHA-256", digest, file.sha256, self.path(0))

    def _index(self, h5: h5py.File) -> ChunkIndex:
        path, file = self.path(0), self.shard.files[0]
        image = self._dataset(h5, self.image)
        plist = image.id.get_create_plist()
        filters = [plist.get_filter(i)[0] for i in range(plist.get_nfilters())]
        if image.chunks is None or any(f not in FILTERS for f in filters):
            raise ShardError(f"'{path}': image is not chunked with the filters {FILTERS}, found {filters}")
        names = [FILTERS[f] for f in filters]
        if names not in (["lzf", "fletcher32"], ["gzip", "fletcher32"], ["fletcher32"]):
            raise ShardError(f"'{path}': filters of image are {names}, in an order that is not the format's")
        self._expect("chunk shape", image.chunks[1:], self.image.shape, path)
        chunk_rows = image.chunks[0]
        count = -(-self.shard.rows // chunk_rows)
        offsets, sizes = np.zeros(count, np.int64), np.zeros(count, np.int64)
        masks = np.zeros(count, np.uint32)

        def keep(info: Any) -> None:
            k = info.chunk_offset[0] // chunk_rows
            if k < count:
                offsets[k], sizes[k], masks[k] = info.byte_offset, info.size, info.filter_mask

        image.id.chunk_iter(keep)
        userblock = h5.userblock_size
        if missing := np.flatnonzero(sizes == 0).tolist():
            # HDF5 itself would read such a chunk as zeros, without a word.
            raise ShardError(f"'{path}': chunks {missing[:5]} of image were never written. {CURE}")
        if len(np.unique(offsets)) < count:  # each has a right checksum, but for one of them it is another's
            raise ShardError(f"'{path}': two chunks of image lie in one place. {CURE}")
        codec = names[0] if len(names) > 1 else None
        if (masks & ~np.uint32(1 if codec else 0)).any() or userblock:
            raise ShardError(
                f"'{path}': a chunk without fletcher32, or a user block: not this format. {CURE}"
            )
        compressed = masks == 0 if codec else np.zeros(count, np.bool_)
        sizes -= CHECKSUM_BYTES
        chunk_bytes = chunk_rows * int(np.prod(self.image.shape))
        if (sizes[~compressed] != chunk_bytes).any() or (sizes <= 0).any():
            raise ShardError(f"'{path}': a raw chunk has not the {chunk_bytes} bytes of its shape. {CURE}")
        if (sizes > 2 * chunk_bytes + 1024).any() or (offsets + sizes + CHECKSUM_BYTES > file.bytes).any():
            raise ShardError(f"'{path}': a chunk lies outside the file. {CURE}")
        return ChunkIndex(file, chunk_rows, offsets, sizes, compressed, codec, CHECKSUM_BYTES)

    def column(self, name: str, rows: Array | None = None) -> Array:
        with self._open() as h5:
            return self._column(h5, name, rows)

    def _column(self, h5: h5py.File, name: str, rows: Array | None) -> Array:
        column = self.columns[name]
        dataset = self._dataset(h5, column)
        return np.asarray(
            (dataset.asstr() if column.kind == "id" else dataset)[... if rows is None else rows]
        )

    @contextmanager
    def _open(self) -> Iterator[h5py.File]:
        path = self.path(0)
        # Through the descriptor that was checked: HDF5 then takes no lock on the file, which would fail
        # beside one that this process holds by plain h5py.
        with os.fdopen(self._checked_file(self.shard.files[0]), "rb", buffering=0) as stream:
            try:
                with h5py.File(stream, "r") as h5:
                    yield h5
            except ShardError:
                raise
            except Exception as error:  # damaged metadata make HDF5 and h5py raise almost anything
                raise ShardError(f"'{path}' cannot be read as HDF5: {error}. {CURE}") from error

    def _dataset(self, h5: h5py.File, column: Column) -> h5py.Dataset:
        path = self.path(0)
        if not isinstance(h5.get(column.name, getlink=True), h5py.HardLink):
            raise ShardError(f"'{path}' has no data set '{column.name}' of its own. {CURE}")
        dataset = h5[column.name]
        if not isinstance(dataset, h5py.Dataset) or dataset.is_virtual or dataset.external:
            raise ShardError(f"'{path}': '{column.name}' does not lie in the file itself: refused")
        self._expect(f"shape of '{column.name}'", dataset.shape, (self.shard.rows, *column.shape), path)
        kind = "utf8" if h5py.check_string_dtype(dataset.dtype) else str(dataset.dtype)
        self._expect(f"dtype of '{column.name}'", kind, COLUMN_KINDS.get(column.kind, column.dtype), path)
        return dataset


class NpyShard(FinishedShard):
    """A shard in one .npy file a column."""

    def opened(self) -> OpenedShard:
        return OpenedShard(self._index(), self.labels(), self.column("crc32"))

    def _index(self) -> ChunkIndex:
        start, dtype = self._header(self.image)
        file = self._file(self.image)
        row_bytes = int(np.prod(self.image.shape)) * dtype.itemsize
        firsts = np.arange(0, self.shard.rows, self.chunk_rows)
        return ChunkIndex(
            file=file,
            chunk_rows=self.chunk_rows,
            offsets=start + firsts * row_bytes,
            sizes=(np.minimum(firsts + self.chunk_rows, self.shard.rows) - firsts) * row_bytes,
            compressed=np.zeros(len(firsts), np.bool_),
            codec=None,
            checksum_bytes=0,
        )

    def column(self, name: str, rows: Array | None = None) -> Array:
        column = self.columns[name]
        start, dtype = self._header(column)
        file = self._file(column)
        path = self.folder / file.name
        with os.fdopen(self._checked_file(file), "rb") as stream:
            data = stream.read()
        # npy has no checksum of its own, and these files are small: a wrong label would look like any other.
        self._expect("SHA-256", hashlib.sha256(data).hexdigest(), file.sha256, path)
        found = np.frombuffer(data, dtype, offset=start).reshape(-1, *column.shape).copy()
        found = found if rows is None else found[rows]
        if column.kind != "id":
            return found
        try:
            return np.array([text.decode("utf-8") for text in found.tolist()], object)
        except UnicodeDecodeError as error:
            raise ShardError(f"'{path}': an id is not UTF-8: {error}. {CURE}") from error

    def _file(self, column: Column) -> ShardFile:
        ending = f".{column.name}.npy"
        for file in self.shard.files:
            if file.name.endswith(ending):
                return file
        raise ShardError(f"no file of shard '{self.path(0)}' ends with '{ending}'. {CURE}")

    def _header(self, column: Column) -> tuple[int, np.dtype[Any]]:
        """(offset of the data, dtype), after the header and the file's size were checked."""
        file = self._file(column)
        path = self.folder / file.name
        with os.fdopen(self._checked_file(file), "rb") as stream:
            try:
                version = np.lib.format.read_magic(stream)
                if version != (1, 0):
                    raise ValueError(f"version {version} of the npy format")
                shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
            except Exception as error:  # a damaged header makes NumPy's parser raise almost anything
                raise ShardError(f"'{path}' cannot be read as npy: {error}. {CURE}") from error
            start = stream.tell()
        self._expect("shape", shape, (self.shard.rows, *column.shape), path)
        kind = "utf8" if dtype.kind == "S" else dtype.name
        self._expect("dtype", kind, COLUMN_KINDS.get(column.kind, column.dtype), path)
        if fortran or not dtype.isnative or dtype.hasobject:
            raise ShardError(f"'{path}' is not little-endian, in C order and without objects. {CURE}")
        size = start + dtype.itemsize * int(np.prod(shape, dtype=object))
        self._expect("size in bytes", file.bytes, size, path)
        return start, dtype


def finished_shard(folder: Path, manifest: Manifest, number: int) -> FinishedShard:
    """The shard ``number`` of ``manifest``, in the class of its storage."""
    return (H5Shard if manifest.storage == "hdf5" else NpyShard)(folder, manifest, number)
