"""One data set to make: a whole source or a split of it, from what was found to what is published."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwright.convert.options import ConvertOptions
from shardwright.convert.output import Output, counted
from shardwright.convert.plan import ShardPlan, decide, differences, plan_shards, refuse_other_request
from shardwright.convert.scan import Scan
from shardwright.convert.stats import Sums
from shardwright.convert.write import Finding, ShardRecord, ShardTask
from shardwright.datasets.layout import Manifest, columns_of, path_to_id
from shardwright.datasets.manifest import read_manifest
from shardwright.errors import OutputError, SourceError


@dataclass(slots=True)
class Part:
    """One data set to make.

    Attributes
    ----------
    split, output, scan
        Its split, empty where the source has none; the folder it comes to; what was found of it.
    newest
        The newest version that is there.
    version
        What it will be; None where the newest is what was asked for.
    plans
        All its shards.
    records
        What was made of them so far, by this run or one before it.
    resumed
        Shards that an earlier run had finished.
    notes
        What a person should know.
    read, seconds
        Pictures that this run read, and the time from the first to the last.
    """

    split: str
    output: Output
    scan: Scan
    version: int | None = None
    newest: Manifest | None = None
    plans: list[ShardPlan] = field(default_factory=list)
    records: list[ShardRecord] = field(default_factory=list)
    resumed: int = 0
    notes: list[str] = field(default_factory=list)
    read: int = 0
    seconds: float = 0.0

    @property
    def inputs(self) -> int:
        """Pictures in its source, those without a class among them."""
        return len(self.scan) + len(self.scan.no_class)

    @property
    def missing(self) -> list[ShardPlan]:
        """Shards that are still to be written."""
        done = {record.number for record in self.records}
        return [plan for plan in self.plans if plan.number not in done]

    def bytes_missing(self, options: ConvertOptions) -> int:
        """Bytes that the missing shards have, at most."""
        return sum(len(plan.samples) for plan in self.missing) * options.row_bytes

    def tasks(self, options: ConvertOptions) -> Iterator[ShardTask]:
        """The work that is missing."""
        for plan in self.missing:
            paths = tuple(self.scan.paths[i] for i in plan.samples.tolist())
            yield ShardTask(
                number=plan.number,
                stem=plan.stem,
                partial=self.output.work / Path(plan.stem).name,
                root=self.scan.root,
                paths=paths,
                ids=tuple(map(path_to_id, paths)),
                labels=tuple(self.scan.labels[plan.samples].tolist()),
                options=options,
            )

    def findings(self) -> list[Finding]:
        """What was rejected or suspect, so far."""
        no_class = [
            Finding(id, "rejected", "no-class", "it lies directly under the root, in no class folder", 0)
            for id in self.scan.no_class
        ]
        return no_class + [finding for record in self.records for finding in record.findings]


def decide_part(part: Part, options: ConvertOptions) -> None:
    """Say which version ``part`` will be, and of which shards; changes nothing on disk.

    Raises
    ------
    OutputError
        See `decide`; or an unfinished conversion of other options lies there, without ``new_version``.
    """
    folder = part.output.folder
    part.newest = newest = read_manifest(folder) if (folder / "manifest.json").exists() else None
    unchanged = (
        newest is not None
        and part.output.fingerprint(newest.version) == part.scan.fingerprint()
        and part.output.holds(newest)
    )
    part.version = decide(newest, unchanged, options, part.inputs, str(folder))
    if part.version is None:
        return
    part.plans = plan_shards(len(part.scan), part.version, options)
    before = part.output.unfinished.request()
    if before is not None and part.output.unfinished.shards() and not options.new_version:
        refuse_other_request(before, _request(part, options), str(folder))


def begin_part(part: Part, options: ConvertOptions) -> None:
    """Make the folders for ``part``, and take up what an earlier run finished of it."""
    request = _request(part, options)
    before = part.output.unfinished.request()
    if before is not None and before != request and part.output.unfinished.shards():
        part.notes.append("an unfinished conversion of another source or other options was begun anew")
    part.output.begin()
    part.records = part.output.unfinished.begin(request, part.plans)
    part.resumed = len(part.records)


def keep_to_environment(part: Part, environment: dict[str, str]) -> None:
    """Drop finished shards that other versions of libraries made: their pixels may differ by a grey level."""
    for record in [record for record in part.records if record.environment != environment]:
        part.output.unfinished.drop(record)
        part.records.remove(record)
        different = "; ".join(differences(record.environment, environment))
        note = f"finished shards of another environment were made again: {different}"
        if note not in part.notes:
            part.notes.append(note)
    part.resumed = len(part.records)


def _request(part: Part, options: ConvertOptions) -> dict[str, Any]:
    return {
        "version": part.version,
        "options": options.recorded(),
        "source": part.scan.fingerprint(),
    }


def refuse_old_rejects(parts: Sequence[Part]) -> None:
    """Raise SourceError if any picture was rejected in those of ``parts`` that stay as they are."""
    for part in parts:
        if part.version is None and part.newest is not None and part.newest.rejected:
            raise SourceError(
                f"--strict is set, and version {part.newest.version} of '{part.output.folder}' was made without "
                f"{sum(part.newest.rejected.values())} pictures that were rejected: see its report"
            )


def refuse_rejects(parts: Sequence[Part]) -> None:
    """Raise SourceError if any picture of ``parts`` was rejected."""
    rejected = [f for part in parts for f in part.findings() if f.verdict == "rejected"]
    if rejected:
        first = "; ".join(f"'{f.id}': {f.reason}: {f.message}" for f in rejected[:5])
        raise SourceError(
            f"{len(rejected)} pictures were rejected, and --strict is set, so nothing was published: {first}"
            f"{' ...' if len(rejected) > 5 else ''}. Mend or remove them, or run without --strict"
        )


def manifest_of(part: Part, options: ConvertOptions) -> Manifest:
    """The version that ``part`` will be.

    Raises
    ------
    SourceError
        No picture could be taken, or less than half as many as before without ``allow_shrink``.
    """
    part.records.sort(key=lambda record: record.number)
    records = [record for record in part.records if record.shard is not None]
    findings = part.findings()
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
        source={
            "files": part.inputs,
            "bytes": int(part.scan.sizes.sum()),
            "animated": sum(record.animated for record in records),
        },
        options=options.recorded(),
        environment=records[0].environment,
    )
