"""The command line: parse, one call, print, exit code. Rooms are imported inside their commands."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from shardwright import __version__
from shardwright.errors import ShardwrightError
from shardwright.exporting import export
from shardwright.group import (
    AS_JSON,
    DEBUG,
    FAILED,
    FOLDER,
    GRACE,
    WITH_REJECTS,
    Group,
    allow_open_files,
    open_closed_streams,
    show,
    show_each,
)
from shardwright.operation import MAX_RUNTIME, Operation, operation
from shardwright.resharding import COMMANDS


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="shardwright")
def main() -> None:
    """Trees of JPEGs to plain HDF5 or .npy shards, once; and training from them at memory speed."""
    # For processes that are started: a json.py in the folder that this is run in is not Python's.
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    if os.name != "posix":  # os.preadv, flock, rename over open files, fsync of folders
        raise ShardwrightError("it runs on Linux and macOS: this system has not the file calls that it needs")
    open_closed_streams()
    allow_open_files()


@main.command()
@click.argument("source", type=FOLDER, metavar="SRC")
@click.argument("out", type=FOLDER, metavar="OUT")
@click.option("--format", type=click.Choice(["hdf5", "npy"]), default="hdf5", show_default=True)
@click.option("--size", type=int, default=256, show_default=True, help="Height and width in pixels.")
@click.option(
    "--fit",
    type=click.Choice(["crop", "pad", "stretch"]),
    default="crop",
    show_default=True,
    help="crop: shorter side to size, centre crop. pad: whole picture on black. stretch: shape not kept.",
)
@click.option(
    "--resample", type=click.Choice(["bilinear", "bicubic", "lanczos"]), default="bilinear", show_default=True
)
@click.option("--channels", type=click.Choice(["1", "3"]), default="3", show_default=True)
@click.option(
    "--max-pixels", type=int, default=64_000_000, show_default=True, help="Larger pictures are rejected."
)
@click.option(
    "--bits",
    type=int,
    help="Bits of 16-bit grey pictures that use fewer, such as 12. Default: 16.",
)
@click.option("--no-orient", is_flag=True, help="Keep pixels as stored: do not apply EXIF's orientation.")
@click.option(
    "--suspect",
    type=click.Choice(["keep", "reject"]),
    default="keep",
    show_default=True,
    help="Pictures that their decoder has doubts about. Either way they are reported.",
)
@click.option(
    "--chunk-rows",
    type=int,
    default=32,
    show_default=True,
    help="Rows of a chunk: the batch, or a divisor of it.",
)
@click.option(
    "--shard-mib",
    type=float,
    help="MiB of pixels a shard. Default: 256, or a 64th of the rows if that is less.",
)
@click.option(
    "--compression",
    type=click.Choice(["lzf", "gzip", "none"]),
    help="Of the images in HDF5. Default: lzf, which every h5py reads; other HDF5 tools read gzip and none.",
)
@click.option(
    "--min-saving",
    type=float,
    default=0.35,
    show_default=True,
    help="A chunk that LZF makes smaller by less than this share is stored raw, and read 7 to 10 times faster.",
)
@click.option("--jobs", type=int, help="Processes. Default: as the CPUs and memory that may be used allow.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the permutation of all rows.")
@click.option(
    "--classes",
    type=FOLDER,
    metavar="FILE",
    help="A class map to use: one name a line; or a data set, for its.",
)
@click.option("--no-splits", is_flag=True, help="Take folders called train, val, ... as classes.")
@click.option("--strict", is_flag=True, help="Fail, and publish nothing, if any picture is rejected.")
@click.option("--new-version", is_flag=True, help="Let other options make the next version of OUT.")
@click.option(
    "--allow-shrink", is_flag=True, help="Convert a source that lost more than half of its pictures."
)
@GRACE
@MAX_RUNTIME
@click.option("--dry-run", is_flag=True, help="Say what would be done: counts, bytes, about how long.")
@AS_JSON
@DEBUG
@operation(work="decode")
def convert(
    source: Path,
    out: Path,
    *,
    job: Operation,
    as_json: bool,
    dry_run: bool,
    classes: Path | None,
    no_splits: bool,
    seed: int,
    jobs: int | None,
    strict: bool,
    new_version: bool,
    allow_shrink: bool,
    newer_than_grace: float,
    max_runtime: float | None,
    no_orient: bool,
    **options: Any,
) -> None:
    """Convert the tree of pictures SRC into a data set in OUT.

    The class of a picture is the first folder below SRC. If all folders in SRC are called train, val,
    valid, validation or test, each becomes a data set of its own below OUT.

    Exit codes: 0 done, or nothing to do; 1 failed; 2 usage; 3 done, with rejects; 4 another job holds OUT;
    5 --max-runtime is over, run again to go on; 130 and 143 interrupted and terminated.
    """
    from shardwright import outcome
    from shardwright.convert import run, scan, summary
    from shardwright.convert.options import ConvertOptions, StoreOptions
    from shardwright.datasets.pixels import PixelOptions

    options["channels"] = int(options["channels"])
    of_pixels = ("size", "fit", "resample", "channels", "max_pixels", "bits", "suspect")
    pixels = {key: options.pop(key) for key in of_pixels}
    wanted = ConvertOptions(
        pixels=PixelOptions(**pixels, orient=not no_orient),
        store=StoreOptions(**options),
        seed=seed,
        classes=scan.read_class_map(classes) if classes else None,
        splits=not no_splits,
        strict=strict,
        new_version=new_version,
        allow_shrink=allow_shrink,
        newer_than_grace=newer_than_grace,
        max_runtime=max_runtime,
        jobs=jobs,
    )
    if dry_run:
        found = run.dry_run(source, out, wanted, job.progress)
        show(found, as_json, summary.foreseen_in_words)
        return
    done = {c.split: c for c in run.convert(source, out, wanted, job.progress)}
    job.log(outcome.of_conversions(done.values()))
    if as_json:
        show({split: summary.as_json(c) for split, c in done.items()}, True, list)
    else:
        show(done, False, summary.in_words)
    if any(c.rejected and c.made for c in done.values()):
        click.get_current_context().exit(WITH_REJECTS)


@main.command()
@click.argument("out", type=FOLDER, metavar="OUT")
@click.option("--files", is_flag=True, help="List the files with sizes and hashes.")
@click.option("--stats", is_flag=True, help="Show mean and standard deviation, and the images of each class.")
@AS_JSON
@DEBUG
def info(out: Path, files: bool, stats: bool, as_json: bool) -> None:
    """Say what the data set OUT is, or each of its splits."""
    from shardwright.convert import describe
    from shardwright.datasets.manifest import data_sets_in

    found = {
        split: describe.describe(folder, files=files, stats=stats)
        for split, folder in data_sets_in(out).items()
    }
    show(found, as_json, describe.in_words)


@main.command()
@click.argument("out", type=FOLDER, metavar="OUT")
@click.option("--full", is_flag=True, help="Check every chunk and row, so that damaged rows are named.")
@click.option(
    "--with",
    "other",
    type=FOLDER,
    metavar="OTHER",
    help="Also compare with the data set OTHER: class maps, and pictures that are in both.",
)
@AS_JSON
@DEBUG
@operation()
def verify(job: Operation, out: Path, full: bool, other: Path | None, as_json: bool) -> None:
    """Check sizes and hashes of the data set OUT, or of each of its splits.

    Exit code 1: damage found; or, of two data sets, other classes or the same picture in both.
    """
    from shardwright import outcome
    from shardwright.convert.verify import verify as check
    from shardwright.datasets.comparison import compare
    from shardwright.datasets.manifest import data_sets_in

    found = {
        split: check(folder, full=full, progress=job.progress) for split, folder in data_sets_in(out).items()
    }
    job.log(outcome.of_verifications(found))
    beside = {split: compare(folder, other) for split, folder in data_sets_in(out).items()} if other else {}
    if as_json:
        values = {
            split: {
                "version": v.manifest.version,
                "shards": len(v.manifest.shards),
                "damage": list(v.damage),
                **({"with": asdict(beside[split])} if beside else {}),
            }
            for split, v in found.items()
        }
        show(values, True, list)
    else:
        show(found, False, lambda v: v.in_words())
        for split, c in beside.items():
            lines = c.in_words() or ["the same classes, no picture in both"]
            with_whom = f"with '{other}'{f' [{split}]' if split else ''}"
            show({"": [f"{with_whom}: {line}" for line in lines]}, False, list)
    if any(v.damage for v in found.values()) or any(c.in_words() for c in beside.values()):
        click.get_current_context().exit(FAILED)


@main.command()
@click.argument("out", type=FOLDER, metavar="OUT")
@AS_JSON
@DEBUG
def versions(out: Path, as_json: bool) -> None:
    """List the versions of the data set OUT, or of each of its splits.

    `its own` are the bytes that no other version needs. `open_dataset(OUT, version=N)` opens one of them.
    """
    from shardwright.convert import versions as of
    from shardwright.datasets.manifest import data_sets_in

    folders = data_sets_in(out)
    found = {split: of.versions(folder) for split, folder in folders.items()}
    if as_json:
        show({split: of.as_json(each) for split, each in found.items()}, True, list)
    else:
        show(
            {split: (folders[split], each) for split, each in found.items()}, False, lambda f: of.in_words(*f)
        )


@main.command()
@click.argument("out", type=FOLDER, metavar="OUT")
@click.option("--keep", type=int, default=2, show_default=True, help="So many of the newest versions stay.")
@click.option(
    "--min-age",
    default="14d",
    show_default=True,
    metavar="AGE",
    help="Versions that were the newest within that time stay: 14d, 36h, 90m, 30s, or 0.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be removed, and remove nothing.")
@AS_JSON
@DEBUG
@operation()
def gc(job: Operation, out: Path, keep: int, min_age: str, dry_run: bool, as_json: bool) -> None:
    """Remove old versions of the data set OUT, or of each of its splits, and shards that no version needs.

    The newest version always stays. Readers of a version that is removed are told so.
    """
    from shardwright import outcome
    from shardwright.convert import gc as of
    from shardwright.convert.options import seconds_of

    found = of.gc(out, of.GcOptions(keep, seconds_of(min_age, "min_age"), dry_run))
    if not dry_run:
        job.log(outcome.of_garbage(found))
    if as_json:
        show({split: of.as_json(each, dry_run) for split, each in found.items()}, True, list)
    else:
        show(found, False, lambda each: of.in_words(each, dry_run))


@main.command()
@click.argument("out", type=FOLDER, metavar="OUT")
@click.option(
    "--source", type=FOLDER, metavar="SRC", required=True, help="The pictures that OUT was converted from."
)
@click.option("--jobs", type=int, help="Processes. Default: as the CPUs and memory that may be used allow.")
@AS_JSON
@DEBUG
@operation(work="decode")
def repair(job: Operation, out: Path, source: Path, jobs: int | None, as_json: bool) -> None:
    """Make the damaged files of the data set OUT, or of each of its splits, again from the pictures in SRC.

    They get the same bytes as before, or are left as they are, and it is said why. Exit code 1: some are still damaged.
    """
    from shardwright import outcome
    from shardwright.convert.repair import repair as mend

    found = mend(out, source, jobs, job.progress)
    job.log(outcome.of_repairs(found))
    show_each(found, as_json)
    if any(each.failures for each in found.values()):
        click.get_current_context().exit(FAILED)


for _command in (*COMMANDS, export):
    main.add_command(_command)
