"""Plans are pure: every sample once, in whole chunks, whatever the number of jobs."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.convert.options import ConvertOptions, StoreOptions
from shardwright.convert.plan import decide, plan_shards
from shardwright.datasets.layout import Manifest, Stats, columns_of
from shardwright.datasets.pixels import PixelOptions
from shardwright.errors import OutputError, UsageError


def options(size: int = 256, seed: int = 0, **store: Any) -> ConvertOptions:
    return ConvertOptions(PixelOptions(size=size), StoreOptions(**store), seed)


@given(
    samples=st.integers(1, 5000),
    size=st.sampled_from([1, 17, 256]),
    chunk_rows=st.integers(1, 300),
    shard_mib=st.none() | st.floats(0.001, 100),
    seed=st.integers(0, 2**63 - 1),
)
def test_every_sample_has_one_row_in_whole_chunks(
    samples: int, size: int, chunk_rows: int, shard_mib: float | None, seed: int
) -> None:
    plans = plan_shards(samples, 2, options(size, seed, chunk_rows=chunk_rows, shard_mib=shard_mib))
    assert sorted(np.concatenate([plan.samples for plan in plans]).tolist()) == list(range(samples))
    rows = [len(plan.samples) for plan in plans]
    assert all(n == rows[0] and n % chunk_rows == 0 for n in rows[:-1])
    assert 1 <= rows[-1] <= -(-rows[0] // chunk_rows) * chunk_rows
    assert [(plan.number, plan.stem) for plan in plans] == [
        (k, f"shards/000002-{k:05d}") for k in range(len(plans))
    ]


@pytest.mark.parametrize(
    ("samples", "store", "rows"),
    [
        (64 * 32, {}, 32),  # a 64th of the rows is one chunk
        (64 * 32 + 1, {}, 64),
        (10, {}, 32),
        (64 * 10_000, {"chunk_rows": 100}, 1300),  # 256 MiB of 192 KiB are 1365 rows
        (64 * 32, {"shard_mib": 256}, 1344),  # what was asked for, not a 64th
        (10, {"shard_mib": 256}, 1344),
        (10**6, {"shard_mib": 12}, 64),  # 2 chunks of 6 MiB
        (10**6, {"shard_mib": 11.9}, 32),
        (10**6, {"shard_mib": 0.001}, 32),  # one chunk at least
    ],
)
def test_rows_of_a_shard(samples: int, store: dict[str, Any], rows: int) -> None:
    wanted = options(**store)
    assert wanted.store.rows_per_shard(samples, wanted.row_bytes) == rows
    assert len(plan_shards(samples, 1, wanted)[0].samples) == min(rows, samples)


def order(wanted: ConvertOptions, version: int = 1) -> list[int]:
    return np.concatenate([plan.samples for plan in plan_shards(500, version, wanted)]).tolist()


def test_the_permutation_depends_on_the_seed_only() -> None:
    first = order(options())
    assert first == order(replace(options(), jobs=7, strict=True))
    assert first == order(options(size=9, chunk_rows=5, shard_mib=0.01, compression="none"), version=9)
    assert first != order(options(seed=1))
    assert first != list(range(500))


def test_neighbours_are_of_different_classes() -> None:
    labels = np.repeat(np.arange(10), 50)  # a tree sorted by class
    for start in range(0, 480, 32):
        assert len(set(labels[order(options())][start : start + 32])) >= 7


# --- what to do with an output that is there ---------------------------------------------------------


def newest(made_with: ConvertOptions, files: int = 10, classes: tuple[str, ...] = ("a", "b")) -> Manifest:
    return Manifest(
        version=3,
        storage=made_with.store.format,
        rows=files,
        classes=classes,
        columns=columns_of(*made_with.image_shape),
        shards=(),
        seed=made_with.seed,
        stats=Stats((), ()),
        source={"files": files},
        options=made_with.recorded(),
    )


def test_an_empty_output_gets_version_1() -> None:
    assert decide(None, False, options(), 10, "out") == 1


def test_what_is_up_to_date_is_left_alone() -> None:
    assert decide(newest(options()), True, options(), 10, "out") is None
    assert decide(newest(options()), True, replace(options(), jobs=3, new_version=True), 10, "out") is None


@pytest.mark.parametrize("files", [10, 11, 5, 1000])
def test_another_source_gets_the_next_version(files: int) -> None:
    assert decide(newest(options()), False, options(), files, "out") == 4


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        (options(size=128), "size is 256 there, 128 here"),
        (options(seed=1), "seed is 0 there, 1 here"),
        (options(chunk_rows=16), "chunk_rows is 32 there, 16 here"),
        (options(compression="none"), "compression is 'lzf' there, 'none' here"),
        (
            options(format="npy"),
            "compression is 'lzf' there, 'none' here; format is 'hdf5' there, 'npy' here",
        ),
        (options(shard_mib=64), "shard_mib is None there, 64 here"),
        (replace(options(), classes=("b", "a")), "class map"),
    ],
)
def test_other_options_are_named_and_refused(wanted: ConvertOptions, says: str) -> None:
    with pytest.raises(OutputError, match=rf"'out' holds version 3.*{says}.*--new-version"):
        decide(newest(options()), True, wanted, 10, "out")
    assert decide(newest(options()), True, replace(wanted, new_version=True), 10, "out") == 4


def test_a_class_map_that_is_no_longer_given_is_another_option() -> None:
    before = newest(replace(options(), classes=("b", "a")), classes=("b", "a"))
    assert decide(before, True, replace(options(), classes=("b", "a")), 10, "out") is None
    with pytest.raises(OutputError, match="class_map is 'given' there, 'folders' here"):
        decide(before, False, options(), 10, "out")


def test_a_source_that_lost_most_of_its_pictures_is_refused() -> None:
    with pytest.raises(
        OutputError, match="has 4 pictures, version 3 of 'out' was made from 10.*--allow-shrink"
    ):
        decide(newest(options()), False, options(), 4, "out")
    assert decide(newest(options()), False, replace(options(), allow_shrink=True), 4, "out") == 4


@pytest.mark.parametrize(
    ("kind", "wrong", "says"),
    [
        (StoreOptions, {"format": "zip"}, "format is 'zip', expected one of hdf5, npy"),
        (StoreOptions, {"chunk_rows": 0}, "chunk_rows is 0, expected 1 to"),
        (StoreOptions, {"shard_mib": 0}, "shard_mib is 0, expected more than 0"),
        (StoreOptions, {"shard_mib": float("nan")}, "shard_mib is nan"),
        (StoreOptions, {"compression": "zip"}, "compression is 'zip', expected one of lzf, gzip, none"),
        (StoreOptions, {"format": "npy", "compression": "lzf"}, "npy knows no compression"),
        (StoreOptions, {"min_saving": 1.5}, "min_saving is 1.5, expected a share from 0 to 1"),
        (ConvertOptions, {"seed": -1}, "seed is -1, expected 0 to"),
        (ConvertOptions, {"jobs": 0}, "jobs is 0, expected 1 to"),
        (ConvertOptions, {"classes": ("a", "a")}, "classes: a name stands twice"),
        (ConvertOptions, {"store": StoreOptions(chunk_rows=1 << 20)}, "HDF5 allows less than 4 GiB"),
    ],
)
def test_an_option_out_of_range_names_the_range(kind: type, wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        kind(**wrong)
