"""One shard, from picture files to finished files under temporary names: the work of one process.

Nothing here raises for what a picture or a disk does: a record comes back.
"""

import errno
import hashlib
import os
import warnings
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from shardwright.convert.environment import environment
from shardwright.convert.hints import Stamp, stamp_of
from shardwright.convert.options import ConvertOptions
from shardwright.convert.records import Finding, ShardRecord
from shardwright.convert.stats import Summing
from shardwright.convert.store import ShardWriter, shard_file, shard_writer
from shardwright.datasets.buffers import Pixels
from shardwright.datasets.header import look
from shardwright.datasets.layout import Shard
from shardwright.datasets.pixels import Picture, PixelOptions, decode
from shardwright.errors import PictureError


@dataclass(frozen=True, slots=True)
class ShardTask:
    """All that a worker needs to write one shard.

    ``paths`` are relative to ``root``; ``partial`` is where to write, a path without ending; ``stem`` is
    what the files will be called without theirs. ``poison`` are the paths at which a process died: they are
    rejected unseen. ``planned_rows`` are the rows that the shard was planned with, if some of its pictures are
    known to be rejected and left out of ``paths``: the bytes depend on it.
    """

    number: int
    stem: str
    partial: Path
    root: Path
    paths: tuple[str, ...]
    ids: tuple[str, ...]
    labels: tuple[int, ...]
    options: ConvertOptions
    poison: frozenset[str] = frozenset()
    planned_rows: int | None = None

    @property
    def planned(self) -> int:
        """Rows that the shard has if no picture is rejected."""
        return self.planned_rows or len(self.paths)

    def write(self) -> ShardRecord:
        """See `write_shard`."""
        return write_shard(self)


_READS = 3
_POISON = "crash: the process that decodes it ends, by a crash in a decoder or for want of memory"


def write_shard(task: ShardTask) -> ShardRecord:
    """Write one shard, chunk by chunk: memory is that of a chunk and a picture."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # Pillow's, on broken EXIF and the like, would be lines without a file
        try:
            writer = shard_writer(task.partial, task.planned, task.options.image_shape, task.options.store)
            try:
                return _write(task, writer)
            except BaseException:
                writer.discard()
                raise
        except (OSError, MemoryError) as error:
            code = getattr(error, "errno", None) or errno.EIO
            return ShardRecord(
                task.number,
                error=(code, getattr(error, "strerror", None) or str(error) or type(error).__name__),
            )


def _write(task: ShardTask, writer: ShardWriter) -> ShardRecord:
    rows = _Rows(task.options.image_shape)
    findings: list[Finding] = []
    stamps: dict[str, Stamp] = {}
    chunk = np.zeros((min(task.options.store.chunk_rows, task.planned), *task.options.image_shape), np.uint8)
    filled = 0
    for path, id, label in zip(task.paths, task.ids, task.labels, strict=True):
        data = b""
        try:
            if path in task.poison:
                raise PictureError(_POISON)
            data, stamps[id] = _read(task.root / path)
            picture = decode(data, task.options.pixels)
        except PictureError as error:
            findings.append(_finding(id, "rejected", error, data))
            continue
        if picture.doubt:
            findings.append(_finding(id, "suspect", PictureError(picture.doubt), data))
        chunk[filled] = picture.pixels
        rows.add(id, label, data, picture, chunk[filled])
        filled += 1
        if filled == len(chunk):
            writer.write(chunk, filled)
            filled = 0
    if filled:
        chunk[filled:] = 0
        writer.write(chunk, filled)
    if not rows.ids:
        writer.discard()
        return ShardRecord(task.number, findings=tuple(findings), environment=environment(), stamps=stamps)
    temporary = writer.finish(rows.columns())
    files = tuple(shard_file(path, task.stem + ending) for ending, path in temporary.items())
    return ShardRecord(
        number=task.number,
        shard=Shard(len(rows.ids), files, (), writer.chunks, writer.compressed_chunks),
        temporary=tuple(temporary.values()),
        findings=tuple(findings),
        sums=rows.summing.sums(),
        animated=rows.animated,
        saved_bytes=writer.saved_bytes,
        environment=environment(),
        stamps=stamps,
    )


def _finding(id: str, verdict: Literal["rejected", "suspect"], why: PictureError, data: bytes) -> Finding:
    return Finding(id, verdict, why.reason, why.message, len(data), *look(data))


def try_picture(path: Path, options: PixelOptions) -> None:
    """Do with one picture what may end a process, and nothing else."""
    with warnings.catch_warnings(), suppress(PictureError, MemoryError):
        warnings.simplefilter("ignore")
        decode(_read(path)[0], options)


def _read(path: Path) -> tuple[bytes, Stamp]:
    """The content of a file as it was at one time, and its stamp then.

    Half of one picture and half of another may decode well.
    """
    try:
        for _ in range(_READS):
            with open(path, "rb") as file:
                before = os.fstat(file.fileno())
                data = file.read()
                after = os.fstat(file.fileno())
            if (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns):
                return data, stamp_of(after)
    except OSError as error:
        raise PictureError(f"unreadable: {error.strerror or error}") from error
    raise PictureError(
        f"unstable: it was written to each of the {_READS} times that it was read; run again later"
    )


class _Rows:
    """The small columns of a shard, gathered row by row."""

    def __init__(self, image_shape: tuple[int, int, int]) -> None:
        self.ids: list[str] = []
        self.labels: list[int] = []
        self.crcs: list[int] = []
        self.digests: list[bytes] = []
        self.shapes: list[tuple[int, int]] = []
        self.animated = 0
        self.summing = Summing(image_shape)

    def add(self, id: str, label: int, data: bytes, picture: Picture, pixels: Pixels) -> None:
        self.ids.append(id)
        self.labels.append(label)
        self.crcs.append(zlib.crc32(pixels))
        self.digests.append(hashlib.sha256(data).digest())
        self.shapes.append(picture.source_shape)
        self.animated += picture.animated
        self.summing.add(pixels)

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        return {
            "label": np.array(self.labels, np.int64),
            "id": np.array(self.ids, object),
            "crc32": np.array(self.crcs, np.uint32),
            "source_sha256": np.frombuffer(b"".join(self.digests), np.uint8).reshape(-1, 32),
            "source_shape": np.array(self.shapes, np.int32).reshape(-1, 2),
        }
