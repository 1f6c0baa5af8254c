"""What a new version of a data set has that the one before had not, and the other way round: by ids and contents."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.convert.verify import damaged_files
from shardwright.datasets.layout import Manifest
from shardwright.datasets.reader import Reader
from shardwright.errors import NAMED, ShardError

_NAMED = 3


@dataclass(frozen=True, slots=True)
class Changes:
    """Ids, sorted: of pictures that are new, gone, of other bytes, and of another label.

    A picture that is rejected now counts as gone.
    """

    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]
    relabelled: tuple[str, ...]

    def counts(self) -> dict[str, int]:
        """How many of each, as JSON values."""
        return {kind: len(ids) for kind, ids in asdict(self).items()}

    def in_words(self) -> str:
        """One line, with the first few ids of each kind."""
        kinds = [f"{len(ids)} {kind} ({_first(ids)})" for kind, ids in asdict(self).items() if ids]
        return ", ".join(kinds) or "the pictures are the same"


def changes(folder: Path, before: Manifest, now: Manifest) -> Changes:
    """Compare two versions of the data set in ``folder``, of which ``now`` was written just now.

    Raises
    ------
    ShardError
        A shard of one of them is damaged, or cannot be read.
    """
    _refuse_damage(folder, before)
    old, new = _contents(folder, before), _contents(folder, now)
    both = old.keys() & new.keys()
    return Changes(
        added=_sorted(new.keys() - old.keys()),
        removed=_sorted(old.keys() - new.keys()),
        changed=_sorted(id for id in both if old[id][0] != new[id][0]),
        relabelled=_sorted(id for id in both if old[id][1] != new[id][1]),
    )


def _refuse_damage(folder: Path, before: Manifest) -> None:
    """Compare HDF5 shards with their SHA-256: over damaged ids HDF5 may go round in circles, or give others.

    In npy each column is a file that is checked when it is read.
    """
    if before.storage != "hdf5":
        return
    if damaged := damaged_files(folder, before, range(len(before.shards))):
        more = f"; and {len(damaged) - NAMED} files more" if len(damaged) > NAMED else ""
        places = "; ".join(file.why for file in damaged[:NAMED])
        raise ShardError(f"version {before.version} is damaged: {places}{more}")


def _contents(folder: Path, manifest: Manifest) -> dict[str, tuple[bytes, int]]:
    """id -> (SHA-256 of the picture's file, label)."""
    reader, rows = Reader(folder, manifest), np.arange(manifest.rows)
    hashes = reader.column("source_sha256", rows)
    ids, labels = reader.column("id", rows).tolist(), reader.labels(rows).tolist()
    return {id: (digest.tobytes(), label) for id, digest, label in zip(ids, hashes, labels, strict=True)}


def _sorted(ids: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(ids))


def _first(ids: tuple[Any, ...]) -> str:
    return ", ".join(f"'{id}'" for id in ids[:_NAMED]) + (", ..." if len(ids) > _NAMED else "")
