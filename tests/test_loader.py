"""One law: every sample exactly once an epoch, the right label with the right pixels, in a seeded order."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from building import Built, build
from torch.utils.data import DataLoader

from shardwright.datasets import open_dataset
from shardwright.errors import UsageError
from shardwright.loaders import Loader, LoaderOptions, make_loader, suggest_workers


@pytest.fixture(params=["hdf5", "npy"])
def built(request: pytest.FixtureRequest, tmp_path: Path) -> Built:
    return build(tmp_path / "set", request.param)


def order_of(built: Built, loader: Loader) -> list[int]:
    """Indices of one epoch's samples, found by their pixels; labels are checked on the way."""
    known = {image.tobytes(): i for i, image in enumerate(built.images)}
    order = []
    for images, labels in loader:
        assert images.dtype == torch.uint8
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert labels.dtype == torch.int64
        for image, label in zip(images.permute(0, 2, 3, 1).numpy(), labels.tolist(), strict=True):
            i = known[image.tobytes()]
            assert label == built.labels[i]
            order.append(i)
    return order


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker")
@pytest.mark.parametrize("workers", [0, 1, 2, 4])
@pytest.mark.parametrize("engine", ["threads", "processes"])
@pytest.mark.parametrize("order", ["sequential", "exact", "block"])
def test_every_sample_once_an_epoch(built: Built, engine: str, workers: int, order: str) -> None:
    def epochs(seed: int) -> list[list[int]]:
        by: Any = "auto" if order == "sequential" else order
        options = LoaderOptions(engine=engine, workers=workers, shuffle_by=by, mixed_chunks=3)  # type: ignore[arg-type]
        loader = make_loader(open_dataset(built.folder), 8, order != "sequential", seed=seed, options=options)
        assert (loader.plan.order, loader.plan.engine, loader.plan.workers) == (order, engine, workers)
        return [order_of(built, loader) for _ in range(2)]

    first, second = epochs(0)
    assert sorted(first) == sorted(second) == list(range(50))
    if order == "sequential":
        assert first == second == list(range(50))
    else:
        assert first != second
        assert epochs(0) == [first, second]
        assert epochs(1)[0] not in (first, second)


@pytest.mark.parametrize("order", ["exact", "block"])
def test_both_engines_give_one_order(built: Built, order: Any) -> None:
    orders = [
        order_of(
            built,
            make_loader(
                open_dataset(built.folder),
                7,
                shuffle=True,
                options=LoaderOptions(engine=engine, workers=workers, shuffle_by=order),
            ),
        )
        for engine, workers in (("threads", 0), ("threads", 3), ("processes", 1))  # type: ignore[assignment]
    ]
    assert orders[0] == orders[1] == orders[2]


def test_set_epoch(built: Built) -> None:
    loader = make_loader(open_dataset(built.folder), 8, shuffle=True)
    epochs = [order_of(built, loader) for _ in range(3)]
    loader.set_epoch(1)
    assert [order_of(built, loader), order_of(built, loader)] == epochs[1:]


@pytest.mark.parametrize(("batch_size", "drop_last", "sizes"), [
    (8, False, [8] * 6 + [2]), (8, True, [8] * 6), (50, True, [50]), (64, False, [50]),
    (1, False, [1] * 50), (7, False, [7] * 7 + [1]),
])  # fmt: skip
def test_batch_sizes(built: Built, batch_size: int, drop_last: bool, sizes: list[int]) -> None:
    loader = make_loader(open_dataset(built.folder), batch_size, drop_last=drop_last)
    assert [len(labels) for _, labels in loader] == sizes
    assert len(loader) == len(sizes)


def test_less_rows_than_a_batch(built: Built) -> None:
    """An epoch without a batch trains nothing, and ends without an error: it is said when the loader is made."""
    dataset = open_dataset(built.folder)
    with pytest.warns(
        UserWarning, match=r"50 rows are less than a batch of 51, .*drop_last.* smaller batch_"
    ) as said:
        loader = make_loader(dataset, 51, shuffle=True, drop_last=True)
    assert [warning.filename for warning in said] == [__file__]
    assert (list(loader), len(loader)) == ([], 0)
    for shuffle_by in ("exact", "block"):
        options = LoaderOptions(uneven="drop", shuffle_by=shuffle_by)  # type: ignore[arg-type]
        assert len(make_loader(dataset, 25, shuffle=True, ranks=(1, 2), options=options)) == 1
        with pytest.warns(UserWarning, match="50 rows are less than a batch of 26 on each of 2 ranks"):
            assert len(make_loader(dataset, 26, shuffle=True, ranks=(1, 2), options=options)) == 0
    parts = open_dataset(built.folder, part=(1, 3))  # of 20, 20 and 10 rows
    with pytest.warns(UserWarning, match="10 rows in the smallest of 3 parts are less than a batch of 11"):
        assert len(make_loader(parts, 11, drop_last=True)) == 0


def test_batches_are_the_users_to_keep(built: Built) -> None:
    kept = list(make_loader(open_dataset(built.folder), 8))
    images = torch.cat([images for images, _ in kept]).permute(0, 2, 3, 1)
    np.testing.assert_array_equal(images, built.images)


def test_one_row(tmp_path: Path) -> None:
    built = build(tmp_path / "set", rows=1)
    assert [len(labels) for _, labels in make_loader(open_dataset(built.folder), 4, shuffle=True)] == [1]


def test_collate_fn_and_other_columns(built: Built) -> None:
    def count(samples: Any) -> int:
        return len(samples)

    assert list(make_loader(open_dataset(built.folder), 20, collate_fn=count)) == [20, 20, 10]
    dataset = open_dataset(built.folder, columns=["id", "label"])
    ids, labels = next(iter(make_loader(dataset, 3)))
    assert ids == built.ids[:3]
    assert labels.tolist() == built.labels[:3].tolist()


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # it asks the system itself
@pytest.mark.parametrize(
    ("cpus", "batch_size", "processes", "threads"),
    [
        (1, 64, 1, 1),
        (2, 64, 1, 2),
        (4, 64, 2, 4),
        (16, 8, 2, 8),
        (16, 9, 3, 8),
        (64, 256, 8, 8),
        (6, 1, 1, 6),
    ],
)
def test_suggested_workers(
    built: Built,
    monkeypatch: pytest.MonkeyPatch,
    cpus: int,
    batch_size: int,
    processes: int,
    threads: int,
) -> None:
    """min(cpus - 2, ceil(batch / 4), 8), at least 1, of the CPUs that may be used."""
    monkeypatch.setattr("joblib.cpu_count", lambda: cpus)
    assert suggest_workers(batch_size) == processes
    assert make_loader(open_dataset(built.folder), batch_size).plan.workers == threads
    per_sample = make_loader(open_dataset(built.folder, transform=torch.neg), batch_size)
    assert (per_sample.plan.workers, per_sample.num_workers) == (processes, processes)
    assert per_sample.prefetch_factor == 3
    assert per_sample.persistent_workers


@pytest.mark.parametrize("engine", ["auto", "threads", "processes"])
def test_transforms_reach_the_batch(built: Built, engine: Any) -> None:
    dataset = open_dataset(built.folder, transform=lambda image: image.float().mean())
    loader = make_loader(dataset, 5, options=LoaderOptions(engine=engine))
    assert loader.plan.engine == ("processes" if engine == "auto" else engine)
    means, _ = next(iter(loader))
    np.testing.assert_allclose(means, built.images[:5].mean((1, 2, 3)), rtol=1e-5)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"batch_size": 0}, "batch_size is 0, expected"),
    ({"batch_size": 2.5}, "batch_size is 2.5, expected"),
    ({"batch_size": True}, "batch_size is True, expected"),
    ({"batch_size": 4, "seed": -1}, "seed is -1, expected"),
])  # fmt: skip
def test_what_is_out_of_range(built: Built, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_loader(open_dataset(built.folder), **arguments)


def test_other_datasets_are_refused(built: Built) -> None:
    with pytest.raises(UsageError, match="dataset is list, expected an H5Dataset"):
        make_loader([1, 2], 4)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="workers is -1, expected"):
        LoaderOptions(workers=-1)
    loader = make_loader(open_dataset(built.folder), 4)
    with pytest.raises(UsageError, match="epoch is -1"):
        loader.set_epoch(-1)
    assert isinstance(loader, DataLoader)
