"""`split`: a data set dealt out over parts such as train and val, by a hash of each id."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import numpy as np

from shardwright.convert.build import build
from shardwright.convert.copy_build import CopyBuild, decided
from shardwright.convert.copy_plan import CopyPlan, ReshardOptions
from shardwright.convert.copy_summary import Copied, copied
from shardwright.convert.made_of import made_of, to_go_on_with, versions_to_copy
from shardwright.convert.options import RunOptions, check_seed
from shardwright.convert.output import Output, check_output, check_paths, counted
from shardwright.convert.plan import MADE_OF
from shardwright.convert.progress import ProgressMaker, Silent
from shardwright.convert.selection import sides
from shardwright.datasets.layout import SPLIT_NAMES
from shardwright.datasets.manifest import read_manifest
from shardwright.errors import OutputError, SourceError, UsageError, named


@dataclass(frozen=True, slots=True)
class SplitOptions(RunOptions):
    """All that `split` may be told.

    Parameters
    ----------
    shares
        Part -> the share of the rows of each class that it is to get, by expectation. See `parse_shares`.
    seed
        Of the hash that decides the part of an id.
    new_version, jobs, max_runtime
        As in `ReshardOptions`.
    """

    shares: Mapping[str, Fraction]
    seed: int = 0
    new_version: bool = False

    def __post_init__(self) -> None:
        RunOptions.__post_init__(self)
        check_seed(self.seed)
        if len(self.shares) < 2:
            raise UsageError(f"{len(self.shares)} parts: expected two or more")


def split(
    source: Path, out: Path, options: SplitOptions, progress: ProgressMaker = Silent
) -> dict[str, Copied]:
    """Make a data set a part in ``out`` of the rows of ``source``: part -> what became of it.

    Rows keep their order, and all parts have the class map of ``source``. The part of an id follows from it and the
    seed alone, so that it stays there when other pictures come.

    Raises
    ------
    UsageError
        Paths of which one lies in the other.
    FormatError, ShardError
        ``source`` is no data set, or damaged.
    SourceError
        A part would be empty.
    LockedError, OutputError
        As `reshard` raises them; or ``out`` holds a part that is not asked for.
    """
    _check(source, out, options)
    made = build(out, list(options.shares), lambda: _builds(source, out, options), options, progress, "split")
    return {each.split: copied(each, manifest) for each, manifest in made}


def dry_run(source: Path, out: Path, options: SplitOptions) -> dict[str, Copied]:
    """Say what `split` would do, and do nothing. Raises as it does, for what can be known before."""
    _check(source, out, options)
    return {each.split: copied(each, None, dry_run=True) for each in _builds(source, out, options)}


def _check(source: Path, out: Path, options: SplitOptions) -> None:
    check_paths(source, out)
    read_manifest(source)
    check_output(out, list(options.shares))
    if held := [name for name in SPLIT_NAMES if name not in options.shares and (out / name).exists()]:
        raise OutputError(
            f"the output '{out}' holds the part {named(held)}, which is not asked for: its pictures would be in two "
            "parts. Use another output, or remove it yourself"
        )


def _builds(source: Path, out: Path, options: SplitOptions) -> Sequence[CopyBuild]:
    plain = ReshardOptions()
    runs = to_go_on_with([out / name for name in options.shares], options.new_version)
    (manifest,), notes = versions_to_copy("split", [source], runs)
    whole = CopyPlan(source, manifest, plain)
    places = sides(whole.rows.ids(whole.index), options.seed, options.shares)
    if empty := [name for name, rows in places.items() if not len(rows)]:
        raise SourceError(
            f"'{source}' has {len(whole.rows)} rows, of which {named(empty)} would get none: use larger shares, or "
            "another seed"
        )
    told = {
        "by": {name: f"{share.numerator}/{share.denominator}" for name, share in options.shares.items()},
        "seed": options.seed,
    }
    builds = []
    for name, rows in places.items():
        plan = whole.taking(np.asarray(rows))
        each = plan.build(name, Output(out / name), plain)
        origin = {**made_of("split", [plan.manifest], told), "part": name}
        # What was rejected has no row, but a side.
        lost = [f for f in each.findings if f.verdict == "rejected"]
        own = [lost[k] for k in sides([f.id for f in lost], options.seed, options.shares)[name].tolist()]
        each.findings = own + [f for f in each.findings if f.verdict != "rejected"]
        counts = {"files": len(rows) + len(own)} if "files" in each.draft.source else {}
        each.draft = replace(
            each.draft,
            rejected=counted(own, "rejected"),
            source={
                "pixels_environment": each.draft.source["pixels_environment"],
                **counts,
                MADE_OF: origin,
            },
        )
        each.notes += notes
        each.plan_beside(options.new_version)
        builds.append(each)
    return decided(builds, options.new_version)
