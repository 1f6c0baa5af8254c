"""One data set to make of rows of others: from what is asked for to the work that is missing."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np

from shardwright.convert.copying import CopyTask
from shardwright.convert.madeof import refuse_others, same_made
from shardwright.convert.options import StoreOptions
from shardwright.convert.output import Output
from shardwright.convert.plan import MADE_OF, ShardPlan, refuse_other_request
from shardwright.convert.relayout import recorded
from shardwright.convert.rowsource import RowSource, SourceRows
from shardwright.convert.write import Finding, ShardRecord
from shardwright.datasets.fit import Resample
from shardwright.datasets.layout import SHARDS_FOLDER, Manifest
from shardwright.datasets.manifest import read_manifest
from shardwright.datasets.rows import Index


@dataclass(slots=True)
class Rewrite:
    """One data set to make of rows of others.

    Attributes
    ----------
    split, output, rows, index
        Its split, empty where there is none; where it goes; what its rows are from, and which they are, in order.
    draft
        Its manifest, but for version, shards, environment, and what is counted. Its stats hold where ``all_rows``.
    store, shard_rows, same_saving, size, resample
        How its shards are laid out, how many rows each has; the rest as in `CopyTask`.
    all_rows
        Whether these are all rows of one data set, of the same pixels: then stats, report and hint stay what they are.
    findings, hint
        What the reports of the sources say; and what is known of the pictures' source, empty if it does not hold.
    newest, version
        The newest version that is there, and the one that is to be made; None where the newest is what is asked for.
    plans, records, resumed, notes, seconds, copied
        All its shards; those that are finished; how many an earlier run had finished; what a person should know; what
        this run took, and the rows that it copied.
    """

    split: str
    output: Output
    rows: SourceRows
    index: Index
    draft: Manifest
    store: StoreOptions
    shard_rows: list[int]
    same_saving: bool
    size: int | None = None
    resample: Resample = "bilinear"
    all_rows: bool = False
    findings: list[Finding] = field(default_factory=list)
    hint: str = ""
    newest: Manifest | None = None
    version: int | None = None
    plans: list[ShardPlan] = field(default_factory=list)
    records: list[ShardRecord] = field(default_factory=list)
    resumed: int = 0
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    copied: int = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of one of its images."""
        return int(np.prod(self.draft.image_shape))

    @property
    def missing(self) -> list[ShardPlan]:
        """Shards that are still to be written."""
        done = {record.number for record in self.records}
        return [plan for plan in self.plans if plan.number not in done]

    def bytes_missing(self) -> int:
        """Bytes of pixels that the missing shards have."""
        return sum(len(plan.samples) for plan in self.missing) * self.row_bytes

    def plan(self, version: int) -> None:
        """It is to be ``version``."""
        self.version = version
        ends = np.cumsum(self.shard_rows).tolist()
        self.plans = [
            ShardPlan(number, f"{SHARDS_FOLDER}/{version:06d}-{number:05d}", self.index[end - rows : end])
            for number, (rows, end) in enumerate(zip(self.shard_rows, ends, strict=True))
        ]

    def request(self) -> dict[str, Any]:
        """What an unfinished run of it is told by."""
        source = {key: value for key, value in self.draft.source.items() if key == MADE_OF}
        return {
            "version": self.version,
            "options": dict(self.draft.options),
            "source": source,
            "rows": [hashlib.sha256(self.index.tobytes()).hexdigest(), *self.shard_rows],
        }

    def tasks(self) -> Iterator[CopyTask]:
        """The work that is missing."""
        columns = tuple(column.name for column in self.draft.columns if column.kind != "image")
        for plan in self.missing:
            yield CopyTask(
                number=plan.number,
                stem=plan.stem,
                partial=self.output.work / Path(plan.stem).name,
                sources=tuple(self.rows.sources),
                index=plan.samples,
                columns=columns,
                store=self.store,
                same_saving=self.same_saving,
                size=self.size,
                resample=self.resample,
                sums=not self.all_rows,
            )


def refuse_unfinished(part: Rewrite) -> None:
    """Keep finished shards of another run from being thrown away.

    Raises
    ------
    OutputError
        There is an unfinished conversion, or a rewrite, with other options.
    """
    before = part.output.unfinished.request()
    if before is not None and part.version is not None and part.output.unfinished.shards():
        refuse_other_request(before, part.request(), str(part.output.folder))


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
    source = dict(manifest.source)
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


def newest_of(output: Output) -> Manifest | None:
    """The newest version in an output; None where there is none."""
    return read_manifest(output.folder) if (output.folder / "manifest.json").exists() else None


def resample_of(manifest: Manifest) -> Resample:
    """The resampling that its pictures were resized by."""
    found = manifest.options.get("resample")
    return cast(Resample, found) if found in get_args(Resample) else "bilinear"


def decide_beside(part: Rewrite, sources: Sequence[RowSource], new_version: bool) -> None:
    """Say which version ``part`` is to be in an output of its own.

    Raises
    ------
    OutputError
        The output was made otherwise, without ``new_version``.
    """
    newest, wanted = part.newest, part.draft.source[MADE_OF]
    if newest is None:
        part.plan(1)
        return
    if same_made(newest, wanted) and part.output.holds(newest):
        return
    if not new_version:
        refuse_others(newest, wanted, sources, part.draft.classes, part.output.folder)
    part.plan(newest.version + 1)
