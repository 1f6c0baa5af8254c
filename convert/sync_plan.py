"""What became of the pictures of a data set since its newest version: which rows stay, go, or are to be made."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwright.convert.hints import Hints
from shardwright.convert.scan import Scan
from shardwright.datasets.rows import Index

#: The SHA-256 of the pictures at these places of the scan; None for one that cannot be read.
Digests = Callable[[Index], Sequence[bytes | None]]


@dataclass(frozen=True, slots=True)
class SyncPlan:
    """What is to become of each row that is there, and of each picture that is found.

    Rows are indices of the newest version, *places* are positions in the scan; all are int64 and ascend.

    Attributes
    ----------
    kept, kept_at
        Rows that stay, and the places of their pictures, -1 for one that is too new to be taken.
    dead
        Rows that go.
    fresh
        Places of pictures that are to be decoded.
    moved, moved_from
        Places of pictures whose bytes a row that goes was made of, and that row: its pixels are copied.
    rejected
        Places of pictures that were rejected then, and are what they were.
    unreadable
        Rows whose pictures cannot be read now; they stay.
    changes
        Kind -> ids, sorted: ``added``; ``changed``, of other bytes; ``moved``, new ones of the bytes of one that is
        gone; ``removed``, gone and not moved.
    """

    kept: Index
    kept_at: Index
    dead: Index
    fresh: Index
    moved: Index
    moved_from: Index
    rejected: Index
    unreadable: Index
    changes: Mapping[str, tuple[str, ...]]

    @property
    def is_empty(self) -> bool:
        """Whether all rows stay as they are, and none comes."""
        return not (len(self.dead) or len(self.fresh) or len(self.moved))


def plan_sync(hints: Hints, scan: Scan, digests: Digests) -> SyncPlan:
    """Compare what was known of the source with what is found. Asks ``digests`` only where sizes and times do not tell.

    A picture is taken for unchanged by its size and times; else by its bytes. One that is new, or of other bytes, and
    whose bytes are those of a row that goes, has moved.
    """
    known = {id: k for k, id in enumerate(hints.ids)}
    then = np.fromiter((known.get(id, -1) for id in scan.ids), np.int64, len(scan))
    is_known = then >= 0
    was_row = is_known & (then < hints.rows)
    same = np.zeros(len(scan), bool)
    same[is_known] = scan.stamps.taking(np.flatnonzero(is_known)).same(hints.stamps.taking(then[is_known]))
    same[is_known] &= hints.is_certain()[then[is_known]]
    same_class = np.zeros(len(scan), bool)
    same_class[was_row] = hints.labels[then[was_row]] == scan.labels[was_row]

    doubtful = np.flatnonzero(was_row & ~(same & same_class))
    found = dict(zip(doubtful.tolist(), digests(doubtful), strict=True))
    unreadable = np.array([at for at in doubtful.tolist() if found[at] is None and same_class[at]], np.int64)
    equal = np.array(
        [at for at in doubtful.tolist() if found[at] == hints.hashes[then[at]].tobytes() and same_class[at]],
        np.int64,
    )
    stays = was_row & same & same_class
    stays[equal] = stays[unreadable] = True

    kept, kept_at = then[stays], np.flatnonzero(stays)
    too_new = [known[id] for id in scan.too_new if known.get(id, hints.rows) < hints.rows]
    kept = np.append(kept, np.array(too_new, np.int64))
    kept_at = np.append(kept_at, np.full(len(too_new), -1))
    order = np.argsort(kept)
    kept, kept_at = kept[order], kept_at[order]
    dead = np.setdiff1d(np.arange(hints.rows), kept)

    rejected = np.flatnonzero(is_known & ~was_row & same)
    to_make = np.flatnonzero(~stays & ~(is_known & ~was_row & same))
    moved, moved_from = _moved(hints, scan, to_make, dead, found, digests)
    by_kind: dict[str, list[str]] = {"added": [], "changed": [], "moved": []}
    is_moved = np.isin(to_make, moved)
    for at, has_moved in zip(to_make.tolist(), is_moved.tolist(), strict=True):
        kind = "changed" if was_row[at] else "moved" if has_moved else "added"
        by_kind[kind].append(scan.ids[at])
    left = np.setdiff1d(dead, moved_from[~was_row[moved]])
    removed = {hints.ids[row] for row in left.tolist()} - set(scan.ids)
    return SyncPlan(
        kept=kept,
        kept_at=kept_at,
        dead=dead,
        fresh=to_make[~is_moved],
        moved=moved,
        moved_from=moved_from,
        rejected=rejected,
        unreadable=then[unreadable],
        changes={**{kind: tuple(ids) for kind, ids in by_kind.items()}, "removed": tuple(sorted(removed))},
    )


def _moved(
    hints: Hints,
    scan: Scan,
    to_make: Index,
    dead: Index,
    found: dict[int, bytes | None],
    digests: Digests,
) -> tuple[Index, Index]:
    """(places, rows) of pictures that are to be made, and whose bytes are those of a row that goes."""
    rows = {hints.hashes[row].tobytes(): row for row in dead[::-1].tolist()}
    asked = np.array([at for at in to_make.tolist() if at not in found], np.int64)
    sizes = hints.stamps.sizes[dead]
    likely = asked if (sizes < 0).any() else asked[np.isin(scan.sizes[asked], sizes)]
    found = {**found, **dict(zip(likely.tolist(), digests(likely), strict=True))}
    pairs = [(at, rows[digest]) for at in to_make.tolist() if (digest := found.get(at)) in rows]
    places: npt.NDArray[np.int64] = np.array(pairs, np.int64).reshape(-1, 2)
    return places[:, 0], places[:, 1]
