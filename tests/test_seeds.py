"""Random numbers of a sample are a function of (seed, epoch, index), whichever process draws them."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from building import Built, OwnBatch, OwnItem, OwnItems, build, drawn, mixed, threads_here

from shardwright.datasets import open_dataset
from shardwright.datasets.base import ShardedDataset
from shardwright.datasets.seeds import SeededIndices, kept_generators
from shardwright.loaders import Loader, LoaderOptions, collate, make_loader

Drawn = dict[str, list[float]]


def transformed(folder: Path) -> ShardedDataset:
    return open_dataset(folder, columns=("image", "id"), transform=drawn)


KINDS: dict[str, tuple[Callable[[Path], ShardedDataset], Callable[[Any], Any]]] = {
    "transform": (transformed, collate),
    "own __getitem__": (OwnItem, collate),
    "own __getitems__": (OwnItems, collate),
    "drawing collate_fn": (transformed, mixed),
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.mktemp("seeds") / "set", rows=30)


def loader_of(
    built: Built,
    kind: str = "transform",
    *,
    batch_size: int = 4,
    seed: int = 3,
    ranks: Any = None,
    engine: Any = "threads",
    workers: int = 0,
    **options: Any,
) -> Loader:
    dataset, collate_fn = KINDS[kind]
    chosen = LoaderOptions(engine=engine, workers=workers, shuffle_by="exact", quiet=True, **options)
    return make_loader(
        dataset(built.folder), batch_size, True, seed=seed, collate_fn=collate_fn, ranks=ranks, options=chosen
    )


def drawn_in(loader: Any) -> Drawn:
    """What was drawn in one epoch: for each sample, by id; and for each batch, by all ids."""
    found: Drawn = {}
    for numbers, ids, *batch in loader:
        found.update(zip(ids, numbers.tolist(), strict=True))
        if batch:
            found[",".join(ids)] = batch[0].tolist()
    return found


@pytest.mark.parametrize(
    ("method", "workers", "kind"),
    [
        *(("fork", workers, kind) for workers in (1, 2) for kind in KINDS),
        *(("forkserver", 2, kind) for kind in KINDS),
        ("spawn", 2, "transform"),  # these take seconds to start
        ("spawn", 1, "drawing collate_fn"),
    ],
)
def test_the_same_in_any_process(built: Built, kind: str, method: Any, workers: int) -> None:
    here = loader_of(built, kind)
    there = loader_of(built, kind, engine="processes", workers=workers, start_method=method)
    for _ in range(3):  # the workers persist
        assert drawn_in(there) == drawn_in(here)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("engine", "workers"), [("processes", 0), ("threads", 1), ("threads", 2)])
def test_the_same_without_processes(built: Built, kind: str, engine: str, workers: int) -> None:
    here, there = loader_of(built, kind), loader_of(built, kind, engine=engine, workers=workers)
    for _ in range(3):
        assert drawn_in(there) == drawn_in(here)


@pytest.mark.parametrize("kind", KINDS)
def test_others_in_another_epoch_with_another_seed_and_for_another_sample(built: Built, kind: str) -> None:
    loader = loader_of(built, kind)
    runs = [drawn_in(loader), drawn_in(loader), drawn_in(loader_of(built, kind, seed=4))]
    assert all(set(built.ids) <= run.keys() for run in runs)
    numbers = [number for run in runs for drawn in run.values() for number in drawn]
    assert len(set(numbers)) == len(numbers)
    loader.set_epoch(0)
    assert drawn_in(loader) == runs[0]


@pytest.mark.parametrize("kind", ["transform", "own __getitem__", "own __getitems__"])
def test_the_same_in_other_batches_and_on_other_ranks(built: Built, kind: str) -> None:
    alone = drawn_in(loader_of(built, kind))
    assert drawn_in(loader_of(built, kind, batch_size=7)) == alone
    shares = [drawn_in(loader_of(built, kind, ranks=(rank, 3), uneven="spread")) for rank in range(3)]
    assert {id: numbers for share in shares for id, numbers in share.items()} == alone


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("engine", "workers"), [("threads", 2), ("processes", 0), ("processes", 2)])
def test_the_same_when_resumed(built: Built, kind: str, engine: str, workers: int) -> None:
    loader = loader_of(built, kind, engine=engine, workers=workers)
    drawn_in(loader)
    batches = iter(loader)
    begun = drawn_in([next(batches), next(batches), next(batches)])
    other = loader_of(built, kind, engine=engine, workers=workers)
    other.load_state_dict(loader.state_dict())
    rest = drawn_in(other)
    whole = loader_of(built, kind)
    whole.set_epoch(1)
    assert len(begun) < len(begun | rest)
    assert begun | rest == drawn_in(whole)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("engine", "workers"), [("processes", 0), ("processes", 1), ("threads", 0), ("threads", 2)]
)
def test_the_callers_own_generators_are_left_alone(
    built: Built, kind: str, engine: str, workers: int
) -> None:
    def own(loops: Any) -> list[list[float]]:
        torch.manual_seed(1)
        np.random.seed(2)
        random.seed(3)
        return [drawn().tolist() for _ in loops]

    with kept_generators():
        loader = loader_of(built, kind, engine=engine, workers=workers)
        undisturbed = own(range(2 * len(loader)))
        assert own(batch for _ in range(2) for batch in loader) == undisturbed


def test_workers_have_one_thread_of_torch_each(built: Built) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        dataset = open_dataset(built.folder, transform=threads_here)
        options = LoaderOptions(engine="processes", workers=2, quiet=True)
        assert {int(n) for threads, _ in make_loader(dataset, 4, options=options) for n in threads} == {1}
    finally:
        torch.set_num_threads(before)


def test_what_is_drawn_for_a_batch_at_once(built: Built) -> None:
    """By a subclass that goes through no indices: the same in any number of workers, others for other batches."""
    found = []
    for workers in (0, 1, 2):
        options = LoaderOptions(engine="processes", workers=workers, shuffle_by="exact", quiet=True)
        loader = make_loader(OwnBatch(built.folder), 4, True, seed=3, options=options)
        found.append([drawn_in(loader), drawn_in(loader)])
    assert found[0] == found[1] == found[2]
    for one, other in found:
        assert len({tuple(numbers) for numbers in [*one.values(), *other.values()]}) == 60


def test_indices_seed_nothing_of_the_callers() -> None:
    """Frameworks go through the indices of our batch sampler in the process of the training loop."""
    before = torch.default_generator.get_state()
    indices = SeededIndices(np.array([5, 6, 7]), seed=1, epoch=2)
    assert [*indices, *np.asarray(indices)] == [5, 6, 7] * 2
    assert torch.equal(torch.default_generator.get_state(), before)


def test_indices_that_are_only_looked_at_seed_nothing() -> None:
    with kept_generators():
        torch.manual_seed(0)
        before = torch.default_generator.get_state()
        indices = SeededIndices(np.array([5, 6, 7]), seed=1, epoch=2)
        assert (len(indices), indices[1]) == (3, 6)
        assert indices[1:].indices.tolist() == [6, 7]
        assert torch.equal(torch.default_generator.get_state(), before)
        assert list(indices[1:]) == [6, 7]
        assert not torch.equal(torch.default_generator.get_state(), before)
