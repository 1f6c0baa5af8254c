"""The one command that deletes what was published: old versions, and shards that no version names any more.

In an order that a kill at any instant leaves every version whole that still has a manifest: the manifest of a version
goes first, for good, and its shards follow, which then no manifest names. So the same command again finishes.
"""

import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.convert.lock import data_sets_of, sole_writer
from shardwright.convert.options import UNITS
from shardwright.convert.output import refuse_links
from shardwright.convert.unfinished import Unfinished
from shardwright.datasets.layout import SHARD_NAME, SHARDS_FOLDER, WORK_FOLDER, manifest_name
from shardwright.datasets.manifest import read_manifest, versions_of
from shardwright.errors import FormatError, OutputError, ShardwrightError, UsageError

_REPORT = re.compile(r"report-(\d{6,})\.jsonl")
_HINTS = re.compile(r"source-(\d{6,})\.npz")


@dataclass(frozen=True, slots=True)
class GcOptions:
    """What stays.

    Parameters
    ----------
    keep
        So many of the newest versions, at least 1.
    min_age_seconds
        Whatever is younger. The age of a version counts from when another became the newest, so that who opened it
        while it was the newest has that long to read it. 0: nothing is too young.
    dry_run
        Whether nothing is removed.
    """

    keep: int = 2
    min_age_seconds: float = 14 * 86400.0
    dry_run: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.keep, bool) or not isinstance(self.keep, int) or self.keep < 1:
            raise UsageError(
                f"keep is {self.keep!r}, expected 1 or more: the newest version is never removed"
            )
        if not 0 <= self.min_age_seconds < 1e12:
            raise UsageError(f"min_age is {self.min_age_seconds} seconds, expected 0 or more")


@dataclass(frozen=True, slots=True)
class Garbage:
    """What goes of one data set.

    Attributes
    ----------
    folder, newest
        The data set, and its newest version.
    versions
        Those that go.
    stay
        The others, oldest first -> for how many seconds each has not been the newest; None for the newest.
    manifests, notes, shards
        Files that go, in this order, as path relative to ``folder`` -> bytes; notes are reports and source hints.
    young
        Files that no version names, but younger than the least age: they stay.
    """

    folder: Path
    newest: int
    versions: tuple[int, ...]
    stay: dict[int, float | None]
    manifests: dict[str, int]
    notes: dict[str, int]
    shards: dict[str, int]
    young: int

    @property
    def files(self) -> dict[str, int]:
        """All files that go, in order -> bytes."""
        return {**self.manifests, **self.notes, **self.shards}

    @property
    def bytes(self) -> int:
        """Bytes of them all."""
        return sum(self.files.values())


def gc(out: Path, options: GcOptions | None = None) -> dict[str, Garbage]:
    """Remove old versions of the data set ``out``, or of each of its splits: split -> what went.

    What goes is decided for all of them before the first file is removed. Only plain files with names as this
    project gives them are removed, no link is followed, and a shard stays while any manifest names it.

    Raises
    ------
    FormatError
        There is no data set, or a manifest cannot be read, so that it is not known what its version needs.
    LockedError
        Another process writes to ``out``.
    OutputError
        A folder of it is a link, or a file cannot be removed.
    """
    options = options or GcOptions()
    parts = data_sets_of(out)
    for folder in parts.values():
        read_manifest(folder)  # what is no data set is not even locked
        refuse_links(folder)
        if folder != out and folder.is_symlink():
            raise OutputError(
                f"'{folder}' is a link: what is removed there would be another's. Nothing was changed"
            )
    if options.dry_run:
        return {split: _garbage(folder, options) for split, folder in parts.items()}
    with sole_writer(out, [split for split in parts if split]):
        found = {split: _garbage(folder, options) for split, folder in parts.items()}
        try:
            for garbage in found.values():
                _remove(garbage)
        except OSError as error:
            if isinstance(error, ShardwrightError):
                raise
            raise OutputError(
                f"cannot remove '{error.filename}' of '{out}': {error.strerror}. Every version that has a manifest is "
                "whole; the same command goes on"
            ) from error
    return found


def _garbage(folder: Path, options: GcOptions) -> Garbage:
    newest, now = read_manifest(folder), time.time()
    not_newest = _not_newest_since(folder, newest.version)
    beyond = sorted(not_newest)[: max(0, len(not_newest) + 1 - options.keep)]
    plain = _plain_files(folder, ".")

    def old(time_of_change: float) -> bool:
        return options.min_age_seconds == 0 or now - time_of_change >= options.min_age_seconds

    goes = [v for v in beyond if old(not_newest[v]) and manifest_name(v) in plain]
    stays = sorted({*versions_of(folder), newest.version} - {*goes})
    needed = _needed(folder, goes)
    manifests = {manifest_name(v): plain[manifest_name(v)].st_size for v in goes}
    notes = {}
    for where, pattern in ((".", _REPORT), (WORK_FOLDER, _HINTS)):
        for name, status in _plain_files(folder, where).items():
            version = int(match[1]) if (match := pattern.fullmatch(name)) else newest.version
            if version in goes or (
                version < newest.version and version not in stays and old(status.st_mtime)
            ):
                notes[name if where == "." else f"{where}/{name}"] = status.st_size
    shards, young = {}, 0
    unfinished = Unfinished(folder).is_there()
    for name, status in _plain_files(folder, SHARDS_FOLDER).items():
        path = f"{SHARDS_FOLDER}/{name}"
        match = SHARD_NAME.fullmatch(path)
        if match is None or path.casefold() in needed:
            continue
        if unfinished and int(match[1]) > newest.version:
            continue  # placed by a run that was killed just then, whose records want it
        if old(status.st_mtime):
            shards[path] = status.st_size
        else:
            young += 1
    stay = {v: now - not_newest[v] if v in not_newest else None for v in stays}
    return Garbage(
        folder, newest.version, tuple(goes), stay, manifests, dict(sorted(notes.items())), shards, young
    )


def _not_newest_since(folder: Path, newest: int) -> dict[int, float]:
    """Version before the newest -> when it stopped being that: the time of the manifest after it, or its own."""
    times: dict[int, float] = {}
    after = os.lstat(folder / "manifest.json").st_mtime
    for version in reversed([v for v in versions_of(folder) if v <= newest]):
        own = os.lstat(folder / manifest_name(version)).st_mtime
        if version == newest:
            after = max(own, after)
        else:
            times[version] = max(own, after)
            after = own
    return times


def _needed(folder: Path, goes: Sequence[int]) -> set[str]:
    """Files that all manifests but those of the versions ``goes`` name, without case."""
    needed: set[str] = set()
    for version in [None, *versions_of(folder)]:
        try:
            manifest = read_manifest(folder, version)
        except FormatError as error:
            raise FormatError(
                f"{error}. What that version needs is not known, so nothing was removed: restore the file, or remove "
                "it yourself if you are sure"
            ) from error
        if version not in goes:
            needed.update(file.name.casefold() for shard in manifest.shards for file in shard.files)
    return needed


def _plain_files(folder: Path, where: str) -> dict[str, os.stat_result]:
    """Name -> status of the files in a folder of the data set that are no links, sorted."""
    try:
        with _opened(folder, where) as fd, os.scandir(fd) as entries:
            found = {entry.name: entry.stat(follow_symlinks=False) for entry in entries}
    except FileNotFoundError:
        return {}
    return {name: status for name, status in sorted(found.items()) if stat.S_ISREG(status.st_mode)}


def _remove(garbage: Garbage) -> None:
    for names in (garbage.manifests, garbage.notes, garbage.shards):
        by_folder: dict[str, list[str]] = {}
        for name in names:
            where, _, file = name.rpartition("/")
            by_folder.setdefault(where or ".", []).append(file)
        for where, files in by_folder.items():
            with _opened(garbage.folder, where) as fd:
                _unlink(files, fd)


def _unlink(names: Sequence[str], folder: int) -> None:
    for name in names:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)
    os.fsync(folder)  # a manifest must be gone for good before a shard is: power may go too


@contextmanager
def _opened(folder: Path, where: str) -> Iterator[int]:
    """A descriptor of the folder ``where`` of the data set: what is done by it is done there, and through no link."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    top = os.open(folder, flags)
    try:
        fd = os.open(where, flags | os.O_NOFOLLOW, dir_fd=top)
        try:
            yield fd
        finally:
            os.close(fd)
    finally:
        os.close(top)


def as_json(found: Garbage, dry_run: bool) -> dict[str, Any]:
    """What went, or would, as JSON values."""
    return {
        "dry_run": dry_run,
        "newest": found.newest,
        "removed": list(found.versions),
        "kept": list(found.stay),
        "files": list(found.files),
        "bytes": found.bytes,
        "young": found.young,
    }


def in_words(found: Garbage, dry_run: bool) -> list[str]:
    """What went, or would, as lines for a person."""
    lines = []
    for version, seconds in found.stay.items():
        since = "the newest" if seconds is None else f"not the newest for {_duration(seconds)}"
        lines.append(f"  version {version} stays: {'unpublished' if version > found.newest else since}")
    goes = "would go" if dry_run else "is gone"
    lines += [f"  version {version} {goes}" for version in found.versions]
    lines += [f"  {name}" for name in (*found.manifests, *found.notes)]
    if found.shards:
        first, last = next(iter(found.shards)), list(found.shards)[-1]
        lines.append(f"  {len(found.shards)} shard files that no other version needs: {first} to {last}")
    if found.young:
        lines.append(
            f"  {found.young} shard files that no version needs are younger than --min-age: they stay"
        )
    if not found.files:
        return [f"'{found.folder}': nothing to remove", *lines]
    how = "would be removed" if dry_run else "removed"
    return [f"'{found.folder}': {len(found.files)} files {how}, {found.bytes / 1e6:.1f} MB", *lines]


def _duration(seconds: float) -> str:
    unit = next((u for u in "dhm" if abs(seconds) >= UNITS[u]), "s")
    return f"{seconds / UNITS[unit]:.1f} {unit}"
