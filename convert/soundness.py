"""Whether the shards that rows are copied from are what they were; and whether there is room for the copies."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Self

import joblib
import numpy as np

from shardwright.convert.encode import encode_chunk
from shardwright.convert.rewrite import Rewrite
from shardwright.convert.space import check_room, free_bytes
from shardwright.convert.verify import damage_of
from shardwright.datasets.layout import Manifest
from shardwright.datasets.rows import Index
from shardwright.datasets.shards import finished_shard
from shardwright.errors import ShardError

_NAMED = 5


Place = tuple[Path, int, int]


class SourceCheck:
    """Compares the HDF5 shards that are still to be copied from with their SHA-256, beside the copying.

    Nothing else guards their ids. Shards in npy have a file a column: those are checked as they are read. A context:
    what was not looked at yet at its end is left.
    """

    def __init__(self, parts: Sequence[Rewrite]) -> None:
        self._pool = ThreadPoolExecutor(joblib.cpu_count())
        self._looks: dict[Place, Future[list[str]]] = {}
        for part in parts:
            for plan in part.missing:
                for place, manifest in _places(part, plan.samples).items():
                    if place not in self._looks:
                        self._looks[place] = self._pool.submit(_look, place, manifest)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def confirm(self, part: Rewrite, index: Index) -> None:
        """Wait until the shards with the rows at ``index`` were looked at.

        Raises
        ------
        ShardError
            One is damaged: names all that are.
        """
        if any(self._looks[place].result() for place in _places(part, index)):
            self.refuse_damage()

    def refuse_damage(self) -> None:
        """Wait until all were looked at.

        Raises
        ------
        ShardError
            Some are damaged. Names files and rows.
        """
        found = {place: look.result() for place, look in self._looks.items()}
        damage = [where for places in found.values() for where in places]
        if damage:
            folder = next(place[0] for place, places in found.items() if places)
            more = f"; and {len(damage) - _NAMED} places more" if len(damage) > _NAMED else ""
            raise ShardError(
                f"the source is damaged, so nothing was published: {'; '.join(damage[:_NAMED])}{more}. "
                f"`shardwright repair '{folder}' --source SRC` makes damaged files again from the pictures"
            )


def _look(place: Place, manifest: Manifest) -> list[str]:
    return list(damage_of(finished_shard(place[0], manifest, place[2])))


def _places(part: Rewrite, index: Index) -> dict[Place, Manifest]:
    """The HDF5 shards that hold the rows at ``index``, as (folder, version, number) -> manifest."""
    found: dict[Place, Manifest] = {}
    for k, (source, manifest) in enumerate(zip(part.rows.sources, part.rows.manifests, strict=True)):
        first, end = part.rows.first[k], part.rows.first[k + 1]
        own = index[(index >= first) & (index < end)] - first
        if len(own) and manifest.storage == "hdf5":
            rows = part.rows.map_of(k)
            for number in np.unique(rows.shard_of(rows.slot_of(own))).tolist():
                found[source.folder, manifest.version, number] = manifest
    return found


def check_room_for(todo: Sequence[Rewrite], out: Path) -> None:
    """Refuse what does not fit.

    Raises
    ------
    OutputError
        Names both figures.
    """
    at_most = sum(part.bytes_missing() for part in todo)
    if at_most > free_bytes(out):
        part = next(part for part in todo if part.missing)
        check_room(out, int(at_most * _stored_share(part)))


def _stored_share(part: Rewrite) -> float:
    """Share of its pixels' bytes that a data set will have on disk, from its first chunk."""
    if part.store.codec == "none":
        return 1.0
    index = part.missing[0].samples[: part.store.chunk_rows]
    shape = part.rows.manifests[0].image_shape
    pixels = np.empty((len(index), *shape), np.uint8)
    part.rows.images(index, pixels.reshape(len(index), -1))
    payload, _, _ = encode_chunk(pixels, len(index), part.store.codec, part.store.min_saving)
    return len(payload) / pixels.nbytes
