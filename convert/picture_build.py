"""A data set that is being made of pictures: a whole source, or a split of it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.convert.build import newest_of
from shardwright.convert.changes import Changes, changes
from shardwright.convert.duplicates import duplicates
from shardwright.convert.hints import Hints, Stamps
from shardwright.convert.output import counted
from shardwright.convert.plan import PIECED, ShardPlan, decide, plan_shards, plan_with
from shardwright.convert.records import Finding, without_class
from shardwright.convert.report import read_report
from shardwright.convert.scanned_build import ScannedBuild
from shardwright.convert.write import ShardTask
from shardwright.datasets.layout import Manifest, columns_of, path_to_id
from shardwright.datasets.reader import Reader
from shardwright.errors import NAMED, ShardError, SourceError

_READ_BYTES = 1 << 20


@dataclass(slots=True, kw_only=True)
class PictureBuild(ScannedBuild):
    """A data set that is being made of pictures.

    Attributes
    ----------
    changes
        What that version has, and the one before had not, or else; None for the first one.
    """

    changes: Changes | None = None

    @property
    def decodes(self) -> bool:
        return True

    def decide(self) -> None:
        """Say which version it will be, and of which shards; changes nothing on disk.

        Raises
        ------
        OutputError
            See `plan.decide`; or an unfinished conversion of other options lies there, without ``new_version``.
        SourceError
            The newest is what is asked for, but for pictures that were rejected, and ``strict`` is set.
        """
        self.newest = newest = newest_of(self.output)
        hints = None if newest is None else self.output.hints(newest)
        unchanged = (
            newest is not None
            and hints is not None
            and hints.fingerprint == self.scan.fingerprint()
            and self.output.holds(newest)
            and not self._readable_again(newest)
        )
        self.version = decide(newest, unchanged, self.options, self.inputs, str(self.output.folder))
        if self.version is None:
            return
        if newest is not None:
            self.notes += _renumbered(newest, self.scan.classes)
        self.plans = plan_shards(len(self.scan), self.version, self.options)
        if not self.options.new_version:
            self.refuse_unfinished()
        everything, nothing = np.arange(len(self.scan)), np.empty(0, np.int64)
        if salvaged := self.salvage(everything, nothing):
            self.plans = plan_with(salvaged, len(self.scan), self.version, self.options)

    def _readable_again(self, newest: Manifest) -> bool:
        """Whether a picture can be read now that could not when ``newest`` was made: rights change no size or time."""
        if not newest.rejected.get("unreadable"):
            return False
        try:
            findings = read_report(self.output.folder, newest.version)
        except ValueError:
            return False  # which they were is not known
        then = {f.id for f in findings if f.verdict == "rejected" and f.reason == "unreadable"}
        paths = [path for id, path in zip(self.scan.ids, self.scan.paths, strict=True) if id in then]
        again = [path for path in paths if _can_be_read(self.scan.root / path)]
        if again:
            self.notes.append(
                f"of the pictures that could not be read, {len(again)} can be now, such as '{path_to_id(again[0])}'"
            )
        return bool(again)

    def refuse_old_rejects(self) -> None:
        """Raise SourceError if it stays as it is, and pictures of it were rejected."""
        if self.options.strict and self.version is None and self.newest is not None and self.newest.rejected:
            raise SourceError(
                f"--strict is set, and version {self.newest.version} of '{self.output.folder}' was made without "
                f"{sum(self.newest.rejected.values())} pictures that were rejected: see its report"
            )

    def request(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "options": self.options.recorded(),
            "source": {"classes": list(self.scan.classes)},
            "found": {"scan": self.scan.fingerprint(), PIECED: bool(self.salvaged)},
        }

    def task(self, plan: ShardPlan) -> ShardTask:
        return self.from_pictures(plan)

    def findings(self) -> list[Finding]:
        """What was rejected or suspect, so far."""
        return without_class(self.scan.no_class) + [
            finding for record in self.records for finding in record.findings
        ]

    def conclude(self) -> None:
        rejected = [f for f in self.findings() if f.verdict == "rejected"] if self.options.strict else []
        if not rejected:
            return
        self.output.unfinished.forget()  # pictures will be mended or removed, and then no finished shard fits
        first = "; ".join(f"'{f.id}': {f.reason}: {f.message}" for f in rejected[:5])
        raise SourceError(
            f"{len(rejected)} pictures were rejected, and --strict is set, so nothing was "
            f"published: {first}{' ...' if len(rejected) > 5 else ''}. Mend or remove them, or run without --strict"
        )

    def manifest(self) -> Manifest:
        records, sums, _ = self.finished()
        shards = tuple(record.shard for record in records if record.shard is not None)
        findings = self.findings()
        if not shards:
            self.output.unfinished.forget()  # so that an output that was missing is so again
            raise SourceError(
                f"not one of the {len(self.scan)} pictures in '{self.scan.root}' could be taken: {_last(findings)}"
            )
        rows = sum(shard.rows for shard in shards)
        if self.newest is not None and 2 * rows < self.newest.rows and not self.options.allow_shrink:
            raise SourceError(
                f"only {rows} of the {len(self.scan)} pictures in '{self.scan.root}' could be taken, version "
                f"{self.newest.version} has {self.newest.rows}: nothing was published. {_last(findings)}. If that is "
                "meant, use --allow-shrink"
            )
        return Manifest(
            version=self.version or 1,
            storage=self.options.store.format,
            rows=rows,
            classes=self.scan.classes,
            columns=columns_of(*self.image_shape),
            shards=shards,
            seed=self.options.seed,
            stats=sums.stats(),
            rejected=counted(findings, "rejected"),
            suspect=counted(findings, "suspect"),
            skipped=self.scan.skipped,
            source={
                "files": self.inputs,
                "bytes": int(self.scan.sizes.sum()),
                "animated": sum(record.animated for record in records),
                **({PIECED: True} if self.salvaged else {}),
            },
            options=self.options.recorded(),
            environment=next(record.environment for record in records if record.shard is not None),
        )

    def accompany(self, manifest: Manifest) -> Manifest:
        hints = self._hints(manifest)
        same = duplicates(hints.ids, hints.labels, hints.hashes)
        manifest = replace(manifest, duplicates=counted(same, "duplicate"))
        self.published = self.findings() + same
        self.output.accompany(manifest, self.published, hints)
        return manifest

    def look_back(self, manifest: Manifest) -> None:
        if self.newest is not None:
            try:
                self.changes = changes(self.output.folder, self.newest, manifest)
            except ShardError as error:
                self.notes.append(f"what changed cannot be said: {error}")

    def _hints(self, manifest: Manifest) -> Hints:
        """What its pictures were, those of its rows first."""
        rejected = {f.id for record in self.records for f in record.findings if f.verdict == "rejected"}
        order = np.concatenate([plan.samples for plan in sorted(self.plans, key=lambda plan: plan.number)])
        lost = np.array([self.scan.ids[k] in rejected for k in order.tolist()], bool)
        rows = order[~lost]
        everything = np.append(rows, order[lost])
        seen = self.stamps()
        return Hints(
            fingerprint=self.scan.fingerprint(),
            began_ns=self.began_ns(),
            rows=len(rows),
            ids=[self.scan.ids[k] for k in everything.tolist()],
            stamps=Stamps.of([seen.get(self.scan.ids[k]) for k in everything.tolist()]),
            labels=self.scan.labels[rows],
            hashes=Reader(self.output.folder, manifest).column("source_sha256", np.arange(len(rows))),
        )


def _can_be_read(path: Path) -> bool:
    """All of it: else each run would make a version for a picture that a disk gives the first bytes of."""
    try:
        with open(path, "rb", buffering=0) as file:
            while file.read(_READ_BYTES):
                pass
        return True
    except OSError:
        return False


def _last(findings: list[Finding]) -> str:
    last = findings[-1]
    return f"'{last.id}': {last.reason}: {last.message}"


def _renumbered(newest: Manifest, classes: Sequence[str]) -> list[str]:
    """That classes get other numbers than they had: a model that was trained before would take one for another."""
    number = {name: k for k, name in enumerate(classes)}
    moved = [
        f"'{name}' was {k}, is {number[name]}"
        for k, name in enumerate(newest.classes)
        if number.get(name, k) != k
    ]
    if not moved:
        return []
    more = f" and {len(moved) - NAMED} more" if len(moved) > NAMED else ""
    return [
        f"classes have other numbers than in version {newest.version}: {'; '.join(moved[:NAMED])}{more}. "
        "`shardwright sync` keeps them"
    ]
