"""Whether the shards that rows are copied from are what they were; and whether there is room for the copies."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import joblib
import numpy as np

from shardwright.convert.encode import encode_chunk
from shardwright.convert.rewrite import Rewrite
from shardwright.convert.rowsource import damaged_source
from shardwright.convert.space import check_room, free_bytes
from shardwright.convert.verify import damage_of
from shardwright.datasets.shards import finished_shard


def refuse_damage(parts: Sequence[Rewrite]) -> None:
    """Look at all HDF5 shards that are still to be copied from, where one was found damaged.

    Raises
    ------
    ShardError
        Names files and rows.
    """
    for part in parts:
        index = np.concatenate([plan.samples for plan in part.missing] or [np.empty(0, np.int64)])
        for k, (source, manifest) in enumerate(zip(part.rows.sources, part.rows.manifests, strict=True)):
            first, end = part.rows.first[k], part.rows.first[k + 1]
            own = index[(index >= first) & (index < end)] - first
            if manifest.storage != "hdf5":  # who stumbled there has named file and rows
                continue
            rows = part.rows.map_of(k)
            numbers = np.unique(rows.shard_of(rows.slot_of(own))).tolist() if len(own) else []
            with ThreadPoolExecutor(joblib.cpu_count()) as pool:
                folder = source.folder
                looks = pool.map(
                    lambda n, f=folder, m=manifest: list(damage_of(finished_shard(f, m, n))), numbers
                )
                damage = [where for places in looks for where in places]
            if damage:
                raise damaged_source(folder, damage)


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
