"""Read, check and publish manifests: every value is checked before anything believes it."""

import json
import os
import re
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import numpy as np

from shardwright.datasets.layout import (
    COLUMN_KINDS,
    FORMAT,
    FORMAT_VERSION,
    SPLIT_NAMES,
    WORK_FOLDER,
    Column,
    Manifest,
    Shard,
    ShardFile,
    Stats,
    Storage,
    columns_of,
    manifest_name,
)
from shardwright.errors import FormatError, ShardError, UsageError

SUPPORTED_NEEDS: frozenset[str] = frozenset()
MAX_MANIFEST_BYTES = 1 << 30
#: Columns that readers look for; each is called after its kind.
_READ = ("crc32", "id", "image", "label")
_SHAPES = {column.kind: column.shape for column in columns_of(1, 1, 1) if column.kind != "image"}
_MANIFEST = re.compile(r"manifest-(\d{6,})\.json")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")


def versions_of(folder: Path) -> list[int]:
    """The versions whose manifests lie in ``folder``, oldest first."""
    return sorted(int(m[1]) for name in os.listdir(folder) if (m := _MANIFEST.fullmatch(name)))


def newest_version(folder: Path) -> int | None:
    """The version that ``manifest.json`` holds; None where there is no such file."""
    return read_manifest(folder).version if (folder / "manifest.json").exists() else None


def splits_of(folder: Path) -> list[str]:
    """Names of the splits of which ``folder`` holds a data set each, in the order train, val, ..., test."""
    return [name for name in SPLIT_NAMES if (folder / name / "manifest.json").is_file()]


def data_sets_in(out: Path) -> dict[str, Path]:
    """Split -> folder of its data set; '' for a folder that is one itself, or none."""
    if (out / "manifest.json").exists():
        return {"": out}
    return {split: out / split for split in splits_of(out)} or {"": out}


def why_removed(folder: Path, version: int) -> str | None:
    """That ``version`` was there and is no more, and what to do; None where it is there, or never was."""
    try:
        versions = versions_of(folder)
    except OSError:
        return None
    if version in versions or not 1 <= version < max(versions, default=0):
        return None
    return (
        f"'{folder}' has no version {version}, it has {', '.join(map(str, versions))}: version {version} was removed, "
        "as `shardwright gc` does. Open the newest; --keep and --min-age of gc say how long a version stays"
    )


def if_removed(error: ShardError, folder: Path, version: int) -> ShardError:
    """``error``; or one that says it, if its file is missing because its version was removed."""
    if not isinstance(error.__cause__, FileNotFoundError) or (why := why_removed(folder, version)) is None:
        return error
    return ShardError(f"cannot open '{error.__cause__.filename}': {why}")


def read_manifest(folder: Path, version: int | None = None) -> Manifest:
    """Read and check the manifest of ``folder``: the newest, or that of one version.

    Raises
    ------
    UsageError
        ``version`` is no whole number.
    FormatError
        No data set there, no such version, or a manifest that is damaged, hostile or of a newer format.
    """
    if version is not None and (isinstance(version, bool) or not isinstance(version, int)):
        raise UsageError(f"version is {version!r}, expected a whole number, or None for the newest")
    path = folder / ("manifest.json" if version is None else manifest_name(version))
    try:
        status = path.stat()
        if stat.S_ISFIFO(status.st_mode):  # to read it would wait for a writer
            raise FormatError(f"'{path}' is no file")
        size = status.st_size
        if size > MAX_MANIFEST_BYTES:
            raise FormatError(
                f"'{path}' has {size} bytes, more than a manifest may have ({MAX_MANIFEST_BYTES})"
            )
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        if version is not None and not path.is_symlink() and newest_version(folder) == version:
            return read_manifest(folder)  # its copy
        raise FormatError(_why_missing(folder, version)) from error
    except OSError as error:
        raise FormatError(f"cannot read '{path}': {error.strerror}") from error
    try:
        found = _parse(json.loads(text))
        if version is not None and found.version != version:
            raise ValueError(f"it is of version {found.version}, by its name of version {version}")
        return found
    except (ValueError, RecursionError) as error:
        raise FormatError(f"'{path}' is no manifest that this version can read: {error}") from error


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Publish ``manifest`` as the newest version of ``folder``; durable when it returns.

    The version's own file comes first, ``manifest.json`` is replaced last, so that a reader sees the
    old version or the new one, whole.

    Raises
    ------
    FormatError
        No reader would take it. Nothing was written.
    """
    text = manifest.to_json().encode()
    _refuse_unreadable(text, folder, manifest.version)
    for name in (manifest_name(manifest.version), "manifest.json"):
        replace_file(folder / name, text, folder / WORK_FOLDER)


def _refuse_unreadable(text: bytes, folder: Path, version: int) -> None:
    """What no reader takes would be the end of the data set: no command could mend it, or make the next version."""
    try:
        if len(text) > MAX_MANIFEST_BYTES:
            raise ValueError(f"it has {len(text)} bytes, a manifest may have {MAX_MANIFEST_BYTES}")
        _parse(json.loads(text))
    except ValueError as error:
        raise FormatError(
            f"version {version} of '{folder}' was not published, no reader would take its manifest: {error}. "
            "What was there stays as it was; please report this fault of shardwright"
        ) from error


def replace_file(path: Path, data: bytes, state: Path) -> None:
    """Put ``data`` in place of the file ``path`` in one step, durable when it returns.

    ``state`` is a folder on the same file system, where the new file is made.
    """
    partial = state / f"{path.name}.partial"
    try:
        with open(partial, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError:
        with suppress(OSError):  # a disk that failed may be read-only by now: what it failed of is to be said
            partial.unlink()
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` durable: a rename is, only once its folder is synced."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _why_missing(folder: Path, version: int | None) -> str:
    if not folder.is_dir():
        return f"no data set at '{folder}': {'it is not a' if folder.exists() else 'there is no such'} folder"
    if splits := splits_of(folder):
        return f"'{folder}' holds one data set a split: open one of them, " + ", ".join(
            f"'{folder / split}'" for split in splits
        )
    if version is not None and (versions := versions_of(folder)):
        if removed := why_removed(folder, version):
            return removed
        return f"'{folder}' has no version {version}, it has {', '.join(map(str, versions))}"
    return f"no data set at '{folder}': it holds no manifest.json. `shardwright convert SRC '{folder}'` makes one"


# --- from JSON: every value is checked before anything believes it -----------------------------------


def _parse(found: Any) -> Manifest:
    entry = _Entry(found, "the manifest")
    if entry.get("format", str) != FORMAT:
        raise ValueError(f"format is {found['format']!r}, expected {FORMAT!r}")
    if (number := entry.count("format_version", least=1)) > FORMAT_VERSION:
        raise ValueError(
            f"format version {number} is newer than {FORMAT_VERSION}: install a newer shardwright"
        )
    if unknown := sorted(set(map(str, entry.get("needs", list, []))) - SUPPORTED_NEEDS):
        raise ValueError(f"it needs {', '.join(unknown)}, unknown here: install a newer shardwright")
    storage = entry.get("storage", str)
    if storage not in ("hdf5", "npy"):
        raise ValueError(f"storage is {storage!r}, expected 'hdf5' or 'npy'")
    classes = tuple(entry.list("classes", str))
    if len(set(classes)) != len(classes):
        raise ValueError("a class name stands twice")
    columns = tuple(_column(_Entry(c, "a column")) for c in entry.list("columns", dict))
    if len({c.name for c in columns}) != len(columns):
        raise ValueError("columns: a name stands twice")
    if sorted((c.name, c.kind) for c in columns if {c.name, c.kind} & {*_READ}) != [(k, k) for k in _READ]:
        raise ValueError(f"columns: expected one each of {', '.join(_READ)}, called after its kind")
    shards = tuple(_shard(_Entry(s, f"shard {i}")) for i, s in enumerate(entry.list("shards", dict)))
    names = [file.name for shard in shards for file in shard.files]
    if len(set(names)) != len(names):
        raise ValueError("a file stands in two shards")
    rows = entry.count("rows")
    if rows != sum(shard.living_rows for shard in shards):
        raise ValueError(f"rows is {rows}, its shards have {sum(shard.living_rows for shard in shards)}")
    shape = next(c.shape for c in columns if c.kind == "image")
    stats = _stats(_Entry(entry.get("stats", dict), "stats"), rows, shape)
    options = _Entry(entry.get("options", dict, {}), "options")
    options.count("chunk_rows", least=1, default=1)
    source = _Entry(entry.get("source", dict, {}), "source")
    source.count("files", default=0)
    return Manifest(
        version=entry.count("version", least=1),
        storage=cast(Storage, storage),
        rows=rows,
        classes=classes,
        columns=columns,
        shards=shards,
        seed=entry.get("seed", int, 0),
        stats=stats,
        rejected=entry.counts("rejected"),
        suspect=entry.counts("suspect"),
        duplicates=entry.counts("duplicates"),
        skipped=entry.counts("skipped"),
        source=source.found,
        options=options.found,
        environment=entry.get("environment", dict, {}),
    )


def _column(entry: "_Entry") -> Column:
    column = Column(
        entry.get("name", str),
        entry.get("kind", str),
        entry.get("dtype", str),
        tuple(entry.list("shape", int)),
    )
    if not re.fullmatch(r"\w{1,64}", column.name, re.ASCII):
        raise ValueError(f"{column.name!r} is no name for a column")
    if column.kind in COLUMN_KINDS and column.dtype != COLUMN_KINDS[column.kind]:
        raise ValueError(
            f"column {column.name!r} of kind {column.kind!r} is {column.dtype}, expected {COLUMN_KINDS[column.kind]}"
        )
    if any(not 0 < n < 1 << 31 for n in column.shape) or len(column.shape) > 8:
        raise ValueError(f"column {column.name!r} has shape {list(column.shape)}")
    if column.shape != _SHAPES.get(column.kind, column.shape):
        raise ValueError(
            f"column {column.name!r} of kind {column.kind!r} has shape {list(column.shape)}, "
            f"expected {list(_SHAPES[column.kind])}"
        )
    if column.kind == "image" and (
        len(column.shape) != 3 or int(np.prod(column.shape, dtype=object)) >= 1 << 31
    ):
        raise ValueError(
            f"images of shape {list(column.shape)}, expected [height, width, channels] under 2 GiB"
        )
    return column


def _stats(entry: "_Entry", rows: int, shape: tuple[int, ...]) -> Stats:
    height, width, channels = shape
    mean, std = entry.list("mean", float), entry.list("std", float)
    if not len(mean) == len(std) == channels or not all(0 <= level <= 255 for level in mean + std):
        raise ValueError(f"stats: expected mean and std of {channels} channels, in grey levels 0 to 255")
    pixels = entry.count("pixels", default=0)
    total, squares = entry.list("total", int, []), entry.list("squares", int, [])
    if pixels not in (0, rows * height * width):
        raise ValueError(
            f"stats: pixels is {pixels}, {rows} rows of {height}x{width} have {rows * height * width}"
        )
    if not len(total) == len(squares) == channels * (pixels > 0):
        raise ValueError(f"stats: expected total and squares of {channels} channels beside pixels")
    for t, q in zip(total, squares, strict=True):
        # Else a later version, which adds and takes away, would have the root of a negative variance for its deviation.
        if not (0 <= t <= 255 * pixels and t * t <= pixels * q and q <= 255 * t):
            raise ValueError(
                f"stats: no {pixels} grey levels 0 to 255 have the total {_short(t)} and the squares {_short(q)}"
            )
    return Stats(tuple(mean), tuple(std), pixels, tuple(total), tuple(squares))


def _short(number: int) -> str:
    """``number`` for a message: it may have more digits than Python puts into words."""
    return str(number) if abs(number) < 1 << 128 else "of more than 128 bits"


def _shard(entry: "_Entry") -> Shard:
    rows = entry.count("rows", least=1)
    dead = entry.list("dead_rows", int, [])
    if any(a >= b for a, b in zip([-1, *dead], [*dead, rows], strict=True)):
        raise ValueError(f"{entry.what}: dead_rows are not sorted, different and within its {rows} rows")
    files = tuple(_file(_Entry(f, f"{entry.what}, a file")) for f in entry.list("files", dict))
    if not files:
        raise ValueError(f"{entry.what} has no file")
    chunks, compressed = entry.count("chunks", least=1), entry.count("compressed_chunks")
    if not compressed <= chunks <= rows:
        raise ValueError(f"{entry.what}: {compressed} compressed_chunks of {chunks} chunks of {rows} rows")
    return Shard(rows, files, tuple(dead), chunks, compressed)


def _file(entry: "_Entry") -> ShardFile:
    name, sha256 = entry.get("name", str), entry.get("sha256", str)
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a plain relative path")
    if not re.fullmatch(r"[0-9a-f]{64}", sha256):
        raise ValueError(f"sha256 of {name!r} is not 64 hexadecimal digits")
    return ShardFile(name, entry.count("bytes"), sha256)


class _Entry:
    """A JSON object whose values are taken by name and type; what is wrong is named."""

    _MISSING = object()

    def __init__(self, found: Any, what: str) -> None:
        if not isinstance(found, dict):
            raise ValueError(f"{what} is {type(found).__name__}, expected an object")
        self.found, self.what = found, what

    def get(self, key: str, kind: type, default: Any = _MISSING) -> Any:
        value = self.found.get(key, default)
        if value is self._MISSING:
            raise ValueError(f"{self.what} has no {key!r}")
        if not _is(value, kind):
            raise ValueError(f"{self.what}: {key!r} is {type(value).__name__}, expected {kind.__name__}")
        return value

    def count(self, key: str, *, least: int = 0, default: Any = _MISSING) -> int:
        value = cast(int, self.get(key, int, default))
        if not least <= value < 1 << 62:
            raise ValueError(f"{self.what}: {key!r} is {value}, expected at least {least}")
        return value

    def counts(self, key: str) -> dict[str, int]:
        values = self.get(key, dict, {})
        if not all(_is(value, int) for value in values.values()):
            raise ValueError(f"{self.what}: {key!r} holds something else than counts")
        return cast("dict[str, int]", values)

    def list(self, key: str, kind: type, default: Any = _MISSING) -> list[Any]:
        values = self.get(key, list, default)
        if not all(_is(value, kind) for value in values):
            raise ValueError(f"{self.what}: {key!r} holds something else than {kind.__name__}")
        return cast("list[Any]", values)


def _is(value: object, kind: type) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))
