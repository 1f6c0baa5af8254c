"""Before rows are copied: whether the shards that they come from are what they were, and whether there is room."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import joblib
import numpy as np

from shardwright.convert.encode import encode_chunk
from shardwright.convert.progress import ProgressMaker
from shardwright.convert.rewrite import Rewrite
from shardwright.convert.space import check_room, free_bytes
from shardwright.convert.verify import damage_of
from shardwright.datasets.layout import Manifest
from shardwright.datasets.rows import Index, RowMap
from shardwright.datasets.shards import finished_shard
from shardwright.errors import ShardError

_NAMED = 5


def verify_sources(parts: Sequence[Rewrite], progress: ProgressMaker) -> None:
    """Check the SHA-256 of HDF5 shards that are still to be copied from: nothing else guards their ids.

    Shards in npy have a file a column: those are checked as they are read.

    Raises
    ------
    ShardError
        Names files and rows.
    """
    wanted: dict[tuple[Path, int, int], Manifest] = {}
    for part in parts:
        for source, manifest, own in _needed(part):
            if manifest.storage == "hdf5":
                maps = RowMap(manifest.shards)
                for number in np.unique(maps.shard_of(maps.slot_of(own))).tolist():
                    wanted[source, manifest.version, number] = manifest
    if not wanted:
        return
    places = list(wanted)
    damage: list[str] = []
    with progress("verify", len(places), "shards") as bar, ThreadPoolExecutor(joblib.cpu_count()) as pool:

        def look(place: tuple[Path, int, int]) -> list[str]:
            return list(damage_of(finished_shard(place[0], wanted[place], place[2])))

        for place, found in zip(places, pool.map(look, places), strict=True):
            damage += found
            bar.update(1)
            if found:
                folder = place[0]
    if damage:
        more = f"; and {len(damage) - _NAMED} places more" if len(damage) > _NAMED else ""
        raise ShardError(
            f"the source is damaged, so nothing was published: {'; '.join(damage[:_NAMED])}{more}. "
            f"`shardwright repair '{folder}' --source SRC` makes damaged files again from the pictures"
        )


def _needed(part: Rewrite) -> Iterator[tuple[Path, Manifest, Index]]:
    """(folder, manifest, own indices) of each source that has rows in a missing shard."""
    if not part.missing:
        return
    index = np.concatenate([plan.samples for plan in part.missing])
    for k, (source, manifest) in enumerate(zip(part.rows.sources, part.rows.manifests, strict=True)):
        first, end = part.rows.first[k], part.rows.first[k + 1]
        own = index[(index >= first) & (index < end)] - first
        if len(own):
            yield source.folder, manifest, own


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
