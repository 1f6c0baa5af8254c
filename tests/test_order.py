"""Orders are pure, complete, and as random as they say."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from building import build
from hypothesis import given
from hypothesis import strategies as st

from shardwright.datasets import open_dataset
from shardwright.datasets.layout import Shard, ShardFile
from shardwright.datasets.rows import RowMap
from shardwright.loaders import LoaderOptions, ShuffleQuality, shuffle_quality
from shardwright.loaders.order import Epoch, block_shuffle, exact_shuffle, sequential

FILE = (ShardFile("shards/x.h5", 1, "0" * 64),)
borders = st.lists(st.integers(1, 9), min_size=1, max_size=40).map(lambda sizes: np.cumsum([0, *sizes]))


@given(borders, st.integers(1, 12), st.integers(0, 2**62), st.integers(0, 1000))
def test_every_index_once_in_whole_groups(blocks: np.ndarray, mixed: int, seed: int, epoch: int) -> None:
    for order in (
        sequential(blocks, mixed),
        exact_shuffle(blocks, seed, epoch),
        block_shuffle(blocks, mixed, seed, epoch),
    ):
        assert sorted(order.indices.tolist()) == list(range(blocks[-1]))
        assert order.groups[0] == 0
        assert order.groups[-1] == blocks[-1]
        assert (np.diff(order.groups) > 0).all()


@given(borders, st.integers(1, 12), st.integers(0, 99))
def test_a_chunk_is_in_one_group(blocks: np.ndarray, mixed: int, seed: int) -> None:
    order = block_shuffle(blocks, mixed, seed, 0)
    chunk_of = np.searchsorted(blocks, order.indices, side="right")
    groups = [set(chunk_of[a:b].tolist()) for a, b in pairwise(order.groups.tolist())]
    assert sum(map(len, groups)) == len(blocks) - 1
    assert all(len(group) == mixed for group in groups[:-1])


@pytest.mark.parametrize("make", [
    lambda seed, epoch: exact_shuffle(np.array([0, 5000]), seed, epoch),
    lambda seed, epoch: block_shuffle(np.arange(0, 5001, 10), 8, seed, epoch),
])  # fmt: skip
def test_pure_and_new_each_epoch(make) -> None:  # type: ignore[no-untyped-def]
    def flat(order: Epoch) -> list[int]:
        return order.indices.tolist()

    assert flat(make(3, 1)) == flat(make(3, 1))
    assert flat(make(3, 1)) != flat(make(3, 2))
    assert flat(make(3, 1)) != flat(make(4, 1))
    # Not one and the same for (seed, epoch) and (epoch, seed), nor near the sorted order.
    assert flat(make(3, 1)) != flat(make(1, 3))
    assert abs(np.corrcoef(np.arange(5000), make(0, 0).indices)[0, 1]) < 0.1


@st.composite
def shards(draw: st.DrawFn) -> list[Shard]:
    found = []
    for rows in draw(st.lists(st.integers(1, 30), min_size=1, max_size=8)):
        dead = draw(st.sets(st.integers(0, rows - 1)))
        found.append(Shard(rows, FILE, tuple(sorted(dead))))
    return found


@given(shards(), st.integers(1, 10))
def test_rows_and_blocks_pass_over_the_dead(found: list[Shard], chunk_rows: int) -> None:
    rows = RowMap(found)
    places = [(s, r) for s, shard in enumerate(found) for r in range(shard.rows) if r not in shard.dead_rows]
    slot = rows.slot_of(np.arange(len(rows)))
    shard = rows.shard_of(slot)
    assert list(zip(shard.tolist(), (slot - rows.first_slot[shard]).tolist(), strict=True)) == places
    if not places:
        return
    blocks = rows.blocks(chunk_rows).tolist()
    assert blocks[0] == 0
    assert blocks[-1] == len(places)
    chunks = [{(s, r // chunk_rows) for s, r in places[a:b]} for a, b in pairwise(blocks)]
    assert all(len(chunk) == 1 for chunk in chunks)
    assert len({chunk.pop() for chunk in chunks}) == len(blocks) - 1


def test_shuffle_quality_tells_a_poor_order_from_a_good_one(tmp_path: Path) -> None:
    dataset = open_dataset(
        build(tmp_path / "set", rows=640, shard_rows=160, chunk_rows=8, shape=(2, 2, 1)).folder
    )

    def quality(mixed: int) -> ShuffleQuality:
        options = LoaderOptions(shuffle_by="block", mixed_chunks=mixed)
        return shuffle_quality(dataset, 16, options=options)

    poor, good = quality(2), quality(40)
    assert poor.measured.chunk_mates > 0.4  # two chunks a batch
    assert good.measured.chunk_mates < 0.05
    assert good.exact.chunk_mates < 0.02
    assert poor.measured.met_again > 5 * poor.exact.met_again
    assert poor.exact == good.exact
    assert "block order: label_distance" in str(poor)
