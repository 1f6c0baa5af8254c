"""Writers of one shard, a format each: chunks as they come, small columns at the end.

A shard is written under temporary names, synced and hashed; who gives it its name is not decided here.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import h5py
import numpy as np
import numpy.typing as npt

from shardwright.convert.encode import encode_chunk
from shardwright.convert.guard import GuardedFile
from shardwright.convert.options import StoreOptions
from shardwright.datasets.buffers import Pixels
from shardwright.datasets.codecs import GZIP_LEVEL
from shardwright.datasets.layout import ShardFile

Array = npt.NDArray[Any]
_COLUMN_CHUNK_ROWS = 1 << 16
# Where a chunk's checksum shifts the next one by 4 bytes, rows are read at two thirds of the speed: the kernel copies
# best from multiples of 64. Pages, so that rows of whole pages touch no other.
_ALIGNMENT_BYTES, _ALIGNED_FROM_BYTES = 4096, 64 << 10
_NPY_HEADER_BYTES = 128


class ShardWriter(Protocol):
    """Takes the chunks of one shard in order, each whole but the last, then its small columns."""

    chunks: int
    compressed_chunks: int
    #: Bytes that LZF saves, or would save by a probe, over all chunks written.
    saved_bytes: float

    def write(self, pixels: Pixels, rows: int) -> None:
        """Append a chunk: uint8 (chunk_rows, H, W, C), of which ``rows`` are valid, the others zero."""

    def finish(self, columns: Mapping[str, Array]) -> dict[str, Path]:
        """Write the small columns, make all durable; name without stem -> temporary path."""

    def discard(self) -> None:
        """Remove what was written."""


class H5Writer:
    """One HDF5 file. See `GuardedFile` for how a full disk is survived."""

    def __init__(
        self, partial: Path, rows: int, image_shape: tuple[int, int, int], options: StoreOptions
    ) -> None:
        self.chunks = self.compressed_chunks = 0
        self.saved_bytes = 0.0
        self._path = partial.with_name(partial.name + ".h5")
        self._codec, self._min_saving = options.codec, options.min_saving
        self._rows = 0
        self._guard = GuardedFile(self._path)
        self._h5 = h5py.File(
            self._guard, "w", alignment_threshold=_ALIGNED_FROM_BYTES, alignment_interval=_ALIGNMENT_BYTES
        )
        self._chunk_rows = min(options.chunk_rows, rows)
        # If pictures are rejected, the extent shrinks at the end: fewer rows than were planned for.
        self._image = self._h5.create_dataset(
            "image",
            (rows, *image_shape),
            np.uint8,
            chunks=(self._chunk_rows, *image_shape),
            compression={"none": None, "lzf": "lzf", "gzip": "gzip"}[options.codec],
            compression_opts=GZIP_LEVEL if options.codec == "gzip" else None,
            fletcher32=True,
        )

    def write(self, pixels: Pixels, rows: int) -> None:
        payload, mask, saving = encode_chunk(pixels, rows, self._codec, self._min_saving)
        self.append(payload, mask, rows)
        self.saved_bytes += saving * pixels[:rows].nbytes

    def append(self, payload: bytes | Pixels, mask: int, rows: int) -> None:
        """Append a chunk that is encoded already: its bytes with their fletcher32, and its filter mask."""
        self._rows += rows
        if rows < self._chunk_rows:
            # Before the last chunk is written: HDF5 would zero the rows behind the new extent in it.
            self._shrink()
        self._image.id.write_direct_chunk((self.chunks * self._chunk_rows, 0, 0, 0), payload, mask)
        self._guard.check()
        self.chunks += 1
        self.compressed_chunks += self._codec != "none" and mask == 0

    def finish(self, columns: Mapping[str, Array]) -> dict[str, Path]:
        self._shrink()
        for name, values in columns.items():
            if values.dtype == object:
                self._h5.create_dataset(name, data=values, dtype=h5py.string_dtype("utf-8"))
            else:
                chunks = (min(len(values), _COLUMN_CHUNK_ROWS), *values.shape[1:])
                self._h5.create_dataset(name, data=values, chunks=chunks, fletcher32=True)
            self._guard.check()
        stored = self._image.id.get_num_chunks()
        self._close()
        if stored != self.chunks:
            raise OSError(f"HDF5 kept {stored} of {self.chunks} chunks in '{self._path}'")
        return {".h5": self._path}

    def discard(self) -> None:
        if not self._guard.closed:
            self._h5.close()
            self._guard.close()
        self._path.unlink(missing_ok=True)

    def _shrink(self) -> None:
        if self._image.shape[0] != self._rows:
            self._image.resize(self._rows, axis=0)

    def _close(self) -> None:
        self._h5.close()
        self._guard.check()
        self._guard.sync()
        self._guard.close()


class NpyWriter:
    """One .npy file a column; the header of the image file is written again once the rows are known."""

    def __init__(
        self, partial: Path, rows: int, image_shape: tuple[int, int, int], options: StoreOptions
    ) -> None:
        self.chunks = self.compressed_chunks = 0
        self.saved_bytes = 0.0
        self._partial, self._image_shape = partial, image_shape
        self._rows = 0
        self._paths: dict[str, Path] = {}
        self._image = self._create(".image.npy")
        self._header()

    def write(self, pixels: Pixels, rows: int) -> None:
        self._image.write(pixels[:rows])
        self._image.check()
        self.chunks += 1
        self._rows += rows

    def finish(self, columns: Mapping[str, Array]) -> dict[str, Path]:
        self._image.seek(0)
        self._header()
        self._image.sync()
        self._image.close()
        for name, values in columns.items():
            if values.dtype == object:
                values = np.array([text.encode() for text in values], np.bytes_)
            with self._create(f".{name}.npy") as file:
                np.lib.format.write_array(file, values, version=(1, 0), allow_pickle=False)
                file.check()
                file.sync()
        return self._paths

    def discard(self) -> None:
        self._image.close()
        for path in self._paths.values():
            path.unlink(missing_ok=True)

    def _create(self, ending: str) -> GuardedFile:
        path = self._paths[ending] = self._partial.with_name(self._partial.name + ending)
        return GuardedFile(path)

    def _header(self) -> None:
        header = {"descr": "|u1", "fortran_order": False, "shape": (self._rows, *self._image_shape)}
        np.lib.format.write_array_header_1_0(self._image, header)
        self._image.check()
        if self._image.tell() != _NPY_HEADER_BYTES:
            raise OSError(f"NumPy wrote an npy header of {self._image.tell()} bytes")


def shard_writer(
    partial: Path, rows: int, image_shape: tuple[int, int, int], options: StoreOptions
) -> ShardWriter:
    """The writer of ``options.format``, for a shard of at most ``rows`` rows under names from ``partial``."""
    return (H5Writer if options.format == "hdf5" else NpyWriter)(partial, rows, image_shape, options)


def shard_file(path: Path, name: str) -> ShardFile:
    """Size and SHA-256 of the file at ``path``, which is to be called ``name``."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return ShardFile(name, file.tell(), digest.hexdigest())
