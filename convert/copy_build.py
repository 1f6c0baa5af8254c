"""A data set that is being made of rows of others."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.convert.build import Build
from shardwright.convert.copying import CopyTask
from shardwright.convert.duplicates import duplicates
from shardwright.convert.encode import encode_chunk
from shardwright.convert.hints import Hints
from shardwright.convert.layouts import recorded
from shardwright.convert.made_of import refuse_others, same_made
from shardwright.convert.options import StoreOptions
from shardwright.convert.output import counted
from shardwright.convert.plan import MADE_OF, PIECED, SYNCED_FROM, ShardPlan, shard_stem
from shardwright.convert.records import Finding, ShardRecord
from shardwright.convert.report import of_kept_rows
from shardwright.convert.rowsource import SourceRows
from shardwright.convert.workers import Workers
from shardwright.datasets.fit import Resample
from shardwright.datasets.layout import Manifest
from shardwright.datasets.reader import Reader
from shardwright.datasets.rows import Index


@dataclass(slots=True, kw_only=True)
class CopyBuild(Build):
    """A data set that is being made of rows of others.

    Attributes
    ----------
    source, index
        What its rows are from, and which they are, in order.
    draft
        Its manifest, but for version, shards, environment, and what is counted. Its stats hold where ``all_rows``.
    store, shard_rows, same_saving, size, resample
        How its shards are laid out, how many rows each has; the rest as in `CopyTask`.
    all_rows
        Whether these are all rows of one data set, of the same pixels: then stats, report and hint stay what they are.
    findings, hints
        What the reports of the sources say; and what is known of the pictures' source, None if it does not hold.
    """

    source: SourceRows
    index: Index
    draft: Manifest
    store: StoreOptions
    shard_rows: list[int]
    same_saving: bool
    size: int | None = None
    resample: Resample = "bilinear"
    all_rows: bool = False
    findings: list[Finding] = field(default_factory=list)
    hints: Hints | None = None

    @property
    def image_shape(self) -> tuple[int, int, int]:
        return self.draft.image_shape

    @property
    def decodes(self) -> bool:
        return self.size is not None

    def plan(self, version: int) -> None:
        """It is to be ``version``."""
        self.version = version
        ends = np.cumsum(self.shard_rows).tolist()
        self.plans = [
            ShardPlan(number, shard_stem(version, number), self.index[end - rows : end])
            for number, (rows, end) in enumerate(zip(self.shard_rows, ends, strict=True))
        ]

    def plan_beside(self, new_version: bool) -> None:
        """Say which version it is to be in an output of its own.

        Raises
        ------
        OutputError
            The output was made otherwise, without ``new_version``.
        """
        newest = self.newest
        if newest is None:
            self.plan(1)
            return
        if same_made(newest, self.draft) and self.output.holds(newest):
            return
        if not new_version:
            refuse_others(newest, self.draft, self.source.sources, self.output.folder)
        self.plan(newest.version + 1)

    def request(self) -> dict[str, Any]:
        source = {key: value for key, value in self.draft.source.items() if key == MADE_OF}
        return {
            "version": self.version,
            "options": dict(self.draft.options),
            "source": source,
            "rows": [hashlib.sha256(self.index.tobytes()).hexdigest(), *self.shard_rows],
        }

    def tasks(self) -> Iterator[CopyTask]:
        columns = tuple(column.name for column in self.draft.columns if column.kind != "image")
        known = self.source.known
        for plan in self.missing:
            yield CopyTask(
                number=plan.number,
                stem=plan.stem,
                partial=self.output.work / Path(plan.stem).name,
                sources=tuple(self.source.sources),
                index=plan.samples,
                columns=columns,
                store=self.store,
                same_saving=self.same_saving,
                size=self.size,
                resample=self.resample,
                sums=not self.all_rows,
                decodes=self.decodes,
                known=None if known is None else known.taking(plan.samples),
            )

    def stored_share(self, workers: Workers) -> float:
        if self.store.codec == "none":
            return 1.0
        index = self.missing[0].samples[: self.store.chunk_rows]
        pixels = np.empty((len(index), *self.source.manifests[0].image_shape), np.uint8)
        self.source.images(index, pixels.reshape(len(index), -1))
        payload, _, _ = encode_chunk(pixels, len(index), self.store.codec, self.store.min_saving)
        return len(payload) / pixels.nbytes

    def fits(self, record: ShardRecord, plan: ShardPlan) -> bool:
        return record.shard is not None and record.shard.rows == len(plan.samples)  # no row is left out

    def name_damage(self) -> None:
        if not self.source.is_removed():
            index = [plan.samples for plan in self.missing]
            self.source.refuse_damage(np.concatenate(index) if index else np.empty(0, np.int64))

    def manifest(self) -> Manifest:
        records, sums, environment = self.finished()
        return replace(
            self.draft,
            version=self.version or 1,
            rows=len(self.index),
            shards=tuple(record.shard for record in records if record.shard is not None),
            stats=self.draft.stats if self.all_rows else sums.stats(),
            environment=environment,
        )

    def accompany(self, manifest: Manifest) -> Manifest:
        findings = self.findings
        if not self.all_rows:
            reader, rows = Reader(self.output.folder, manifest), np.arange(manifest.rows)
            ids = reader.column("id", rows).tolist()
            findings = of_kept_rows(findings, set(ids))
            if any(column.name == "source_sha256" for column in manifest.columns):
                findings += duplicates(ids, reader.labels(rows), reader.column("source_sha256", rows))
            manifest = replace(
                manifest, suspect=counted(findings, "suspect"), duplicates=counted(findings, "duplicate")
            )
        self.output.accompany(manifest, findings, self.hints)
        return manifest


def draft(
    manifest: Manifest,
    rows: int,
    shape: tuple[int, int, int],
    store: StoreOptions,
    seed: int,
    size: int | None,
    origin: dict[str, Any],
) -> Manifest:
    """What the manifest of a copy says that is known before it is made."""
    columns = tuple(
        replace(column, shape=shape) if column.kind == "image" else column for column in manifest.columns
    )
    source = {key: value for key, value in manifest.source.items() if key not in (SYNCED_FROM, PIECED)}
    source.setdefault("pixels_environment", dict(manifest.environment))
    if "files" in source:  # what is left out here is none of its pictures
        source["files"] = rows + sum(manifest.rejected.values())
    return replace(
        manifest,
        storage=store.format,
        columns=columns,
        seed=seed,
        options=recorded(manifest, store, seed, size),
        source={**source, MADE_OF: origin},
    )


def decided(builds: Sequence[CopyBuild], new_version: bool) -> Sequence[CopyBuild]:
    """``builds``, if none of them would throw the finished shards of another run away, or may."""
    if not new_version:
        for each in builds:
            each.refuse_unfinished()
    return builds
