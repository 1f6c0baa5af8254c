"""Pure: how many rows in which shards, and which sample in which row."""

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwright.convert.options import ConvertOptions
from shardwright.datasets.layout import SHARDS_FOLDER, Manifest
from shardwright.errors import OutputError

#: Key in a manifest's ``source`` of the data sets that it was made of.
MADE_OF = "made_of"
#: Key there of the version that one was brought up to date from.
SYNCED_FROM = "synced_from"
#: Key there that says that its pictures changed before it was finished: not one plan dealt all its rows out.
PIECED = "pieced"


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """One shard to write: its name without ending, and the samples of its rows, in order."""

    number: int
    stem: str
    samples: npt.NDArray[np.int64]


def plan_shards(samples: int, version: int, options: ConvertOptions) -> list[ShardPlan]:
    """Deal ``samples`` out over shards in one seeded permutation.

    Class-sorted trees and batch-aligned chunks would make batches of one class; after a global
    permutation any run of rows is a fair draw. Nothing here depends on the number of jobs.
    """
    order = np.random.Generator(np.random.PCG64(options.seed)).permutation(samples)
    return deal([order], options.store.rows_per_shard(samples, options.row_bytes), version)


def plan_with(
    finished: Sequence[ShardPlan], samples: int, version: int, options: ConvertOptions
) -> list[ShardPlan]:
    """Deal those of ``samples`` out that are in none of the ``finished`` shards; all shards, by number."""
    rest = np.setdiff1d(np.arange(samples), np.concatenate([plan.samples for plan in finished]))
    order = rest[np.random.Generator(np.random.PCG64(options.seed)).permutation(len(rest))]
    rows = options.store.rows_per_shard(samples, options.row_bytes)
    new = deal([order], rows, version, {plan.number for plan in finished})
    return sorted([*finished, *new], key=lambda plan: plan.number)


def deal(
    orders: Iterable[npt.NDArray[np.int64]], rows: int, version: int, taken: Collection[int] = ()
) -> list[ShardPlan]:
    """Deal samples out over shards of ``rows``, those of each of ``orders`` for itself; without numbers ``taken``."""
    numbers = (number for number in itertools.count() if number not in taken)
    each = (order[start : start + rows] for order in orders for start in range(0, len(order), rows))
    return [
        ShardPlan(number, shard_stem(version, number), samples)
        for samples, number in zip(each, numbers, strict=False)
    ]


def shard_stem(version: int, number: int) -> str:
    """What the files of a shard are called in the data set, without their endings."""
    return f"{SHARDS_FOLDER}/{version:06d}-{number:05d}"


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Options in which two conversions differ, in words."""
    return [
        f"{key} is {found.get(key)!r} there, {wanted.get(key)!r} here"
        for key in sorted({*found, *wanted})
        if found.get(key) != wanted.get(key)
    ]


def decide(
    newest: Manifest | None, unchanged: bool, options: ConvertOptions, inputs: int, out: str
) -> int | None:
    """The version to make next; None where the newest is what was asked for.

    Parameters
    ----------
    newest
        The newest version in the output, if there is one.
    unchanged
        Whether the source is what it was when ``newest`` was made.
    inputs
        Pictures in the source now.
    out
        The output's path, for messages.

    Raises
    ------
    OutputError
        Other options than the newest version's without ``new_version``; a source that lost more than half
        of its pictures without ``allow_shrink``.
    """
    if newest is None:
        return 1
    wanted = options.recorded()
    different = differences(newest.options, wanted)
    if options.classes is not None and options.classes != newest.classes:
        different.append(
            f"the class map has {len(options.classes)} names, not the same as the {len(newest.classes)} there"
        )
    command, told = asked_for({"source": newest.source})
    if command in ("merge", "split") or told.get("only_classes") or told.get("ids"):
        different.append(f"it was made by `{command}`, of a part of the rows or of several data sets")
    if different and not options.new_version:
        raise OutputError(
            f"'{out}' holds version {newest.version}, made with other options: {'; '.join(different)}. "
            "Use another output, the same options, or --new-version"
        )
    if not different and unchanged:
        return None
    before = int(newest.source.get("files", 0))
    if inputs * 2 < before and not options.allow_shrink:
        raise OutputError(
            f"the source has {inputs} pictures, version {newest.version} of '{out}' was made from {before}. "
            "If that is meant, use --allow-shrink"
        )
    return newest.version + 1


def refuse_other_request(before: Mapping[str, Any], now: Mapping[str, Any], out: str) -> None:
    """Keep finished shards of an unfinished run from being thrown away by another command, or an option mistyped.

    Raises
    ------
    OutputError
        The two requests are of other commands, or have different options.
    """
    command, told = asked_for(before)
    wanted, telling = asked_for(now)
    different = differences({**(before.get("options") or {}), **told}, {**now["options"], **telling})
    if command != wanted:
        raise OutputError(
            f"'{out}' holds an unfinished `{command}`: run it again to go on with it, or `{wanted}` with --new-version "
            "to give it up"
        )
    if different:
        raise OutputError(
            f"'{out}' holds an unfinished `{command}` with other options: {'; '.join(different)}. Use the same options "
            "to go on with it, or --new-version to begin anew"
        )


def asked_for(request: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Command and options by the ``source`` of a request or a manifest: of pictures, `convert`."""
    source = request.get("source")
    made = source.get(MADE_OF) if isinstance(source, Mapping) else None
    if not isinstance(made, Mapping):
        return "convert", {}
    told = made.get("options")
    return str(made.get("command")), dict(told) if isinstance(told, Mapping) else {}
