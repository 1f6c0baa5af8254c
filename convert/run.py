"""`convert`: a tree of pictures to a data set, or to one a split, in parallel."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.convert.build import build
from shardwright.convert.changes import Changes
from shardwright.convert.estimate import estimate
from shardwright.convert.lock import split_writer
from shardwright.convert.options import ConvertOptions
from shardwright.convert.output import Output, check_output, check_paths, other_splits
from shardwright.convert.picture_build import PictureBuild
from shardwright.convert.progress import ProgressMaker, Silent
from shardwright.convert.records import Finding
from shardwright.convert.scan import Scan, class_map_of, find_splits, scan
from shardwright.datasets.layout import Manifest
from shardwright.errors import SourceError


@dataclass(frozen=True, slots=True)
class Conversion:
    """What became of one data set.

    Attributes
    ----------
    split
        Its split, empty where the source has none.
    folder, manifest
        Where it lies, and the version that is the newest now.
    made
        Whether that version was made by this run, or was there already.
    source_bytes
        Bytes of the picture files.
    seconds
        From the first picture that this run read to the last shard.
    findings
        What was rejected or suspect.
    lzf_saving
        The share that LZF saves or would save on all pixels; None where no probe was made.
    read
        Pictures that this run read, in those seconds.
    resumed
        Shards that an earlier run, which did not come to its end, had finished.
    changes
        What the version before had not, or else; None for the first one.
    notes
        What else a person should know, in words.
    """

    split: str
    folder: Path
    manifest: Manifest
    made: bool
    source_bytes: int
    seconds: float = 0.0
    findings: tuple[Finding, ...] = ()
    lzf_saving: float | None = None
    read: int = 0
    resumed: int = 0
    changes: Changes | None = None
    notes: tuple[str, ...] = ()

    @property
    def rejected(self) -> int:
        """Inputs that are not in the data set."""
        return sum(self.manifest.rejected.values())


def convert(
    source: Path,
    out: Path,
    options: ConvertOptions | None = None,
    progress: ProgressMaker = Silent,
) -> list[Conversion]:
    """Convert the tree at ``source`` into a data set at ``out``, or one a split.

    Shards are written by one process each; this process alone publishes, the manifest last. Until then a
    reader sees the version before, or none. A run that was killed, or failed, can be repeated: shards that
    were finished are not made again, and the bytes are those of one undisturbed run.

    Parameters
    ----------
    source
        A folder with a folder of pictures a class; or with folders train, val, ..., of such folders.
    out
        A folder that is missing, empty, or holds earlier versions.
    progress
        Makes the progress of a stage, such as `Bar` or `Silent`.

    Raises
    ------
    UsageError
        ``source`` is no folder, or one of the two lies in the other.
    SourceError
        No pictures, or a tree that cannot be taken as it is.
    LockedError
        Another process writes to ``out``.
    OutOfTimeError
        ``options.max_runtime`` is over; finished shards are kept.
    OutputError
        ``out`` holds something else, was made with other options, or cannot be written.
    """
    options = options or ConvertOptions()
    check_paths(source, out)
    splits = find_splits(source) if options.splits else []
    check_output(out, splits)

    def decide() -> list[PictureBuild]:
        builds = _decided(source, out, options, progress)
        for each in builds:
            each.refuse_old_rejects()
            each.give_up_taken_back()
        return builds

    made = build(out, splits, decide, options, progress, "convert", split_writer)
    return [_unchanged(each) if manifest is None else _made(each, manifest) for each, manifest in made]


def dry_run(
    source: Path, out: Path, options: ConvertOptions, progress: ProgressMaker = Silent
) -> dict[str, dict[str, Any]]:
    """Say what `convert` would do, and do nothing: split -> JSON values, ``version`` None for nothing to do.

    Raises as `convert` does for what can be known before pictures are decoded.
    """
    check_paths(source, out)
    check_output(out, find_splits(source) if options.splits else [])
    return {
        each.split: {"version": each.version, **estimate(each.scan, options)}
        for each in _decided(source, out, options, progress)
    }


def _decided(source: Path, out: Path, options: ConvertOptions, progress: ProgressMaker) -> list[PictureBuild]:
    scans = scan_source(source, options, progress)
    builds = [
        PictureBuild(split=split, output=Output(out / split), scan=found, options=options)
        for split, found in scans.items()
    ]
    for each in builds:
        each.decide()
    for name in other_splits(out, [split for split in scans if split]):
        builds[-1].notes.append(
            f"'{out}' also holds the split '{name}', which the source has not: it stays as it is"
        )
    return builds


def scan_source(source: Path, options: ConvertOptions, progress: ProgressMaker = Silent) -> dict[str, Scan]:
    """Scan ``source``: split -> what lies in it, with one class map for all; the split is '' where there is none.

    Raises
    ------
    SourceError
        A split, or the source, has no pictures; or see `scan`.
    """
    splits = find_splits(source) if options.splits else []
    classes = options.classes or (class_map_of(source, splits) if splits else None)
    latest_ns = time.time_ns() - int(options.newer_than_grace * 1e9) if options.newer_than_grace else None
    scans = {}
    with progress("scan", None, "files") as bar:
        for split in splits or [""]:
            scans[split] = found = scan(source / split, classes, bar.update, latest_ns)
            if not len(found):
                raise SourceError(_why_empty(found))
    return scans


def _why_empty(found: Scan) -> str:
    if found.no_class:
        return (
            f"'{found.root}' has {len(found.no_class)} pictures, such as '{found.no_class[0]}', but none in a "
            "class folder: put each into a folder named after its class"
        )
    if found.skipped.get("too-new"):
        return f"all pictures in '{found.root}' are newer than the grace: run again when they are older"
    return f"'{found.root}' has no pictures: is it the right folder, is its disk mounted?"


def _made(each: PictureBuild, manifest: Manifest) -> Conversion:
    saved = sum(record.saved_bytes for record in each.records)
    pixel_bytes = manifest.rows * each.row_bytes
    return Conversion(
        split=each.split,
        folder=each.output.folder,
        manifest=manifest,
        made=True,
        source_bytes=int(each.scan.sizes.sum()),
        seconds=each.seconds,
        findings=tuple(each.published),
        lzf_saving=saved / pixel_bytes if manifest.options["compression"] == "lzf" else None,
        read=each.written,
        resumed=each.resumed,
        changes=each.changes,
        notes=tuple(each.notes),
    )


def _unchanged(each: PictureBuild) -> Conversion:
    if each.newest is None:
        raise RuntimeError(f"{each.output.folder}: no version, and none to make")
    size = int(each.scan.sizes.sum())
    return Conversion(each.split, each.output.folder, each.newest, False, size, notes=tuple(each.notes))
