"""Damaged files of a data set, made again from their pictures to the same bytes, and put in their old places.

A file is replaced by one step, and only by one that has the SHA-256 in the manifest: whatever was guessed on the way,
what comes of it is right, or nothing comes of it. The version stays what it was, and so do all whole files.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shardwright.convert.lock import data_sets_of, sole_writer
from shardwright.convert.origin import Origin, Pictures, Rows, column_of_damaged, remembered
from shardwright.convert.output import Output, check_paths, refuse_links
from shardwright.convert.plan import MADE_OF, SYNCED_FROM, differences
from shardwright.convert.progress import ProgressMaker, Silent
from shardwright.convert.records import ShardRecord
from shardwright.convert.retrace import selection_of
from shardwright.convert.space import check_room, unwritable
from shardwright.convert.verify import DamagedFile, damaged_files
from shardwright.convert.workers import Workers
from shardwright.convert.write import ShardTask
from shardwright.datasets.layout import SHARD_NAME, SHARDS_FOLDER, Manifest, ShardFile
from shardwright.datasets.manifest import read_manifest, sync_folder
from shardwright.errors import NAMED, FormatError, ShardwrightError, UsageError, named


@dataclass(frozen=True, slots=True)
class Failure:
    """Damaged files of one shard that could not be made again, and why."""

    files: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Repair:
    """What became of one data set.

    Attributes
    ----------
    folder, manifest
        The data set, and the version that was looked at: the newest.
    checked
        Files whose size and SHA-256 were compared with the manifest.
    repaired
        Those that were damaged, were made again, and are right now, read from the disk.
    failures
        What is still damaged.
    """

    folder: Path
    manifest: Manifest
    checked: int
    repaired: tuple[str, ...] = ()
    failures: tuple[Failure, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """It as JSON values."""
        return {
            "version": self.manifest.version,
            "checked": self.checked,
            "repaired": list(self.repaired),
            "failed": [{"files": list(f.files), "why": f.why} for f in self.failures],
        }

    def in_words(self) -> list[str]:
        """Lines for a person; the last one says what was checked."""
        lines = [f"'{self.folder}': version {self.manifest.version}"]
        lines += [f"  repaired '{name}'" for name in self.repaired]
        for failure in self.failures:
            lines.append(f"  still damaged: {named(failure.files)}: {failure.why}")
        right = self.checked - sum(len(failure.files) for failure in self.failures)
        which = f"all {right}" if right == self.checked else f"{right} of {self.checked}"
        nothing = "" if self.repaired or self.failures else ": nothing to repair"
        return [*lines, f"  checked: sizes and hashes of {which} files are right{nothing}"]


def repair(
    out: Path, source: Path, jobs: int | None = None, progress: ProgressMaker = Silent
) -> dict[str, Repair]:
    """Make the damaged files of the data set ``out`` again, or of each of its splits: split -> what became of it.

    Parameters
    ----------
    source
        The pictures: the tree that ``out`` was converted from.
    jobs
        Worker processes. None: the CPUs that this process may use.

    Raises
    ------
    UsageError
        ``source`` is no folder, or one of the two lies in the other.
    FormatError
        There is no data set, or a later version of this program made it.
    LockedError
        Another process writes to ``out``. Not where nothing is damaged.
    OutputError
        A folder of it is a link, or it cannot be written; what was repaired before that stays so.
    """
    check_paths(source, out)
    parts = data_sets_of(out)
    found = {}
    for split, folder in parts.items():
        manifest = read_manifest(folder)
        found[split] = manifest, damaged_files(folder, manifest, range(len(manifest.shards)), progress)
    if not any(damage for _, damage in found.values()):
        return {
            split: Repair(parts[split], manifest, _files(manifest)) for split, (manifest, _) in found.items()
        }
    for folder in parts.values():
        refuse_links(folder)
    with sole_writer(out, [split for split in parts if split]), Workers(jobs) as workers:
        done = {}
        for split, (manifest, damage) in found.items():
            folder = parts[split]
            now = read_manifest(folder)  # before the lock was ours, somebody may have repaired it, or gone on
            suspects = {d.shard for d in damage} if now == manifest else range(len(now.shards))
            damage = damaged_files(folder, now, sorted(suspects))
            pictures = Pictures(_root(source, split, now), progress)
            work = _Work(folder, now, pictures, damage)
            try:
                work.do(workers, progress)
            except OSError as error:
                if isinstance(error, ShardwrightError):
                    raise
                raise unwritable(error, folder) from error
            done[split] = work.result()
        return done


def _root(source: Path, split: str, manifest: Manifest) -> Path:
    """Where the pictures of a split are; those of a part that `split` made are not apart."""
    return source if MADE_OF in manifest.source and not (source / split).is_dir() else source / split


@dataclass(slots=True)
class _Broken:
    """A damaged shard: the files that are to be made again, and what was found on the way."""

    number: int
    files: list[ShardFile]
    origin: Origin | None = None
    made_as: int = 0  # its number among the shards of the version that made it
    stem: str = ""
    answers: Iterator[Rows] = field(default_factory=lambda: iter(()))
    tried: list[Rows] = field(default_factory=list)
    whys: list[str] = field(default_factory=list)
    made_by: str = ""  # which command made it of which data sets, where it was not made of pictures

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(file.name for file in self.files)


class _Work:
    """The repair of one data set."""

    def __init__(
        self, folder: Path, manifest: Manifest, pictures: Pictures, damage: Sequence[DamagedFile]
    ) -> None:
        self._folder, self._manifest, self._pictures = folder, manifest, pictures
        self._output = Output(folder)
        self._repaired: set[str] = set()
        self._origins: dict[int, Origin] = {}
        self._broken = [
            _Broken(number, [d.file for d in damage if d.shard == number])
            for number in sorted({d.shard for d in damage})
        ]

    def result(self) -> Repair:
        failures = tuple(Failure(b.names, _in_full(b, self._pictures.root)) for b in self._broken if b.files)
        names = [file.name for shard in self._manifest.shards for file in shard.files]
        repaired = tuple(name for name in names if name in self._repaired)  # workers end in any order
        return Repair(self._folder, self._manifest, len(names), repaired, failures)

    def do(self, workers: Workers, progress: ProgressMaker) -> None:
        """Try one answer to what the rows were after the other, all damaged shards at a time."""
        todo = []
        for broken in self._broken:
            try:
                self._prepare(broken, workers)
                todo.append(broken)
            except (UsageError, FormatError) as error:
                broken.whys.append(str(error))
        if not todo:
            return
        needed = sum(file.bytes for broken in todo for file in self._manifest.shards[broken.number].files)
        check_room(self._folder, needed)
        self._output.forget_work()
        self._output.work.mkdir(parents=True)
        (self._folder / SHARDS_FOLDER).mkdir(exist_ok=True)
        try:
            images = sum(self._manifest.shards[broken.number].rows for broken in todo)
            with progress("repair", images, "images") as bar:
                made = 1
                while made:
                    made = 0
                    for record in workers.write(self._tasks(todo)):
                        if record is not None:
                            made += 1
                            broken = next(b for b in todo if b.number == record.number)
                            self._take(broken, record)
                            bar.update(0 if broken.files else self._manifest.shards[broken.number].rows)
        finally:
            self._output.forget_work()

    def _prepare(self, broken: _Broken, workers: Workers) -> None:
        """Find out what is known of the shard.

        Raises
        ------
        UsageError, FormatError
            Why it cannot be made again.
        """
        shard = self._manifest.shards[broken.number]
        for file in broken.files:
            path = self._folder / file.name
            if path.is_dir() and not path.is_symlink():
                raise UsageError("a folder lies in its place: move it away")
        names = [SHARD_NAME.fullmatch(file.name) for file in shard.files]
        stems = {(match[1], match[2]) if match else None for match in names}
        found = stems.pop()
        if stems or found is None:
            raise UsageError("its files are not named as a conversion names them: another program made it")
        version, broken.made_as = map(int, found)
        broken.stem = f"{SHARDS_FOLDER}/{found[0]}-{found[1]}"
        maker = self._maker(version)
        broken.made_by = _made_by(maker)
        broken.origin = self._origin(maker)
        planned = broken.origin.planned_rows(shard.files[0].name, broken.made_as, shard.rows)
        if max(planned) < shard.rows:
            raise UsageError(
                "the manifest's options do not give a shard of so many rows: another program made it"
            )

        def read(name: str) -> list[Any] | None:
            try:
                return workers.call(column_of_damaged, self._folder, self._manifest, broken.number, name)
            except ShardwrightError:  # the process died of it
                return None

        known = broken.origin.known(shard.files[0].name)
        answers = broken.origin.answers(broken.made_as, shard.rows, known, remembered(read))
        broken.answers = (replace(rows, planned=number) for rows in answers for number in planned)

    def _maker(self, version: int) -> Manifest:
        """The version that made a shard; or the one that still has it, where that was removed."""
        if version == self._manifest.version:
            return self._manifest
        try:
            return read_manifest(self._folder, version)
        except FormatError:
            if SYNCED_FROM in self._manifest.source:
                return self._manifest
            raise

    def _origin(self, manifest: Manifest) -> Origin:
        version = manifest.version
        if version not in self._origins:
            names = {name for broken in self._broken for name in broken.names}
            damaged = [
                number
                for number, shard in enumerate(manifest.shards)
                if any(file.name in names for file in shard.files)
            ]
            self._origins[version] = Origin(self._folder, manifest, self._pictures, damaged)
        return self._origins[version]

    def _tasks(self, todo: Sequence[_Broken]) -> Iterator[ShardTask]:
        """The next way to make each shard that is still damaged. Pictures are looked at while others are decoded."""
        for broken in todo:
            if broken.files and broken.origin is not None and (rows := self._next_rows(broken)) is not None:
                yield ShardTask(
                    number=broken.number,
                    stem=broken.stem,
                    partial=self._output.work / f"{broken.number}",
                    root=self._pictures.root,
                    paths=rows.paths,
                    ids=rows.ids,
                    labels=rows.labels,
                    options=broken.origin.options,
                    planned_rows=rows.planned,
                )

    def _next_rows(self, broken: _Broken) -> Rows | None:
        for rows in broken.answers:
            if rows.lacking:
                known = [id for id in rows.lacking if id]
                broken.whys.append(
                    f"pictures that are missing or changed in '{self._pictures.root}' ({len(rows.lacking)}): "
                    f"{named(known) if known else 'their ids cannot be read'}"
                )
            elif rows not in broken.tried:
                broken.tried.append(rows)
                return rows
        if not broken.whys:
            unknown = "its rows are not known: what is left of it cannot be read"
            others = f", and the pictures in '{self._pictures.root}' are not those that it was made from"
            broken.whys.append(unknown if broken.made_by else unknown + others)
        return None

    def _take(self, broken: _Broken, record: ShardRecord) -> None:
        """Put what was made in place of what is damaged, where it is the same as it was once."""
        made = dict(zip(record.shard.files, record.temporary, strict=True)) if record.shard else {}
        right = [file for file in broken.files if file in made]
        try:
            for file in right:
                os.replace(made[file], self._folder / file.name)
            if right:
                sync_folder(self._folder / SHARDS_FOLDER)
        finally:
            for path in record.temporary:
                path.unlink(missing_ok=True)
        if right:
            still = {d.file for d in damaged_files(self._folder, self._manifest, [broken.number])}
            self._repaired |= {file.name for file in right if file not in still}
            broken.files = [file for file in broken.files if file in still]
        if broken.files:
            broken.whys.append(_why_other_bytes(broken, record))


def _why_other_bytes(broken: _Broken, record: ShardRecord) -> str:
    reasons = []
    if rejected := [f for f in record.findings if f.verdict == "rejected"]:
        first = "; ".join(f"'{f.id}': {f.reason}: {f.message}" for f in rejected[:NAMED])
        reasons.append(f"pictures that cannot be taken any more ({len(rejected)}): {first}")
    if broken.origin is not None:
        if changed := broken.origin.changed_since(broken.tried[-1].paths):
            reasons.append(f"pictures were changed since: {named(changed)}")
        if different := _other_libraries(broken.origin, record):
            reasons.append(f"it was made by other versions of libraries: {'; '.join(different)}")
    why = ". ".join(reasons) or "the source is not what it was made from, or it was made by other means"
    return f"its pictures give other bytes now: {why}"


def _other_libraries(origin: Origin, record: ShardRecord) -> list[str]:
    then = origin.environment
    # Of a copy of pixels that were made in several ways, none is known.
    now = {key: value for key, value in record.environment.items() if key in then or not origin.copied}
    return differences(then, now)


def _made_by(manifest: Manifest) -> str:
    """Which command made a version of which data sets, and what to do; empty where pictures still say it all.

    A `reshard` that keeps pixels, and remembers which rows it took, leaves shards that are made of the pictures again.
    """
    made = manifest.source.get(MADE_OF)
    if not isinstance(made, dict):
        return ""
    options, command = manifest.options, made.get("command")
    mixed = "pixel_path" not in options or isinstance(manifest.source.get("pixels_environment"), list)
    known = selection_of(manifest.source) is not None
    if command == "reshard" and "resized_from" not in options and not mixed and known:
        return ""
    asked = made.get("options")
    if command == "reshard" and isinstance(asked, dict) and asked.get("size") is not None:
        command = "reshard --size"
    found = made.get("data_sets")
    sources = [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
    which = [
        f"version {each.get('version')} of a data set of {each.get('rows')} rows (fingerprint "
        f"{each.get('fingerprint')})"
        for each in sources[:NAMED]
    ]
    of = " and ".join(which) + (" and others" if len(sources) > NAMED else "")
    return (
        f"it was made by `{command}` of {of or 'another data set'}: repair {'those' if len(which) > 1 else 'that'}, or "
        "convert the pictures again, and run the same command into a new folder"
    )


def _in_full(broken: _Broken, root: Path) -> str:
    why = ". Tried with other rows: ".join(dict.fromkeys(broken.whys))
    if not broken.made_by:
        return why
    if broken.origin is None:  # the options are no conversion's, and need not be
        return broken.made_by
    return f"{broken.made_by}. Tried with the pictures in '{root}': {why}"


def _files(manifest: Manifest) -> int:
    return sum(len(shard.files) for shard in manifest.shards)
