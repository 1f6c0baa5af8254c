"""Pure: what is kept of an unfinished run whose source has changed since it was begun."""

from collections.abc import Iterable, Sequence

import numpy as np

from shardwright.convert.plan import ShardPlan, shard_stem
from shardwright.convert.records import ShardRecord
from shardwright.datasets.rows import Index


def salvage(
    records: Iterable[ShardRecord], ids: Sequence[str], wanted: Index, version: int
) -> list[ShardPlan]:
    """Plans of the finished shards all of whose pictures are still wanted, in order; each picture is in one.

    Whether a picture is what it was is not asked: a shard in which one is not is made again as it was planned.

    Parameters
    ----------
    records
        Of the finished shards.
    ids
        Of all samples now.
    wanted
        (n,): places of those of them that are to be made.
    """
    place = {ids[at]: at for at in wanted.tolist()}
    plans = []
    for record in sorted(records, key=lambda record: record.number):
        if record.ids and all(id in place for id in record.ids):
            samples = np.array([place.pop(id) for id in record.ids], np.int64)
            plans.append(ShardPlan(record.number, shard_stem(version, record.number), samples))
    return plans
