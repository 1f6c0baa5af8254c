"""The command that hands a data set on to other tools: parse, one call, print. Rooms are imported inside it."""

from pathlib import Path
from typing import Any

import click

from shardwright.group import AS_JSON, DEBUG, FOLDER, show_each
from shardwright.operation import Operation, operation
from shardwright.resharding import JOBS


@click.command()
@click.argument("source", type=FOLDER, metavar="SRC")
@click.argument("out", type=FOLDER, metavar="OUT")
@click.option(
    "--to",
    type=click.Choice(["folder", "webdataset"]),
    required=True,
    help="folder: a picture file each, in a folder a class. webdataset: tars of samples.",
)
@click.option(
    "--encode",
    type=click.Choice(["png", "jpeg"]),
    default="png",
    show_default=True,
    help="png keeps every pixel.",
)
@click.option(
    "--quality", type=int, help="Of JPEG, 1 to 100. Default: 95. Colours at full resolution from 90."
)
@click.option(
    "--shard-mib", type=float, help="About so many MiB a tar. Default: 256, or a 64th of the rows if less."
)
@click.option("--version", type=int, metavar="N", help="Of SRC. Default: the newest.")
@JOBS
@click.option("--dry-run", is_flag=True, help="Say what would be done: files, bytes, about how long.")
@AS_JSON
@DEBUG
@operation(work="copy")
def export(
    source: Path,
    out: Path,
    *,
    as_json: bool,
    dry_run: bool,
    to: Any,
    encode: Any,
    quality: int | None,
    shard_mib: float | None,
    version: int | None,
    jobs: int | None,
    job: Operation,
) -> None:
    """Write the data set SRC, or each of its splits, for other tools: no picture that it was made of is needed.

    Nothing is to be seen in OUT before all is there. The same command again does nothing, or goes on.
    """
    from shardwright import outcome
    from shardwright.convert import export as of
    from shardwright.convert.picturefile import PictureFile

    file = PictureFile(encode, quality)
    wanted = of.ExportOptions(to, file, shard_mib, version, jobs)
    done = of.dry_run(source, out, wanted) if dry_run else of.export(source, out, wanted, job.progress)
    job.log(outcome.of_exports(done.values()))
    show_each(done, as_json)
