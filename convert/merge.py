"""`merge`: several data sets as one, with one class map joined by name."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.convert.build import build, newest_of
from shardwright.convert.copy_build import CopyBuild, decided
from shardwright.convert.copy_summary import Copied, copied
from shardwright.convert.joining import added, common_options, different_pixels, join_classes
from shardwright.convert.layouts import (
    LayoutOptions,
    carried_columns,
    even_shards,
    recorded,
    same_saving,
    store_of,
)
from shardwright.convert.made_of import made_of, to_go_on_with, versions_to_copy
from shardwright.convert.options import RunOptions, check_seed
from shardwright.convert.output import Output, check_output, check_paths
from shardwright.convert.plan import MADE_OF
from shardwright.convert.progress import ProgressMaker, Silent
from shardwright.convert.records import Finding
from shardwright.convert.report import read_report
from shardwright.convert.rowsource import RowSource, SourceRows
from shardwright.convert.selection import canonical
from shardwright.datasets.ids import path_to_id
from shardwright.datasets.layout import Manifest
from shardwright.datasets.manifest import read_manifest
from shardwright.errors import SourceError, UsageError, named

_SUMMED = ("files", "bytes", "animated")


@dataclass(frozen=True, slots=True)
class MergeOptions(RunOptions):
    """All that `merge` may be told.

    Parameters
    ----------
    layout
        How the rows are to lie on disk; what is None is as the first data set has it.
    seed
        Of the permutation of all rows. None: they keep their order, one data set after the other.
    prefix
        Whether ids begin with the name of their data set's folder.
    new_version, jobs, max_runtime
        As in `ReshardOptions`.
    """

    layout: LayoutOptions = field(default_factory=LayoutOptions)
    seed: int | None = 0
    prefix: bool = False
    new_version: bool = False

    def __post_init__(self) -> None:
        RunOptions.__post_init__(self)
        check_seed(self.seed or 0)


def merge(
    folders: Sequence[Path], out: Path, options: MergeOptions | None = None, progress: ProgressMaker = Silent
) -> Copied:
    """Make one data set in ``out`` of the newest versions of those in ``folders``.

    Raises
    ------
    UsageError
        Less than two data sets, one of them twice, or paths of which one lies in the other.
    FormatError, ShardError
        One of them is no data set, damaged, or of other columns than the first.
    SourceError
        Images of other shapes, classes that are the same but for case or Unicode form, or ids that are in two of them.
    LockedError, OutputError
        As `reshard` raises them.
    """
    options = options or MergeOptions()
    _check(folders, out)
    ((each, manifest),) = build(
        out,
        [],
        lambda: decided([_build(folders, out, options)], options.new_version),
        options,
        progress,
        "merge",
    )
    return copied(each, manifest)


def dry_run(folders: Sequence[Path], out: Path, options: MergeOptions) -> Copied:
    """Say what `merge` would do, and do nothing. Raises as it does, for what can be known before."""
    _check(folders, out)
    (each,) = decided([_build(folders, out, options)], options.new_version)
    return copied(each, None, dry_run=True)


def _check(folders: Sequence[Path], out: Path) -> None:
    if len(folders) < 2:
        raise UsageError(
            f"{len(folders)} data sets: expected two or more to merge, and the output after them"
        )
    for k, folder in enumerate(folders):
        check_paths(folder, out)
        if any(folder.samefile(other) for other in folders[:k]):
            raise UsageError(f"'{folder}' is given twice")
        read_manifest(folder)
    check_output(out, [])


def _build(folders: Sequence[Path], out: Path, options: MergeOptions) -> CopyBuild:
    manifests, newer = versions_to_copy("merge", folders, to_go_on_with([out], options.new_version))
    first = manifests[0]
    for folder, manifest in zip(folders, manifests, strict=True):
        if manifest.image_shape != first.image_shape:
            here, there = ("x".join(map(str, m.image_shape)) for m in (first, manifest))
            raise SourceError(
                f"images of '{folders[0]}' are {here}, those of '{folder}' are {there}: `shardwright reshard --size` "
                "makes larger ones smaller"
            )
    columns = carried_columns(manifests, folders)
    classes = join_classes(folders, [manifest.classes for manifest in manifests])
    number = {name: k for k, name in enumerate(classes)}
    sources = [
        RowSource(
            folder,
            manifest.version,
            tuple(number[name] for name in manifest.classes),
            f"{path_to_id(folder.resolve().name)}/" if options.prefix else "",
        )
        for folder, manifest in zip(folders, manifests, strict=True)
    ]
    rows = SourceRows(sources, manifests)
    if not len(rows):
        raise SourceError("none of the data sets has a row")
    index = np.arange(len(rows))
    ids = rows.ids(index)
    _refuse_same_ids(ids, rows, folders)
    if options.seed is not None:
        index = canonical(ids, index, options.seed)
    stores = [store_of(folder, manifest) for folder, manifest in zip(folders, manifests, strict=True)]
    store = options.layout.target(stores[0])
    findings, notes = _findings(sources)
    notes += newer + different_pixels(folders, manifests)
    made = CopyBuild(
        split="",
        output=Output(out),
        source=rows,
        index=index,
        draft=replace(
            first,
            storage=store.format,
            classes=classes,
            columns=(*(c for c in first.columns if c.kind == "image"), *columns),
            seed=options.seed or 0,
            rejected=added(manifest.rejected for manifest in manifests),
            skipped=added(manifest.skipped for manifest in manifests),
            source=_source(manifests, options),
            options=common_options(manifests, recorded(first, store, options.seed or 0, None)),
        ),
        store=store,
        shard_rows=even_shards(len(index), int(np.prod(first.image_shape)), store),
        same_saving=all(same_saving(each, store) for each in stores),
        findings=findings,
        newest=newest_of(Output(out)),
        notes=notes,
    )
    made.plan_beside(options.new_version)
    return made


def _refuse_same_ids(ids: list[str], rows: SourceRows, folders: Sequence[Path]) -> None:
    counts = Counter(ids)
    if len(counts) == len(ids):
        return
    same = sorted(id for id, count in counts.items() if count > 1)
    places = [k for k, id in enumerate(ids) if id == same[0]]
    where = [folders[int(np.searchsorted(rows.first, place, side="right")) - 1] for place in places]
    raise SourceError(
        f"{len(same)} ids are in more than one data set: {named(same)}; the first in "
        f"{' and '.join(map(repr, map(str, where)))}. With --prefix each begins with its folder's name"
    )


def _findings(sources: Sequence[RowSource]) -> tuple[list[Finding], list[str]]:
    findings, notes = [], []
    for source in sources:
        try:
            found = read_report(source.folder, source.version)
        except ValueError as error:
            notes.append(f"{error}: it is not carried over")
            continue
        findings += [replace(finding, id=source.prefix + finding.id) for finding in found]
    return findings, notes


def _source(manifests: Sequence[Manifest], options: MergeOptions) -> dict[str, Any]:
    told = {
        **asdict(options.layout),
        "seed": options.seed,
        "prefix": options.prefix,
    }
    counts = ({k: m.source[k] for k in _SUMMED if type(m.source.get(k)) is int} for m in manifests)
    environments: list[Any] = []
    for m in manifests:
        before = m.source.get("pixels_environment", dict(m.environment))
        environments += [
            e for e in (before if isinstance(before, list) else [before]) if e not in environments
        ]
    total = added(counts)
    if "files" in total:
        total["files"] = sum(m.rows + sum(m.rejected.values()) for m in manifests)
    return {
        **total,
        "pixels_environment": environments[0] if len(environments) == 1 else environments,
        MADE_OF: made_of("merge", manifests, told),
    }
