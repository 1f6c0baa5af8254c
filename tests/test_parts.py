"""Nodes that hold only some shards: parts of a data set, each a data set of its own, in step with the others."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from building import Built, build
from hypothesis import given
from hypothesis import strategies as st

from shardwright.datasets import open_dataset
from shardwright.errors import UsageError
from shardwright.loaders import BatchTransform, LoaderOptions, RandomCrop, make_loader
from shardwright.loaders.draws import Drawing
from shardwright.loaders.order import block_shuffle, exact_shuffle
from shardwright.loaders.ranks import Dealing, batch_count, in_step, share_of


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.mktemp("parts") / "set", rows=203, shard_rows=30)  # 7 shards


def test_parts_are_disjoint_and_complete(built: Built) -> None:
    parts = [open_dataset(built.folder, part=(node, 3), columns=("id",)) for node in range(3)]
    assert [len(part) for part in parts] == [83, 60, 60]
    ids = [id for part in parts for (id,) in part]
    assert sorted(ids) == sorted(built.ids)
    assert parts[1].classes == open_dataset(built.folder).classes


def test_the_shards_of_other_parts_need_not_be_there(built: Built, tmp_path: Path) -> None:
    few = build(tmp_path / "set", rows=80, shard_rows=20)
    for shard in few.manifest.shards[1::2]:
        for file in shard.files:
            (few.folder / file.name).unlink()
    dataset = open_dataset(few.folder, part=(0, 2))
    images = [image for batch, _ in make_loader(dataset, 8) for image in batch.permute(0, 2, 3, 1).numpy()]
    assert (np.array(images) == np.concatenate([few.images[:20], few.images[40:60]])).all()


@pytest.mark.parametrize("part", [(3, 3), (-1, 2), (0, 0), "all", 1])
def test_no_such_part(built: Built, part: Any) -> None:
    with pytest.raises(UsageError, match="expected \\(node, nodes\\)"):
        open_dataset(built.folder, part=part)


def test_more_parts_than_shards(built: Built) -> None:
    with pytest.raises(UsageError, match="8 parts of a data set of 7 shards"):
        open_dataset(built.folder, part=(7, 8))


@pytest.mark.parametrize("engine", ["threads", "processes"])
@pytest.mark.parametrize("order", ["exact", "block"])
@pytest.mark.parametrize("uneven", ["drop", "pad", "spread"])
def test_nodes_keep_step(built: Built, order: Any, engine: Any, uneven: Any) -> None:
    options = LoaderOptions(engine=engine, workers=1, shuffle_by=order, uneven=uneven, quiet=True)
    found = []
    for node in range(3):
        dataset = open_dataset(built.folder, part=(node, 3), columns=("image", "id"))
        for rank in range(2):
            loader = make_loader(dataset, 8, shuffle=True, ranks=(rank, 2), options=options)
            found.append([list(ids) for _, ids in loader])
            assert len(loader) == len(found[-1])
    # Parts of 83, 60, 60 rows, global batches of 16: 3.75 or 5.2 of them.
    assert {len(batches) for batches in found} == {{"drop": 3, "pad": 4, "spread": 6}[uneven]}
    times = Counter(id for batches in found for ids in batches for id in ids)
    if uneven == "spread":
        assert times == Counter(built.ids)
        assert min(len(ids) for batches in found for ids in batches) >= 1
    else:
        assert {len(ids) for batches in found for ids in batches} == {8}
        assert sum(n - 1 for n in times.values()) < 16 * 3


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=4),
    st.integers(1, 3),
    st.integers(1, 8),
    st.sampled_from(["drop", "pad", "spread"]),
    st.sampled_from(["exact", "block"]),
)
def test_any_parts_keep_step(parts: list[int], world: int, batch: int, uneven: Any, order: str) -> None:
    dealing = in_step(parts, Dealing(batch * world, uneven, world if order == "block" else 1))
    for rows in parts:
        blocks = np.unique(np.append(np.arange(0, rows, 7), rows))
        epoch = exact_shuffle(blocks, 1, 2) if order == "exact" else block_shuffle(blocks, 2, 1, 2, world)
        shares = [share_of(epoch, dealing, rank, world) for rank in range(world)]
        assert {len(share) for share in shares} == {dealing.batches} == {batch_count(rows, dealing)}
        sizes = [np.diff(share.bounds) for share in shares]
        for share, size in zip(shares, sizes, strict=True):
            assert share.bounds[-1] == len(share.indices) or not len(share)
            assert (size == batch).all() if uneven != "spread" else (size <= batch).all()
        if uneven == "spread":
            assert Counter(np.concatenate([share.indices for share in shares]).tolist()) == Counter(
                range(rows)
            )


def test_a_state_is_for_the_same_parts(built: Built) -> None:
    def loader_of(part: Any) -> Any:
        dataset = open_dataset(built.folder, part=part, columns=("image", "id"))
        return make_loader(dataset, 8, shuffle=True, options=LoaderOptions(workers=0, quiet=True))

    loaders = [loader_of((node, 2)) for node in range(2)]
    seen: Counter[str] = Counter()
    for loader in loaders:
        for _, (_, ids) in zip(range(3), loader, strict=False):
            seen.update(ids)
    states = [json.loads(json.dumps(loader.state_dict())) for loader in loaders]
    assert states[0] == states[1]
    for node in range(2):
        rest = loader_of((node, 2))
        rest.load_state_dict(states[0])
        seen.update(id for _, ids in rest for id in ids)
    assert set(seen) <= set(built.ids)
    assert max(seen.values()) <= 2
    for part in (None, (0, 3)):
        with pytest.raises(UsageError, match="parts is 2 there, [13] here"):
            loader_of(part).load_state_dict(states[0])


def test_random_numbers_differ_between_parts() -> None:
    transform = BatchTransform(RandomCrop(8))
    boxes = [Drawing(transform, (200, 200, 3), 0, 0, part).draws(np.arange(50)).boxes for part in range(2)]
    assert (boxes[0] != boxes[1]).any(axis=1).mean() > 0.9
