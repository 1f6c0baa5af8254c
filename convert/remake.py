"""Writes and publishes data sets made of rows of others, by worker processes, the manifest last.

What `run` is for pictures. Each is published whole or not at all; a run that was killed is gone on with by the same
command, to the same bytes.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from shardwright.convert.copying import environment_of
from shardwright.convert.duplicates import duplicates
from shardwright.convert.output import counted
from shardwright.convert.plan import differences
from shardwright.convert.progress import ProgressMaker
from shardwright.convert.report import of_kept_rows
from shardwright.convert.rewrite import Rewrite
from shardwright.convert.soundness import check_room_for, refuse_damage
from shardwright.convert.space import full_disk
from shardwright.convert.stats import Sums
from shardwright.convert.workers import Workers
from shardwright.datasets.layout import Manifest
from shardwright.datasets.manifest import why_removed
from shardwright.datasets.reader import Reader
from shardwright.errors import OutputError, ShardError, ShardwrightError


def make(
    parts: Sequence[Rewrite], out: Path, stage: str, jobs: int | None, progress: ProgressMaker
) -> list[Manifest | None]:
    """Write and publish those of ``parts`` that have a version to be; the new manifests, None for the others.

    Whoever calls it holds ``out``. All are written before the first is published.

    Raises
    ------
    ShardError
        A shard of a source is damaged, or gone. Nothing was published.
    OutputError
        It cannot be written, or has no room.
    """
    todo = [part for part in parts if part.version is not None]
    published: list[str] = []
    try:
        for part in todo:
            _begin(part)
        environments = [record.environment for part in todo for record in part.records]
        mixed = any(found != environments[0] for found in environments)
        if mixed or any(part.missing for part in todo):
            with Workers(jobs) as workers:
                for part in todo:
                    _keep_to_environment(part, workers)
                check_room_for(todo, out)
                try:
                    for part in todo:
                        _write_shards(part, stage, progress, workers)
                except ShardError:  # where a worker stumbles over damage, all that there is is named
                    sources = [source for part in todo for source in part.rows.sources]
                    if not any(why_removed(source.folder, source.version) for source in sources):
                        refuse_damage(todo)
                    raise
        manifests = [None if part.version is None else _manifest_of(part) for part in parts]
        done: list[Manifest | None] = []
        for part, manifest in zip(parts, manifests, strict=True):
            done.append(None if manifest is None else _publish(part, manifest))
            published += [str(part.output.folder)] * (manifest is not None)
        return done
    except OSError as error:
        if isinstance(error, ShardwrightError):
            raise
        needed = sum(part.bytes_missing() for part in todo)
        raise full_disk(error, out, needed, published) or OutputError(
            f"cannot write '{out}': {error.strerror or error}"
        ) from error
    finally:
        for part in parts:
            part.output.abandon()


def _begin(part: Rewrite) -> None:
    request = part.request()
    before = part.output.unfinished.request()
    if before is not None and before != request and part.output.unfinished.shards():
        part.notes.append("an unfinished run of another source or other options was begun anew")
    part.output.begin()
    part.records = part.output.unfinished.begin(request, part.plans)
    rows = {plan.number: len(plan.samples) for plan in part.plans}
    for record in list(part.records):
        if record.shard is None or record.shard.rows != rows[record.number]:
            part.output.unfinished.drop(record)
            part.records.remove(record)
    part.resumed = len(part.records)


def _keep_to_environment(part: Rewrite, workers: Workers) -> None:
    if not part.records:
        return
    now = workers.call(environment_of, part.size is not None)
    for record in [record for record in part.records if record.environment != now]:
        part.output.unfinished.drop(record)
        part.records.remove(record)
        note = (
            "finished shards of another environment were made again: "
            f"{'; '.join(differences(record.environment, now))}"
        )
        if note not in part.notes:
            part.notes.append(note)
    part.resumed = len(part.records)


def _write_shards(part: Rewrite, stage: str, progress: ProgressMaker, workers: Workers) -> None:
    start = time.monotonic()
    rows = {plan.number: len(plan.samples) for plan in part.plans}
    before = done = shown = sum(rows[record.number] for record in part.records)
    with progress(part.split or stage, len(part.index), "images", done) as bar:
        for record in workers.write(part.tasks()):
            if record is not None:
                part.output.unfinished.keep(record)
                part.records.append(record)
                done += rows[record.number]
            under_way = part.output.bytes_under_way() // part.row_bytes
            now = max(shown, min(done + under_way, len(part.index)))
            bar.update(now - shown)
            shown = now
    part.copied = done - before
    part.seconds = time.monotonic() - start


def _manifest_of(part: Rewrite) -> Manifest:
    records = sorted(part.records, key=lambda record: record.number)
    if any(record.environment != records[0].environment for record in records):
        raise OutputError("workers with different library versions took part: nothing was published")
    sums = Sums()
    for record in records:
        sums.merge(record.sums)
    return replace(
        part.draft,
        version=part.version or 1,
        rows=len(part.index),
        shards=tuple(record.shard for record in records if record.shard is not None),
        stats=part.draft.stats if part.all_rows else sums.stats(),
        environment=records[0].environment,
    )


def _publish(part: Rewrite, manifest: Manifest) -> Manifest:
    part.output.place(manifest)
    findings = part.findings
    if not part.all_rows:
        ids = set()
        if any(f.verdict == "suspect" for f in findings):
            ids = set(Reader(part.output.folder, manifest).column("id", np.arange(manifest.rows)).tolist())
        findings = of_kept_rows(findings, ids)
        if any(column.name == "source_sha256" for column in manifest.columns):
            findings = findings + duplicates(part.output.folder, manifest)
        manifest = replace(
            manifest, suspect=counted(findings, "suspect"), duplicates=counted(findings, "duplicate")
        )
    part.output.publish(manifest, findings, part.hint)
    return manifest
