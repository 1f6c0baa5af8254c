"""The command line: parse, one call, print, exit code. Rooms are imported inside their commands."""

import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from shardwright import __version__
from shardwright.errors import ShardwrightError

FAILED, WITH_REJECTS, INTERRUPTED, TERMINATED = 1, 3, 130, 143
# More files are never open at once, and a program that closes all it may have would be slow.
MOST_OPEN_FILES = 1 << 16


class _Group(click.Group):
    """Maps errors to exit codes and one line each; ``--debug`` adds the traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        ctx.obj = {"debug": False}
        try:
            with _terminable():
                return super().invoke(ctx)
        except (ShardwrightError, OSError) as error:
            if isinstance(error, BrokenPipeError):  # the reader of our output had enough
                raise
            if ctx.obj["debug"]:
                traceback.print_exc()
            click.echo(f"shardwright: {_printable(str(error))}", err=True)
            ctx.exit(error.exit_code if isinstance(error, ShardwrightError) else FAILED)
        except (KeyboardInterrupt, _Terminated) as error:
            terminated = isinstance(error, _Terminated)
            what = "terminated" if terminated else "interrupted"
            how = (
                "; the same command goes on where this one was" if ctx.invoked_subcommand == "convert" else ""
            )
            click.echo(f"shardwright: {what}{how}", err=True)
            ctx.exit(TERMINATED if terminated else INTERRUPTED)


class _Terminated(BaseException):
    """SIGTERM came; by default it would end the process with its workers alive and its files in place."""


@contextmanager
def _terminable() -> Iterator[None]:
    """Raise `_Terminated` at SIGTERM, and KeyboardInterrupt at the first SIGINT alone; never in a library call."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough; cleaning up is not to be cut short
        raise _Terminated

    def interrupt(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, terminate)}
    if (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ):  # else it is ignored, as in the background
        before[signal.SIGINT] = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except (KeyboardInterrupt, _Terminated):
        raise  # the process is about to end, and is not to be disturbed again: nothing is restored
    except BaseException:
        _restore(before)
        raise
    _restore(before)


def _restore(handlers: Mapping[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


def _printable(text: str) -> str:
    """``text`` in one line that any terminal or log takes."""
    encoding = sys.stderr.encoding or "ascii"
    flat = "".join(
        c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text
    )
    return flat.encode(encoding, "backslashreplace").decode(encoding)


_folder = click.Path(path_type=Path)
_json = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object on stdout, and nothing else."
)
_debug = click.option(
    "--debug",
    is_flag=True,
    expose_value=False,
    callback=lambda ctx, _, value: ctx.obj.update(debug=value),
    help="Show a traceback with an error.",
)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="shardwright")
def main() -> None:
    """Trees of JPEGs to plain HDF5 or .npy shards, once; and training from them at memory speed."""
    # For processes that are started: a json.py in the folder that this is run in is not Python's.
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    if os.name != "posix":  # os.preadv, flock, rename over open files, fsync of folders
        raise ShardwrightError("it runs on Linux and macOS: this system has not the file calls that it needs")
    _allow_open_files()


def _allow_open_files() -> None:
    """Raise the limit of open files as far as the system lets a user: a library does not, a command may."""
    import resource  # not on Windows, where it is to be said that this does not run

    with suppress(OSError, ValueError):  # macOS allows less than it says
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_OPEN_FILES)
        if soft != resource.RLIM_INFINITY and soft < most:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


@main.command()
@click.argument("source", type=_folder, metavar="SRC")
@click.argument("out", type=_folder, metavar="OUT")
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
@click.option("--jobs", type=int, help="Processes. Default: the CPUs that may be used.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the permutation of all rows.")
@click.option(
    "--classes",
    type=_folder,
    metavar="FILE",
    help="A class map to use: one name a line; or a data set, for its.",
)
@click.option("--no-splits", is_flag=True, help="Take folders called train, val, ... as classes.")
@click.option("--strict", is_flag=True, help="Fail, and publish nothing, if any picture is rejected.")
@click.option("--new-version", is_flag=True, help="Let other options make the next version of OUT.")
@click.option(
    "--allow-shrink", is_flag=True, help="Convert a source that lost more than half of its pictures."
)
@click.option(
    "--newer-than-grace",
    type=float,
    default=0.0,
    metavar="SECONDS",
    help="Leave pictures that were changed within the last SECONDS for the next run.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be done: counts, bytes, about how long.")
@_json
@_debug
def convert(
    source: Path,
    out: Path,
    *,
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
    no_orient: bool,
    **options: Any,
) -> None:
    """Convert the tree of pictures SRC into a data set in OUT.

    The class of a picture is the first folder below SRC. If all folders in SRC are called train, val,
    valid, validation or test, each becomes a data set of its own below OUT.

    Exit codes: 0 done, or nothing to do; 1 failed; 2 usage; 3 done, with rejects; 4 another job holds OUT;
    130 and 143 interrupted and terminated.
    """
    from shardwright.convert import progress, run, scan, summary
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
        jobs=jobs,
    )
    if dry_run:
        found = run.dry_run(source, out, wanted, progress.for_stream())
        _print(found, as_json, summary.foreseen_in_words)
        return
    done = {c.split: c for c in run.convert(source, out, wanted, progress.for_stream())}
    if as_json:
        _print({split: summary.as_json(c) for split, c in done.items()}, True, list)
    else:
        _print(done, False, summary.in_words)
    if any(c.rejected and c.made for c in done.values()):
        click.get_current_context().exit(WITH_REJECTS)


@main.command()
@click.argument("out", type=_folder, metavar="OUT")
@click.option("--files", is_flag=True, help="List the files with sizes and hashes.")
@click.option("--stats", is_flag=True, help="Show mean and standard deviation, and the images of each class.")
@_json
@_debug
def info(out: Path, files: bool, stats: bool, as_json: bool) -> None:
    """Say what the data set OUT is, or each of its splits."""
    from shardwright.convert import describe

    found = {
        split: describe.describe(folder, files=files, stats=stats) for split, folder in _parts(out).items()
    }
    _print(found, as_json, describe.in_words)


@main.command()
@click.argument("out", type=_folder, metavar="OUT")
@click.option("--full", is_flag=True, help="Check every chunk and row, so that damaged rows are named.")
@click.option(
    "--with",
    "other",
    type=_folder,
    metavar="OTHER",
    help="Also compare with the data set OTHER: class maps, and pictures that are in both.",
)
@_json
@_debug
def verify(out: Path, full: bool, other: Path | None, as_json: bool) -> None:
    """Check sizes and hashes of the data set OUT, or of each of its splits.

    Exit code 1: damage found; or, of two data sets, other classes or the same picture in both.
    """
    from shardwright.convert import progress
    from shardwright.convert.verify import verify as check
    from shardwright.datasets.comparison import compare

    found = {
        split: check(folder, full=full, progress=progress.for_stream())
        for split, folder in _parts(out).items()
    }
    beside = {split: compare(folder, other) for split, folder in _parts(out).items()} if other else {}
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
        _print(values, True, list)
    else:
        _print(found, False, lambda v: v.in_words())
        for split, c in beside.items():
            lines = c.in_words() or ["the same classes, no picture in both"]
            for line in lines:
                click.echo(_printable(f"with '{other}'{f' [{split}]' if split else ''}: {line}"))
    if any(v.damage for v in found.values()) or any(c.in_words() for c in beside.values()):
        click.get_current_context().exit(FAILED)


def _parts(out: Path) -> dict[str, Path]:
    """Split -> folder of its data set; '' for a folder that is one itself."""
    from shardwright.datasets.manifest import splits_of

    if (out / "manifest.json").exists():
        return {"": out}
    return {split: out / split for split in splits_of(out)} or {"": out}


def _print(found: Mapping[str, Any], as_json: bool, in_words: Callable[[Any], list[str]]) -> None:
    """One JSON object, keyed by split where there are splits; or lines."""
    if as_json:
        click.echo(json.dumps(found[""] if list(found) == [""] else found, ensure_ascii=True))
        return
    for split, entry in found.items():
        if split and len(found) > 1 and isinstance(entry, dict):
            click.echo(f"[{split}]")
        for line in in_words(entry):
            click.echo(_printable(line))
