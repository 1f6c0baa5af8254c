"""The commands that make data sets of data sets: parse, one call, print. Rooms are imported inside them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from shardwright.errors import UsageError
from shardwright.group import AS_JSON, DEBUG, FOLDER, GRACE, WITH_REJECTS, show_each
from shardwright.operation import MAX_RUNTIME, Operation, operation

JOBS = click.option(
    "--jobs", type=int, help="Processes. Default: as the CPUs and memory that may be used allow."
)
NEW_VERSION = click.option("--new-version", is_flag=True, help="Let what is made otherwise follow in OUT.")
DRY_RUN = click.option("--dry-run", is_flag=True, help="Say what would be done: rows, shards, bytes.")


def layout(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of how rows lie on disk."""
    for option in reversed(
        (
            click.option("--format", type=click.Choice(["hdf5", "npy"])),
            click.option("--chunk-rows", type=int, help="Rows of a chunk: the batch, or a divisor of it."),
            click.option("--shard-mib", type=float, help="MiB of pixels a shard."),
            click.option("--compression", type=click.Choice(["lzf", "gzip", "none"])),
            click.option(
                "--min-saving",
                type=float,
                help="A chunk that LZF makes smaller by less than this share is stored raw.",
            ),
        )
    ):
        command = option(command)
    return command


@click.command()
@click.argument("source", type=FOLDER, metavar="SRC")
@click.argument("out", type=FOLDER, metavar="[OUT]", required=False)
@layout
@click.option("--size", type=int, help="Height and width in pixels, smaller than they are.")
@click.option("--seed", type=int, help="Of a new permutation of all rows, whatever the present one is.")
@click.option(
    "--only-classes",
    multiple=True,
    metavar="A,B",
    help="Take the rows of these classes alone. May be repeated. Class numbers stay.",
)
@click.option("--ids", type=FOLDER, metavar="FILE", help="Take the rows with these ids alone, one a line.")
@NEW_VERSION
@JOBS
@MAX_RUNTIME
@DRY_RUN
@AS_JSON
@DEBUG
@operation(work="copy")
def reshard(
    source: Path,
    out: Path | None,
    *,
    job: Operation,
    as_json: bool,
    dry_run: bool,
    ids: Path | None,
    size: int | None,
    seed: int | None,
    only_classes: tuple[str, ...],
    new_version: bool,
    jobs: int | None,
    max_runtime: float | None,
    **options: Any,
) -> None:
    """Lay the data set SRC, or each of its splits, out anew: as its next version, or in OUT.

    What is not given stays as SRC has it, the order of the rows too. Where the newest version is what is asked
    for, nothing is made: it may be run again and again.
    """
    from shardwright.convert import reshard as of
    from shardwright.convert.copy_plan import ReshardOptions
    from shardwright.convert.layouts import LayoutOptions
    from shardwright.convert.selection import read_ids

    wanted = ReshardOptions(
        layout=LayoutOptions(**options),
        size=size,
        seed=seed,
        only_classes=only_classes,
        ids=read_ids(ids) if ids else None,
        new_version=new_version,
        jobs=jobs,
        max_runtime=max_runtime,
    )
    if dry_run:
        _report(of.dry_run(source, out, wanted), as_json, job)
    else:
        _report(of.reshard(source, out, wanted, job.progress), as_json, job)


@click.command()
@click.argument("folders", type=FOLDER, metavar="A B...", nargs=-1, required=True)
@click.argument("out", type=FOLDER, metavar="OUT")
@layout
@click.option("--seed", type=int, default=0, show_default=True, help="Of the permutation of all rows.")
@click.option("--keep-order", is_flag=True, help="Rows as they are, those of A first.")
@click.option("--prefix", is_flag=True, help="Ids begin with the name of their data set's folder.")
@NEW_VERSION
@JOBS
@MAX_RUNTIME
@DRY_RUN
@AS_JSON
@DEBUG
@operation(work="copy")
def merge(
    folders: tuple[Path, ...],
    out: Path,
    *,
    job: Operation,
    as_json: bool,
    dry_run: bool,
    seed: int,
    keep_order: bool,
    prefix: bool,
    new_version: bool,
    jobs: int | None,
    max_runtime: float | None,
    **options: Any,
) -> None:
    """Make one data set in OUT of the data sets A, B, and so on.

    Class maps are joined by name: A's numbers stay, names that A has not follow. Ids must be different.
    """
    from shardwright.convert import merge as of
    from shardwright.convert.layouts import LayoutOptions

    if keep_order and click.get_current_context().get_parameter_source("seed") is not ParameterSource.DEFAULT:
        raise UsageError("--seed is of a permutation, and --keep-order asks for none: leave one of them out")
    wanted = of.MergeOptions(
        LayoutOptions(**options),
        None if keep_order else seed,
        prefix,
        new_version=new_version,
        jobs=jobs,
        max_runtime=max_runtime,
    )
    done = of.dry_run(folders, out, wanted) if dry_run else of.merge(folders, out, wanted, job.progress)
    _report({"": done}, as_json, job)


@click.command()
@click.argument("source", type=FOLDER, metavar="SRC")
@click.argument("out", type=FOLDER, metavar="OUT")
@click.option(
    "--by",
    required=True,
    metavar="SHARES",
    help="Such as train=0.9,val=0.1, of train, val, valid, validation and test; the shares sum to 1.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the hash of the ids.")
@NEW_VERSION
@JOBS
@MAX_RUNTIME
@DRY_RUN
@AS_JSON
@DEBUG
@operation(work="copy")
def split(
    source: Path,
    out: Path,
    *,
    job: Operation,
    as_json: bool,
    dry_run: bool,
    by: str,
    seed: int,
    new_version: bool,
    jobs: int | None,
    max_runtime: float | None,
) -> None:
    """Deal the data set SRC out over parts, each a data set in OUT.

    A hash of seed and id decides: pictures stay in their part when others come. Shares are expected, of every
    class; the real ones are printed.
    """
    from shardwright.convert import split as of
    from shardwright.convert.selection import parse_shares

    wanted = of.SplitOptions(parse_shares(by), seed, new_version, jobs=jobs, max_runtime=max_runtime)
    done = of.dry_run(source, out, wanted) if dry_run else of.split(source, out, wanted, job.progress)
    _report(done, as_json, job)


@click.command()
@click.argument("source", type=FOLDER, metavar="SRC")
@click.argument("out", type=FOLDER, metavar="OUT")
@click.option(
    "--allow-shrink", is_flag=True, help="Follow a source that lost more than half of its pictures."
)
@GRACE
@click.option("--new-version", is_flag=True, help="Give up the unfinished run of another command.")
@JOBS
@MAX_RUNTIME
@DRY_RUN
@AS_JSON
@DEBUG
@operation(work="decode")
def sync(source: Path, out: Path, *, as_json: bool, dry_run: bool, job: Operation, **options: Any) -> None:
    """Bring the data set OUT, or each of its splits, up to date with the pictures in SRC.

    New and changed pictures come in new shards, rows of pictures that are gone are marked dead, nothing is rewritten:
    one new version. Class numbers stay, new classes follow. Exit codes as of convert.
    """
    from shardwright import outcome
    from shardwright.convert import sync as of

    wanted = of.SyncOptions(**options)
    call = of.dry_run if dry_run else of.sync
    done = call(source, out, wanted, job.progress)
    job.log(outcome.of_syncs(done.values()))
    show_each(done, as_json)
    if any(each.rejected and each.made for each in done.values()):
        click.get_current_context().exit(WITH_REJECTS)


def _report(found: dict[str, Any], as_json: bool, job: Operation) -> None:
    from shardwright import outcome

    job.log(outcome.of_rewrites(found.values()))
    show_each(found, as_json)


COMMANDS = (reshard, merge, split, sync)
