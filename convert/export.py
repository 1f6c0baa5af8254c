"""`export`: a data set as what other tools read: pictures in a folder a class, or tars for WebDataset."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from shardwright.convert.export_options import ExportOptions
from shardwright.convert.export_part import Part
from shardwright.convert.export_state import ExportState
from shardwright.convert.export_summary import Exported
from shardwright.convert.jobs import COPYING, jobs_allowed
from shardwright.convert.lock import data_sets_of, sole_writer
from shardwright.convert.output import check_paths
from shardwright.convert.progress import ProgressMaker, Silent
from shardwright.convert.space import check_room, unwritable
from shardwright.convert.workers import Workers
from shardwright.datasets.layout import WORK_FOLDER
from shardwright.datasets.manifest import read_manifest
from shardwright.errors import OutputError, ShardwrightError, SourceError, named

__all__ = ["ExportOptions", "Exported", "dry_run", "export"]


def export(
    source: Path, out: Path, options: ExportOptions, progress: ProgressMaker = Silent
) -> dict[str, Exported]:
    """Write the data set ``source``, or each of its splits, as other tools read it: split -> what became of it.

    Pixels, labels and the number of samples are those of the data set; each row is checked by its CRC-32 on the way.
    What is made is seen when all of it is made, and a run that was killed is gone on with by the same command.

    Parameters
    ----------
    out
        A folder that is missing, empty, or holds what the same command made before.
    progress
        Makes the progress of a stage, such as `Bar` or `Silent`.

    Raises
    ------
    UsageError
        Paths of which one lies in the other; images that cannot be encoded so.
    FormatError, ShardError
        ``source`` is no data set, or damaged; or an id or a class name in it cannot be a path.
    LockedError
        Another process writes to ``out``.
    OutputError
        ``out`` holds something else, or cannot be written.
    """
    parts = _checked(source, out, options)
    with sole_writer(out, [part.split for part in parts if part.split]):
        done: list[str] = []
        try:
            for part in parts:
                part.look()
            missing = [part for part in parts if part.status is None or part.status.stage == "making"]
            if missing:
                _make(missing, out, options, progress)
            # All of them are made before one is seen.
            for part in parts:
                done += part.finish()
        except OSError as error:
            if isinstance(error, ShardwrightError):
                raise
            needed = sum(part.bytes_at_most() for part in parts)
            raise unwritable(error, out, needed, done) from error
        finally:
            for part in parts:
                part.state.abandon()
    return {part.split: part.exported() for part in parts}


def dry_run(source: Path, out: Path, options: ExportOptions) -> dict[str, Exported]:
    """Say what `export` would do, and do nothing. Raises as it does, for what can be known before ids are read."""
    found = {}
    for part in _checked(source, out, options):
        part.look()
        if part.status is not None and part.status.stage == "finished":
            found[part.split] = replace(part.exported(), dry_run=True)
            continue
        part.plan()
        jobs = options.jobs or jobs_allowed(COPYING)
        found[part.split] = replace(
            part.exported(),
            files=part.rows_total if options.to == "folder" else len(part.units()),
            bytes=int(part.row_bytes * part.rows_total),
            written=part.rows_total,
            seconds=part.row_seconds * part.rows_total / jobs,
            made=True,
            dry_run=True,
        )
    return found


def _checked(source: Path, out: Path, options: ExportOptions) -> list[Part]:
    """The data sets to export, after looks at source and output that change nothing."""
    check_paths(source, out)
    folders = data_sets_of(source)
    manifests = {split: read_manifest(folder, options.version) for split, folder in folders.items()}
    splits = [split for split in folders if split]
    if out.is_dir():
        names = set(os.listdir(out)) - {WORK_FOLDER}
        if splits and (names - {*splits} or ExportState(out).status() is not None):
            raise OutputError(
                f"the output '{out}' holds {named(sorted(names)) or 'an export'}, the source has the splits "
                f"{', '.join(splits)}. Nothing was changed: use an empty folder"
            )
    elif os.path.lexists(out):
        raise OutputError(f"the output '{out}' is not a folder")
    parts = []
    for split, folder in folders.items():
        manifest = manifests[split]
        options.file.check(*manifest.image_shape)
        if not manifest.rows:
            raise SourceError(f"'{folder}' has no rows")
        parts.append(Part(split, folder, manifest, ExportState(out / split), options))
        parts[-1].state.check(None)
    return parts


def _make(parts: Sequence[Part], out: Path, options: ExportOptions, progress: ProgressMaker) -> None:
    for part in parts:
        part.plan()
        part.begin()
    if any(part.missing() for part in parts):
        check_room(out, sum(part.bytes_missing() for part in parts))
        with Workers(options.jobs, COPYING) as workers:
            for part in parts:
                part.make(workers, progress)
    for part in parts:
        part.all_made()
