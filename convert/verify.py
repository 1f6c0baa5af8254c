"""Whether a data set is what its manifest says: quickly by sizes and hashes, or chunk by chunk."""

import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import joblib
import numpy as np

from shardwright.convert.progress import ProgressMaker, Silent
from shardwright.convert.store import shard_file
from shardwright.datasets import codecs
from shardwright.datasets.files import read_into
from shardwright.datasets.layout import Manifest
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
        return [f"{what}: damaged", *(f"  {place}" for place in self.damage)]


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
        for found in pool.map(lambda n: list(_damage(finished_shard(folder, manifest, n), full)), numbers):
            damage += found
            bar.update(1)
    return Verification(folder, manifest, full, tuple(damage))


def _damage(shard: FinishedShard, full: bool) -> Iterator[str]:
    sound = complete = True
    for expected in shard.shard.files:
        path = shard.folder / expected.name
        try:
            found = shard_file(path, expected.name)
        except OSError as error:
            complete = False
            yield f"'{path}': {error.strerror}"
            continue
        if found.bytes != expected.bytes:
            complete = False
            yield f"'{path}' has {found.bytes} bytes, expected {expected.bytes}"
        elif found.sha256 != expected.sha256:
            sound = False
            yield f"'{path}': wrong SHA-256"
    if complete and (full or not sound):  # where a hash is wrong, say which rows it costs
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
