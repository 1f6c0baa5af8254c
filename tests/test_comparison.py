"""The same picture twice: in one data set, and in two; and class maps beside each other."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from drawing import png, put

from shardwright.convert import ConvertOptions, PixelOptions, StoreOptions, convert
from shardwright.datasets import compare, open_dataset
from shardwright.datasets.layout import Storage
from shardwright.errors import FormatError

Command = Callable[..., Any]


def options(storage: Storage = "hdf5") -> ConvertOptions:
    return ConvertOptions(
        pixels=PixelOptions(size=16),
        store=StoreOptions(storage, chunk_rows=4, shard_mib=4 * 16 * 16 * 3 / 2**20),
    )


@pytest.mark.parametrize("storage", ["hdf5", "npy"])
def test_duplicates_are_counted_and_listed(here: None, tmp_path: Path, storage: Storage) -> None:
    files = {f"{'ab'[k % 2]}/{k}.png": png(k) for k in range(10)}
    files |= {
        "a/again.png": png(0),
        "a/and again.png": png(0),
        "b/elsewhere.png": png(2),
        "a/not.png": png(99),
    }
    put(tmp_path / "src", files)
    (done,) = convert(tmp_path / "src", tmp_path / "out", options(storage))
    assert len(open_dataset(tmp_path / "out")) == 14  # they stay
    assert done.manifest.duplicates == {"other-class": 1, "same-class": 2}
    assert open_dataset(tmp_path / "out").manifest == done.manifest
    lines = [json.loads(line) for line in (tmp_path / "out" / "report-000001.jsonl").read_text().splitlines()]
    assert [(line["id"], line["verdict"], line["reason"], line["message"]) for line in lines] == [
        ("a/again.png", "duplicate", "same-class", "the same bytes as 'a/0.png'"),
        ("a/and again.png", "duplicate", "same-class", "the same bytes as 'a/0.png'"),
        ("b/elsewhere.png", "duplicate", "other-class", "the same bytes as 'a/2.png'"),
    ]


@pytest.fixture
def two(here: None, tmp_path: Path) -> tuple[Path, Path]:
    """Two data sets of the classes a, c and b, c, with two pictures in both."""
    put(tmp_path / "one", {f"{'ac'[k % 2]}/{k}.png": png(k) for k in range(8)})
    put(tmp_path / "two", {f"{'bc'[k % 2]}/{k}.png": png(k + 6) for k in range(8)})
    convert(tmp_path / "one", tmp_path / "first", options())
    convert(tmp_path / "two", tmp_path / "second", options("npy"))
    return tmp_path / "first", tmp_path / "second"


def test_two_data_sets(two: tuple[Path, Path], tmp_path: Path) -> None:
    found = compare(*two)
    assert (found.only_first, found.only_second, found.renumbered) == (("a",), ("b",), ())
    assert found.shared == (("a/6.png", "b/0.png"), ("c/7.png", "c/1.png"))
    assert not found.same_classes
    assert found.in_words()[-1] == "2 pictures that are in both: 'a/6.png = b/0.png', 'c/7.png = c/1.png'"
    assert compare(two[0], two[0]).same_classes
    put(tmp_path / "three", {"c/x.png": png(50)})
    convert(tmp_path / "three", tmp_path / "third", options())
    assert compare(tmp_path / "third", two[0]).renumbered == ("c",)
    assert compare(tmp_path / "third", two[0]).shared == ()
    with pytest.raises(FormatError):
        compare(two[0], tmp_path)


def test_verify_with_another(two: tuple[Path, Path], tmp_path: Path, command: Command) -> None:
    ran = command("verify", two[0], "--with", two[1])
    assert ran.code == 1
    assert f"with '{two[1]}': 2 pictures that are in both: " in ran.out
    ran = command("verify", two[0], "--with", two[1], "--json")
    assert ran.code == 1
    assert json.loads(ran.out)["with"]["shared"] == [["a/6.png", "b/0.png"], ["c/7.png", "c/1.png"]]
    put(tmp_path / "val", {"a/x.png": png(70), "c/y.png": png(71)})
    convert(tmp_path / "val", tmp_path / "apart", options())
    ran = command("verify", tmp_path / "apart", "--with", two[0])
    assert ran.code == 0
    assert "the same classes, no picture in both" in ran.out
    assert command("verify", two[0], "--with", tmp_path / "nowhere").code == 1


def test_verify_splits_with_another(here: None, tmp_path: Path, command: Command) -> None:
    put(tmp_path / "src", {"train/a/1.png": png(1), "val/a/2.png": png(2), "val/a/1 too.png": png(1)})
    convert(tmp_path / "src", tmp_path / "out", options())
    ran = command("verify", tmp_path / "out" / "val", "--with", tmp_path / "out" / "train")
    assert ran.code == 1
    assert "'a/1 too.png = a/1.png'" in ran.out
    ran = command("verify", tmp_path / "out", "--with", tmp_path / "out" / "train")
    assert "[val]: 1 pictures that are in both" in ran.out
