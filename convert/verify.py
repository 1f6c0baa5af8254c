"""Whether a data set is what its manifest says: quickly by sizes and hashes, or chunk by chunk."""

import errno
import os
import stat
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import joblib
import numpy as np

from shardwright.convert.progress import ProgressMaker, Silent
from shardwright.convert.store import shard_file
from shardwright.datasets import codecs
from shardwright.datasets.files import read_into
from shardwright.datasets.layout import Manifest, Shard, ShardFile
from shardwright.datasets.manifest import read_manifest
from shardwright.datasets.shards import FinishedShard, finished_shard
from shardwright.errors import ShardError


@dataclass(frozen=True, slots=True)
class Verification:
    """What `verify` found: ``damage`` in words, one entry a place; empty where all is well."""

    folder: Path
    manifest: Manifest
    full: bool
    damage: tuple[str, ...]

    def in_words(self) -> list[str]:
        """Lines for a person."""
        m = self.manifest
        what = f"'{self.folder}': version {m.version}, {m.rows} images in {len(m.shards)} shards"
        checked = "every chunk and row" if self.full else "sizes and hashes"
        if not self.damage:
            return [f"{what}: {checked} are right"]
        cure = (
            f"  `shardwright repair '{self.folder}' --source SRC` makes damaged files again from the pictures"
        )
        return [f"{what}: damaged", *(f"  {place}" for place in self.damage), cure]


def verify(folder: Path, *, full: bool = False, progress: ProgressMaker = Silent) -> Verification:
    """Check the newest version of the data set in ``folder``.

    Sizes and SHA-256 of every file; with ``full`` also the fletcher32 of every chunk and the CRC-32 of
    every row, so that the rows are named.

    Raises
    ------
    FormatError
        There is no data set, or its manifest cannot be read.
    """
    manifest = read_manifest(folder)
    damage: list[str] = []
    numbers = range(len(manifest.shards))
    with progress("verify", len(numbers), "shards") as bar, ThreadPoolExecutor(joblib.cpu_count()) as pool:
        for found in pool.map(lambda n: list(damage_of(finished_shard(folder, manifest, n), full)), numbers):
            damage += found
            bar.update(1)
    return Verification(folder, manifest, full, tuple(damage))


@dataclass(frozen=True, slots=True)
class DamagedFile:
    """A file of a shard that is not what its manifest says: ``why`` in words; ``complete`` if it has its size."""

    shard: int
    file: ShardFile
    why: str
    complete: bool


def damaged_files(
    folder: Path, manifest: Manifest, shards: Iterable[int], progress: ProgressMaker = Silent
) -> list[DamagedFile]:
    """The files of some shards whose size or SHA-256 is another than the manifest's, in order. Hashes in threads."""
    numbers = list(shards)
    with progress("verify", len(numbers), "shards") as bar, ThreadPoolExecutor(joblib.cpu_count()) as pool:
        damaged: list[DamagedFile] = []
        for found in pool.map(lambda n: list(_damaged_files(folder, n, manifest.shards[n])), numbers):
            damaged += found
            bar.update(1)
    return damaged


def _damaged_files(folder: Path, number: int, shard: Shard) -> Iterator[DamagedFile]:
    for expected in shard.files:
        path = folder / expected.name
        try:
            status = os.lstat(path)
            if os.path.islink(path.parent):  # readers refuse it
                yield DamagedFile(
                    number, expected, f"'{path.parent}' is a link, and no folder of its own", False
                )
            elif stat.S_ISLNK(status.st_mode):
                yield DamagedFile(
                    number, expected, f"'{path}' is a link, and a shard is a file of its own", False
                )
            elif stat.S_ISDIR(status.st_mode):
                yield DamagedFile(number, expected, f"'{path}': {os.strerror(errno.EISDIR)}", False)
            elif not stat.S_ISREG(status.st_mode):  # to open a pipe would wait for a writer
                yield DamagedFile(number, expected, f"'{path}' is no plain file", False)
            elif status.st_size != expected.bytes:
                why = f"'{path}' has {status.st_size} bytes, expected {expected.bytes}"
                yield DamagedFile(number, expected, why, False)
            elif shard_file(path, expected.name) != expected:
                yield DamagedFile(number, expected, f"'{path}': wrong SHA-256", True)
        except OSError as error:
            yield DamagedFile(number, expected, f"'{path}': {error.strerror}", False)


def damage_of(shard: FinishedShard, full: bool = False) -> Iterator[str]:
    """What is wrong with one shard, in words: sizes and hashes; with ``full``, or where a hash is wrong, every row."""
    damaged = list(_damaged_files(shard.folder, 0, shard.shard))
    yield from (file.why for file in damaged)
    complete = all(file.complete for file in damaged)
    if complete and (full or damaged):  # where a hash is wrong, say which rows it costs
        try:
            yield from _damaged_rows(shard)
        except ShardError as error:
            yield str(error)
        except Exception as error:  # whatever HDF5 or NumPy make of it
            yield f"'{shard.path(0)}' cannot be read: {type(error).__name__}: {error}"


def _damaged_rows(shard: FinishedShard) -> Iterator[str]:
    opened = shard.opened()
    index, crc = opened.index, opened.crc32
    found = len(index.offsets), int(index.compressed.sum())
    if found != (shard.shard.chunks, shard.shard.compressed_chunks):
        yield (
            f"'{shard.path(0)}' has {found[0]} chunks, {found[1]} of them compressed; its manifest says "
            f"{shard.shard.chunks} and {shard.shard.compressed_chunks}"
        )
    for name, column in shard.columns.items():
        # h5py checks their fletcher32. Ids have none, and HDF5 takes the memory that a damaged one claims.
        if column.kind not in ("image", "id"):
            shard.column(name)
    path = shard.folder / index.file.name
    row_bytes = int(np.prod(shard.image.shape))
    with open(path, "rb") as file:
        for k, (offset, size) in enumerate(zip(index.offsets.tolist(), index.sizes.tolist(), strict=True)):
            first = k * index.chunk_rows
            last = min(first + index.chunk_rows, shard.shard.rows)
            stored = np.empty(size + index.checksum_bytes, np.uint8)
            read_into(file.fileno(), stored, offset)
            payload, checksum = stored[:size], stored[size:].tobytes()
            if checksum and codecs.fletcher32(payload) != checksum:
                yield f"'{path}': rows {first} to {last - 1}: wrong fletcher32 of their chunk"
            if index.compressed[k]:
                pixels = np.empty(index.chunk_rows * row_bytes, np.uint8)
                try:
                    codecs.decode(index.codec or "", payload, pixels)
                except ShardError as error:
                    yield f"'{path}': rows {first} to {last - 1}: their chunk: {error}"
                    continue
                payload = pixels
            rows = payload.reshape(-1, row_bytes)
            wrong = [row for row in range(first, last) if zlib.crc32(rows[row - first]) != crc[row]]
            if wrong:
                yield f"'{path}': rows {', '.join(map(str, wrong))}: wrong CRC-32"
