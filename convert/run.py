"""`convert`: a tree of pictures to a data set, or to one a split, in parallel."""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.convert.changes import Changes, changes
from shardwright.convert.duplicates import duplicates
from shardwright.convert.environment import environment
from shardwright.convert.estimate import estimate
from shardwright.convert.lock import split_writer
from shardwright.convert.options import ConvertOptions
from shardwright.convert.output import Output, check_output, check_paths, counted
from shardwright.convert.part import (
    Part,
    begin_part,
    decide_part,
    keep_to_environment,
    manifest_of,
    refuse_old_rejects,
    refuse_rejects,
)
from shardwright.convert.progress import ProgressMaker, Silent
from shardwright.convert.scan import Scan, class_map_of, find_splits, scan
from shardwright.convert.space import check_room, free_bytes, full_disk, stored_share
from shardwright.convert.workers import Workers
from shardwright.convert.write import Finding
from shardwright.datasets.layout import Manifest
from shardwright.errors import OutputError, ShardError, ShardwrightError, SourceError


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
        Makes the progress of a stage, such as `Bar`, `Lines` or `Silent`.

    Raises
    ------
    UsageError
        ``source`` is no folder, or one of the two lies in the other.
    SourceError
        No pictures, or a tree that cannot be taken as it is.
    LockedError
        Another process writes to ``out``.
    OutputError
        ``out`` holds something else, was made with other options, or cannot be written.
    """
    options = options or ConvertOptions()
    check_paths(source, out)
    splits = find_splits(source) if options.splits else []
    check_output(out, splits)
    parts: list[Part] = []
    done: list[Conversion] = []
    with split_writer(out, splits):
        try:
            for split in splits or [""]:
                Output(out / split).settle()
            parts = _decided_parts(source, out, options, progress)
            _make(parts, out, options, progress)
            # All of them are made before one is published.
            manifests = [None if part.version is None else manifest_of(part, options) for part in parts]
            for part, manifest in zip(parts, manifests, strict=True):
                done.append(_unchanged(part) if manifest is None else _publish(part, manifest))
            return done
        except OSError as error:
            if isinstance(error, ShardwrightError):
                raise
            needed = sum(part.bytes_missing(options) for part in parts)
            published = [str(conversion.folder) for conversion in done if conversion.made]
            failed = full_disk(error, out, needed, published) or OutputError(
                f"cannot write '{out}': {error.strerror or error}"
            )
            raise failed from error
        finally:
            for part in parts:
                part.output.abandon()


def _make(parts: Sequence[Part], out: Path, options: ConvertOptions, progress: ProgressMaker) -> None:
    """Write the shards that are missing of all ``parts``."""
    if options.strict:
        refuse_old_rejects(parts)
    todo = [part for part in parts if part.version is not None]
    for part in todo:
        begin_part(part, options)
    environments = [record.environment for part in todo for record in part.records]
    mixed = any(found != environments[0] for found in environments)
    if mixed or any(part.missing for part in todo):
        with Workers(options.jobs) as workers:
            if environments:
                now = workers.call(environment)
                for part in todo:
                    keep_to_environment(part, now)
            _check_room(todo, out, options, workers)
            for part in todo:
                _write_shards(part, options, progress, workers)
    if options.strict:
        try:
            refuse_rejects(todo)
        except SourceError:
            for part in todo:  # pictures will be mended or removed, and then no finished shard fits
                part.output.unfinished.forget()
            raise


def dry_run(
    source: Path, out: Path, options: ConvertOptions, progress: ProgressMaker = Silent
) -> dict[str, dict[str, Any]]:
    """Say what `convert` would do, and do nothing: split -> JSON values, ``version`` None for nothing to do.

    Raises as `convert` does for what can be known before pictures are decoded.
    """
    check_paths(source, out)
    check_output(out, find_splits(source) if options.splits else [])
    return {
        part.split: {"version": part.version, **estimate(part.scan, options)}
        for part in _decided_parts(source, out, options, progress)
    }


def _decided_parts(source: Path, out: Path, options: ConvertOptions, progress: ProgressMaker) -> list[Part]:
    scans = scan_source(source, options, progress)
    parts = [Part(split, Output(out / split), found) for split, found in scans.items()]
    for part in parts:
        decide_part(part, options)
    return parts


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


def _check_room(todo: Sequence[Part], out: Path, options: ConvertOptions, workers: Workers) -> None:
    at_most = sum(part.bytes_missing(options) for part in todo)
    if at_most > free_bytes(out):
        sample = next(part.tasks(options) for part in todo if part.missing)
        share = 1.0
        with suppress(
            ShardwrightError
        ):  # a picture that kills its process is found when its shard is written
            share = workers.call(stored_share, next(sample))
        check_room(out, int(at_most * share))


def _write_shards(part: Part, options: ConvertOptions, progress: ProgressMaker, workers: Workers) -> None:
    start = time.monotonic()
    rows = {plan.number: len(plan.samples) for plan in part.plans}
    before = done = shown = sum(rows[record.number] for record in part.records)
    with progress(part.split or "convert", len(part.scan), "images", done) as bar:
        for record in workers.write(part.tasks(options)):
            if record is not None:
                part.output.unfinished.keep(record)
                part.records.append(record)
                done += rows[record.number]
            under_way = part.output.bytes_under_way() // options.row_bytes
            now = max(shown, min(done + under_way, len(part.scan)))
            bar.update(now - shown)
            shown = now
    part.read = done - before
    part.seconds = time.monotonic() - start


def _publish(part: Part, manifest: Manifest) -> Conversion:
    part.output.place(manifest)
    same = duplicates(part.output.folder, manifest)
    manifest = replace(manifest, duplicates=counted(same, "duplicate"))
    findings = part.findings() + same
    part.output.publish(manifest, findings, part.scan.fingerprint())
    changed = None
    if part.newest is not None:
        try:
            changed = changes(part.output.folder, part.newest, manifest)
        except ShardError as error:
            part.notes.append(f"what changed cannot be said: {error}")
    saved = sum(record.saved_bytes for record in part.records)
    pixel_bytes = manifest.rows * int(np.prod(manifest.image_shape))
    return Conversion(
        split=part.split,
        folder=part.output.folder,
        manifest=manifest,
        made=True,
        source_bytes=int(part.scan.sizes.sum()),
        seconds=part.seconds,
        findings=tuple(findings),
        lzf_saving=saved / pixel_bytes if manifest.options["compression"] == "lzf" else None,
        read=part.read,
        resumed=part.resumed,
        changes=changed,
        notes=tuple(part.notes),
    )


def _unchanged(part: Part) -> Conversion:
    if part.newest is None:
        raise RuntimeError(f"{part.output.folder}: no version, and none to make")
    return Conversion(part.split, part.output.folder, part.newest, False, int(part.scan.sizes.sum()))
