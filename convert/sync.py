"""`sync`: a data set brought up to date with its pictures, as its next version; nothing that is there is rewritten."""

import hashlib
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import time_ns

import joblib
import numpy as np

from shardwright.convert.build import build
from shardwright.convert.hints import Hints, Stamps
from shardwright.convert.lock import data_sets_of
from shardwright.convert.options import ConvertOptions, RunOptions
from shardwright.convert.output import Output, check_output, check_paths
from shardwright.convert.plan import asked_for
from shardwright.convert.progress import ProgressMaker, Silent
from shardwright.convert.report import read_report
from shardwright.convert.rowsource import RowSource, SourceRows
from shardwright.convert.scan import Scan, class_map_of, find_splits, scan
from shardwright.convert.sync_build import SyncBuild
from shardwright.convert.sync_plan import plan_sync
from shardwright.convert.sync_summary import Synced, synced
from shardwright.datasets.layout import Manifest, columns_of
from shardwright.datasets.manifest import read_manifest
from shardwright.datasets.rows import Index
from shardwright.errors import OutputError, SourceError, UsageError, named

#: Files that are hashed before progress is told.
_TOGETHER = 256


@dataclass(frozen=True, slots=True)
class SyncOptions(RunOptions):
    """All that `sync` may be told; how pictures become rows is as the data set has it.

    Parameters
    ----------
    allow_shrink
        Whether a source that lost more than half of its pictures is followed all the same.
    newer_than_grace
        As in `ConvertOptions`; a row whose picture is too new stays what it is until the next run.
    new_version
        Whether the unfinished run of another command is given up.
    jobs, max_runtime
        As in `RunOptions`.
    """

    allow_shrink: bool = False
    newer_than_grace: float = 0.0
    new_version: bool = False

    def __post_init__(self) -> None:
        RunOptions.__post_init__(self)
        if not 0 <= self.newer_than_grace < 1e9:
            raise UsageError(
                f"newer_than_grace is {self.newer_than_grace:g} seconds, expected 0 to less than a billion"
            )


def sync(
    source: Path, out: Path, options: SyncOptions | None = None, progress: ProgressMaker = Silent
) -> dict[str, Synced]:
    """Bring the data set ``out``, or each of its splits, up to date with its pictures: split -> what became of it.

    What is new, changed or gone since the newest version becomes one new version: new and changed pictures in new
    shards, rows that go are marked dead. Pictures that moved are copied from the rows that they were. Ids, labels and
    class numbers of what stays never change; new classes follow the old ones. A data set that is up to date stays as it
    is.

    Raises
    ------
    UsageError
        ``source`` is no folder, or one of the two lies in the other.
    FormatError, ShardError
        ``out`` is no data set, or a shard that is read from is damaged.
    SourceError
        The source cannot be read, or lost more than half of its pictures.
    LockedError
        Another process writes to ``out``.
    OutOfTimeError
        ``options.max_runtime`` is over; finished shards are kept.
    OutputError
        ``out`` was not made of a tree of pictures, or in another way than this version's; or it cannot be written.
    """
    options = options or SyncOptions()
    folders = _checked(source, out, options)
    splits = [split for split in folders if split]

    def decide() -> list[SyncBuild]:
        builds = _builds(source, folders, options, progress)
        for each in builds:
            if not options.new_version:
                each.refuse_unfinished()
            each.remember()  # the next run need not read again what was read now
            each.give_up_taken_back()
        return builds

    made = build(out, splits, decide, options, progress, "sync")
    return {each.split: synced(each, manifest) for each, manifest in made}


def dry_run(
    source: Path, out: Path, options: SyncOptions, progress: ProgressMaker = Silent
) -> dict[str, Synced]:
    """Say what `sync` would do, and do nothing. Raises as it does, for what can be known before."""
    folders = _checked(source, out, options)
    return {
        each.split: synced(each, None, dry_run=True) for each in _builds(source, folders, options, progress)
    }


def _checked(source: Path, out: Path, options: SyncOptions) -> dict[str, Path]:
    """Split -> data set, after looks at both that change nothing."""
    check_paths(source, out)
    folders = data_sets_of(out)
    for folder in folders.values():
        read_manifest(folder)
    check_output(out, [split for split in folders if split])
    found = set(find_splits(source))
    if "" in folders:
        if found and not found <= set(read_manifest(out).classes):
            raise SourceError(
                f"'{source}' has the splits {named(sorted(found))}, '{out}' is one data set: sync each split with a "
                "data set of its own"
            )
        return folders
    if new := sorted(found - folders.keys()):
        raise SourceError(
            f"'{source}' has the split {named(new)}, which '{out}' has not: `shardwright convert` makes it"
        )
    if not found:
        raise SourceError(
            f"'{source}' has not the splits {named(sorted(folders))} of '{out}': is its disk mounted?"
        )
    lost = sorted(folders.keys() - found)
    if lost and not options.allow_shrink:
        raise SourceError(
            f"'{source}' has no longer the split {named(lost)} of '{out}'. If that is meant, --allow-shrink leaves it "
            "as it is, and syncs the others"
        )
    return {split: folder for split, folder in folders.items() if split in found}


def _builds(
    source: Path, folders: dict[str, Path], options: SyncOptions, progress: ProgressMaker
) -> list[SyncBuild]:
    there = class_map_of(source, list(folders))
    latest_ns = time_ns() - int(options.newer_than_grace * 1e9) if options.newer_than_grace else None
    before = {split: read_manifest(folder) for split, folder in folders.items()}
    of_pictures = {split: _options_of(folders[split], before[split], options) for split in folders}
    scans = {}
    with progress("scan", None, "files") as bar:
        for split in folders:
            names = _class_map_before(before[split], before.values())
            classes = _class_map(source, folders[split], before[split], names, there)
            scans[split] = scan(source / split, classes, bar.update, latest_ns)
    builds = []
    for split, folder in folders.items():
        found, manifest = scans[split], before[split]
        output, notes = Output(folder), []
        known = output.hints(manifest)
        if known is None:
            known = _known_by_shards(folder, manifest)
            notes.append(
                f"what was known of the pictures of version {manifest.version} is lost: all of them were read"
            )
        try:
            findings = read_report(folder, manifest.version)
        except ValueError as error:
            findings = []
            notes.append(f"{error}: what was rejected or suspect then is not known")
        # A picture that is left out without a word in the report is looked at again.
        known = known.with_rejects({f.id for f in findings if f.verdict == "rejected"})
        with progress(f"compare {split}".rstrip(), None, "pictures") as bar:
            plan = plan_sync(known, found, partial(_digests, found, bar.update))
        each = SyncBuild(
            split=split,
            output=output,
            notes=notes,
            scan=found,
            options=of_pictures[split],
            before=manifest,
            known=known,
            plan=plan,
            findings_before=findings,
        )
        each.decide()
        builds.append(each)
    return builds


def _options_of(folder: Path, manifest: Manifest, options: SyncOptions) -> ConvertOptions:
    """How the pictures of a data set became rows.

    Raises
    ------
    OutputError
        It was not made of pictures, or in another way than this version's.
    """
    cure = "`shardwright convert` to another output makes a data set that can be synced"
    command, told = asked_for({"source": manifest.source})
    if command in ("merge", "split") or told.get("only_classes") or told.get("ids"):
        raise OutputError(
            f"'{folder}' was made by `{command}`, of a part of the rows or of several data sets: sync what it was made "
            f"of, and run `{command}` again"
        )
    if "resized_from" in manifest.options:
        raise OutputError(
            f"'{folder}' was made smaller by `{command} --size`: sync what it was made of, and run `{command}` again"
        )
    if not manifest.rows:
        raise OutputError(f"'{folder}' has no rows, so nothing tells what was in it. {cure}")
    try:
        found = ConvertOptions.from_recorded(manifest.options)
    except UsageError as error:
        raise OutputError(f"'{folder}' cannot be synced: {error}. {cure}") from error
    if (found.image_shape, found.store.format) != (manifest.image_shape, manifest.storage):
        raise OutputError(f"'{folder}' cannot be synced: its options are not those of its images. {cure}")
    if manifest.columns != columns_of(*manifest.image_shape):
        names = [column.name for column in manifest.columns]
        raise OutputError(
            f"'{folder}' cannot be synced: of its columns {named(names)}, pictures do not tell all. {cure}"
        )
    return replace(found, allow_shrink=options.allow_shrink)


def _class_map_before(manifest: Manifest, of_splits: Iterable[Manifest]) -> tuple[str, ...]:
    """The class map of a data set, or the longer one of another split: a run may have ended between the two."""
    maps = [other.classes for other in of_splits]
    longest = max(maps, key=len)
    is_one = all(longest[: len(names)] == names for names in maps)
    return longest if is_one else manifest.classes


def _class_map(
    source: Path, folder: Path, manifest: Manifest, known: tuple[str, ...], there: Sequence[str]
) -> tuple[str, ...]:
    """The class map ``known`` of a data set, with those of ``there`` that are new behind it."""
    new = [name for name in there if name not in known]
    if new and manifest.options.get("class_map") == "given":
        raise SourceError(
            f"'{source}' has class folders that the class map of '{folder}' does not name: {named(new)}. It was given "
            "by --classes: convert again with one that names them, or move them away"
        )
    old = {_form(name): name for name in known}
    for name in new:
        if (twin := old.get(_form(name))) is not None:
            raise SourceError(
                f"class folder '{name}' of '{source}' and class '{twin}' of '{folder}' differ only in case or Unicode "
                f"form: if they are one class, call the folder '{twin}' again"
            )
    return (*known, *new)


def _form(name: str) -> str:
    """What names are the same by on some file systems."""
    return unicodedata.normalize("NFC", name).casefold()


def _known_by_shards(folder: Path, manifest: Manifest) -> Hints:
    """What the shards themselves still tell of their pictures: not their sizes and times."""
    rows = SourceRows([RowSource(folder, manifest.version)], [manifest])
    index = np.arange(len(rows))
    return Hints(
        fingerprint="",
        began_ns=0,
        rows=len(rows),
        ids=rows.column("id", index).tolist(),
        stamps=Stamps.unknown(len(rows)),
        labels=rows.column("label", index),
        hashes=rows.column("source_sha256", index),
    )


def _digests(found: Scan, told: Callable[[int], None], places: Index) -> list[bytes | None]:
    """The SHA-256 of the pictures at ``places``; hashing lets go of the interpreter's lock."""
    paths = [found.root / found.paths[at] for at in places.tolist()]
    digests: list[bytes | None] = []
    with ThreadPoolExecutor(joblib.cpu_count()) as pool:
        for start in range(0, len(paths), _TOGETHER):
            digests += pool.map(_digest, paths[start : start + _TOGETHER])
            told(len(digests) - start)
    return digests


def _digest(path: Path) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError:
        return None
