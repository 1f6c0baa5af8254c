"""`reshard`: a data set laid out anew, as its next version or as another data set; a part of it, smaller, reordered."""

from collections.abc import Sequence
from pathlib import Path

from shardwright.convert.build import build
from shardwright.convert.copy_build import CopyBuild, decided
from shardwright.convert.copy_plan import CopyPlan, ReshardOptions
from shardwright.convert.copy_summary import Copied, copied
from shardwright.convert.lock import data_sets_of
from shardwright.convert.made_of import to_go_on_with, versions_to_copy
from shardwright.convert.output import (
    Output,
    check_output,
    check_paths,
    check_source,
    other_splits,
    refuse_links,
)
from shardwright.convert.progress import ProgressMaker, Silent
from shardwright.datasets.files import CURE
from shardwright.datasets.manifest import read_manifest
from shardwright.errors import OutputError, ShardError, SourceError, named


def reshard(
    source: Path,
    out: Path | None = None,
    options: ReshardOptions | None = None,
    progress: ProgressMaker = Silent,
) -> dict[str, Copied]:
    """Lay the newest version of ``source``, or of each of its splits, out anew: split -> what became of it.

    Parameters
    ----------
    out
        A folder that is missing, empty, or holds what the same command made before. None: ``source`` itself gets a
        new version. Where the newest version is what is asked for, nothing is made.

    Raises
    ------
    UsageError
        Options that contradict one another, or the data set; or paths of which one lies in the other.
    FormatError, ShardError
        ``source`` is no data set, or damaged.
    LockedError
        Another process writes to the output.
    OutOfTimeError
        ``options.max_runtime`` is over; finished shards are kept.
    OutputError
        ``out`` holds something else, was made otherwise, or cannot be written.
    """
    options = options or ReshardOptions()
    target, folders = _checked(source, out)
    made = build(
        target,
        [split for split in folders if split],
        lambda: _builds(folders, target, out is not None, options),
        options,
        progress,
        "reshard",
    )
    return {each.split: copied(each, manifest) for each, manifest in made}


def dry_run(source: Path, out: Path | None, options: ReshardOptions) -> dict[str, Copied]:
    """Say what `reshard` would do, and do nothing. Raises as it does, for what can be known before."""
    target, folders = _checked(source, out)
    builds = _builds(folders, target, out is not None, options)
    return {each.split: copied(each, None, dry_run=True) for each in builds}


def _checked(source: Path, out: Path | None) -> tuple[Path, dict[str, Path]]:
    """(output, split -> data set), after looks at both that change nothing."""
    check_source(source)
    if out is not None:
        check_paths(source, out)
    folders = data_sets_of(source)
    for folder in folders.values():
        read_manifest(folder)  # what is no data set is not even locked
        if out is None:
            refuse_links(folder)
            if folder != source and folder.is_symlink():
                raise OutputError(f"'{folder}' is a link: a version made there would be another's")
    if out is not None:
        check_output(out, [split for split in folders if split])
    return (source if out is None else out), folders


def _builds(
    folders: dict[str, Path], target: Path, beside: bool, options: ReshardOptions
) -> Sequence[CopyBuild]:
    plans, notes = {}, {}
    runs = to_go_on_with([target / split for split in folders], options.new_version)
    for split, folder in folders.items():
        own = [run for run in runs if run.folder == target / split]
        (manifest,), notes[split] = versions_to_copy("reshard", [folder], own)
        plans[split] = CopyPlan(folder, manifest, options)
    if options.ids is not None:
        found = set().union(*(plan.found_ids for plan in plans.values()))
        if missing := [id for id in options.ids if id not in found]:
            where = " and ".join(f"'{folder}'" for folder in folders.values())
            raise SourceError(
                f"{len(missing)} of {len(options.ids)} ids are not among the rows of {where}: {named(missing)}"
            )
    empty = [split for split, plan in plans.items() if not len(plan.index)]
    if empty and (not beside or len(empty) == len(plans)):
        raise SourceError(f"'{plans[empty[0]].folder}' has no row that was asked for")
    builds = []
    for split in [split for split in plans if split not in empty]:
        plan = plans[split]
        each = plan.build(split, Output(target / split), options)
        if beside:
            each.plan_beside(options.new_version)
        else:
            _plan_in_place(each, plan)
        each.notes += notes[split]
        each.notes += [f"split '{name}' has no row that was asked for, and is left out" for name in empty]
        builds.append(each)
    stays = other_splits(target, [split for split in folders if split not in empty and split])
    for name in stays if beside else []:
        builds[-1].notes.append(
            f"'{target}' also holds the split '{name}', which is not made here: it stays as it is"
        )
    return decided(builds, options.new_version)


def _plan_in_place(build: CopyBuild, plan: CopyPlan) -> None:
    if not plan.is_there():
        build.plan(plan.manifest.version + 1)
    elif not build.output.holds(plan.manifest):
        raise ShardError(
            f"version {plan.manifest.version} of '{plan.folder}' lies as it is to lie, but a file of it is missing or "
            f"of another size. {CURE}"
        )
