"""What came of the work on one shard, and what was found in pictures on the way."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from shardwright.convert.hints import Stamp
from shardwright.convert.stats import Sums
from shardwright.datasets.layout import Shard


@dataclass(frozen=True, slots=True)
class Finding:
    """One input that was rejected, or taken with a doubt: a line of the report.

    ``verdict`` is ``rejected``, ``suspect`` or ``duplicate``. ``format`` and ``size`` (width, height) are what its
    header claims, empty and None where that cannot be told.
    """

    id: str
    verdict: Literal["rejected", "suspect", "duplicate"]
    reason: str
    message: str
    bytes: int
    format: str = ""
    size: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """What came of a task.

    ``shard`` is None where every picture was rejected, or where ``error`` (errno, text) says what kept the
    shard from being written, or ``damage`` what is wrong with the data set that its rows are from. ``animated``
    counts pictures of several frames. ``stamps`` are by id those of the pictures' files when they were read, of rejects
    too where they could be; ``unread`` those of the others as the scan found them, which a worker does not know.
    ``copied`` are rows of another version by the ids that they get, where those are given. ``temporary`` are the paths
    of the shard's files as yet, in their order.
    """

    number: int
    shard: Shard | None = None
    temporary: tuple[Path, ...] = ()
    findings: tuple[Finding, ...] = ()
    sums: Sums = field(default_factory=Sums)
    animated: int = 0
    saved_bytes: float = 0.0
    environment: dict[str, str] = field(default_factory=dict)
    error: tuple[int, str] | None = None
    damage: str = ""
    stamps: Mapping[str, Stamp] = field(default_factory=dict)
    unread: Mapping[str, Stamp] = field(default_factory=dict)
    copied: Mapping[str, int] = field(default_factory=dict)

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of its pictures, each once: in their order, then those that could not be read."""
        return tuple({**self.copied, **self.stamps, **self.unread})


def without_class(ids: Iterable[str]) -> list[Finding]:
    """The findings of pictures that lie directly under the root."""
    why = "it lies directly under the root, in no class folder"
    return [Finding(id, "rejected", "no-class", why, 0) for id in ids]
