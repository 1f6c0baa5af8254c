"""One data set that is being made, and how any is: its shards by worker processes, the manifest last.

Each is published whole or not at all. A run that was killed, failed or ran out of its time is gone on with by the same
command, to the same bytes.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from shardwright.convert.deadline import Deadline
from shardwright.convert.environment import environment_of
from shardwright.convert.jobs import COPYING
from shardwright.convert.lock import sole_writer
from shardwright.convert.options import RunOptions
from shardwright.convert.output import Output
from shardwright.convert.plan import ShardPlan, asked_for, differences, refuse_other_request
from shardwright.convert.progress import Progress, ProgressMaker
from shardwright.convert.records import ShardRecord
from shardwright.convert.space import check_room, unwritable
from shardwright.convert.stats import Sums
from shardwright.convert.workers import Task, Workers
from shardwright.datasets.layout import Manifest
from shardwright.datasets.manifest import read_manifest
from shardwright.errors import OutOfTimeError, OutputError, ShardError, ShardwrightError


@dataclass(slots=True, kw_only=True)
class Build(ABC):
    """One data set that is being made, of whatever: from what is asked for to what is published.

    Attributes
    ----------
    split, output
        Its split, empty where there is none; where it goes.
    newest, version
        The newest version that is there, and the one that is to be made; None where the newest is what is asked for.
    plans, records
        All its shards to write; what was made of them so far, by this run or one before it.
    resumed
        Shards that an earlier run had finished.
    dropped
        Numbers of finished shards that do not fit any more. They are made again last: else runs that have the time for
        one shard each would make the same one again and again, where one of its pictures changes all the time.
    salvaged
        Numbers of those ``plans`` that are of an unfinished run whose source has changed since.
    notes
        What a person should know.
    seconds, written
        What this run took, from the first row to the last; and the rows that it wrote.
    """

    split: str
    output: Output
    newest: Manifest | None = None
    version: int | None = None
    plans: list[ShardPlan] = field(default_factory=list)
    records: list[ShardRecord] = field(default_factory=list)
    resumed: int = 0
    dropped: set[int] = field(default_factory=set)
    salvaged: frozenset[int] = frozenset()
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    written: int = 0

    @property
    @abstractmethod
    def image_shape(self) -> tuple[int, int, int]:
        """(height, width, channels) of every image."""

    @property
    @abstractmethod
    def decodes(self) -> bool:
        """Whether pixels are made, so that the versions of decoders decide the bytes too."""

    @abstractmethod
    def request(self) -> dict[str, Any]:
        """What an unfinished run of it is told by: version, options, and of what it is made.

        And, where that may change from run to run, what was ``found`` of it.
        """

    @abstractmethod
    def tasks(self) -> Iterator[Task]:
        """The work that is missing."""

    @abstractmethod
    def stored_share(self, workers: Workers) -> float:
        """Share of its pixels' bytes that it will have on disk, from a few of them."""

    @abstractmethod
    def manifest(self) -> Manifest:
        """The version that it will be, all its shards being written.

        Raises
        ------
        ShardwrightError
            It is not to be published.
        """

    @abstractmethod
    def accompany(self, manifest: Manifest) -> Manifest:
        """Write what goes with the version, of which all shards are placed; its manifest with what is found in them."""

    def look_back(self, manifest: Manifest) -> None:
        """Compare the version, which is published, with the one before."""
        return

    def fits(self, record: ShardRecord, plan: ShardPlan) -> bool:
        """Whether a finished shard of an earlier run can be what ``plan`` says."""
        return True

    def completed(self, record: ShardRecord, plan: ShardPlan) -> ShardRecord:
        """A new record, with what is known here of the pictures of ``plan`` that its worker does not know."""
        return record

    def name_damage(self) -> None:
        """Raise ShardError for all damage in what it is made of, where a worker stumbled over some."""
        return  # pictures are not damaged, but rejected

    def conclude(self) -> None:
        """All its shards are written: raise ShardwrightError if by them it is not to be published after all.

        Where they amount to what is there, ``version`` is None from now on.
        """
        return

    @property
    def row_bytes(self) -> int:
        """Bytes of one image."""
        return int(np.prod(self.image_shape))

    @property
    def rows(self) -> int:
        """Rows that are to be written, if none is rejected."""
        return sum(len(plan.samples) for plan in self.plans)

    @property
    def missing(self) -> list[ShardPlan]:
        """Shards that are still to be written, those last that were finished before."""
        done = {record.number for record in self.records}
        missing = [plan for plan in self.plans if plan.number not in done]
        return sorted(missing, key=lambda plan: plan.number in self.dropped)

    def bytes_missing(self) -> int:
        """Bytes of pixels that the missing shards have, at most."""
        return sum(len(plan.samples) for plan in self.missing) * self.row_bytes

    def refuse_unfinished(self) -> None:
        """Keep finished shards of another run from being thrown away.

        Raises
        ------
        OutputError
            An unfinished run of another command, or with other options, lies there.
        """
        before = self.output.unfinished.request()
        if before is not None and self.version is not None and self.output.unfinished.shards():
            refuse_other_request(before, self.request(), str(self.output.folder))

    def give_up_taken_back(self) -> None:
        """Where the newest version is what is asked for, remove an unfinished run of changes that were taken back.

        Else it would keep every other command from the output, and could never be gone on with.
        """
        before, now = self.output.unfinished.request(), self.request()
        if self.version is not None or before is None:
            return
        if (asked_for(before), before["options"]) == (asked_for(now), now["options"]):
            self.output.unfinished.give_up()

    def finished(self) -> tuple[list[ShardRecord], Sums, dict[str, str]]:
        """All records in order, the sums of their pixels, and the environment of all.

        Raises
        ------
        OutputError
            Workers of several environments took part.
        """
        records = sorted(self.records, key=lambda record: record.number)
        if any(record.environment != records[0].environment for record in records):
            raise OutputError("workers with different library versions took part: nothing was published")
        sums = Sums()
        for record in records:
            sums.merge(record.sums)
        return records, sums, records[0].environment if records else {}


AnyBuild = TypeVar("AnyBuild", bound=Build)
Show = Callable[[Build, int], Progress]


def newest_of(output: Output) -> Manifest | None:
    """The newest version in an output; None where there is none."""
    return read_manifest(output.folder) if (output.folder / "manifest.json").exists() else None


def build(
    out: Path,
    splits: Sequence[str],
    decide: Callable[[], Sequence[AnyBuild]],
    run: RunOptions,
    progress: ProgressMaker,
    stage: str,
    lock: Callable[[Path, Sequence[str]], AbstractContextManager[None]] = sole_writer,
) -> list[tuple[AnyBuild, Manifest | None]]:
    """Hold ``out``, ``decide`` what is to be made in it, and make it: each with its new manifest, None where none was.

    All shards are written before the first data set is published.

    Parameters
    ----------
    splits
        Names of the splits in ``out``; empty where it is one data set.
    stage
        What the writing is called where there are no splits.

    Raises
    ------
    LockedError
        Another process writes to ``out``.
    ShardError
        A shard of a source is damaged, or gone. Nothing was published.
    OutOfTimeError
        The time that the run may take is over; finished shards are kept.
    OutputError
        It cannot be written, or has no room.
    """
    builds: Sequence[AnyBuild] = ()
    published: list[str] = []
    deadline = Deadline(run.max_runtime)
    with lock(out, splits):
        try:
            for split in splits or [""]:
                Output(out / split).settle()
            builds = decide()
            todo = [each for each in builds if each.version is not None]
            for each in todo:
                _begin(each)
            if _is_missing(todo):
                need = None if any(each.decodes for each in todo) else COPYING
                with Workers(run.jobs, need) as workers:
                    show = partial(_show, progress, stage)
                    _write(todo, out, workers, show, deadline)
            for each in todo:
                each.conclude()
            made = {k: each.manifest() for k, each in enumerate(builds) if each.version is not None}
            for k, manifest in made.items():
                builds[k].output.place(manifest)
                made[k] = builds[k].accompany(manifest)
            for k, manifest in made.items():  # splits at once, as far as may be: what takes time was done
                builds[k].output.publish(manifest)
                published.append(str(builds[k].output.folder))
            for k, manifest in made.items():
                builds[k].look_back(manifest)
            return [(each, made.get(k)) for k, each in enumerate(builds)]
        except OSError as error:
            if isinstance(error, ShardwrightError):
                raise
            needed = sum(each.bytes_missing() for each in builds)
            raise unwritable(error, out, needed, published) from error
        finally:
            begun = any(each.output.unfinished.shards() for each in builds)
            for each in builds:
                each.output.abandon(begun)


def _is_missing(todo: Sequence[Build]) -> bool:
    """Whether a worker is wanted: for shards to write, or to say whose environment is the one now."""
    environments = [record.environment for each in todo for record in each.records]
    mixed = any(found != environments[0] for found in environments)
    return mixed or any(each.missing for each in todo)


def _write(todo: Sequence[Build], out: Path, workers: Workers, show: Show, deadline: Deadline) -> None:
    """Write the shards that are missing of all in ``todo``."""
    for each in todo:
        _keep_to_environment(each, workers)
    at_most = sum(each.bytes_missing() for each in todo)
    check_room(out, at_most, lambda: next(each.stored_share(workers) for each in todo if each.missing))
    try:
        for each in todo:
            _write_shards(each, workers, show, deadline)
    except ShardError:  # where a worker stumbles over damage, all that there is is named
        for each in todo:
            each.name_damage()
        raise


def _show(progress: ProgressMaker, stage: str, each: Build, done: int) -> Progress:
    return progress(each.split or stage, each.rows, "images", done)


def _begin(each: Build) -> None:
    """Make its folders, and take up what an earlier run finished of it."""
    request, unfinished = each.request(), each.output.unfinished
    before, finished = unfinished.request(), unfinished.shards()
    if each.salvaged:
        unfinished.go_on(request, each.salvaged)
    elif before is not None and before != request and finished:
        each.notes.append("an unfinished run of another source or other options was begun anew")
    each.output.begin()
    each.records = unfinished.begin(request, each.plans)
    plans = {plan.number: plan for plan in each.plans}
    for record in list(each.records):
        if not each.fits(record, plans[record.number]):
            _drop(each, record)
    each.resumed = len(each.records)
    if each.salvaged:
        each.notes.append(
            f"the source has changed since the unfinished run was begun: of its {finished} finished shards "
            f"{each.resumed} are kept, whose pictures are what they were"
        )


def _drop(each: Build, record: ShardRecord) -> None:
    each.output.unfinished.drop(record)
    each.records.remove(record)
    each.dropped.add(record.number)


def _keep_to_environment(each: Build, workers: Workers) -> None:
    """Drop finished shards that other versions of libraries made: their pixels may differ by a grey level."""
    if not each.records:
        return
    now = workers.call(environment_of, each.decodes)
    for record in [record for record in each.records if record.environment != now]:
        _drop(each, record)
        different = "; ".join(differences(record.environment, now))
        note = f"finished shards of another environment were made again: {different}"
        if note not in each.notes:
            each.notes.append(note)
    each.resumed = len(each.records)


def _write_shards(each: Build, workers: Workers, show: Show, deadline: Deadline) -> None:
    start = time.monotonic()
    plans = {plan.number: plan for plan in each.plans}
    rows = {number: len(plan.samples) for number, plan in plans.items()}
    before = done = shown = sum(rows[record.number] for record in each.records)
    with show(each, done) as bar:
        for record in workers.write(deadline.in_time(each.tasks())):
            if record is not None:
                record = each.completed(record, plans[record.number])
                each.output.unfinished.keep(record)
                each.records.append(record)
                done += rows[record.number]
            under_way = each.output.bytes_under_way() // each.row_bytes
            now = max(shown, min(done + under_way, each.rows))
            bar.update(now - shown)
            shown = now
    each.written = done - before
    each.seconds = time.monotonic() - start
    if each.missing:
        raise OutOfTimeError(
            f"--max-runtime is over: {len(each.records)} of {len(each.plans)} shards of '{each.output.folder}' are "
            "finished, and kept. The same command goes on from there"
        )
