"""What became of a data set that was synced: as JSON values and in words."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwright.convert.hints import Hints
from shardwright.convert.mixing import mixing
from shardwright.convert.records import Finding
from shardwright.convert.selection import canonical
from shardwright.convert.summary import counted_words
from shardwright.convert.sync_build import SyncBuild
from shardwright.datasets.layout import Manifest, report_name
from shardwright.datasets.rows import RowMap
from shardwright.errors import named

#: Beyond this share of rows on disk that are dead, it is said.
MOST_DEAD = 0.05
#: Below this share of what a fresh order's mixing of classes within chunks is, see `mixing`, it is said.
LEAST_MIXED = 0.9
#: So many times as many shards as an even layout has are said.
MOST_SHARDS = 2


@dataclass(frozen=True, slots=True)
class Synced:
    """What became of one data set.

    Attributes
    ----------
    split, folder
        Its split, empty where there is none; where it lies.
    manifest
        Its newest version now.
    version
        The version that was made, or would be; None where there was nothing to do.
    made
        Whether that was done.
    changes
        Kind -> ids, sorted: as in `SyncPlan`; and ``rejected`` by this run.
    new_classes, lost_classes
        Names of those that the version before had not, and of those of which no row is left.
    dead, mixed
        Share of the rows on disk that are dead, and how well classes are mixed within chunks, see `mixing`.
    seconds, read, resumed, findings, notes
        What the writing took, the pictures and rows that it wrote, shards that an earlier run had finished; what was
        found in the version; what else a person should know.
    """

    split: str
    folder: Path
    manifest: Manifest
    version: int | None
    made: bool
    changes: dict[str, tuple[str, ...]]
    new_classes: tuple[str, ...] = ()
    lost_classes: tuple[str, ...] = ()
    dead: float = 0.0
    mixed: float = 1.0
    seconds: float = 0.0
    read: int = 0
    resumed: int = 0
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def rejected(self) -> int:
        """Pictures that are not in the data set."""
        return sum(self.manifest.rejected.values())

    def as_json(self) -> dict[str, Any]:
        """It as JSON values."""
        m = self.manifest
        return {
            "out": str(self.folder),
            "version": m.version if self.version is None or self.made else self.version,
            "made": self.made,
            **{kind: len(ids) for kind, ids in self.changes.items()},
            "new_classes": list(self.new_classes),
            "lost_classes": list(self.lost_classes),
            "rows": m.rows,
            "shards": len(m.shards),
            "bytes": m.bytes,
            "rejected_all": dict(m.rejected),
            "dead_share": round(self.dead, 4),
            "mixing": round(self.mixed, 3),
            "seconds": round(self.seconds, 3),
            "resumed_shards": self.resumed,
            "notes": list(self.notes),
            "report": str(self.folder / report_name(m.version)),
        }

    def in_words(self) -> list[str]:
        """Lines for a person."""
        m = self.manifest
        notes = [f"  {note}" for note in self.notes]
        if self.version is None:
            there = f"version {m.version}, {counted_words(m.rows, 'image')}"
            return [f"'{self.folder}' is up to date: {there}. Nothing to do.", *notes]
        kinds = [f"{len(ids)} {kind} ({named(ids)})" for kind, ids in self.changes.items() if ids]
        if self.new_classes:
            kinds.append(f"{counted_words(len(self.new_classes), 'new class')} ({named(self.new_classes)})")
        what = ", ".join(kinds)
        if not self.made:
            return [f"'{self.folder}': version {self.version} would have {what}", *notes]
        return [
            f"'{self.folder}': version {m.version}, {counted_words(m.rows, 'image')}: {what}",
            f"  {counted_words(len(m.shards), m.storage + ' shard')}, {m.bytes / 1e6:.1f} MB, "
            f"{self.dead:.1%} of the rows on disk are dead",
            *notes,
        ]


def synced(build: SyncBuild, manifest: Manifest | None, *, dry_run: bool = False) -> Synced:
    """What became of ``build``, of which ``manifest`` was made, if anything."""
    newest = manifest or build.before
    plan = build.plan
    rejected = {f.id for record in build.records for f in record.findings if f.verdict == "rejected"}
    notes = list(build.notes)
    if len(plan.unreadable):
        ids = [build.known.ids[row] for row in plan.unreadable.tolist()]
        notes.append(
            f"{counted_words(len(ids), 'picture')} cannot be read now, their rows stay as they were: {named(ids)}"
        )
    if build.scan.no_class and manifest is None:
        notes.append(
            f"{counted_words(len(build.scan.no_class), 'picture')} directly under the root, in no class folder: "
            f"{named(build.scan.no_class)}"
        )
    labels = build.hints.labels if build.hints is not None else _labels_to_be(build)
    lost = tuple(
        build.before.classes[k] for k in sorted(set(build.known.labels.tolist()) - set(labels.tolist()))
    )
    if lost:
        notes.append(f"no picture is left of {counted_words(len(lost), 'class')}: {named(lost)}")
    dead = 1 - newest.rows / sum(shard.rows for shard in newest.shards)
    mixed = (
        mixing(labels, RowMap(newest.shards).blocks(newest.chunk_rows)) if len(labels) == newest.rows else 1.0
    )
    if not dry_run:
        notes += _advice(build, newest, dead, mixed)
    return Synced(
        split=build.split,
        folder=build.output.folder,
        manifest=newest,
        version=build.version,
        made=manifest is not None and not dry_run,
        changes={**plan.changes, "rejected": tuple(sorted(rejected))},
        new_classes=build.scan.classes[len(build.before.classes) :],
        lost_classes=lost,
        dead=dead,
        mixed=mixed,
        seconds=build.seconds,
        read=build.written,
        resumed=build.resumed,
        findings=tuple(build.published),
        notes=tuple(notes),
    )


def _labels_to_be(build: SyncBuild) -> npt.NDArray[np.int64]:
    """Class numbers of the rows as they would be, if no picture is rejected."""
    plan, scan = build.plan, build.scan
    return np.concatenate([build.known.labels[plan.kept], scan.labels[plan.fresh], scan.labels[plan.moved]])


def _advice(build: SyncBuild, newest: Manifest, dead: float, mixed: float) -> list[str]:
    """What has become poor, and how to restore it."""
    store, row_bytes = build.options.store, build.options.row_bytes
    even = -(-newest.rows // store.rows_per_shard(newest.rows, row_bytes))
    poor = []
    if dead > MOST_DEAD:
        poor.append(f"{dead:.1%} of the rows on disk are dead")
    if build.hints is not None and mixed < LEAST_MIXED * (fresh := _mixed_anew(build.hints, newest)):
        poor.append(f"classes are mixed within chunks at {mixed:.2f}, a fresh order at {fresh:.2f}")
    if len(newest.shards) > MOST_SHARDS * even:
        poor.append(f"there are {len(newest.shards)} shards, of which {even} would do")
    if not poor:
        return []
    return [
        f"{'; '.join(poor)}: `shardwright reshard '{build.output.folder}' --seed {newest.seed}` restores it"
    ]


def _mixed_anew(hints: Hints, newest: Manifest) -> float:
    """The mixing of the order that the advice would give: of few rows even that may be poor."""
    order = canonical(hints.ids[: hints.rows], np.arange(hints.rows), newest.seed)
    blocks = np.append(np.arange(0, hints.rows, newest.chunk_rows), hints.rows)
    return mixing(hints.labels[order], blocks)
