"""Which pictures the rows of a finished shard were made of: from what is left of it, or from the plan it followed.

What is found is a guess until the shard is made again: its SHA-256 in the manifest decides.
"""

import faulthandler
import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import joblib

from shardwright.convert.options import ConvertOptions
from shardwright.convert.output import Output
from shardwright.convert.plan import MADE_OF, PIECED, SYNCED_FROM, plan_shards
from shardwright.convert.progress import ProgressMaker, Silent
from shardwright.convert.report import read_report
from shardwright.convert.retrace import orders, selection_of
from shardwright.convert.scan import Scan, scan
from shardwright.datasets.layout import (
    SHARD_NAME,
    Manifest,
    id_to_path,
    manifest_name,
    path_to_id,
)
from shardwright.datasets.shards import finished_shard
from shardwright.errors import ShardError, SourceError, UsageError

#: Of a shard that no plan tells, so many rejected pictures are tried.
_MOST_REJECTS = 32
#: A column of a shard is read in milliseconds.
PATIENCE_SECONDS = 5.0
_READ_TOGETHER = 256


@dataclass(frozen=True, slots=True)
class Remembered:
    """What the small columns of a damaged shard still say of its rows; None for those that cannot be read."""

    ids: tuple[str, ...] | None
    labels: tuple[int, ...] | None
    digests: tuple[bytes, ...] | None


def remembered(read: Callable[[str], list[Any] | None]) -> Remembered:
    """What is left of a damaged shard, where ``read`` gives a column of it, or None."""
    digests, labels, ids = read("source_sha256"), read("label"), read("id")
    return Remembered(
        None if ids is None or not all(isinstance(id, str) for id in ids) else tuple(ids),
        None if labels is None else tuple(labels),
        None if digests is None else tuple(map(bytes, digests)),
    )


def column_of_damaged(folder: Path, manifest: Manifest, shard: int, name: str) -> list[Any] | None:
    """Read a column of a damaged shard; None where it cannot be read.

    HDF5 may crash over it, or go round in circles: to be called in a process that may be lost, which this ends when
    it takes too long.
    """
    damaged = finished_shard(folder, manifest, shard)
    with open(os.devnull, "w") as nowhere:
        # Its thread needs no lock of the interpreter, which HDF5 may be holding.
        faulthandler.dump_traceback_later(
            PATIENCE_SECONDS + damaged.shard.rows / 10_000, exit=True, file=nowhere
        )
        try:
            values: list[Any] = (damaged.labels() if name == "label" else damaged.column(name)).tolist()
            return values
        except Exception:  # whatever HDF5 or NumPy make of it
            return None
        finally:
            faulthandler.cancel_dump_traceback_later()


@dataclass(frozen=True, slots=True)
class Rows:
    """What the rows of a shard may have been: paths below the source, ids and labels, in order.

    ``lacking`` are ids of pictures that are not in the source, or not as they were: then it cannot be made so.
    ``planned`` are the rows that the shard was planned with, 0 where that is not said.
    """

    paths: tuple[str, ...]
    ids: tuple[str, ...]
    labels: tuple[int, ...]
    lacking: tuple[str, ...] = ()
    planned: int = 0


class Pictures:
    """The pictures of one source: looked at when they are asked for, and each read once at the most."""

    def __init__(self, root: Path, progress: ProgressMaker = Silent) -> None:
        self.root = root
        self._progress = progress
        self._digests: dict[str, bytes | None] = {}

    def is_there(self, path: str) -> bool:
        """Whether ``path`` is a file below the source, and leads nowhere else."""
        inside = not path.startswith("/") and ".." not in path.split("/")
        return inside and os.path.isfile(self.root / path)

    def digests(self, paths: Sequence[str]) -> list[bytes | None]:
        """The SHA-256 of each picture; None where it cannot be read."""
        new = [path for path in dict.fromkeys(paths) if path not in self._digests]
        with ThreadPoolExecutor(joblib.cpu_count()) as pool:  # hashing lets go of the interpreter's lock
            self._digests.update(zip(new, pool.map(self._digest, new), strict=True))
        return [self._digests[path] for path in paths]

    def _digest(self, path: str) -> bytes | None:
        if not self.is_there(path):
            return None
        try:
            with open(self.root / path, "rb") as file:
                return hashlib.file_digest(file, "sha256").digest()
        except OSError:
            return None

    @cached_property
    def ids(self) -> dict[str, str]:
        """id -> path of all that a conversion would find now, sorted by id; reads the folders.

        Raises
        ------
        SourceError
            See `scan`.
        """
        return _ids(self._scan())

    def ids_until(self, latest_ns: int) -> set[str]:
        """Ids of those that were not changed after that time."""
        return set(_ids(self._scan(latest_ns)))

    def _scan(self, latest_ns: int | None = None) -> Scan:
        with self._progress("scan", None, "files") as bar:
            return scan(self.root, None, bar.update, latest_ns)

    def find(self, wanted: set[bytes], among: Sequence[str]) -> dict[bytes, str]:
        """SHA-256 -> path of those pictures ``among`` these whose bytes are ``wanted``; reads no more than it takes."""
        found: dict[bytes, str] = {}
        with self._progress("search", len(among), "images") as bar:
            for start in range(0, len(among), _READ_TOGETHER):
                if len(found) == len(wanted):
                    break
                some = among[start : start + _READ_TOGETHER]
                for path, digest in zip(some, self.digests(some), strict=True):
                    if digest is not None and digest in wanted:
                        found.setdefault(digest, path)
                bar.update(len(some))
        return found


class Origin:
    """How the shards of one version of a data set came to be.

    Parameters
    ----------
    folder, manifest
        The data set, and the version that made them.
    damaged
        Shards of it whose columns are not to be believed.

    Raises
    ------
    UsageError
        Its manifest does not say how, or says it of a way that is not this version's.
    """

    def __init__(self, folder: Path, manifest: Manifest, pictures: Pictures, damaged: Iterable[int]) -> None:
        self.folder, self.manifest, self.pictures = folder, manifest, pictures
        self.options = ConvertOptions.from_recorded(manifest.options)
        if (self.options.image_shape, self.options.store.format) != (manifest.image_shape, manifest.storage):
            raise UsageError("its options are not those of its images")
        self._damaged = frozenset(damaged)
        self._number = {name: k for k, name in enumerate(manifest.classes)}
        #: Samples that were dealt out over its shards, those among them that were rejected then.
        self.samples = int(manifest.source.get("files", 0)) - manifest.rejected.get("no-class", 0)
        rejected = sum(manifest.rejected.values()) - manifest.rejected.get("no-class", 0)
        if not self.unplanned and self.samples != sum(shard.rows for shard in manifest.shards) + rejected:
            raise UsageError("its manifest does not say from how many pictures it was made")
        self._orders: list[list[str]] = []
        self._more_orders = self._guessed_orders()

    @property
    def copied(self) -> bool:
        """Whether the version was made of rows of others, not of pictures."""
        return MADE_OF in self.manifest.source

    @property
    def unplanned(self) -> bool:
        """Whether no one plan tells its rows: `sync` made it, or pictures changed before it was finished."""
        return SYNCED_FROM in self.manifest.source or PIECED in self.manifest.source

    def known(self, name: str) -> Remembered | None:
        """What is known beside the version of the pictures of the shard with the file ``name``; None: nothing."""
        number = next(
            k for k, s in enumerate(self.manifest.shards) if name in {file.name for file in s.files}
        )
        hints = Output(self.folder).hints(self.manifest)
        if hints is None or self.manifest.shards[number].dead_rows:
            return None
        first = sum(shard.living_rows for shard in self.manifest.shards[:number])
        rows = slice(first, first + self.manifest.shards[number].rows)
        return Remembered(
            tuple(hints.ids[rows]), tuple(hints.labels[rows].tolist()), tuple(map(bytes, hints.hashes[rows]))
        )

    @property
    def environment(self) -> dict[str, Any]:
        """What made its pixels and its files. A copy knows what made its pixels, where all were made alike."""
        pixels = self.manifest.source.get("pixels_environment")
        return {**(pixels if isinstance(pixels, dict) else {}), **self.manifest.environment}

    def planned_rows(self, name: str, number: int, rows: int) -> list[int]:
        """Rows that the shard of ``rows`` may have been planned with; more than it has where pictures were rejected.

        ``name`` is that of a file of it, ``number`` the one in it.
        """
        if self.copied:
            return [rows]
        if self.unplanned:
            return self._planned_like_others(name, number, rows)
        each = self.options.store.rows_per_shard(self.samples, self.options.row_bytes)
        return [max(0, min(each, self.samples - number * each))]

    def _planned_like_others(self, name: str, number: int, rows: int) -> list[int]:
        """Guesses: as many as there are; as the others of that run, in whole chunks; or some that were rejected."""
        version, others = SHARD_NAME.fullmatch(name), {}
        for shard in self.manifest.shards:
            other = SHARD_NAME.fullmatch(shard.files[0].name)
            if version and other and other[1] == version[1]:
                others[int(other[2])] = shard.rows
        chunk_rows = self.options.store.chunk_rows
        most = max(rows, -(-max(others.values(), default=rows) // chunk_rows) * chunk_rows)
        rejects = min(sum(self.manifest.rejected.values()), _MOST_REJECTS)
        return list(dict.fromkeys((rows, most, *range(rows + 1, rows + 1 + rejects))))

    def answers(self, number: int, rows: int, known: Remembered | None, left: Remembered) -> Iterator[Rows]:
        """What the rows of the shard ``number`` may have been, the likeliest first, those that cannot be made too.

        Parameters
        ----------
        rows
            How many it has.
        known
            What is known of its pictures beside the version.
        left
            What it still says itself.
        """
        if known is not None and known.ids is not None and known.digests is not None:
            answer = self._by_id(known.ids, known)
            yield answer
            if answer.lacking:
                yield from self._by_content(known.ids, known.digests, known)
        yield from self._answers(number, rows, left)

    def _answers(self, number: int, rows: int, left: Remembered) -> Iterator[Rows]:
        # Damaged HDF5 may also read as something else without a word, where its damage hides a chunk or a checksum.
        without_labels = replace(left, labels=None)
        for believed in dict.fromkeys((left, without_labels, replace(without_labels, digests=None))):
            if believed.ids is not None:
                yield self._by_id(believed.ids, believed)
            for ids in self._planned(number, rows):
                yield self._by_id(ids, believed)
        if left.digests is not None:
            for believed in dict.fromkeys((left, without_labels)):
                yield from self._by_content(left.ids, left.digests, believed)

    def _by_id(self, ids: Sequence[str], left: Remembered) -> Rows:
        """Each picture where its id says that it lay."""
        paths = [_path(id) for id in ids]
        if left.digests is not None and len(left.digests) == len(ids):
            found = self.pictures.digests(paths)
            good = [digest == then for digest, then in zip(found, left.digests, strict=True)]
        else:
            good = list(map(self.pictures.is_there, paths))
        return self._rows(paths, ids, good, left)

    def _by_content(
        self, ids: Sequence[str] | None, digests: Sequence[bytes], left: Remembered
    ) -> Iterator[Rows]:
        """Each picture wherever it is now: it was renamed; or its id is what was damaged."""
        here = (
            [_path(id) for id in ids] if ids is not None and len(ids) == len(digests) else [""] * len(digests)
        )
        at_home = [found == then for found, then in zip(self.pictures.digests(here), digests, strict=True)]
        try:
            where = self._found({digest for digest, home in zip(digests, at_home, strict=True) if not home})
            id_at = {path: id for id, path in self.pictures.ids.items()}
        except SourceError:
            return
        paths = [
            path if home else where.get(digest, "")
            for path, home, digest in zip(here, at_home, digests, strict=True)
        ]
        good = [path != "" for path in paths]
        if ids is not None:
            yield self._rows(paths, ids, good, left)
        yield self._rows(paths, [id_at.get(path, "") for path in paths], good, left)

    def _found(self, wanted: set[bytes]) -> dict[bytes, str]:
        """SHA-256 -> path of pictures of these bytes. Of those that other shards hold the bytes are known."""
        copies = [_path(id) for id, digest in self._others.items() if digest in wanted]
        found = self.pictures.find(wanted, copies) if copies else {}
        strangers = [path for id, path in self.pictures.ids.items() if id not in self._others]
        return {**self.pictures.find(wanted - found.keys(), strangers), **found}

    def _rows(self, paths: Sequence[str], ids: Sequence[str], good: Sequence[bool], left: Remembered) -> Rows:
        labels = left.labels
        if labels is None or len(labels) != len(ids):
            labels = tuple(self._number.get(id.partition("/")[0], -1) for id in ids)
        lacking = tuple(
            id for id, label, there in zip(ids, labels, good, strict=True) if not there or label < 0
        )
        return Rows(tuple(paths), tuple(ids), labels, lacking)

    def _planned(self, number: int, rows: int) -> Iterator[list[str]]:
        """Ids that the plan gives to the shard, for each guess of what the source was."""
        if self.copied:
            end = sum(shard.rows for shard in self.manifest.shards[: number + 1])
            yield from (order[end - rows : end] for order in self._orders_of_copy())
            return
        if self.unplanned:
            return
        for ids in self._sources():
            if len(ids) != self.samples:
                continue
            plans = plan_shards(len(ids), self.manifest.version, self.options)
            planned = [ids[i] for i in plans[number].samples.tolist()] if number < len(plans) else []
            taken = [id for id in planned if id not in self._rejected]
            yield taken if len(taken) == rows else planned

    def _orders_of_copy(self) -> Iterator[list[str]]:
        """Orders that all rows of a copy may have; each is found once, for the first shard that comes to it."""
        for k in itertools.count():
            if k == len(self._orders):
                order = next(self._more_orders, None)
                if order is None:
                    return
                self._orders.append(order)
            yield self._orders[k]

    def _guessed_orders(self) -> Iterator[list[str]]:
        selection, rows = (
            selection_of(self.manifest.source),
            sum(shard.rows for shard in self.manifest.shards),
        )
        if selection is None:
            return
        for ids in self._sources():
            for order in orders(ids, self._rejected, self.options.seed, selection):
                if len(order) == rows:
                    yield order

    def _sources(self) -> Iterator[list[str]]:
        """Guesses at all samples of the source as it was, sorted: as it is now; or as the data set remembers it.

        The second one: what the other shards hold, what was rejected, and what has not changed since.
        """
        try:
            now = list(self.pictures.ids)
            yield now
            then = sorted(self._others.keys() | self._rejected | self._unchanged)
            if then != now:
                yield then
        except SourceError:
            return

    @cached_property
    def _others(self) -> dict[str, bytes]:
        """id -> SHA-256 of the picture's file, of all that the other shards hold."""
        found: dict[str, bytes] = {}
        for number in range(len(self.manifest.shards)):
            if number not in self._damaged:
                shard = finished_shard(self.folder, self.manifest, number)
                with suppress(ShardError):  # without them the count will not be right
                    digests = map(bytes, shard.column("source_sha256"))
                    found.update(zip(shard.column("id").tolist(), digests, strict=True))
        return found

    @cached_property
    def _unchanged(self) -> set[str]:
        made_ns = self._made_ns
        return set() if made_ns is None else self.pictures.ids_until(made_ns)

    @property
    def _made_ns(self) -> int | None:
        try:
            return (self.folder / manifest_name(self.manifest.version)).stat().st_mtime_ns
        except OSError:
            return None

    def changed_since(self, paths: Sequence[str]) -> list[str]:
        """Those of ``paths`` that were changed after the version was made, by the times of their files."""
        made_ns = self._made_ns
        changed = []
        for path in paths if made_ns is not None else ():
            with suppress(OSError):
                if os.stat(self.pictures.root / path).st_mtime_ns > (made_ns or 0):
                    changed.append(path_to_id(path))
        return changed

    @cached_property
    def _rejected(self) -> set[str]:
        """Ids of pictures that its report says were rejected, those without a class left out."""
        with suppress(ValueError):
            found = read_report(self.folder, self.manifest.version)
            return {f.id for f in found if f.verdict == "rejected" and f.reason != "no-class"}
        return set()


def _ids(found: Scan) -> dict[str, str]:
    return {path_to_id(path): path for path in found.paths}


def _path(id: str) -> str:
    """The path that the id says; one that is nowhere, where it is no id."""
    try:
        path = id_to_path(id)
    except ValueError:
        return "/"
    return path if path and "\0" not in path else "/"
