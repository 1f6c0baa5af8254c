"""A data set that is being made of pictures that a scan found: what is the same for all of it, and for what changed."""

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from shardwright.convert.build import Build
from shardwright.convert.hints import Stamp
from shardwright.convert.options import ConvertOptions
from shardwright.convert.plan import ShardPlan
from shardwright.convert.records import Finding, ShardRecord
from shardwright.convert.salvage import salvage
from shardwright.convert.scan import Scan
from shardwright.convert.space import stored_share
from shardwright.convert.workers import Task, Workers
from shardwright.convert.write import ShardTask
from shardwright.datasets.rows import Index
from shardwright.errors import ShardwrightError


@dataclass(slots=True, kw_only=True)
class ScannedBuild(Build):
    """A data set that is being made of pictures.

    Attributes
    ----------
    scan, options
        What was found of its source; and how pictures become rows.
    published
        What was found in the version that was published: rejects, suspects, duplicates.
    """

    scan: Scan
    options: ConvertOptions
    published: list[Finding] = field(default_factory=list)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        return self.options.image_shape

    @property
    def inputs(self) -> int:
        """Pictures in its source, those without a class among them."""
        return len(self.scan) + len(self.scan.no_class)

    @abstractmethod
    def task(self, plan: ShardPlan) -> Task:
        """The work of writing the shard of ``plan``."""

    def tasks(self) -> Iterator[Task]:
        return map(self.task, self.missing)

    def from_pictures(self, plan: ShardPlan) -> ShardTask:
        """The work of writing the shard of ``plan`` from the pictures themselves."""
        samples = plan.samples.tolist()
        return ShardTask(
            number=plan.number,
            stem=plan.stem,
            partial=self.output.work / Path(plan.stem).name,
            root=self.scan.root,
            paths=tuple(self.scan.paths[at] for at in samples),
            ids=tuple(self.scan.ids[at] for at in samples),
            labels=tuple(self.scan.labels[plan.samples].tolist()),
            options=self.options,
        )

    def stored_share(self, workers: Workers) -> float:
        task = next((task for task in self.tasks() if isinstance(task, ShardTask)), None)
        if task is not None:
            # A picture that kills its process is found when its shard is written.
            with suppress(ShardwrightError):
                return workers.call(stored_share, task)
        return 1.0

    def fits(self, record: ShardRecord, plan: ShardPlan) -> bool:
        """Whether the pictures of a finished shard are now what they were, those too that could not be read."""
        now = {self.scan.ids[at]: self.scan.stamps.at(at) for at in plan.samples.tolist()}
        return not record.copied and {**record.unread, **record.stamps} == now

    def completed(self, record: ShardRecord, plan: ShardPlan) -> ShardRecord:
        """A new record with the stamps of pictures that could not be read: they may be mended before the next run."""
        found = ((self.scan.ids[at], at) for at in plan.samples.tolist())
        unread = {id: self.scan.stamps.at(at) for id, at in found if id not in record.stamps}
        return replace(record, unread=unread)

    def salvage(self, wanted: Index, moved: Index) -> list[ShardPlan]:
        """Plans of finished shards of an unfinished run over another source, as far as their pictures still come.

        Parameters
        ----------
        wanted, moved
            (n,), (m,): places of pictures that are to be read, and of those whose pixels are copied.
        """
        before, now = self.output.unfinished.request(), self.request()
        if before is None or before == now or {**before, "found": None} != {**now, "found": None}:
            return []
        records, ids, version = self.output.unfinished.records(), self.scan.ids, now["version"]
        plans = [
            *salvage([record for record in records if not record.copied], ids, wanted, version),
            *salvage([record for record in records if record.copied], ids, moved, version),
        ]
        self.salvaged = frozenset(plan.number for plan in plans)
        return plans

    def stamps(self) -> dict[str, Stamp]:
        """id -> the stamp of the picture's file when it was read; nothing of one that could not be."""
        return {id: stamp for record in self.records for id, stamp in record.stamps.items()}

    def began_ns(self) -> int:
        """A time before that any picture was read, in a run before this one too, and before the scan."""
        return min(self.scan.began_ns, self.output.unfinished.begun_ns() or self.scan.began_ns)
