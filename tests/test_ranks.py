"""Ranks and resuming: who reads what, and what is left of an epoch that was stopped in the middle."""

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from building import Built, build, train_on_rank
from hypothesis import given
from hypothesis import strategies as st

from shardwright.datasets import open_dataset
from shardwright.errors import UsageError
from shardwright.loaders import Loader, LoaderOptions, make_loader
from shardwright.loaders.order import Epoch, block_shuffle, exact_shuffle, sequential
from shardwright.loaders.ranks import Dealing, Share, batch_count, share_of

borders = st.lists(st.integers(1, 9), min_size=1, max_size=25).map(lambda sizes: np.cumsum([0, *sizes]))
orders = st.sampled_from(["sequential", "exact", "block"])
worlds = st.integers(1, 5)


def epoch_of(order: str, blocks: np.ndarray, lanes: int) -> Epoch:
    match order:
        case "sequential":
            return sequential(blocks, 3)
        case "exact":
            return exact_shuffle(blocks, 7, 1)
        case _:
            return block_shuffle(blocks, 3, 7, 1, lanes)


def batches(share: Share) -> list[list[int]]:
    return [share.indices[a:b].tolist() for a, b in zip(share.bounds[:-1], share.bounds[1:], strict=True)]


@given(orders, borders, worlds, st.integers(1, 8), st.sampled_from(["drop", "pad", "spread"]))
def test_every_uneven_end(order: str, blocks: np.ndarray, world: int, batch: int, uneven: Any) -> None:
    lanes = world if order == "block" else 1
    dealing = Dealing(batch * world, uneven, lanes, world)
    epoch = epoch_of(order, blocks, lanes)
    shares = [share_of(epoch, dealing, rank, world) for rank in range(world)]
    rows, count = int(blocks[-1]), batch_count(int(blocks[-1]), dealing)
    assert {len(share) for share in shares} == {count}
    for share in shares:
        assert share.groups[0] == 0
        assert share.groups[-1] == share.bounds[-1] == len(share.indices) or not count
        assert (np.diff(share.groups) > 0).all()
    sizes = [len(b) for share in shares for b in batches(share)]
    times = Counter(i for share in shares for b in batches(share) for i in b)
    assert set(times) <= set(range(rows))
    match uneven:
        case "drop":
            assert set(sizes) <= {batch}
            assert max(times.values(), default=1) == 1
            assert rows - len(times) < batch * world
        case "pad":
            assert set(sizes) == {batch}
            assert len(times) == rows
            assert sum(times.values()) - rows < batch * world
        case "spread":
            assert set(times.values()) == {1}
            assert len(times) == rows
            assert max(sizes) <= batch
            assert count == -(-rows // (batch * world))
            if rows >= world * count:
                assert min(sizes) >= 1


@given(orders, borders, worlds, st.integers(1, 4), st.sampled_from(["drop", "pad", "spread"]), st.data())
def test_the_rest_of_an_epoch_on_other_ranks(
    order: str, blocks: np.ndarray, world: int, batch: int, uneven: Any, data: st.DataObject
) -> None:
    global_batch = batch * world
    others = data.draw(st.sampled_from([n for n in range(1, 9) if global_batch % n == 0]))
    lanes = world if order == "block" else 1
    dealing = Dealing(global_batch, uneven, lanes, world)
    epoch = epoch_of(order, blocks, lanes)
    before = [batches(share_of(epoch, dealing, rank, world)) for rank in range(world)]
    after = [batches(share_of(epoch, dealing, rank, others)) for rank in range(others)]
    assert {len(b) for b in after} == {batch_count(int(blocks[-1]), dealing)}
    stop = data.draw(st.integers(0, len(before[0])))
    seen = Counter(i for rank in before for b in rank[:stop] for i in b)
    rest = Counter(i for rank in after for b in rank[stop:] for i in b)
    whole = Counter(i for rank in before for b in rank for i in b)
    assert seen + rest == whole


def test_a_chunk_is_read_by_one_rank_but_at_the_cuts() -> None:
    blocks = np.arange(0, 3201, 32)
    readers = Counter(
        chunk
        for rank in range(3)
        for chunk in set(
            (
                share_of(block_shuffle(blocks, 4, 0, 0, 3), Dealing(48, "drop", 3), rank, 3).indices // 32
            ).tolist()
        )
    )
    assert sorted(readers.values())[:-2] == [1] * (len(readers) - 2)


# --- the loader -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.mktemp("ranks") / "set", rows=203, shard_rows=50)


def loader_of(
    built: Built,
    rank: int,
    world: int,
    batch_size: int,
    order: Any = "block",
    shuffle: bool = True,
    **options: Any,
) -> Loader:
    return make_loader(
        open_dataset(built.folder, columns=("image", "label", "id")),
        batch_size,
        shuffle=shuffle,
        seed=5,
        ranks=(rank, world),
        options=LoaderOptions(**{"workers": 2, "shuffle_by": order, "quiet": True, **options}),
    )


def ids_of(batches: Any) -> list[list[str]]:
    return [list(ids) for _, _, ids in batches]


@pytest.mark.parametrize("engine", ["threads", "processes"])
@pytest.mark.parametrize("order", ["exact", "block"])
def test_training_keeps_step(built: Built, order: str, engine: str) -> None:
    found = [ids_of(loader_of(built, rank, 3, 8, order, engine=engine)) for rank in range(3)]
    assert {len(batches) for batches in found} == {9} == {len(loader_of(built, 0, 3, 8, order))}
    assert {len(ids) for batches in found for ids in batches} == {8}
    times = Counter(id for batches in found for ids in batches for id in ids)
    assert set(times) == set(built.ids)
    assert sum(times.values()) - len(times) < 24


@pytest.mark.parametrize(("world", "batch_size"), [(3, 8), (4, 50), (5, 60)])
def test_evaluation_is_disjoint_and_complete(built: Built, world: int, batch_size: int) -> None:
    found = [ids_of(loader_of(built, rank, world, batch_size, shuffle=False)) for rank in range(world)]
    assert len({len(batches) for batches in found}) == 1
    assert Counter(id for batches in found for ids in batches for id in ids) == Counter(built.ids)


def test_more_ranks_than_samples(tmp_path: Path) -> None:
    few = build(tmp_path / "few", rows=3)
    images = [[image for image, *_ in loader_of(few, rank, 5, 2, shuffle=False)] for rank in range(5)]
    assert [len(batches) for batches in images] == [1] * 5
    assert sorted(len(batches[0]) for batches in images) == [0, 0, 1, 1, 1]
    assert {tuple(batches[0].shape[1:]) for batches in images} == {(3, 8, 8)}
    trained = [ids_of(loader_of(few, rank, 5, 2)) for rank in range(5)]
    assert {len(ids) for batches in trained for ids in batches} == {2}


@pytest.mark.parametrize("engine", ["threads", "processes"])
@pytest.mark.parametrize("order", ["exact", "block", "sequential"])
def test_resumed_in_the_middle_twice(built: Built, order: str, engine: str) -> None:
    shuffle = order != "sequential"
    by = order if shuffle else "auto"
    whole = loader_of(built, 0, 1, 16, by, shuffle)
    expected = [ids_of(whole) for _ in range(3)]
    states: list[dict[str, Any]] = []
    seen: list[list[str]] = []
    for stop, options in (
        (4, {"workers": 2}),
        (5, {"workers": 1, "prefetch_batches": 9}),
        (20, {"workers": 0}),
    ):
        loader = loader_of(built, 0, 1, 16, by, shuffle, engine=engine, **options)
        loader.set_epoch(1)
        if states:
            loader.load_state_dict(json.loads(json.dumps(states[-1])))
            assert loader.state_dict() == states[-1]
        for _, (_, _, ids) in zip(range(stop), loader, strict=False):
            seen.append(list(ids))
            states.append(loader.state_dict())
    assert seen == expected[1]
    assert len(json.dumps(states[0])) < 1000
    # Behind the end of an epoch comes the next one, and the epochs after it.
    loader = loader_of(built, 0, 1, 16, by, shuffle)
    loader.load_state_dict({**states[0], "batch": 0})
    assert [ids_of(loader) for _ in range(2)] == expected[1:]
    assert (loader.state_dict()["epoch"], loader.state_dict()["batch"]) == (3, 0)


@pytest.mark.parametrize("order", ["exact", "block", "sequential"])
@pytest.mark.parametrize(("before", "after"), [(4, 1), (1, 4), (4, 2), (2, 3)])
def test_evaluation_resumed_on_other_ranks_is_complete(
    built: Built, order: Any, before: int, after: int
) -> None:
    shuffle, by = order != "sequential", order if order != "sequential" else "auto"
    seen: Counter[str] = Counter()
    for rank in range(before):
        loader = loader_of(built, rank, before, 12 // before, by, shuffle, uneven="spread")
        for _, (_, _, ids) in zip(range(3), loader, strict=False):
            seen.update(ids)
    for rank in range(after):
        rest = loader_of(built, rank, after, 12 // after, by, shuffle, uneven="spread")
        rest.load_state_dict(loader.state_dict())
        seen.update(id for ids in ids_of(rest) for id in ids)
    assert seen == Counter(built.ids)


@pytest.mark.parametrize("order", ["exact", "block"])
def test_resumed_on_another_number_of_ranks(built: Built, order: str) -> None:
    loaders = [loader_of(built, rank, 3, 8, order) for rank in range(3)]
    seen: Counter[str] = Counter()
    states = []
    for loader in loaders:
        for _, (_, _, ids) in zip(range(4), loader, strict=False):
            seen.update(ids)
        states.append(loader.state_dict())
    assert states[0] == states[1] == states[2]
    for rank in range(2):
        loader = loader_of(built, rank, 2, 12, order)
        loader.load_state_dict(states[0])
        rest = ids_of(loader)
        assert len(rest) == 5
        seen.update(id for ids in rest for id in ids)
        assert loader.state_dict()["ranks"] == 2
    undisturbed = Counter(
        id for rank in range(3) for ids in ids_of(loader_of(built, rank, 3, 8, order)) for id in ids
    )
    assert seen == undisturbed


def test_a_state_of_something_else_is_refused(built: Built, tmp_path: Path) -> None:
    state = loader_of(built, 0, 1, 16).state_dict()
    other = build(tmp_path / "other", rows=203, shard_rows=51)
    for loader, says in [
        (loader_of(other, 0, 1, 16), "dataset is"),
        (loader_of(built, 0, 1, 8), "global_batch is 16 there, 8 here"),
        (loader_of(built, 0, 1, 16, uneven="drop"), "uneven is 'spread' there, 'drop' here"),
    ]:
        with pytest.raises(UsageError, match=says):
            loader.load_state_dict(state)
    with pytest.raises(UsageError, match="epoch, batch and ranks"):
        loader_of(built, 0, 1, 16).load_state_dict({**state, "batch": -1})
    # The order is the state's, whatever this machine would have chosen.
    loader = loader_of(built, 0, 1, 16, "exact")
    loader.load_state_dict(state)
    assert loader.plan.order == "block"
    assert ids_of(loader) == ids_of(loader_of(built, 0, 1, 16, "block"))


@pytest.mark.parametrize("engine", ["threads", "processes"])
@pytest.mark.parametrize("by", ["loader", "sampler"])
def test_set_epoch_keeps_what_was_restored(built: Built, engine: str, by: str) -> None:
    """A resumed loop that calls set_epoch, as frameworks do, sees no sample a second time."""
    whole = loader_of(built, 0, 1, 16)
    expected = [ids_of(whole) for _ in range(3)]
    stopped = loader_of(built, 0, 1, 16)
    stopped.set_epoch(1)
    for _, _ in zip(range(4), stopped, strict=False):
        pass
    state = stopped.state_dict()
    assert (state["epoch"], state["batch"]) == (1, 4)

    loader = loader_of(built, 0, 1, 16, engine=engine)
    chooser: Any = loader if by == "loader" else loader.sampler
    loader.load_state_dict(state)
    chooser.set_epoch(1)
    chooser.set_epoch(1)
    assert loader.state_dict() == state
    under_way = iter(loader)
    chooser.set_epoch(1)  # Lightning sets it when it has the iterator
    assert loader.state_dict() == state
    assert ids_of(under_way) == expected[1][4:]
    chooser.set_epoch(2)
    assert ids_of(loader) == expected[2]

    # Behind the last batch of the epoch the next one is whole.
    loader.load_state_dict({**state, "batch": len(loader)})
    under_way = iter(loader)
    chooser.set_epoch(2)
    assert ids_of(under_way) == expected[2]

    # Once it goes on, and from another epoch, it is the whole epoch again.
    loader.load_state_dict(state)
    next(iter(loader))
    chooser.set_epoch(1)
    assert loader.state_dict() == {**state, "batch": 0}
    assert ids_of(loader) == expected[1]
    loader.load_state_dict(state)
    under_way = iter(loader)
    chooser.set_epoch(2)
    assert ids_of(under_way) == expected[2]
    loader.load_state_dict(state)
    chooser.set_epoch(0)
    chooser.set_epoch(1)
    assert ids_of(loader) == expected[1]


def test_another_epoch_is_dealt_out_over_the_ranks_there_are(built: Built) -> None:
    state = loader_of(built, 0, 3, 8).state_dict()
    assert state["ranks"] == 3
    loader = loader_of(built, 0, 2, 12)
    loader.load_state_dict({**state, "batch": 2})
    loader.set_epoch(1)
    assert loader.state_dict()["ranks"] == 2


def test_no_epoch_before_the_first(built: Built) -> None:
    with pytest.raises(UsageError, match="epoch is -1, expected a whole number"):
        loader_of(built, 0, 1, 16).set_epoch(-1)


def drawn(batches: Any) -> list[list[int]]:
    return [list(indices) for indices in batches]


@pytest.mark.parametrize("order", ["exact", "block"])
def test_the_batch_sampler_goes_on_too(built: Built, order: str) -> None:
    """As torchdata's loader does it: state of the sampler and of its iterator, restored in this order, twice."""
    whole = loader_of(built, 0, 2, 8, order).batches
    expected = [drawn(whole) for _ in range(3)]
    batches = loader_of(built, 0, 2, 8, order).batches
    iterator: Any = iter(batches)
    assert iterator.state_dict() == batches.state_dict()
    seen = []
    for _ in range(3):
        seen += [list(next(iterator)) for _ in range(3)]
        states = json.loads(json.dumps([batches.state_dict(), iterator.state_dict()]))
        assert (states[0]["epoch"], states[1]["epoch"], states[1]["batch"]) == (1, 0, len(seen))
        batches = loader_of(built, 0, 2, 8, order).batches
        iter(batches)
        batches.load_state_dict(states[0])
        iterator = iter(batches)
        iterator.load_state_dict(states[1])
        assert [batches.state_dict(), iterator.state_dict()] == states
    assert seen + drawn(iterator) == expected[0]
    assert next(iterator, None) is None
    batches.set_epoch(1)
    assert [drawn(batches) for _ in range(2)] == expected[1:]
    # Its state is a loader's as well.
    loader = loader_of(built, 0, 2, 8, order)
    loader.load_state_dict(states[1])
    assert len(ids_of(loader)) == len(expected[0]) - len(seen)


def test_a_refused_state_changes_nothing(built: Built) -> None:
    state = loader_of(built, 0, 1, 8).state_dict()
    loader = loader_of(built, 0, 1, 16, "exact")
    before = loader.state_dict()
    for refusing in (loader, loader.batches, iter(loader.batches)):
        with pytest.raises(
            UsageError, match="the state is not of this loader: global_batch is 8 there, 16 here"
        ):
            refusing.load_state_dict(state)  # type: ignore[union-attr]
    assert loader.state_dict() == before


def test_the_sampler_shows_this_ranks_samples(built: Built) -> None:
    """What frameworks find in `loader.sampler`; without ranks there is nothing that says sharding were done."""
    for rank, shuffle in [(0, True), (1, True), (0, False), (1, False)]:
        loader = loader_of(built, rank, 2, 8, shuffle=shuffle)
        assert isinstance(loader.sampler, torch.utils.data.DistributedSampler)
        loader.sampler.set_epoch(2)
        samples = list(loader.sampler)
        assert samples == [i for batch in drawn(loader.batches) for i in batch]
        assert len(loader.sampler) == len(samples)
    loader = make_loader(open_dataset(built.folder), 8, ranks=None)
    assert not isinstance(loader.sampler, torch.utils.data.DistributedSampler)
    one, other, *_ = loader.batches  # frameworks put parts of batches together
    assert list(one[:2] + other[1:]) == [*one[:2], *other[1:]]
    assert (one + other).epoch == one.epoch


def test_a_state_shuffles_nothing_that_is_not_shuffled(built: Built) -> None:
    shuffled, plain = loader_of(built, 0, 1, 16), loader_of(built, 0, 1, 16, "auto", shuffle=False)
    for loader, state in [(shuffled, plain.state_dict()), (plain, shuffled.state_dict())]:
        with pytest.raises(UsageError, match="order is '\\w+' there, '\\w+' here"):
            loader.load_state_dict(state)


@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_the_epoch_begun_last_counts(built: Built, engine: str) -> None:
    loader = loader_of(built, 0, 1, 16, engine=engine)
    state = loader.state_dict()
    first, second = iter(loader), iter(loader)
    next(first)
    next(second)
    next(second)
    if engine == "threads":
        next(first)
    else:
        with pytest.raises(UsageError, match="another epoch of this loader was begun"):
            next(first)
    assert (loader.state_dict()["epoch"], loader.state_dict()["batch"]) == (1, 2)
    assert len(list(second)) == 11
    third = iter(loader)
    next(third)
    assert next(second, None) is None
    assert (loader.state_dict()["epoch"], loader.state_dict()["batch"]) == (2, 1)
    loader.load_state_dict(state)
    next(third)
    assert loader.state_dict() == state
    loader.set_epoch(5)
    list(third)
    assert (loader.state_dict()["epoch"], loader.state_dict()["batch"]) == (5, 0)


def test_an_epoch_of_no_batches_is_one_epoch(built: Built) -> None:
    for engine in ("threads", "processes"):
        with pytest.warns(UserWarning, match="203 rows are less than a batch of 300"):
            loader = loader_of(built, 0, 1, 300, engine=engine, uneven="drop", workers=1)
        assert [list(loader), list(loader)] == [[], []]
        assert loader.state_dict()["epoch"] == 2


def test_numbers_of_numpys(built: Built) -> None:
    dataset = open_dataset(built.folder)
    loader = make_loader(dataset, np.int32(16), shuffle=True, seed=np.int64(3))  # type: ignore[arg-type]
    loader.set_epoch(np.int64(2))  # type: ignore[arg-type]
    assert json.loads(json.dumps(loader.state_dict()))["epoch"] == 2
    wrong: list[Any] = [1.5, True, "1", -1]
    for value in wrong:
        with pytest.raises(UsageError, match="expected a whole number"):
            loader.set_epoch(value)
        with pytest.raises(UsageError, match="expected a whole number"):
            make_loader(dataset, 4, seed=value)
        for name in ("workers", "prefetch_batches", "mixed_chunks"):
            with pytest.raises(UsageError, match=f"{name} is .*, expected a whole number"):
                LoaderOptions(**{name: value})
    with pytest.raises(UsageError, match="expected 'drop', or no drop_last"):
        make_loader(dataset, 4, drop_last=True, options=LoaderOptions(uneven="pad"))
    with pytest.raises(UsageError, match="there is no CUDA here"):
        make_loader(dataset, 4, options=LoaderOptions(pin_memory=True))


@pytest.mark.parametrize("ranks", ["some", (1,), (2, 2), (-1, 2), ("0", 1), (True, 2), 3])
def test_ranks_that_are_none(built: Built, ranks: Any) -> None:
    with pytest.raises(UsageError, match="ranks is"):
        make_loader(open_dataset(built.folder), 4, ranks=ranks)


def test_restoring_a_long_epoch_is_quick() -> None:
    """A state of 1.28 million rows: by the clock, with room for a noisy machine."""
    blocks = np.arange(0, 1_280_001, 32)
    start = time.perf_counter()
    share_of(block_shuffle(blocks, 10, 0, 3, 4), Dealing(256, "pad", 4), 1, 4)
    assert time.perf_counter() - start < 5


# --- processes of torch.distributed ---------------------------------------------------------------------


def test_auto_follows_torch_distributed(built: Built, tmp_path: Path) -> None:
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    jobs = [
        context.Process(target=train_on_rank, args=(r, 2, built.folder, str(tmp_path / "meet"), queue))
        for r in range(2)
    ]
    for job in jobs:
        job.start()
    found = dict(queue.get(timeout=60) for _ in jobs)
    for job in jobs:
        job.join(60)
        assert job.exitcode == 0
    assert len(found[0]) == len(found[1]) == 13
    assert {id for batches in found.values() for ids in batches for id in ids} == set(built.ids)
    one, other = ({id for ids in found[rank][:12] for id in ids} for rank in range(2))
    assert not one & other
