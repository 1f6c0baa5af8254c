"""What is asked of one data set, beside what is there: which of its rows, in which order, in which shards."""

import hashlib
from collections.abc import Sequence
from copy import copy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np

from shardwright.convert.build import newest_of
from shardwright.convert.copy_build import CopyBuild, draft
from shardwright.convert.layouts import (
    LayoutOptions,
    carried_columns,
    even_shards,
    same_saving,
    same_store,
    store_of,
)
from shardwright.convert.made_of import made_of
from shardwright.convert.options import RunOptions, check_seed
from shardwright.convert.output import Output
from shardwright.convert.report import read_report
from shardwright.convert.rowsource import RowSource, SourceRows
from shardwright.convert.selection import canonical, class_numbers
from shardwright.datasets.fit import Resample
from shardwright.datasets.layout import Manifest
from shardwright.datasets.rows import Index
from shardwright.errors import SourceError, UsageError


@dataclass(frozen=True, slots=True)
class ReshardOptions(RunOptions):
    """All that `reshard` may be told; what is None stays as the data set has it.

    Parameters
    ----------
    layout
        How the rows are to lie on disk.
    size
        Height and width of all images, smaller than they are.
    seed
        Of a new permutation. It starts from the ids in their order, so that it does not depend on the present one.
    only_classes
        Classes whose rows are taken alone; class map and numbers stay. Each may be several with commas between.
    ids
        Ids whose rows are taken alone.
    new_version
        Whether an output that was made otherwise is followed by a new version, and an unfinished run given up.
    jobs, max_runtime
        As in `RunOptions`.
    """

    layout: LayoutOptions = field(default_factory=LayoutOptions)
    size: int | None = None
    seed: int | None = None
    only_classes: tuple[str, ...] = ()
    ids: tuple[str, ...] | None = None
    new_version: bool = False

    def __post_init__(self) -> None:
        RunOptions.__post_init__(self)
        check_seed(self.seed or 0)
        if self.size is not None and self.size < 1:
            raise UsageError(f"size is {self.size}, expected at least 1")

    def given(self, classes: Sequence[str]) -> dict[str, Any]:
        """What was asked for of a data set of ``classes``, as JSON values: what decides the bytes beside it."""
        ids = (
            None
            if self.ids is None
            else hashlib.sha256("\n".join(sorted(self.ids)).encode()).hexdigest()[:16]
        )
        return {
            **asdict(self.layout),
            "size": self.size,
            "seed": self.seed,
            "only_classes": [classes[k] for k in class_numbers(self.only_classes, classes)],
            "ids": ids,
        }


class CopyPlan:
    """What is asked of one version of a data set, beside what is there."""

    def __init__(self, folder: Path, manifest: Manifest, options: ReshardOptions) -> None:
        self.folder, self.manifest = folder, manifest
        self.source = RowSource(folder, self.manifest.version)
        self.rows = SourceRows([self.source], [self.manifest])
        if not len(self.rows):
            raise SourceError(f"'{folder}' has no rows")
        self.now = store_of(folder, self.manifest)
        self.store = options.layout.target(self.now)
        self.size = _checked_size(self.manifest, folder, options.size)
        self.columns = carried_columns([self.manifest], [folder])
        self.found_ids: set[str] = set()
        self.index = self._index(options)
        height, width, channels = self.manifest.image_shape
        self.shape = (self.size or height, self.size or width, channels)
        self.shard_rows = self._shard_rows(options)

    @property
    def all_rows(self) -> bool:
        return len(self.index) == len(self.rows) and self.size is None

    def _index(self, options: ReshardOptions) -> Index:
        index = np.arange(len(self.rows))
        if options.only_classes:
            numbers = class_numbers(options.only_classes, self.manifest.classes)
            index = index[np.isin(self.rows.column("label", index), numbers)]
        ids: list[str] | None = None
        if options.ids is not None or options.seed is not None:
            ids = self.rows.ids(index)
        if options.ids is not None and ids is not None:
            wanted = set(options.ids)
            chosen = [k for k, id in enumerate(ids) if id in wanted]
            self.found_ids = {ids[k] for k in chosen}
            index, ids = index[chosen], [ids[k] for k in chosen]
        return index if options.seed is None or ids is None else canonical(ids, index, options.seed)

    def _shard_rows(self, options: ReshardOptions) -> list[int]:
        """As many rows a shard as now, where nothing asks for others: then whole shards are copied."""
        row_bytes = int(np.prod(self.shape))
        even = even_shards(len(self.index), row_bytes, self.store)
        in_order = len(self.index) == len(self.rows) and bool((np.diff(self.index) == 1).all())
        as_now = (
            options.layout.shard_mib is None
            and self.store.chunk_rows == self.now.chunk_rows
            and self.size is None
            and in_order
            and not any(shard.dead_rows for shard in self.manifest.shards)
        )
        return [shard.rows for shard in self.manifest.shards] if as_now else even

    def taking(self, rows: Index) -> "CopyPlan":
        """The same of some of its rows alone."""
        taken = copy(self)
        taken.index = self.index[rows]
        taken.shard_rows = even_shards(len(rows), int(np.prod(self.shape)), self.store)
        return taken

    def is_there(self) -> bool:
        """Whether the data set lies as it is to lie."""
        return (
            self.all_rows
            and same_store(self.now, self.store)
            and self.shard_rows == [shard.rows for shard in self.manifest.shards]
            and not any(shard.dead_rows for shard in self.manifest.shards)
            and bool((self.index == np.arange(len(self.index))).all())
        )

    def build(self, split: str, output: Output, options: ReshardOptions) -> CopyBuild:
        """What makes it in ``output``."""
        notes, findings = [], []
        try:
            findings = read_report(self.folder, self.manifest.version)
        except ValueError as error:
            notes.append(f"{error}: it is not carried over")
        seed = self.manifest.seed if options.seed is None else options.seed
        hints = self.rows.hints[0] if len(self.index) == len(self.rows) else None
        return CopyBuild(
            split=split,
            output=output,
            source=self.rows,
            index=self.index,
            draft=draft(
                self.manifest,
                len(self.index),
                self.shape,
                self.store,
                seed,
                self.size,
                made_of("reshard", [self.manifest], options.given(self.manifest.classes)),
            ),
            store=self.store,
            shard_rows=self.shard_rows,
            same_saving=same_saving(self.now, self.store),
            size=self.size,
            resample=_resample_of(self.manifest),
            all_rows=self.all_rows,
            findings=findings,
            hints=hints.permuted(self.index) if hints else None,
            newest=newest_of(output),
            notes=notes,
        )


def _checked_size(manifest: Manifest, folder: Path, size: int | None) -> int | None:
    height, width, _ = manifest.image_shape
    if size is None or (size, size) == (height, width):
        return None
    if height != width:
        raise UsageError(f"size is {size}, and the images of '{folder}' are no squares: {height}x{width}")
    if size > height:
        raise UsageError(
            f"size is {size}, and the images of '{folder}' are {height}x{width}: only smaller ones can be made of "
            "them. Convert the pictures again for larger ones"
        )
    return size


def _resample_of(manifest: Manifest) -> Resample:
    """The resampling that its pictures were resized by."""
    found = manifest.options.get("resample")
    return cast(Resample, found) if found in get_args(Resample) else "bilinear"
