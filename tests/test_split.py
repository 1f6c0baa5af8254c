"""`split` deals a data set out: every row in one part, by its id and a seed alone."""

import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from building import build
from hypothesis import given
from hypothesis import strategies as st
from test_one_writer import everything
from test_reshard import assert_whole, in_order, rows_of

from shardwright.convert import ConvertOptions, PixelOptions, StoreOptions, convert, copying
from shardwright.convert.lock import one_writer
from shardwright.convert.reshard import reshard
from shardwright.convert.selection import parse_shares, sides
from shardwright.convert.split import SplitOptions, split
from shardwright.datasets import open_dataset
from shardwright.datasets.layout import Storage
from shardwright.datasets.manifest import read_manifest
from shardwright.errors import OutputError, SourceError, UsageError

Command = Callable[..., Any]


@pytest.fixture(params=["hdf5", "npy"])
def storage(request: pytest.FixtureRequest) -> Storage:
    return request.param  # type: ignore[no-any-return]


def by(text: str, seed: int = 0, *, new_version: bool = False) -> SplitOptions:
    return SplitOptions(parse_shares(text), seed, new_version, jobs=1)


def test_every_row_is_in_one_part(tmp_path: Path, storage: Storage, command: Command) -> None:
    built = build(tmp_path / "src", storage, rows=300, dead={0: (3, 4)})
    shares = ("--by", "train=0.8,val=0.1,test=0.1", "--jobs", 1)
    ran = command("split", built.folder, tmp_path / "out", *shares)
    assert ran.code == 0, ran.err
    before = rows_of(built.folder)
    parts = {name: rows_of(tmp_path / "out" / name) for name in ("train", "val", "test")}
    assert {id: row for rows in parts.values() for id, row in rows.items()} == before
    assert sum(map(len, parts.values())) == len(before) == 298
    for name, rows in parts.items():
        assert in_order(rows) == [item for item in in_order(before) if item[0] in rows]
        manifest = read_manifest(tmp_path / "out" / name)
        assert (manifest.classes, manifest.storage) == (built.manifest.classes, storage)
        assert (
            f"'{tmp_path / 'out' / name}': version 1, {len(rows)} of 298 ({len(rows) / 298:.1%}) images"
            in ran.out
        )
        assert_whole(tmp_path / "out" / name)
    assert 0.7 < len(parts["train"]) / 298 < 0.9
    again = command("split", built.folder, tmp_path / "out", *shares)
    assert again.out.count("Nothing to do") == 3
    found = json.loads(command("split", built.folder, tmp_path / "out", *shares, "--json").out)
    assert {name: each["rows"] for name, each in found.items()} == {name: len(r) for name, r in parts.items()}


@given(st.sets(st.text(max_size=8), min_size=1, max_size=60), st.sets(st.text(max_size=8)), st.integers(0, 9))
def test_an_id_stays_in_its_part_when_others_come(ids: set[str], more: set[str], seed: int) -> None:
    shares = parse_shares("train=0.5,val=0.3,test=0.2")

    def part_of(names: list[str]) -> dict[str, str]:
        return {
            names[k]: part for part, places in sides(names, seed, shares).items() for k in places.tolist()
        }

    before, after = part_of(sorted(ids)), part_of(sorted(ids | more, reverse=True))
    assert {id: after[id] for id in ids} == before
    assert len(after) == len(ids | more)


def test_shares_are_those_that_were_asked_for() -> None:
    ids = [f"c{k % 3}/{k}.jpg" for k in range(30_000)]
    for seed in range(3):
        found = sides(ids, seed, parse_shares("val=0.1,train=0.9"))
        assert list(found) == ["train", "val"]
        for number in range(3):  # of every class
            share = np.count_nonzero(found["val"] % 3 == number) / 10_000
            assert abs(share - 0.1) < 0.015
    other = sides(ids, 1, parse_shares("val=0.2,train=0.8"))
    assert set(found["train"]) != set(other["train"])
    larger = sides(ids, 2, parse_shares("val=0.2,train=0.8"))
    assert set(found["val"]) < set(larger["val"])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("train=0.9", "sum to 0.9"),
        ("train=1", "more than 0 and less than 1"),
        ("train=0.9,val=0.2", "sum to 1.1"),
        ("train=0.9,dev=0.1", "'dev' is no name of a part"),
        ("train=0.5,train=0.5", "stands twice"),
        ("train=0.9;val=0.1", "expected parts and their shares"),
        ("train=0,val=1", "more than 0"),
        ("", "expected parts"),
        ("train=-0.1,val=1.1", "expected parts"),
        ("train=nan,val=0.1", "expected parts"),
        ("train=1/0,val=0.1", "expected parts"),
        ("train=9/10,val=1e-1", "expected parts"),
    ],
)
def test_shares_that_are_none(tmp_path: Path, command: Command, text: str, why: str) -> None:
    ran = command("split", build(tmp_path / "src").folder, tmp_path / "out", "--by", text)
    assert (ran.code, why in ran.err) == (2, True), ran.err
    assert not (tmp_path / "out").exists()


def test_shares_in_any_form() -> None:
    assert parse_shares(" val = 1/3, train=2/3") == {"train": Fraction(2, 3), "val": Fraction(1, 3)}
    assert list(parse_shares("train=0.333,val=.333,test=0.334")) == ["train", "val", "test"]


def test_when_pictures_come(here: None, tmp_path: Path) -> None:
    """The next version of the source makes the next of each part, and every picture stays where it was."""
    from drawing import png, put

    put(tmp_path / "tree", {f"{'ab'[k % 2]}/{k}.png": png(k, 8) for k in range(60)})
    put(tmp_path / "tree", {f"a/broken {k}.jpg": b"\xff\xd8\xff" for k in range(20)})
    options = ConvertOptions(PixelOptions(size=8), StoreOptions(chunk_rows=8), jobs=1)
    source = convert(tmp_path / "tree", tmp_path / "src", options)[0].manifest
    split(tmp_path / "src", tmp_path / "out", by("train=0.8,val=0.2"))
    before = {name: set(rows_of(tmp_path / "out" / name)) for name in ("train", "val")}
    manifests = [read_manifest(tmp_path / "out" / name) for name in before]
    assert (
        sum(m.rejected["damaged" if "damaged" in m.rejected else next(iter(m.rejected))] for m in manifests)
        == 20
    )
    assert sum(m.source["files"] for m in manifests) == source.source["files"]
    put(tmp_path / "tree", {f"b/more {k}.png": png(900 + k, 8) for k in range(30)})
    convert(tmp_path / "tree", tmp_path / "src", options)
    done = split(tmp_path / "src", tmp_path / "out", by("train=0.8,val=0.2"))
    for name, ids in before.items():
        assert done[name].version == 2
        now = set(rows_of(tmp_path / "out" / name))
        assert ids <= now
        assert {id for id in now - ids if "more" not in id} == set()


def test_outputs_that_do_not_fit(here: None, tmp_path: Path, command: Command) -> None:
    built, out = build(tmp_path / "src", rows=100), tmp_path / "out"
    split(built.folder, out, by("train=0.8,val=0.1,test=0.1"))
    before = everything(out)
    with pytest.raises(OutputError, match="holds the part 'test', which is not asked for"):
        split(built.folder, out, by("train=0.8,val=0.2"))
    with pytest.raises(OutputError, match="seed is 0 there, 1 here"):
        split(built.folder, out, by("train=0.8,val=0.1,test=0.1", 1))
    with pytest.raises(OutputError, match="made by `split`, not `reshard`"):
        reshard(built.folder, out / "val")
    with pytest.raises(UsageError, match="lie in one another"):
        split(built.folder, built.folder / "parts", by("train=0.8,val=0.2"))
    with pytest.raises(OutputError, match="holds one data set"):
        split(built.folder, build(tmp_path / "other").folder, by("train=0.8,val=0.2"))
    assert everything(out) == before | {"val/.shardwright/lock": b""}
    with one_writer(out):
        assert command("split", built.folder, out, "--by", "train=0.8,val=0.1,test=0.1").code == 4
    assert split(built.folder, out, by("train=0.8,val=0.1,test=0.1", 1, new_version=True))["val"].version == 2
    splits = command("split", out, tmp_path / "again", "--by", "train=0.5,val=0.5")
    assert (splits.code, "one data set a split" in splits.err) == (1, True)


def test_a_part_without_a_row(here: None, tmp_path: Path) -> None:
    built = build(tmp_path / "src", rows=8, shard_rows=8)
    with pytest.raises(SourceError, match="of which 'val' would get none"):
        split(built.folder, tmp_path / "out", by("train=0.999,val=0.001"))
    assert not (tmp_path / "out").exists()


def test_it_goes_on_where_it_was(
    here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage: Storage
) -> None:
    built, options = build(tmp_path / "src", storage, rows=300), by("train=0.5,val=0.5")
    split(built.folder, tmp_path / "undisturbed", options)
    total = sum(
        len(open_dataset(tmp_path / "undisturbed" / part).manifest.shards) for part in ("train", "val")
    )
    real, calls = copying.copy_shard, 0

    def copy_shard(task: copying.CopyTask) -> Any:
        nonlocal calls
        calls += 1
        if calls == total:
            raise KeyboardInterrupt
        return real(task)

    monkeypatch.setattr(copying, "copy_shard", copy_shard)
    with pytest.raises(KeyboardInterrupt):
        split(built.folder, tmp_path / "out", options)
    assert not list(tmp_path.glob("out/*/manifest.json"))
    done = split(built.folder, tmp_path / "out", options)
    assert sum(each.resumed for each in done.values()) == total - 1
    assert everything(tmp_path / "out") == everything(tmp_path / "undisturbed")
