"""What lies on disk, format version 1: manifest, columns, shards, and what they are called.

A data set is a folder::

    manifest-000001.json   one immutable file a version
    manifest.json          a copy of the newest, replaced last
    report-000001.jsonl    what was rejected or suspect in it
    shards/                flat, immutable; names are never used twice
    .shardwright/          work in progress and source hints: never needed to read

Readers believe the manifest alone. ``docs/format.md`` says the same for people of other languages.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from shardwright.datasets.ids import id_to_path, path_to_id
from shardwright.errors import UsageError

__all__ = [
    "COLUMN_KINDS",
    "FORMAT",
    "FORMAT_VERSION",
    "SHARDS_FOLDER",
    "SHARD_NAME",
    "SPLIT_NAMES",
    "WORK_FOLDER",
    "Column",
    "Manifest",
    "Shard",
    "ShardFile",
    "Stats",
    "Storage",
    "columns_of",
    "id_to_path",
    "manifest_name",
    "path_to_id",
    "report_name",
]

FORMAT = "shardwright"
FORMAT_VERSION = 1
SPLIT_NAMES = ("train", "val", "valid", "validation", "test")
WORK_FOLDER = ".shardwright"
SHARDS_FOLDER = "shards"
#: Path of a shard file that a conversion made, relative to the data set; its version and number are groups.
SHARD_NAME = re.compile(rf"{SHARDS_FOLDER}/(\d{{6,}})-(\d{{5,}})(\.h5|\.\w{{1,64}}\.npy)", re.ASCII)

Storage = Literal["hdf5", "npy"]
#: kind -> dtype on disk of a column of that kind. ``utf8`` is variable-length UTF-8 in HDF5, fixed-width
#: bytes in npy.
COLUMN_KINDS: Mapping[str, str] = {
    "image": "uint8",
    "label": "int64",
    "id": "utf8",
    "crc32": "uint32",
    "sha256": "uint8",
    "shape": "int32",
}


@dataclass(frozen=True, slots=True)
class Column:
    """One array of a shard; its first dimension is the row, ``shape`` are the others."""

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ShardFile:
    """One file of a shard: POSIX path relative to the data set, size in bytes, SHA-256 in hex."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard: ``rows`` on disk, of which the sorted ``dead_rows`` no longer belong to the data set.

    ``chunks`` counts the chunks of the image column, ``compressed_chunks`` those of them that are stored
    compressed (the others are raw, and their rows can be read one by one).
    """

    rows: int
    files: tuple[ShardFile, ...]
    dead_rows: tuple[int, ...] = ()
    chunks: int = 0
    compressed_chunks: int = 0

    @property
    def living_rows(self) -> int:
        """Rows that a reader sees."""
        return self.rows - len(self.dead_rows)


@dataclass(frozen=True, slots=True)
class Stats:
    """Mean and standard deviation of each channel, in grey levels 0 to 255, over all living rows.

    Attributes
    ----------
    mean, std
        (channels,) each; the standard deviation is that of the population.
    pixels, total, squares
        What they were made of: the number of pixels, and the sums of each channel's grey levels and of their squares,
        exact. Then a later version can add what it has, and take away what it has not. 0 and empty where not known.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    pixels: int = 0
    total: tuple[int, ...] = ()
    squares: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Manifest:
    """One immutable version of a data set. The keys in JSON are the names of the fields."""

    version: int
    storage: Storage
    rows: int
    classes: tuple[str, ...]
    columns: tuple[Column, ...]
    shards: tuple[Shard, ...]
    seed: int
    stats: Stats
    rejected: Mapping[str, int] = field(default_factory=dict)
    suspect: Mapping[str, int] = field(default_factory=dict)
    duplicates: Mapping[str, int] = field(default_factory=dict)
    skipped: Mapping[str, int] = field(default_factory=dict)
    source: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(height, width, channels) of every image."""
        height, width, channels = next(c.shape for c in self.columns if c.kind == "image")
        return height, width, channels

    @property
    def chunk_rows(self) -> int:
        """Rows that belong together on disk, as asked for; in HDF5 the file itself says what came of it."""
        rows = self.options.get("chunk_rows")
        return rows if isinstance(rows, int) and rows > 0 else 32

    @property
    def bytes(self) -> int:
        """Size of all shard files in bytes."""
        return sum(file.bytes for shard in self.shards for file in shard.files)

    def part(self, node: int, nodes: int) -> "Manifest":
        """The same with every ``nodes``-th shard alone, from ``node`` on. What is said of all rows stays as it is.

        Raises
        ------
        UsageError
            There are fewer shards than nodes.
        """
        if nodes > len(self.shards):
            raise UsageError(
                f"{nodes} parts of a data set of {len(self.shards)} shards: expected at most as many"
            )
        shards = self.shards[node::nodes]
        return replace(self, shards=shards, rows=sum(shard.living_rows for shard in shards))

    def fingerprint(self) -> str:
        """SHA-256 over the hashes of all shard files and the dead rows, in hex, its first 16 digits: what it holds."""
        hashes = "".join(file.sha256 for shard in self.shards for file in shard.files)
        dead = {number: shard.dead_rows for number, shard in enumerate(self.shards) if shard.dead_rows}
        return hashlib.sha256((hashes + (repr(dead) if dead else "")).encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """The text of the manifest file: sorted by nothing but the order of the fields, one final newline."""
        head = {"format": FORMAT, "format_version": FORMAT_VERSION, "needs": []}
        return json.dumps({**head, **asdict(self)}, indent=1, ensure_ascii=True) + "\n"


def columns_of(height: int, width: int, channels: int) -> tuple[Column, ...]:
    """The columns of a data set of ``(height, width, channels)`` images, in the order of the format."""
    shapes = {"image": (height, width, channels), "sha256": (32,), "shape": (2,)}
    names = {"sha256": "source_sha256", "shape": "source_shape"}
    return tuple(
        Column(names.get(kind, kind), kind, dtype, shapes.get(kind, ()))
        for kind, dtype in COLUMN_KINDS.items()
    )


def manifest_name(version: int) -> str:
    """File name of a version's manifest."""
    return f"manifest-{version:06d}.json"


def report_name(version: int) -> str:
    """File name of a version's report."""
    return f"report-{version:06d}.jsonl"
