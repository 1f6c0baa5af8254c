"""A data set that is being brought up to date: its shards stay, rows of them go, new shards come."""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwright.convert.copying import CopyTask
from shardwright.convert.duplicates import duplicates
from shardwright.convert.hints import Hints, Stamps
from shardwright.convert.output import counted
from shardwright.convert.plan import MADE_OF, SYNCED_FROM, ShardPlan, deal, differences
from shardwright.convert.records import Finding, ShardRecord, without_class
from shardwright.convert.rowsource import RowSource, SourceRows
from shardwright.convert.scanned_build import ScannedBuild
from shardwright.convert.stats import Summing, Sums
from shardwright.convert.sync_plan import SyncPlan
from shardwright.convert.workers import Task
from shardwright.datasets.files import CURE
from shardwright.datasets.layout import Manifest, Shard, id_to_path
from shardwright.datasets.reader import Reader
from shardwright.datasets.rows import Index, RowMap
from shardwright.errors import ShardError, SourceError

#: Images that are read together to take their sums.
_TOGETHER = 64


@dataclass(slots=True, kw_only=True)
class SyncBuild(ScannedBuild):
    """A data set that is being brought up to date.

    Attributes
    ----------
    scan
        In a class map with new classes behind the old.
    before, known, plan
        Its newest version; what was known of its source then; and what became of that.
    findings_before
        What the report of that version says.
    hints
        What is known of the source of the version that was published.
    """

    before: Manifest
    known: Hints
    plan: SyncPlan
    findings_before: Sequence[Finding] = ()
    hints: Hints | None = None

    @property
    def decodes(self) -> bool:
        return len(self.plan.fresh) > 0

    def decide(self) -> None:
        """Say which version it will be, and of which new shards.

        Raises
        ------
        SourceError
            More than half of the rows would go, without ``allow_shrink``; or pictures that may only be out of sight.
        ShardError
            A file of the version that is there is missing, or of another size.
        """
        self.newest = self.before
        if not self.output.holds(self.before):
            raise ShardError(
                f"version {self.before.version} of '{self.output.folder}' lacks a file, or one has another size. {CURE}"
            )
        if self.plan.is_empty and self.before.classes == self.scan.classes:
            return
        self._refuse_hidden()
        self._refuse_loss(len(self.plan.kept) + len(self.plan.fresh) + len(self.plan.moved))
        self.version = self.before.version + 1
        # As many rows as the other shards have: the whole decides, not the little that comes.
        rows = self.options.store.rows_per_shard(
            len(self.plan.kept) + len(self.plan.fresh) + len(self.plan.moved), self.options.row_bytes
        )
        order = np.random.Generator(np.random.PCG64([self.options.seed, self.version]))
        fresh = self.plan.fresh[order.permutation(len(self.plan.fresh))]
        self.plans = deal([fresh, self.plan.moved], rows, self.version)
        if salvaged := self.salvage(self.plan.fresh, self.plan.moved):
            done = np.concatenate([plan.samples for plan in salvaged])
            rest = [places[np.isin(places, done, invert=True)] for places in (fresh, self.plan.moved)]
            new = deal(rest, rows, self.version, self.salvaged)
            self.plans = sorted([*salvaged, *new], key=lambda plan: plan.number)

    def _refuse_hidden(self) -> None:
        """Keep rows from going whose pictures may be there, where they cannot be seen."""
        there = set(self.scan.ids)
        gone = [id for id in (self.known.ids[row] for row in self.plan.dead.tolist()) if id not in there]
        pictures = [self.scan.root / path for id in gone if (path := _path_of(id))]
        folders = {parent for path in pictures for parent in path.parents if self.scan.root in parent.parents}
        for folder in sorted(folders):
            if os.path.lexists(folder) and not folder.is_dir():
                raise SourceError(
                    f"'{folder}' was a folder of pictures, and is none now: is its disk mounted? Mount it; or remove "
                    "what lies in its place, if its pictures are to go"
                )
        for picture in pictures:
            if os.path.lexists(picture) and not os.access(picture, os.R_OK):
                raise SourceError(
                    f"cannot read '{picture}', which was a picture: give permission to read it, or move it away if it "
                    "is to go"
                )

    def _refuse_loss(self, rows: int) -> None:
        if rows and (2 * rows >= self.before.rows or self.options.allow_shrink):
            return
        raise SourceError(
            f"{rows} of the {self.before.rows} rows of version {self.before.version} of '{self.output.folder}' would "
            f"be left: '{self.scan.root}' has {len(self.scan)} pictures. Nothing was published. "
            + ("If that is meant, use --allow-shrink" if rows else "Is its disk mounted?")
        )

    def request(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "options": dict(self.before.options),
            "source": {
                MADE_OF: {"command": "sync", "options": {}},
                "before": self.before.fingerprint(),
                "classes": list(self.scan.classes),
            },
            "found": {
                "scan": self.scan.fingerprint(),
                "rows": [plan.samples.tolist() for plan in self.plans],
                "moved_from": self.plan.moved_from.tolist(),
            },
        }

    def task(self, plan: ShardPlan) -> Task:
        if not self._is_moved(plan):
            return self.from_pictures(plan)
        return CopyTask(
            number=plan.number,
            stem=plan.stem,
            partial=self.output.work / Path(plan.stem).name,
            sources=(RowSource(self.output.folder, self.before.version),),
            index=self._moved_from(plan),
            columns=tuple(c.name for c in self.before.columns if c.kind != "image"),
            store=self.options.store,
            same_saving=True,
            size=None,
            resample="bilinear",
            sums=True,
            decodes=self.decodes,
            given={
                "id": np.array([self.scan.ids[at] for at in plan.samples.tolist()], object),
                "label": self.scan.labels[plan.samples],
            },
        )

    def _is_moved(self, plan: ShardPlan) -> bool:
        return bool(np.isin(plan.samples[0], self.plan.moved))

    def _moved_from(self, plan: ShardPlan) -> Index:
        found: Index = self.plan.moved_from[np.searchsorted(self.plan.moved, plan.samples)]
        return found

    def fits(self, record: ShardRecord, plan: ShardPlan) -> bool:
        if not self._is_moved(plan):
            return ScannedBuild.fits(self, record, plan)
        ids = [self.scan.ids[at] for at in plan.samples.tolist()]
        return (
            record.shard is not None
            and record.shard.rows == len(ids)
            and record.copied == dict(zip(ids, self._moved_from(plan).tolist(), strict=True))
        )

    def completed(self, record: ShardRecord, plan: ShardPlan) -> ShardRecord:
        return record if self._is_moved(plan) else ScannedBuild.completed(self, record, plan)

    def findings(self) -> list[Finding]:
        """What is rejected or suspect: of rows that stay as they were, and of new ones."""
        stay = {self.known.ids[row] for row in self.plan.kept.tolist()}
        moved: dict[str, list[str]] = {}
        for row, at in zip(self.plan.moved_from.tolist(), self.plan.moved.tolist(), strict=True):
            moved.setdefault(self.known.ids[row], []).append(self.scan.ids[at])
        rejected = {self.scan.ids[at] for at in self.plan.rejected.tolist()}
        found = without_class(self.scan.no_class)
        for finding in self.findings_before:
            if finding.verdict == "suspect" and finding.id in stay:
                found.append(finding)
            elif finding.verdict == "suspect" and finding.id in moved:
                found += [replace(finding, id=id) for id in moved[finding.id]]
            elif finding.verdict == "rejected" and finding.id in rejected:
                found.append(finding)
        return found + [finding for record in self.records for finding in record.findings]

    def conclude(self) -> None:
        """Pictures that were rejected, and are rejected again, are no new version."""
        known = set(self.known.ids[self.known.rows :])
        amounts_to_nothing = (
            not len(self.plan.dead)
            and self.before.classes == self.scan.classes
            and all(record.shard is None for record in self.records)
            and all(self.scan.ids[at] in known for at in self.plan.fresh.tolist())
        )
        if amounts_to_nothing:
            self.version = None
            self.remember()
            self.output.unfinished.forget()

    def manifest(self) -> Manifest:
        records, sums, environment = self.finished()
        new = [record.shard for record in records if record.shard is not None]
        rows = len(self.plan.kept) + sum(shard.rows for shard in new)
        findings = self.findings()
        self._refuse_loss(rows)
        sums.merge(self._sums_of_kept())
        source = dict(self.before.source)
        made_by = source.get("pixels_environment", dict(self.before.environment))
        environments = made_by if isinstance(made_by, list) and made_by else [dict(self.before.environment)]
        environments = [made_by] if isinstance(made_by, dict) else environments
        if self.decodes and environment not in environments:
            self._note_other_environment(environments[-1], environment)
            environments = [*environments, environment]
        return replace(
            self.before,
            version=self.version or 1,
            rows=rows,
            classes=self.scan.classes,
            shards=(*self._shards_of_kept(), *new),
            stats=sums.stats(),
            rejected=counted(findings, "rejected"),
            suspect=counted(findings, "suspect"),
            skipped=self.scan.skipped,
            source={
                # How many of the pictures that stay are animated is not known.
                **{key: value for key, value in source.items() if key not in (MADE_OF, "animated")},
                "files": self.inputs,
                "bytes": int(self.scan.sizes.sum()),
                "pixels_environment": environments[0] if len(environments) == 1 else environments,
                SYNCED_FROM: self.before.version,
            },
            environment=environment or self.before.environment,
        )

    def _note_other_environment(self, before: Any, now: dict[str, str]) -> None:
        different = "; ".join(differences(before if isinstance(before, dict) else {}, now))
        self.notes.append(
            f"new pictures were decoded in another environment than the ones before, and may differ by a grey level: "
            f"{different}. `shardwright convert --new-version` makes all of them alike"
        )

    def _shards_of_kept(self) -> list[Shard]:
        """The shards that are there, with the rows that go marked; without those of which no row is left."""
        rows = RowMap(self.before.shards)
        slots = rows.slot_of(self.plan.dead)
        where = rows.shard_of(slots)
        shards = []
        for number, shard in enumerate(self.before.shards):
            dead = (slots[where == number] - rows.first_slot[number]).tolist()
            if len(dead) < shard.living_rows:
                shards.append(replace(shard, dead_rows=tuple(sorted((*shard.dead_rows, *dead)))))
        return shards

    def _sums_of_kept(self) -> Sums:
        """The sums over the rows that stay: those of the version before without the rows that go, where it has them."""
        sums = Sums.of(self.before.stats)
        if sums is not None and len(self.plan.dead) < len(self.plan.kept):
            try:
                return sums.less(self._sums_of(self.plan.dead))
            except ShardError as error:  # they go: that they are damaged is no reason to keep them
                self.notes.append(f"rows that go are damaged, so that all that stay were read: {error}")
        return self._sums_of(self.plan.kept)

    def _sums_of(self, index: Index) -> Sums:
        rows = SourceRows([RowSource(self.output.folder, self.before.version)], [self.before])
        summing = Summing(self.image_shape)
        pixels = np.empty((_TOGETHER, *self.image_shape), np.uint8)
        for start in range(0, len(index), _TOGETHER):
            some = index[start : start + _TOGETHER]
            rows.images(some, pixels[: len(some)].reshape(len(some), -1))
            for image in pixels[: len(some)]:
                summing.add(image)
        return summing.sums()

    def accompany(self, manifest: Manifest) -> Manifest:
        self.hints = hints = self._hints(manifest)
        same = duplicates(hints.ids, hints.labels, hints.hashes)
        manifest = replace(manifest, duplicates=counted(same, "duplicate"))
        self.published = self.findings() + same
        self.output.accompany(manifest, self.published, hints)
        return manifest

    def remember(self) -> None:
        """Keep what is known of the source of the newest version now, if that is more than was known.

        Where another version is to be made: what was found out of rows that stay, so that a run that is stopped has not
        read their pictures for nothing.
        """
        now = self._hints_of_before() if self.version else self._hints(self.before)
        if not self.known.says_no_less(now):
            self.output.remember(self.before, now)

    @property
    def _seen(self) -> npt.NDArray[np.bool_]:
        """(kept,): whether a row that stays is what its picture is now: it is not too new, and can be read."""
        return (self.plan.kept_at >= 0) & ~np.isin(self.plan.kept, self.plan.unreadable)

    def _certain(self) -> Stamps:
        """What was known, with what is to be looked at again in any case as unknown."""
        doubtful = np.flatnonzero(~self.known.is_certain())
        return self.known.stamps.put(doubtful, Stamps.unknown(len(doubtful)))

    def _hints_of_before(self) -> Hints:
        seen = self._seen
        stamps = self._certain().put(self.plan.kept[seen], self.scan.stamps.taking(self.plan.kept_at[seen]))
        return replace(self.known, began_ns=self.scan.began_ns, stamps=stamps)

    def _hints(self, manifest: Manifest) -> Hints:
        """What the pictures of ``manifest`` were: of rows that stay, of new ones, of those that were rejected."""
        lost = {f.id for record in self.records for f in record.findings if f.verdict == "rejected"}
        made = np.concatenate([np.empty(0, np.int64), *(plan.samples for plan in self.plans)])
        is_lost = np.array([self.scan.ids[at] in lost for at in made.tolist()], bool)
        new, read = made[~is_lost], self.stamps()
        moved = set(self.plan.moved.tolist())
        scanned = self.scan.stamps
        now = [
            scanned.at(at) if at in moved else read.get(self.scan.ids[at])
            for at in (*new.tolist(), *made[is_lost].tolist())
        ]
        kept, seen = self.plan.kept, self._seen
        front = self._certain().taking(kept)
        front = front.put(np.flatnonzero(seen), scanned.taking(self.plan.kept_at[seen]))
        rejected = [*made[is_lost].tolist(), *self.plan.rejected.tolist()]
        return Hints(
            fingerprint=self.scan.fingerprint() if seen.all() else "",
            began_ns=self.began_ns(),
            rows=manifest.rows,
            ids=[
                *(self.known.ids[row] for row in kept.tolist()),
                *(self.scan.ids[at] for at in (*new.tolist(), *rejected)),
            ],
            stamps=front.followed_by(Stamps.of(now)).followed_by(scanned.taking(self.plan.rejected)),
            labels=np.concatenate([self.known.labels[kept], self.scan.labels[new]]),
            hashes=self._hashes(manifest),
        )

    def _hashes(self, manifest: Manifest) -> npt.NDArray[np.uint8]:
        """SHA-256 of each row's picture: known of those that stay, of new ones in their shards."""
        kept = self.known.hashes[self.plan.kept]
        if len(kept) == manifest.rows:
            return kept
        reader = Reader(self.output.folder, manifest)
        return np.concatenate([kept, reader.column("source_sha256", np.arange(len(kept), manifest.rows))])


def _path_of(id: str) -> str:
    """The path that an id says; empty for what is no id."""
    with suppress(ValueError):
        return id_to_path(id)
    return ""
