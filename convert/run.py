"""`convert`: a tree of pictures to a data set, or to one a split, in parallel."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import joblib
import numpy as np

from shardwright.convert.estimate import estimate
from shardwright.convert.lock import one_writer
from shardwright.convert.options import ConvertOptions
from shardwright.convert.output import Output, check_output, check_paths, counted
from shardwright.convert.plan import ShardPlan, decide, plan_shards
from shardwright.convert.progress import ProgressMaker, Silent
from shardwright.convert.scan import Scan, class_map_of, find_splits, scan
from shardwright.convert.stats import Sums
from shardwright.convert.workers import result_of, workers
from shardwright.convert.write import Finding, ShardRecord, ShardTask
from shardwright.datasets.layout import Manifest, columns_of, path_to_id
from shardwright.datasets.manifest import read_manifest
from shardwright.errors import OutputError, ShardwrightError, SourceError


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
        From the first picture to the published manifest.
    findings
        What was rejected or suspect.
    lzf_saving
        The share that LZF saves or would save on all pixels; None where no probe was made.
    """

    split: str
    folder: Path
    manifest: Manifest
    made: bool
    source_bytes: int
    seconds: float = 0.0
    findings: tuple[Finding, ...] = ()
    lzf_saving: float | None = None

    @property
    def rejected(self) -> int:
        """Inputs that are not in the data set."""
        return sum(self.manifest.rejected.values())


@dataclass(slots=True)
class _Part:
    """One data set to make: a whole source, or a split of it."""

    split: str
    output: Output
    scan: Scan
    version: int | None = None
    newest: Manifest | None = None
    plans: list[ShardPlan] = field(default_factory=list)
    records: list[ShardRecord] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def inputs(self) -> int:
        """Pictures in its source, those without a class among them."""
        return len(self.scan) + len(self.scan.no_class)


def convert(
    source: Path,
    out: Path,
    options: ConvertOptions | None = None,
    progress: ProgressMaker = Silent,
) -> list[Conversion]:
    """Convert the tree at ``source`` into a data set at ``out``, or one a split.

    Shards are written by one process each; this process alone publishes, the manifest last. Until then a
    reader sees the version before, or none.

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
    with one_writer(out):
        for split in splits or [""]:
            Output(out / split).settle()
        parts = _decided_parts(source, out, options, progress)
        todo = [part for part in parts if part.version is not None]
        try:
            if todo:
                with workers(options) as submit:
                    for part in todo:
                        _write_shards(part, options, progress, submit)
            if options.strict:
                _refuse_rejects(parts)
            # All of them are made before one is published.
            manifests = {part.split: _manifest(part, options) for part in todo}
            return [
                _publish(part, manifests[part.split]) if part.split in manifests else _unchanged(part)
                for part in parts
            ]
        except OSError as error:
            if isinstance(error, ShardwrightError):
                raise
            raise OutputError(f"cannot write '{out}': {error.strerror or error}") from error
        finally:
            for part in todo:
                part.output.abandon()


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


def _decided_parts(source: Path, out: Path, options: ConvertOptions, progress: ProgressMaker) -> list[_Part]:
    scans = scan_source(source, options, progress)
    parts = [_Part(split, Output(out / split), found) for split, found in scans.items()]
    for part in parts:
        _decide(part, options)
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
    scans = {}
    with progress("scan", None, "files") as bar:
        for split in splits or [""]:
            scans[split] = found = scan(source / split, classes, bar.update)
            if not len(found):
                raise SourceError(_why_empty(found))
    return scans


def _why_empty(found: Scan) -> str:
    if found.no_class:
        return (
            f"'{found.root}' has {len(found.no_class)} pictures, such as '{found.no_class[0]}', but none in a "
            "class folder: put each into a folder named after its class"
        )
    return f"'{found.root}' has no pictures: is it the right folder, is its disk mounted?"


def _decide(part: _Part, options: ConvertOptions) -> None:
    folder = part.output.folder
    part.newest = read_manifest(folder) if (folder / "manifest.json").exists() else None
    newest = part.newest
    unchanged = (
        newest is not None
        and part.output.fingerprint(newest.version) == part.scan.fingerprint()
        and part.output.holds(newest)
    )
    part.version = decide(newest, unchanged, options, part.inputs, str(folder))
    if part.version is not None:
        part.plans = plan_shards(len(part.scan), part.version, options)


def _write_shards(
    part: _Part,
    options: ConvertOptions,
    progress: ProgressMaker,
    submit: Callable[[ShardTask], "Future[ShardRecord]"],
) -> None:
    start = time.monotonic()
    part.output.begin()
    # No more under way than one beside those at work: loky's executor cannot drop what it has not handed
    # to a worker yet when it is stopped.
    most = (options.jobs or joblib.cpu_count()) + 1
    plans = iter(part.plans)
    pending: dict[Future[ShardRecord], int] = {}
    done = shown = 0
    with progress(part.split or "convert", len(part.scan), "images") as bar:
        while True:
            for plan in islice(plans, most - len(pending)):
                pending[submit(_task(part, plan, options))] = len(plan.samples)
            if not pending:
                break
            finished, _ = wait(pending, timeout=0.5, return_when=FIRST_COMPLETED)
            for future in finished:
                done += pending.pop(future)
                part.records.append(result_of(future))
            written = part.output.bytes_under_way() // options.row_bytes
            now = max(shown, done, min(written, len(part.scan)))
            bar.update(now - shown)
            shown = now
    part.records.sort(key=lambda record: record.number)
    part.seconds = time.monotonic() - start


def _task(part: _Part, plan: ShardPlan, options: ConvertOptions) -> ShardTask:
    paths = tuple(part.scan.paths[i] for i in plan.samples.tolist())
    return ShardTask(
        number=plan.number,
        stem=plan.stem,
        partial=part.output.work / Path(plan.stem).name,
        root=part.scan.root,
        paths=paths,
        ids=tuple(map(path_to_id, paths)),
        labels=tuple(part.scan.labels[plan.samples].tolist()),
        options=options,
    )


def _findings(part: _Part) -> list[Finding]:
    no_class = [
        Finding(id, "rejected", "no-class", "it lies directly under the root, in no class folder", 0)
        for id in part.scan.no_class
    ]
    return no_class + [finding for record in part.records for finding in record.findings]


def _refuse_rejects(parts: Sequence[_Part]) -> None:
    for part in parts:
        if part.version is None and part.newest is not None and part.newest.rejected:
            raise SourceError(
                f"--strict is set, and version {part.newest.version} of '{part.output.folder}' was made without "
                f"{sum(part.newest.rejected.values())} pictures that were rejected: see its report"
            )
    rejected = [f for part in parts for f in _findings(part) if f.verdict == "rejected"]
    if rejected:
        first = "; ".join(f"'{f.id}': {f.reason}: {f.message}" for f in rejected[:5])
        raise SourceError(
            f"{len(rejected)} pictures were rejected, and --strict is set, so nothing was published: {first}"
            f"{' ...' if len(rejected) > 5 else ''}. Mend or remove them, or run without --strict"
        )


def _manifest(part: _Part, options: ConvertOptions) -> Manifest:
    """The version that ``part`` will be."""
    records = [record for record in part.records if record.shard is not None]
    findings = _findings(part)
    if not records:
        raise SourceError(
            f"not one of the {len(part.scan)} pictures in '{part.scan.root}' could be taken: "
            f"'{findings[-1].id}': {findings[-1].reason}: {findings[-1].message}"
        )
    if any(record.environment != records[0].environment for record in records):
        raise OutputError("workers with different library versions took part: nothing was published")
    sums = Sums()
    for record in records:
        sums.merge(record.sums)
    shards = tuple(record.shard for record in records if record.shard is not None)
    rows = sum(shard.rows for shard in shards)
    if part.newest is not None and 2 * rows < part.newest.rows and not options.allow_shrink:
        raise SourceError(
            f"only {rows} of the {len(part.scan)} pictures in '{part.scan.root}' could be taken, version "
            f"{part.newest.version} has {part.newest.rows}: nothing was published. '{findings[-1].id}': "
            f"{findings[-1].reason}: {findings[-1].message}. If that is meant, use --allow-shrink"
        )
    return Manifest(
        version=part.version or 1,
        storage=options.store.format,
        rows=rows,
        classes=part.scan.classes,
        columns=columns_of(*options.image_shape),
        shards=shards,
        seed=options.seed,
        stats=sums.stats(),
        rejected=counted(findings, "rejected"),
        suspect=counted(findings, "suspect"),
        skipped=part.scan.skipped,
        source={"files": part.inputs, "bytes": int(part.scan.sizes.sum())},
        options=options.recorded(),
        environment=records[0].environment,
    )


def _publish(part: _Part, manifest: Manifest) -> Conversion:
    findings = _findings(part)
    temporary = [path for record in part.records for path in record.temporary]
    part.output.publish(manifest, temporary, findings, part.scan.fingerprint())
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
    )


def _unchanged(part: _Part) -> Conversion:
    if part.newest is None:
        raise RuntimeError(f"{part.output.folder}: no version, and none to make")
    return Conversion(part.split, part.output.folder, part.newest, False, int(part.scan.sizes.sum()))
