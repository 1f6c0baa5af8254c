"""`reshard` lays a data set out anew: the same rows, or those asked for, whole, or nothing at all."""

import gc as garbage
import json
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from building import Built, build, republish
from drawing import png, put
from PIL import Image
from test_one_writer import everything, processes_naming
from test_repair import only as only_repair
from test_resume import wait_for_none
from test_verify import flip
from trees import CLASSES, draw_tree

from shardwright.convert import ConvertOptions, PixelOptions, StoreOptions, convert, copying, rowsource, write
from shardwright.convert.copy_plan import ReshardOptions
from shardwright.convert.copy_summary import Copied
from shardwright.convert.gc import GcOptions, gc
from shardwright.convert.layouts import LayoutOptions
from shardwright.convert.lock import one_writer
from shardwright.convert.merge import MergeOptions, merge
from shardwright.convert.options import Compression
from shardwright.convert.output import Output
from shardwright.convert.repair import repair
from shardwright.convert.reshard import dry_run, reshard
from shardwright.convert.selection import parse_shares
from shardwright.convert.split import SplitOptions
from shardwright.convert.split import split as deal_out
from shardwright.convert.unfinished import Unfinished
from shardwright.convert.verify import verify
from shardwright.datasets import open_dataset
from shardwright.datasets.buffers import RowBuffers
from shardwright.datasets.fit import fitted
from shardwright.datasets.layout import Column, Manifest, Storage
from shardwright.datasets.manifest import read_manifest, write_manifest
from shardwright.datasets.manifest import replace_file as _replace_file
from shardwright.datasets.reader import Reader
from shardwright.errors import (
    FormatError,
    LockedError,
    OutOfTimeError,
    OutputError,
    ShardError,
    ShardwrightError,
    SourceError,
    UsageError,
)
from shardwright.loaders import LoaderOptions, make_loader

Command = Callable[..., Any]
Rows = dict[str, tuple[Any, ...]]


@pytest.fixture(params=["hdf5", "npy"])
def storage(request: pytest.FixtureRequest) -> Storage:
    return request.param  # type: ignore[no-any-return]


def asked(
    *,
    size: int | None = None,
    seed: int | None = None,
    only_classes: tuple[str, ...] = (),
    ids: tuple[str, ...] | None = None,
    new_version: bool = False,
    jobs: int | None = 1,
    **layout: Any,
) -> ReshardOptions:
    return ReshardOptions(LayoutOptions(**layout), size, seed, only_classes, ids, new_version, jobs=jobs)


def only(found: dict[str, Copied]) -> Copied:
    (done,) = found.values()
    return done


def rows_of(folder: Path, version: int | None = None) -> Rows:
    """id -> every other column of its row, the pixels too, in the order of the index; each CRC-32 is checked."""
    manifest = read_manifest(folder, version)
    reader, index = Reader(folder, manifest, "read"), np.arange(manifest.rows)
    pixels = np.empty((manifest.rows, *manifest.image_shape), np.uint8)
    reader.images(index, RowBuffers([pixels.reshape(manifest.rows, -1)]))
    names = [c.name for c in manifest.columns if c.kind not in ("image", "id")]
    columns = [[np.asarray(v).tobytes() for v in reader.column(name, index)] for name in names]
    ids = reader.column("id", index).tolist()
    return dict(zip(ids, zip((p.tobytes() for p in pixels), *columns, strict=True), strict=True))


def in_order(rows: Rows) -> list[Any]:
    return list(rows.items())


def shape_of(manifest: Manifest) -> tuple[Any, ...]:
    return manifest.storage, manifest.chunk_rows, [shard.rows for shard in manifest.shards]


def assert_whole(folder: Path) -> None:
    assert verify(folder, full=True).damage == ()


# --- the same rows --------------------------------------------------------------------------------------


@pytest.mark.parametrize("beside", [False, True])
def test_there_and_back(here: None, tmp_path: Path, beside: bool) -> None:
    """Tree -> HDF5 in chunks of 32 -> npy -> HDF5 in chunks of 64 -> of 32: every row and column, in its place."""
    draw_tree(tmp_path / "tree")
    made = convert(
        tmp_path / "tree",
        tmp_path / "0",
        ConvertOptions(
            PixelOptions(size=32), StoreOptions("hdf5", 32, shard_mib=64 * 32 * 32 * 3 / 2**20), jobs=1
        ),
    )[0].manifest
    before, folder = rows_of(tmp_path / "0"), tmp_path / "0"
    for step, layout in enumerate(
        ({"format": "npy"}, {"format": "hdf5", "chunk_rows": 64}, {"chunk_rows": 32}), 1
    ):
        out = tmp_path / str(step) if beside else None
        assert only(reshard(folder, out, asked(**layout))).made
        folder = out or folder
        now = read_manifest(folder)
        assert in_order(rows_of(folder)) == in_order(before)
        assert (now.stats, now.classes, now.columns) == (made.stats, made.classes, made.columns)
        assert (now.rejected, now.suspect, now.duplicates) == (made.rejected, made.suspect, made.duplicates)
        assert now.version == (1 if beside else step + 1)
        assert_whole(folder)
        files = everything(folder)
        assert not only(
            reshard(*((tmp_path / str(step - 1), out) if beside else (folder, None)), asked(**layout))
        ).made
        assert everything(folder) == files
    assert shape_of(now) == shape_of(made)
    assert (folder / f"report-{now.version:06d}.jsonl").read_bytes() == (
        tmp_path / "0" / "report-000001.jsonl"
    ).read_bytes()


@pytest.mark.parametrize("compression", ["lzf", "gzip", "none", "npy"])
@pytest.mark.parametrize("before", ["lzf", "gzip", "none", "npy"])
def test_from_each_kind_to_each(here: None, tmp_path: Path, before: str, compression: str) -> None:
    def kind(name: str) -> dict[str, Any]:
        return {"storage": "npy"} if name == "npy" else {"storage": "hdf5", "compression": name}

    built = build(tmp_path / "src", **kind(before), dead={0: (0, 7), 2: (9,)})
    layout = {("format" if k == "storage" else k): v for k, v in kind(compression).items()}
    done = only(reshard(built.folder, tmp_path / "out", asked(**layout, chunk_rows=16)))
    assert in_order(rows_of(tmp_path / "out")) == in_order(rows_of(built.folder))
    assert done.manifest is not None
    assert done.manifest.stats == built.manifest.stats
    assert not any(shard.dead_rows for shard in done.manifest.shards)
    assert_whole(tmp_path / "out")
    again = only(reshard(built.folder, tmp_path / "out", asked(**layout, chunk_rows=16)))
    assert (again.made, again.version) == (False, None)


def test_nothing_to_do(tmp_path: Path, storage: Storage, command: Command) -> None:
    built = build(tmp_path / "src", storage)
    before = everything(built.folder)
    for options in ([], ["--format", storage], ["--chunk-rows", 8], ["--size", 8]):
        ran = command("reshard", built.folder, *options)
        assert (ran.code, "version 1, 50 images. Nothing to do." in ran.out) == (0, True), ran.err
    found = json.loads(command("reshard", built.folder, "--json").out)
    assert (found["version"], found["made"], found["rows"]) == (1, False, 50)
    assert {**everything(built.folder), ".shardwright/lock": b""} == {**before, ".shardwright/lock": b""}
    assert command("reshard", built.folder, tmp_path / "out").code == 0
    assert "Nothing to do" in command("reshard", built.folder, tmp_path / "out").out


def test_dead_rows_are_left_behind(here: None, tmp_path: Path, storage: Storage) -> None:
    built = build(tmp_path / "src", storage, dead={0: (0,), 1: tuple(range(8, 16))})
    before = rows_of(built.folder)
    assert only(reshard(built.folder, options=asked())).made
    assert in_order(rows_of(built.folder)) == in_order(before)
    assert read_manifest(built.folder).stats == built.manifest.stats
    assert not only(reshard(built.folder, options=asked())).made


def test_bytes_do_not_depend_on_jobs(tmp_path: Path, storage: Storage) -> None:
    built = build(tmp_path / "src", "hdf5", rows=200, dead={1: (1, 2)})
    for jobs in (1, 3):
        reshard(built.folder, tmp_path / f"{jobs}", asked(format=storage, seed=3, jobs=jobs))
    assert everything(tmp_path / "1") == everything(tmp_path / "3")


@pytest.mark.parametrize("compression", ["lzf", "gzip", "none"])
def test_chunks_that_stay_are_neither_decoded_nor_encoded(
    here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: Compression
) -> None:
    built = build(tmp_path / "src", rows=96, shard_rows=32, compression=compression)

    def no(*_: Any) -> None:
        raise AssertionError("a chunk was taken apart")

    monkeypatch.setattr("shardwright.convert.store.encode_chunk", no)
    monkeypatch.setattr(Reader, "images", no)
    done = only(reshard(built.folder, tmp_path / "out", asked(shard_mib=64 * 192 / 2**20)))
    monkeypatch.undo()
    assert done.manifest is not None
    assert [shard.rows for shard in done.manifest.shards] == [64, 32]
    assert sum(s.compressed_chunks for s in done.manifest.shards) == sum(
        s.compressed_chunks for s in built.manifest.shards
    )
    assert in_order(rows_of(tmp_path / "out")) == in_order(rows_of(built.folder))
    assert_whole(tmp_path / "out")


def test_a_folder_of_splits(tmp_path: Path, command: Command, storage: Storage) -> None:
    for split, rows in (("train", 60), ("val", 20)):
        build(tmp_path / "src" / split, storage, rows=rows)
    before = {split: rows_of(tmp_path / "src" / split) for split in ("train", "val")}
    ran = command("reshard", tmp_path / "src", tmp_path / "out", "--chunk-rows", 4, "--json", "--jobs", 1)
    assert ran.code == 0, ran.err
    assert {split: found["rows"] for split, found in json.loads(ran.out).items()} == {"train": 60, "val": 20}
    assert command("reshard", tmp_path / "src", "--chunk-rows", 4, "--jobs", 1).code == 0
    for folder in ("src", "out"):
        for split, rows in before.items():
            assert in_order(rows_of(tmp_path / folder / split)) == in_order(rows)
    assert command("reshard", tmp_path / "src", "--chunk-rows", 4).out.count("Nothing to do") == 2
    with one_writer(tmp_path / "src" / "val"):
        assert command("reshard", tmp_path / "src", "--chunk-rows", 2).code == 4


# --- some of them, smaller, in another order --------------------------------------------------------------


def test_a_seed_orders_whatever_the_order_was(here: None, tmp_path: Path, storage: Storage) -> None:
    built = build(tmp_path / "src", storage)
    reshard(built.folder, tmp_path / "a", asked(seed=7))
    reshard(tmp_path / "a", tmp_path / "b", asked(seed=1))
    reshard(tmp_path / "b", tmp_path / "c", asked(seed=7))
    a, b, c = (rows_of(tmp_path / name) for name in "abc")
    assert in_order(a) == in_order(c) != in_order(b)
    assert a == b == rows_of(built.folder)
    order = np.random.Generator(np.random.PCG64(7)).permutation(50)
    assert list(a) == [sorted(built.ids)[i] for i in order]
    assert read_manifest(tmp_path / "a").seed == 7
    assert only(reshard(tmp_path / "c", options=asked(seed=1))).made
    assert in_order(rows_of(tmp_path / "c")) == in_order(b)
    assert not only(reshard(tmp_path / "c", options=asked(seed=1))).made


def test_a_seed_gives_the_order_of_a_conversion(here: None, tmp_path: Path) -> None:
    draw_tree(tmp_path / "tree")
    (tmp_path / "tree" / "cat" / "broken.jpg").unlink()
    options = ConvertOptions(PixelOptions(size=32), StoreOptions(chunk_rows=8), jobs=1)
    convert(tmp_path / "tree", tmp_path / "0", options)
    convert(tmp_path / "tree", tmp_path / "5", replace(options, seed=5))
    reshard(tmp_path / "0", options=asked(seed=5))
    assert in_order(rows_of(tmp_path / "0")) == in_order(rows_of(tmp_path / "5"))
    (again,) = convert(tmp_path / "tree", tmp_path / "0", replace(options, seed=5))
    assert not again.made  # it is what that conversion would make


def test_some_classes(here: None, tmp_path: Path, storage: Storage, command: Command) -> None:
    built = build(tmp_path / "src", storage)
    ran = command("reshard", built.folder, tmp_path / "out", "--only-classes", "c1,c3", "--jobs", 1)
    assert ran.code == 0, ran.err
    kept = np.isin(built.labels, [1, 3])
    dataset = open_dataset(tmp_path / "out")
    assert dataset.ids() == [id for id, keep in zip(built.ids, kept, strict=True) if keep]
    assert dataset.labels().tolist() == built.labels[kept].tolist()
    assert dataset.classes == built.manifest.classes
    assert np.allclose(dataset.manifest.stats.mean, built.images[kept].mean(axis=(0, 1, 2)))
    assert f"{kept.sum()} of 50 (" in ran.out
    again = command("reshard", built.folder, tmp_path / "out", "--only-classes", "c3", "--only-classes", "c1")
    assert "Nothing to do" in again.out
    assert command("reshard", built.folder, "--only-classes", "c1,c3").code == 0
    assert "Nothing to do" in command("reshard", built.folder, "--only-classes", "c1,c3").out
    unknown = command("reshard", built.folder, "--only-classes", "c1,dog")
    assert (unknown.code, "no class is called 'dog'" in unknown.err) == (2, True)
    none = command("reshard", built.folder, "--only-classes", "c2")
    assert (none.code, "no row that was asked for" in none.err) == (1, True)


def test_classes_by_the_names_of_their_folders(here: None, tmp_path: Path) -> None:
    """A name that is not UTF-8 comes from the command line as the operating system has it, not as an id."""
    name = os.fsdecode(b"caf\xe9")
    put(tmp_path / "tree", {f"{c}/{k}.png": png(seed=k) for c in (name, "dog") for k in range(3)})
    convert(tmp_path / "tree", tmp_path / "src", ConvertOptions(PixelOptions(size=8), jobs=1))
    reshard(tmp_path / "src", tmp_path / "out", asked(only_classes=(f"dog,{name}",)))
    reshard(tmp_path / "src", tmp_path / "one", asked(only_classes=(name,)))
    assert len(open_dataset(tmp_path / "out")) == 6
    assert sorted(open_dataset(tmp_path / "one").ids()) == [
        "caf\\xE9/0.png",
        "caf\\xE9/1.png",
        "caf\\xE9/2.png",
    ]


def test_ids_of_one_split_alone(here: None, tmp_path: Path, command: Command) -> None:
    """Elsewhere the other splits are left out; in place they would lose all their rows."""
    put(tmp_path / "tree", {f"{s}/a/{s}{k}.png": png(seed=k) for s in ("train", "val") for k in range(4)})
    convert(tmp_path / "tree", tmp_path / "src", ConvertOptions(PixelOptions(size=8), jobs=1))
    (tmp_path / "ids").write_text("a/val1.png\na/val3.png\n")
    ran = command("reshard", tmp_path / "src", tmp_path / "out", "--ids", tmp_path / "ids")
    assert ran.code == 0, ran.err
    assert "split 'train' has no row that was asked for, and is left out" in ran.out
    assert [p.name for p in sorted((tmp_path / "out").iterdir()) if not p.name.startswith(".")] == ["val"]
    assert sorted(open_dataset(tmp_path / "out" / "val").ids()) == ["a/val1.png", "a/val3.png"]
    ran = command("reshard", tmp_path / "src", "--ids", tmp_path / "ids")
    assert (ran.code, "train' has no row that was asked for" in ran.err) == (1, True)


def test_a_split_that_the_source_has_no_more_is_told_of(here: None, tmp_path: Path, command: Command) -> None:
    for split in ("train", "val"):
        build(tmp_path / "src" / split)
    assert command("reshard", tmp_path / "src", tmp_path / "out", "--chunk-rows", 4).code == 0
    shutil.rmtree(tmp_path / "src" / "val")
    ran = command("reshard", tmp_path / "src", tmp_path / "out", "--chunk-rows", 4)
    assert "also holds the split 'val', which is not made here: it stays as it is" in ran.out
    assert_whole(tmp_path / "out" / "val")


def test_some_ids(tmp_path: Path, storage: Storage, command: Command) -> None:
    built = build(tmp_path / "src", storage)
    wanted = [built.ids[k] for k in (40, 3, 17)]
    (tmp_path / "ids").write_text("\r\n".join([*wanted, "", wanted[0]]), "utf-8")
    ran = command("reshard", built.folder, tmp_path / "out", "--ids", tmp_path / "ids", "--jobs", 1)
    assert ran.code == 0, ran.err
    assert open_dataset(tmp_path / "out").ids() == [built.ids[k] for k in (3, 17, 40)]
    (tmp_path / "ids").write_text("\n".join([*wanted, "c1/gone.jpg", "c2/gone.jpg"]), "utf-8")
    ran = command("reshard", built.folder, tmp_path / "other", "--ids", tmp_path / "ids")
    assert (ran.code, "2 of 5 ids are not among" in ran.err, "'c1/gone.jpg'" in ran.err) == (1, True, True)
    assert not (tmp_path / "other").exists()
    for content, why in ((b"\n\n", "holds no ids"), (b"\xff\n", "not UTF-8")):
        (tmp_path / "ids").write_bytes(content)
        ran = command("reshard", built.folder, "--ids", tmp_path / "ids")
        assert (ran.code, why in ran.err) == (2, True)
    assert command("reshard", built.folder, "--ids", tmp_path / "missing").code == 2


def test_smaller(here: None, tmp_path: Path, storage: Storage) -> None:
    built = build(tmp_path / "src", storage, shape=(16, 16, 3), dead={1: (4,)})
    done = only(reshard(built.folder, tmp_path / "out", asked(size=6)))
    small = np.stack([fitted(image, 6, "stretch", "bilinear") for image in built.images])
    now = rows_of(tmp_path / "out")
    assert [row[0] for row in now.values()] == [image.tobytes() for image in small]
    dataset = open_dataset(tmp_path / "out", columns=("crc32",), verify="read")
    assert [int(row[0]) for row in dataset] == [zlib.crc32(image) for image in small]
    assert done.manifest is not None
    assert np.allclose(done.manifest.stats.std, small.std(axis=(0, 1, 2)))
    assert (done.manifest.options["size"], done.manifest.options["resized_from"]) == (6, [16])
    assert done.manifest.image_shape == (6, 6, 3)
    assert "torch" in done.manifest.environment
    assert not only(reshard(tmp_path / "out", options=asked(size=6))).made
    assert_whole(tmp_path / "out")


# --- what contradicts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--format", "npy", "--compression", "lzf"], "npy knows no compression"),
        (["--size", 9], "only smaller ones"),
        (["--size", 0], "size is 0"),
        (["--chunk-rows", 0], "chunk_rows is 0"),
        (["--chunk-rows", 1 << 21], "chunk_rows is"),
        (["--shard-mib", 0], "shard_mib is 0"),
        (["--min-saving", 2], "min_saving is 2"),
        (["--min-saving", 0.5, "--compression", "gzip"], "min_saving is of chunks under lzf"),
        (["--seed", -1], "seed is -1"),
        (["--jobs", 0], "jobs is 0"),
        (["--format", "zarr"], "zarr"),
    ],
)
def test_options_that_contradict(tmp_path: Path, command: Command, options: list[Any], why: str) -> None:
    built = build(tmp_path / "src")
    ran = command("reshard", built.folder, tmp_path / "out", *options)
    assert (ran.code, why in ran.err) == (2, True), ran.err
    assert not (tmp_path / "out").exists()


def test_what_contradicts_the_data_set(here: None, tmp_path: Path) -> None:
    npy = build(tmp_path / "npy", "npy")
    with pytest.raises(UsageError, match="npy knows no compression"):
        reshard(npy.folder, options=asked(compression="lzf"))
    with pytest.raises(UsageError, match="min_saving is of chunks under lzf"):
        reshard(npy.folder, options=asked(min_saving=0.2))
    wide = build(tmp_path / "wide", shape=(8, 12, 3))
    with pytest.raises(UsageError, match="are no squares: 8x12"):
        reshard(wide.folder, options=asked(size=4))
    assert only(reshard(wide.folder, options=asked(chunk_rows=4))).made


@pytest.mark.parametrize("out", ["src", "src/below", "."])
def test_nested_paths(tmp_path: Path, command: Command, out: str) -> None:
    built = build(tmp_path / "src")
    before = everything(tmp_path)
    ran = command("reshard", built.folder, tmp_path / out, "--chunk-rows", 4)
    assert (ran.code, "lie in one another" in ran.err) == (2, True)
    assert everything(tmp_path) == before


def test_outputs_that_are_not_ours(tmp_path: Path, command: Command) -> None:
    built = build(tmp_path / "src")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.doc").write_text("all of it")
    (tmp_path / "file").write_text("")
    for out in ("foreign", "file"):
        assert command("reshard", built.folder, tmp_path / out).code == 1
    assert (tmp_path / "foreign" / "thesis.doc").read_text() == "all of it"
    for arguments in ([tmp_path / "missing"], [tmp_path / "missing", tmp_path / "out"]):
        ran = command("reshard", *arguments)
        assert (ran.code, "is missing" in ran.err) == (2, True)
    ran = command("reshard", tmp_path / "foreign")
    assert (ran.code, "no data set" in ran.err) == (1, True)
    shutil.rmtree(built.folder / ".shardwright")
    (built.folder / ".shardwright").symlink_to(tmp_path / "foreign")
    ran = command("reshard", built.folder, "--chunk-rows", 4)
    assert (ran.code, "is a link" in ran.err) == (1, True)
    assert sorted(os.listdir(tmp_path / "foreign")) == ["thesis.doc"]


def test_what_comes_to_the_same_is_no_other_option(here: None, tmp_path: Path) -> None:
    """What was left as it is may be given later, and the other way round."""
    built = build(tmp_path / "src", storage="hdf5")
    now = built.manifest.chunk_rows
    assert only(reshard(built.folder, tmp_path / "out", asked(chunk_rows=now))).made
    files = everything(tmp_path / "out")
    for options in (asked(), asked(chunk_rows=now), asked(format="hdf5")):
        assert not only(reshard(built.folder, tmp_path / "out", options)).made
    assert everything(tmp_path / "out") == files
    with pytest.raises(OutputError, match="made with other options: only_classes is"):
        reshard(built.folder, tmp_path / "out", asked(only_classes=("c1",)))


def test_an_end_in_time(here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run makes one shard at least, whatever its time, and the last one's bytes are those of one run."""
    built = build(tmp_path / "src")
    options = asked(chunk_rows=4, shard_mib=16 * 8 * 8 * 3 / 2**20)
    reshard(built.folder, tmp_path / "undisturbed", options)
    for finished in (1, 2, 3):
        with monkeypatch.context() as patch:
            written = shards_written(patch)
            with pytest.raises(OutOfTimeError, match=f"{finished} of 4 shards"):
                reshard(built.folder, tmp_path / "out", replace(options, max_runtime=1e-9))
        assert len(written) == 1
        assert not (tmp_path / "out" / "manifest.json").exists()
    done = only(reshard(built.folder, tmp_path / "out", replace(options, max_runtime=1e-9)))
    assert (done.resumed, done.made) == (3, True)
    assert everything(tmp_path / "out") == everything(tmp_path / "undisturbed")


def test_an_output_that_was_made_otherwise(here: None, tmp_path: Path, command: Command) -> None:
    built, other = build(tmp_path / "src"), build(tmp_path / "other", rows=30)
    out = tmp_path / "out"
    reshard(built.folder, out, asked(chunk_rows=4))
    before = everything(out)
    with pytest.raises(OutputError, match="made with other options: chunk_rows is 4 there, 2 here"):
        reshard(built.folder, out, asked(chunk_rows=2))
    with pytest.raises(OutputError, match="made of another data set than .*fingerprint is"):
        reshard(other.folder, out, asked(chunk_rows=4))
    with pytest.raises(OutputError, match="which `reshard` did not make"):
        reshard(built.folder, other.folder, asked(chunk_rows=4))
    assert everything(out) == before
    done = only(reshard(built.folder, out, asked(chunk_rows=2, new_version=True)))
    assert (done.version, read_manifest(out).chunk_rows) == (2, 2)


def test_a_later_version_of_the_source_makes_the_next(here: None, tmp_path: Path) -> None:
    """Also where the version that the output was made of was removed since."""
    built, out = build(tmp_path / "src"), tmp_path / "out"
    for turn, chunk_rows in enumerate((8, 4, 2), 1):
        reshard(built.folder, options=asked(chunk_rows=chunk_rows))
        if turn == 3:
            gc(built.folder, GcOptions(keep=1, min_age_seconds=0))
        done = only(reshard(built.folder, out, asked(format="npy")))
        assert (done.made, done.version) == (True, turn)
    assert not only(reshard(built.folder, out, asked(format="npy"))).made
    next((out / "shards").iterdir()).unlink()
    assert only(reshard(built.folder, out, asked(format="npy"))).version == 4
    assert in_order(rows_of(out)) == in_order(rows_of(built.folder))


def test_dry_run_changes_nothing(tmp_path: Path, command: Command) -> None:
    built = build(tmp_path / "src")
    before = everything(tmp_path)
    ran = command("reshard", built.folder, tmp_path / "out", "--chunk-rows", 4, "--dry-run")
    assert (ran.code, "version 1 would be 50 images in" in ran.out) == (0, True)
    found = json.loads(command("reshard", built.folder, "--chunk-rows", 4, "--dry-run", "--json").out)
    assert (found["version"], found["made"], found["rows"]) == (2, False, 50)
    assert only(dry_run(built.folder, None, asked())).version is None
    assert everything(tmp_path) == before


# --- what it carries over -----------------------------------------------------------------------------------


def with_column(built: Built, column: Column, values: np.ndarray[Any, Any]) -> None:
    """Give the shards of ``built`` a column that this version does not know."""
    from shardwright.convert.store import shard_file

    shards, start = [], 0
    for shard in built.manifest.shards:
        part, start = values[start : start + shard.rows], start + shard.rows
        files = list(shard.files)
        if built.manifest.storage == "hdf5":
            with h5py.File(built.folder / files[0].name, "a") as h5:
                dtype = h5py.string_dtype("utf-8") if part.dtype == object else None
                h5.create_dataset(column.name, data=part, dtype=dtype)
            files = [shard_file(built.folder / files[0].name, files[0].name)]
        else:
            name = files[0].name.rsplit(".", 2)[0] + f".{column.name}.npy"
            flat = np.array([t.encode() for t in part], np.bytes_) if part.dtype == object else part
            np.save(built.folder / name, flat)
            files.append(shard_file(built.folder / name, name))
        shards.append(replace(shard, files=tuple(files)))
    republish(built, columns=(*built.manifest.columns, column), shards=tuple(shards))


@pytest.mark.parametrize("target", ["hdf5", "npy"])
def test_columns_that_are_not_known(here: None, tmp_path: Path, storage: Storage, target: Storage) -> None:
    built = build(tmp_path / "src", storage)
    numbers = np.arange(100, dtype=np.float32).reshape(50, 2)
    with_column(built, Column("gaze", "gaze", "float32", (2,)), numbers)
    reshard(built.folder, tmp_path / "out", asked(format=target, chunk_rows=4, seed=1))
    now = Reader(tmp_path / "out", read_manifest(tmp_path / "out"))
    ids = now.column("id", np.arange(50)).tolist()
    order = [built.ids.index(id) for id in ids]
    assert (now.column("gaze", np.arange(50)) == numbers[order]).all()
    assert_whole(tmp_path / "out")


@pytest.mark.parametrize("target", ["hdf5", "npy"])
def test_text_that_is_not_known(here: None, tmp_path: Path, storage: Storage, target: Storage) -> None:
    built = build(tmp_path / "src", storage)
    texts = np.array([f"a brick, {k} €" for k in range(50)], object)
    with_column(built, Column("caption", "caption", "utf8"), texts)
    reshard(built.folder, tmp_path / "out", asked(format=target, chunk_rows=4))
    found = Reader(tmp_path / "out", read_manifest(tmp_path / "out")).column("caption", np.arange(50))
    assert [bytes(text).decode() for text in found.tolist()] == texts.tolist()


@pytest.mark.parametrize(
    "column",
    [
        Column("when", "time", "datetime64[ns]"),
        Column("words", "words", "utf8", (2,)),
        Column("x", "x", "?!"),
    ],
)
def test_columns_that_cannot_be_carried_over(here: None, tmp_path: Path, column: Column) -> None:
    built = build(tmp_path / "src")
    republish(built, columns=(*built.manifest.columns, column))
    with pytest.raises(FormatError, match=f"the column '{column.name}'.* cannot be carried over"):
        reshard(built.folder, options=asked(chunk_rows=4))


def test_what_the_manifest_says(here: None, tmp_path: Path) -> None:
    draw_tree(tmp_path / "tree")
    options = ConvertOptions(PixelOptions(size=32), StoreOptions(chunk_rows=8), jobs=1)
    before = convert(tmp_path / "tree", tmp_path / "out", options)[0].manifest
    now = only(reshard(tmp_path / "out", options=asked(chunk_rows=4))).manifest
    assert now is not None
    assert now.options == {**before.options, "chunk_rows": 4}
    assert (now.rejected, now.skipped) == (before.rejected, before.skipped)
    assert now.source["files"] == before.source["files"]
    assert now.source["pixels_environment"] == before.environment
    assert "torch" not in now.environment
    assert now.environment.items() <= before.environment.items()
    assert now.source["made_of"]["data_sets"] == [
        {"fingerprint": before.fingerprint(), "version": 1, "rows": before.rows}
    ]
    (again,) = convert(
        tmp_path / "tree", tmp_path / "out", replace(options, store=StoreOptions(chunk_rows=4))
    )
    assert not again.made
    with pytest.raises(OutputError, match="chunk_rows is 4 there, 8 here"):
        convert(tmp_path / "tree", tmp_path / "out", options)


def test_repair_makes_it_again(here: None, tmp_path: Path, storage: Storage) -> None:
    """From the pictures, as a conversion with the layout and seed that it has now."""
    draw_tree(tmp_path / "tree")
    convert(
        tmp_path / "tree", tmp_path / "out", ConvertOptions(PixelOptions(size=32), StoreOptions(chunk_rows=8))
    )
    reshard(tmp_path / "out", options=asked(format=storage, chunk_rows=4, shard_mib=8 * 3072 / 2**20))
    before = everything(tmp_path / "out")
    path = next((tmp_path / "out" / "shards").glob("000002-00001*"))
    flip(path, path.stat().st_size // 2)
    assert only_repair(repair(tmp_path / "out", tmp_path / "tree")).failures == ()
    assert everything(tmp_path / "out") == before


@pytest.mark.parametrize("seed", [None, 5])
def test_repair_where_pictures_were_rejected(
    here: None, tmp_path: Path, storage: Storage, seed: int | None
) -> None:
    """A copy has no room for them in its shards, wherever the conversion had it."""
    draw_tree(tmp_path / "tree")
    convert(
        tmp_path / "tree", tmp_path / "out", ConvertOptions(PixelOptions(size=32), StoreOptions(chunk_rows=8))
    )
    layout = {"format": storage, "chunk_rows": 4, "shard_mib": 8 * 3072 / 2**20}
    manifest = only(reshard(tmp_path / "out", options=asked(seed=seed, **layout))).manifest
    assert manifest is not None
    before = everything(tmp_path / "out")
    for shard in manifest.shards:
        path = tmp_path / "out" / shard.files[0].name
        for damage in (lambda p=path: flip(p, p.stat().st_size // 2), path.unlink):
            damage()
            assert only_repair(repair(tmp_path / "out", tmp_path / "tree")).failures == ()
            assert everything(tmp_path / "out") == before
    shutil.rmtree(tmp_path / "out" / "shards")
    assert only_repair(repair(tmp_path / "out", tmp_path / "tree")).failures == ()
    made = {name: data for name, data in before.items() if not name.startswith("shards/000001")}
    assert everything(tmp_path / "out") == made


def test_repair_compares_the_libraries_that_made_the_pixels(
    here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_tree(tmp_path / "tree")
    convert(tmp_path / "tree", tmp_path / "out", ConvertOptions(PixelOptions(size=32)))
    manifest = only(reshard(tmp_path / "out", options=asked(chunk_rows=4))).manifest
    assert manifest is not None
    path = tmp_path / "out" / manifest.shards[0].files[0].name
    flip(path, path.stat().st_size // 2)
    now, real = write.environment(), write.decode

    def other(data: bytes, options: PixelOptions) -> Any:
        picture = real(data, options)
        return replace(picture, pixels=picture.pixels ^ 1)

    monkeypatch.setattr(write, "decode", other)
    for environment, why in (
        (now, "the source is not what it was made from, or it was made by other means"),
        (
            {**now, "torch": "9.9"},
            f"it was made by other versions of libraries: torch is '{now['torch']}' there, '9.9' here",
        ),
    ):
        monkeypatch.setattr(write, "environment", lambda environment=environment: environment)
        (failure,) = only_repair(repair(tmp_path / "out", tmp_path / "tree")).failures
        assert failure.why.partition(". Tried ")[0] == f"its pictures give other bytes now: {why}"


def damaged(folder: Path) -> str:
    """Flip a byte in the middle of the first shard; the file that it lies in."""
    name = read_manifest(folder).shards[0].files[0].name
    flip(folder / name, (folder / name).stat().st_size // 2)
    return name


def converted(tmp_path: Path, *names: str) -> list[Manifest]:
    """A tree and a data set of each name, in ``trees`` and beside."""
    manifests = []
    for name in names:
        draw_tree(tmp_path / "trees" / name)
        options = ConvertOptions(PixelOptions(size=32), StoreOptions(chunk_rows=8), jobs=1)
        manifests.append(convert(tmp_path / "trees" / name, tmp_path / name, options)[0].manifest)
    return manifests


def called(manifest: Manifest) -> str:
    return f"version 1 of a data set of {manifest.rows} rows (fingerprint {manifest.fingerprint()})"


def test_repair_of_a_smaller_one_says_what_it_was_made_of(here: None, tmp_path: Path) -> None:
    (before,) = converted(tmp_path, "a")
    reshard(tmp_path / "a", tmp_path / "out", asked(size=16))
    damaged(tmp_path / "out")
    (failure,) = only_repair(repair(tmp_path / "out", tmp_path / "trees" / "a")).failures
    assert failure.why == (
        f"it was made by `reshard --size` of {called(before)}: repair that, or convert the pictures again, and run "
        "the same command into a new folder"
    )


def test_repair_of_a_merged_one(here: None, tmp_path: Path) -> None:
    """Its pictures may lie in one tree, under their ids; where they do not, it says what it was made of."""
    a, b = converted(tmp_path, "a", "b")
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out", MergeOptions(prefix=True, jobs=1))
    before = everything(tmp_path / "out")
    damaged(tmp_path / "out")
    few = tmp_path / "few"
    shutil.copytree(tmp_path / "trees" / "a", few)
    for picture in sorted(few.rglob("*.png"))[1:]:
        picture.unlink()
    (failure,) = only_repair(repair(tmp_path / "out", few)).failures
    assert failure.why.startswith(
        f"it was made by `merge` of {called(a)} and {called(b)}: repair those, or convert the pictures again, and run "
        f"the same command into a new folder. Tried with the pictures in '{few}': pictures that are missing or changed "
        f"in '{few}' "
    )
    assert "''" not in failure.why
    assert only_repair(repair(tmp_path / "out", tmp_path / "trees")).failures == ()
    assert everything(tmp_path / "out") == before


def test_repair_of_a_split_one(here: None, tmp_path: Path, storage: Storage) -> None:
    """Its pictures are not apart; each part can be repaired from the whole source, by itself or with the others."""
    converted(tmp_path, "a")
    reshard(tmp_path / "a", tmp_path / "b", asked(format=storage))
    source, out = tmp_path / "trees" / "a", tmp_path / "out"
    deal_out(tmp_path / "b", out, SplitOptions(parse_shares("train=0.5,val=0.5"), jobs=1))
    before = everything(out)
    damaged(out / "train")
    damaged(out / "val")
    assert only_repair(repair(out / "val", source)).failures == ()
    done = repair(out, source)
    assert done["train"].failures == ()
    assert everything(out) == before
    damaged(out / "train")
    for id in rows_of_ids(out / "train"):
        (source / id).unlink()
    (failure,) = repair(out, source)["train"].failures
    copy = read_manifest(tmp_path / "b")
    assert failure.why.startswith(f"it was made by `split` of {called(copy)}: repair that, or ")
    assert f"missing or changed in '{source}' " in failure.why
    assert "train'" not in failure.why
    assert "''" not in failure.why


@pytest.mark.parametrize("made", ["split", "split of another order", "classes", "classes, seed", "merge"])
def test_repair_of_copies_whose_shards_are_gone(
    here: None, tmp_path: Path, storage: Storage, made: str
) -> None:
    """Nothing is left of their ids: which pictures they took, and in which order, follows from the command."""
    tree, a, out = tmp_path / "tree", tmp_path / "a", tmp_path / "out"
    draw_tree(tree)
    if made in (
        "split of another order",
        "merge",
    ):  # where the broken picture was is remembered on its side alone
        (tree / CLASSES[0] / "broken.jpg").unlink()
    options = ConvertOptions(PixelOptions(size=32), StoreOptions(format=storage, chunk_rows=4), jobs=1)
    layout: dict[str, Any] = {"chunk_rows": 4, "shard_mib": 4 * 3072 / 2**20}
    if made == "merge":
        for k, name in enumerate(("cats", "others")):
            shutil.copytree(tree, tmp_path / name)
            for gone in CLASSES[1:] if k == 0 else CLASSES[:1]:
                shutil.rmtree(tmp_path / name / gone)
            convert(tmp_path / name, a / name, options)
        merge([a / "cats", a / "others"], out, MergeOptions(LayoutOptions(**layout), seed=3, jobs=1))
    else:
        convert(tree, a, options)
        seed = 5 if "order" in made or "seed" in made else None
        classes = CLASSES[:2] if "classes" in made else ()
        reshard(a, out if classes else None, asked(seed=seed, only_classes=classes, **layout))
        if made.startswith("split"):
            deal_out(a, out, SplitOptions(parse_shares("train=0.6,val=0.4"), seed=2, jobs=1))
    before = everything(out)
    folders = [out / "train", out / "val"] if made.startswith("split") else [out]
    for folder in folders:
        shards = read_manifest(folder).shards
        assert len(shards) > 1
        for file in shards[1].files:
            (folder / file.name).unlink()
    assert all(done.failures == () for done in repair(out, tree).values())
    assert everything(out) == before
    for folder in folders:
        shutil.rmtree(folder / "shards")
    assert all(done.failures == () for done in repair(out, tree).values())
    assert everything(out) == before


def test_repair_of_a_split_one_when_pictures_came(here: None, tmp_path: Path) -> None:
    """They are newer than the data set, and so none of those that it was made of."""
    converted(tmp_path, "a")
    source, out = tmp_path / "trees" / "a", tmp_path / "out"
    deal_out(tmp_path / "a", out, SplitOptions(parse_shares("train=0.6,val=0.4"), jobs=1))
    before = everything(out)
    for k in range(9):
        shutil.copyfile(next((source / CLASSES[1]).iterdir()), source / CLASSES[1] / f"new {k}.png")
    manifest = out / "train" / "manifest-000001.json"
    later_ns = manifest.stat().st_mtime_ns + 10**9
    for picture in source.rglob("new *"):
        os.utime(picture, ns=(later_ns, later_ns))
    for part in ("train", "val"):
        shutil.rmtree(out / part / "shards")
    assert all(done.failures == () for done in repair(out, source).values())
    assert everything(out) == before


@pytest.mark.parametrize("made", ["ids", "no seed", "hostile"])
def test_repair_of_copies_that_do_not_say_what_they_took(here: None, tmp_path: Path, made: str) -> None:
    converted(tmp_path, "a")
    out = tmp_path / "out"
    if made == "ids":
        reshard(tmp_path / "a", out, asked(ids=tuple(rows_of_ids(tmp_path / "a"))))
    elif made == "no seed":
        converted(tmp_path, "b")
        merge([tmp_path / "a", tmp_path / "b"], out, MergeOptions(seed=None, prefix=True, jobs=1))
    else:
        deal_out(tmp_path / "a", tmp_path / "parts", SplitOptions(parse_shares("train=0.6,val=0.4"), jobs=1))
        (tmp_path / "parts" / "train").rename(out)
        for name in ("manifest.json", "manifest-000001.json"):
            found = json.loads((out / name).read_bytes())
            found["source"]["made_of"]["options"]["by"] = {"train": "1e999999999", "val": [3]}
            (out / name).write_text(json.dumps(found))
    shutil.rmtree(out / "shards")
    failures = only_repair(repair(out, tmp_path / "trees" / "a")).failures
    assert failures
    for failure in failures:
        assert failure.why.startswith("it was made by `")
        assert "its rows are not known" in failure.why


def rows_of_ids(folder: Path) -> list[str]:
    dataset = open_dataset(folder, columns=("id",))
    return dataset.ids(range(1, len(dataset)))


def test_repair_lists_no_ids_that_are_not_known(
    here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardwright.convert import repair as module

    converted(tmp_path, "a")
    real = module.column_of_damaged

    def without_ids(folder: Path, manifest: Manifest, shard: int, name: str) -> Any:
        return None if name == "id" else real(folder, manifest, shard, name)

    monkeypatch.setattr(module, "column_of_damaged", without_ids)
    path = next((tmp_path / "a" / "shards").iterdir())
    flip(path, path.stat().st_size // 2)
    for picture in sorted((tmp_path / "trees" / "a").rglob("*.png"))[1:]:
        picture.unlink()
    for failure in only_repair(repair(tmp_path / "a", tmp_path / "trees" / "a")).failures:
        assert "their ids cannot be read" in failure.why
        assert "''" not in failure.why


def test_a_selection_is_not_taken_for_the_source(here: None, tmp_path: Path) -> None:
    draw_tree(tmp_path / "tree")
    options = ConvertOptions(PixelOptions(size=32), StoreOptions(chunk_rows=8), jobs=1)
    rows = convert(tmp_path / "tree", tmp_path / "out", options)[0].manifest.rows
    reshard(tmp_path / "out", options=asked(only_classes=("cat",)))
    with pytest.raises(OutputError, match="it was made by `reshard`, of a part of the rows"):
        convert(tmp_path / "tree", tmp_path / "out", options)
    meant = replace(options, new_version=True)
    (again,) = convert(tmp_path / "tree", tmp_path / "out", meant)
    assert (again.made, again.manifest.rows) == (True, rows)


def test_shards_that_a_version_names_are_not_removed(here: None, tmp_path: Path) -> None:
    """By another program's version 1, with names that ours would give to version 2."""
    built = build(tmp_path / "src")
    shards = []
    for shard in built.manifest.shards:
        name = shard.files[0].name.replace("000001-", "000002-")
        (built.folder / shard.files[0].name).rename(built.folder / name)
        shards.append(replace(shard, files=(replace(shard.files[0], name=name),)))
    republish(built, shards=tuple(shards))
    before = everything(built.folder)
    with pytest.raises(OutputError, match="an earlier version names it"):
        reshard(built.folder, options=asked(chunk_rows=4))
    after = everything(built.folder)
    assert {name: after.get(name) for name in before} == before


def test_another_selection_is_another_run(
    here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = build(tmp_path / "src")
    stopped_after(1, monkeypatch, built.folder, None, asked(only_classes=("c1",), shard_mib=0.001))
    with pytest.raises(OutputError, match="unfinished `reshard` with other options: only_classes is"):
        reshard(built.folder, options=asked(only_classes=("c2",), shard_mib=0.001))
    draw_tree(tmp_path / "tree")
    with pytest.raises(OutputError, match="unfinished `reshard`: run it again|made with other options"):
        convert(tmp_path / "tree", built.folder, ConvertOptions(jobs=1, new_version=False))


def test_damaged_ids_are_an_error_and_no_standstill(tmp_path: Path, command: Command) -> None:
    """HDF5 goes round in circles over this one; it must never be asked."""
    built = build(tmp_path / "src", rows=40, shard_rows=40)
    path = built.folder / built.manifest.shards[0].files[0].name
    content = bytearray(path.read_bytes())
    at = content.index(b"GCOL")
    content[at + 16 : at + 4096] = b"\1" * 4080
    path.write_bytes(content)
    for arguments in (["reshard", "--seed", 1], ["reshard", "--chunk-rows", 4]):
        ran = command(arguments[0], built.folder, *arguments[1:])
        assert (ran.code, "the source is damaged" in ran.err) == (1, True), ran.err
    ran = command("split", built.folder, tmp_path / "parts", "--by", "train=0.5,val=0.5")
    assert (ran.code, "the source is damaged" in ran.err) == (1, True), ran.err


def test_a_report_that_is_gone(here: None, tmp_path: Path) -> None:
    built = build(tmp_path / "src")
    for content in (None, b"[" * 9999, b"3\n", b'{"id": 3}\n'):
        report = built.folder / "report-000001.jsonl"
        report.unlink(missing_ok=True)
        if content is not None:
            report.write_bytes(content)
        done = only(reshard(built.folder, tmp_path / f"{content and content[:3]!r}", asked(chunk_rows=4)))
        assert (done.made, "report" in done.notes[0]) == (True, True)


# --- damage ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_rows", [8, 4])
@pytest.mark.parametrize("beside", [False, True])
def test_damage_in_the_middle_is_named(
    tmp_path: Path, storage: Storage, command: Command, chunk_rows: int, beside: bool
) -> None:
    built = build(tmp_path / "src", storage, flat=0)
    file = built.manifest.shards[1].files[0].name
    flip(built.folder / file, _offset_of_row(built, 1, 11))
    out = [tmp_path / "out"] if beside else []
    before = everything(built.folder)
    ran = command("reshard", built.folder, *out, "--chunk-rows", chunk_rows, "--shard-mib", 0.01, "--jobs", 1)
    assert ran.code == 1
    assert f"'{built.folder / file}'" in ran.err
    assert any(rows in ran.err for rows in ("rows 8 to 15", "row 11")), ran.err
    assert "shardwright repair" in ran.err
    assert not (tmp_path / "out" / "manifest.json").exists()
    after = everything(built.folder)
    assert {name: after[name] for name in before if name != ".shardwright/lock"} == {
        name: before[name] for name in before if name != ".shardwright/lock"
    }
    assert read_manifest(built.folder).version == 1


def _offset_of_row(built: Built, shard: int, row: int) -> int:
    path = built.folder / built.manifest.shards[shard].files[0].name
    if path.suffix != ".h5":
        return 128 + row * 192 + 5
    with h5py.File(path) as h5:
        return int(h5["image"].id.get_chunk_info(row // 8).byte_offset) + row % 8 * 192 + 5


def test_a_damaged_id_is_not_laundered(here: None, tmp_path: Path, storage: Storage) -> None:
    """HDF5 has no checksum for ids: a wrong one would get a right hash in the new version."""
    built = build(tmp_path / "src", storage)
    path = next(p for p in sorted((built.folder / "shards").iterdir()) if p.name.endswith((".h5", ".id.npy")))
    data = path.read_bytes()
    path.write_bytes(data.replace(b"00003.jpg", b"00093.jpg"))
    assert path.read_bytes() != data
    with pytest.raises(ShardError, match="SHA-256"):
        reshard(built.folder, tmp_path / "out", asked(chunk_rows=4))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("known", ["all", "of others", "nothing"])
def test_ids_that_are_known_are_not_read(
    here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: str
) -> None:
    """Beside the shards, and of the pictures that these name: then damaged ids in them harm nobody."""
    (manifest,) = converted(tmp_path, "src")
    rows, output = rows_of(tmp_path / "src"), Output(tmp_path / "src")
    if known == "of others":
        hints = output.hints(manifest)
        assert hints is not None
        output.remember(manifest, replace(hints, hashes=hints.hashes[::-1].copy()))
    elif known == "nothing":
        (tmp_path / "src" / ".shardwright" / "source-000001.npz").unlink()
    hashed: list[object] = []
    with monkeypatch.context() as patch:
        patch.setattr(rowsource, "damage_of", lambda shard: hashed.append(shard) or [])
        reshard(tmp_path / "src", tmp_path / "sound", asked(chunk_rows=4))
    assert len(hashed) == (0 if known == "all" else len(manifest.shards))
    assert rows_of(tmp_path / "sound") == rows
    path = tmp_path / "src" / manifest.shards[0].files[0].name
    data = bytearray(path.read_bytes())
    data[data.index(b"GCOL") + 24 : data.index(b"GCOL") + 200] = bytes(176)
    path.write_bytes(data)
    if known == "all":
        reshard(tmp_path / "src", tmp_path / "out", asked(chunk_rows=4))
        assert rows_of(tmp_path / "out") == rows
        return
    with pytest.raises(ShardError, match="SHA-256"):
        reshard(tmp_path / "src", tmp_path / "out", asked(chunk_rows=4))
    assert not (tmp_path / "out").exists()


def test_ids_that_are_known_of_other_rows_choose_none(here: None, tmp_path: Path) -> None:
    """What is known beside the shards decides no more about which rows are taken, and where, than it is true."""
    (manifest,) = converted(tmp_path, "src")
    rows, output = rows_of(tmp_path / "src"), Output(tmp_path / "src")
    chosen, shares = tuple(list(rows)[:3]), parse_shares("train=0.5,val=0.5")
    reshard(tmp_path / "src", tmp_path / "mixed", asked(seed=7))
    deal_out(tmp_path / "src", tmp_path / "parts", SplitOptions(shares, jobs=1))
    hints = output.hints(manifest)
    assert hints is not None
    output.remember(manifest, hints.permuted(np.roll(np.arange(hints.rows), 1)))
    reshard(tmp_path / "src", tmp_path / "chosen", asked(ids=chosen))
    assert rows_of(tmp_path / "chosen") == {id: rows[id] for id in chosen}
    reshard(tmp_path / "src", tmp_path / "again", asked(seed=7))
    assert in_order(rows_of(tmp_path / "again")) == in_order(rows_of(tmp_path / "mixed"))
    deal_out(tmp_path / "src", tmp_path / "others", SplitOptions(shares, jobs=1))
    for part in shares:
        assert rows_of(tmp_path / "others" / part) == rows_of(tmp_path / "parts" / part)


def test_ids_that_are_known_without_a_digest_in_the_shards(here: None, tmp_path: Path) -> None:
    """Of a data set whose column of that name is another, or is none."""
    (manifest,) = converted(tmp_path, "src")
    rows, output = rows_of(tmp_path / "src"), Output(tmp_path / "src")
    hints = output.hints(manifest)
    assert hints is not None
    (tmp_path / "src" / "manifest-000001.json").unlink()
    columns = tuple(column for column in manifest.columns if column.name != "source_sha256")
    manifest = replace(manifest, columns=columns)
    write_manifest(tmp_path / "src", manifest)
    output.remember(manifest, hints)
    reshard(tmp_path / "src", tmp_path / "out", asked(chunk_rows=4))
    assert list(rows_of(tmp_path / "out")) == list(rows)


@pytest.mark.parametrize("damage", ["mask", "address", "zeros", "white", "packed"])
def test_a_chunk_is_not_moved_as_what_it_is_not(here: None, tmp_path: Path, damage: str) -> None:
    """Its checksum is right, and it is another's, or a bit beside it flipped: it would get a right hash."""
    tree = put(tmp_path / "tree", {f"a/{k}.png": png(k) for k in range(16)})
    for k in range(16):  # noise below white
        with Image.open(tree / "a" / f"{k}.png") as image:
            white = image.convert("RGB")
        white.paste((255, 255, 255), (0, 0, 16, 4) if damage != "packed" else (0, 0, 16, 15))
        white.save(tree / "a" / f"{k}.png")
    options = ConvertOptions(PixelOptions(size=16), StoreOptions(chunk_rows=4, shard_mib=1.0), jobs=1)
    manifest = convert(tree, tmp_path / "src", options)[0].manifest
    path = tmp_path / "src" / manifest.shards[0].files[0].name
    with h5py.File(path) as h5:
        first, second = (h5["image"].id.get_chunk_info(k) for k in (0, 1))
    raw = int(damage != "packed")
    assert (first.filter_mask, second.filter_mask) == (raw, raw)
    data = path.read_bytes()
    if damage == "mask":
        old, new = (struct.pack("<II", first.size, mask) for mask in (1, 0))
    elif damage == "address":
        old, new = (struct.pack("<Q", chunk.byte_offset) for chunk in (second, first))
    elif damage == "white":
        old = data[first.byte_offset :][: 16 * 16 * 3]
        new = bytes(16 * 4 * 3) + old[16 * 4 * 3 :]
        assert old.startswith(b"\xff" * (16 * 4 * 3))
    else:
        old, new = data[first.byte_offset :][: first.size], bytes(first.size)
    assert old in data
    path.write_bytes(data.replace(old, new, 1))
    with pytest.raises(ShardError, match="the source is damaged.*SHA-256"):
        reshard(tmp_path / "src", tmp_path / "out", asked())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["label", "crc32", "source_shape", "source_sha256"])
def test_zeros_in_place_of_a_column_are_not_taken(here: None, tmp_path: Path, name: str) -> None:
    """What a disk lost has the checksum of zeros, which is zero: it would get a right hash in the new version."""
    manifest = converted(tmp_path, "src")[0]
    path = tmp_path / "src" / manifest.shards[-1].files[0].name
    with h5py.File(path) as h5:
        assert h5["label"][...].any()
        chunk = h5[name].id.get_chunk_info(0)
    with open(path, "r+b") as file:
        file.seek(chunk.byte_offset)
        file.write(bytes(chunk.size))
    with h5py.File(path) as h5:
        assert not h5[name][...].any()
    with pytest.raises(ShardError, match="the source is damaged.*SHA-256"):
        reshard(tmp_path / "src", tmp_path / "out", asked())
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_black_pictures_are_moved(here: None, tmp_path: Path) -> None:
    """Their checksum is that of what a disk lost, and they are not."""
    put(tmp_path / "tree" / "a", {"1.png": png(1, 8)})
    Image.new("RGB", (8, 8)).save(tmp_path / "tree" / "a" / "0.png")
    store = StoreOptions(chunk_rows=1, compression="none")
    convert(tmp_path / "tree", tmp_path / "src", ConvertOptions(PixelOptions(size=8), store, jobs=1))
    reshard(tmp_path / "src", tmp_path / "out", asked(seed=3))
    assert rows_of(tmp_path / "out") == rows_of(tmp_path / "src")


def test_ids_that_are_known_of_merged_ones(
    here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converted(tmp_path, "one", "two")
    options = MergeOptions(LayoutOptions(chunk_rows=4), prefix=True, jobs=1)
    with monkeypatch.context() as patch:
        patch.setattr(rowsource, "damage_of", lambda shard: pytest.fail("hashed"))
        merge([tmp_path / "one", tmp_path / "two"], tmp_path / "out", options)
    wanted = {f"{name}/{id}": row for name in ("one", "two") for id, row in rows_of(tmp_path / name).items()}
    assert rows_of(tmp_path / "out") == wanted


@pytest.mark.parametrize("damage", ["gone", "short", "link"])
def test_files_that_are_no_shards(here: None, tmp_path: Path, storage: Storage, damage: str) -> None:
    built = build(tmp_path / "src", storage)
    path = built.folder / built.manifest.shards[2].files[0].name
    match damage:
        case "gone":
            path.unlink()
        case "short":
            os.truncate(path, path.stat().st_size - 9)
        case "link":
            path.rename(tmp_path / "elsewhere")
            path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ShardError, match=path.name):
        reshard(built.folder, tmp_path / "out", asked(chunk_rows=4))
    if damage != "link":
        with pytest.raises(ShardError, match="a file of it is missing or of another size"):
            reshard(built.folder, options=asked())
    assert read_manifest(built.folder).version == 1


def test_a_version_that_is_removed_meanwhile(
    here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = build(tmp_path / "src", rows=200)
    real = copying.copy_shard

    def copy_shard(task: copying.CopyTask) -> Any:
        if task.number == 1 and read_manifest(built.folder).version == 1:
            monkeypatch.setattr(copying, "copy_shard", real)
            copying._opened.cache_clear()  # as a worker does that starts now
            reshard(built.folder, options=asked(chunk_rows=2))
            gc(built.folder, GcOptions(keep=1, min_age_seconds=0))
        return real(task)

    monkeypatch.setattr(copying, "copy_shard", copy_shard)
    with pytest.raises(ShardError, match="version 1 was removed"):
        reshard(built.folder, tmp_path / "out", asked(chunk_rows=4))
    assert not (tmp_path / "out" / "manifest.json").exists()


# --- killed, interrupted, full ------------------------------------------------------------------------------


def program(*arguments: object) -> list[str]:
    return [sys.executable, "-P", "-m", "shardwright", "reshard", *map(str, arguments), "--jobs", "2"]


def without_lock(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in everything(folder).items() if name != ".shardwright/lock"}


def test_killed_at_random_instants(tmp_path: Path, storage: Storage, kills: int) -> None:
    """SIGKILL, every other time to the parent alone, until the command ends by itself: the same bytes, in place."""
    built = build(tmp_path / "src", rows=400)
    options = ["--format", storage, "--chunk-rows", "4", "--shard-mib", str(8 * 192 / 2**20)]
    shutil.copytree(built.folder, tmp_path / "undisturbed")
    subprocess.run(program(tmp_path / "undisturbed", *options), check=True, capture_output=True)
    right = without_lock(tmp_path / "undisturbed")
    rows = in_order(rows_of(built.folder))
    mark = f"SHARDWRIGHT_TEST_{os.getpid()}_reshard_{storage}"
    chance = random.Random(0)
    work = tmp_path / "work"
    longest, killed = 2.0, 0
    shutil.copytree(built.folder, work)
    while killed < kills:
        start = time.monotonic()
        process = subprocess.Popen(
            program(work, *options),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, mark: "1"},
            start_new_session=True,
        )
        try:
            if killed % 4 < 3:  # most of the time goes into starting
                while process.poll() is None and not list(work.glob(".shardwright/run/*")):
                    time.sleep(0.002)
                process.wait(chance.uniform(0, longest / 2))
            else:
                process.wait(chance.uniform(0, longest))
        except subprocess.TimeoutExpired:
            killed += 1
            if killed % 2:
                process.kill()
            else:
                os.killpg(process.pid, signal.SIGKILL)
                for pid in processes_naming(mark):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
            wait_for_none(mark)
            assert in_order(rows_of(work)) == rows
            continue
        assert process.returncode == 0
        longest = time.monotonic() - start
        assert without_lock(work) == right
        shutil.rmtree(work)
        shutil.copytree(built.folder, work)
    subprocess.run(program(work, *options), check=True, capture_output=True)
    assert without_lock(work) == right


def stopped_after(shards: int, monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> None:
    """Reshard, and be interrupted once so many shards are finished."""
    real, calls = copying.copy_shard, 0

    def copy_shard(task: copying.CopyTask) -> Any:
        nonlocal calls
        calls += 1
        if calls > shards:
            raise KeyboardInterrupt
        return real(task)

    with monkeypatch.context() as patch:
        patch.setattr(copying, "copy_shard", copy_shard)
        with pytest.raises(KeyboardInterrupt):
            reshard(*arguments)


def shards_written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    real, found = copying.copy_shard, []

    def copy_shard(task: copying.CopyTask) -> Any:
        found.append(task.number)
        return real(task)

    monkeypatch.setattr(copying, "copy_shard", copy_shard)
    return found


@pytest.mark.parametrize("finished", [0, 1, 4])
def test_finished_shards_are_not_made_again(
    here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage: Storage, finished: int
) -> None:
    built, options = (
        build(tmp_path / "src"),
        asked(format=storage, chunk_rows=5, shard_mib=10 * 192 / 2**20, seed=4),
    )
    reshard(built.folder, tmp_path / "undisturbed", options)
    stopped_after(finished, monkeypatch, built.folder, tmp_path / "out", options)
    written = shards_written(monkeypatch)
    done = only(reshard(built.folder, tmp_path / "out", options))
    assert sorted(written) == list(range(finished, 5))
    assert done.resumed == finished
    assert everything(tmp_path / "out") == everything(tmp_path / "undisturbed")


def test_other_options_do_not_throw_finished_shards_away(
    here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, out = build(tmp_path / "src"), tmp_path / "out"
    stopped_after(2, monkeypatch, built.folder, out, asked(chunk_rows=4))
    with pytest.raises(
        OutputError, match="unfinished `reshard` with other options: chunk_rows is 4 there, 2 here"
    ):
        reshard(built.folder, out, asked(chunk_rows=2))
    draw_tree(tmp_path / "tree")
    with pytest.raises(OutputError, match="unfinished `reshard`: run it again"):
        convert(tmp_path / "tree", out, ConvertOptions(PixelOptions(size=32)))
    done = only(reshard(built.folder, out, asked(chunk_rows=2, new_version=True)))
    assert (done.version, done.resumed) == (1, 0)
    assert in_order(rows_of(out)) == in_order(rows_of(built.folder))


@pytest.mark.parametrize("after", range(9))
@pytest.mark.parametrize("beside", [False, True])
def test_killed_while_publishing(
    here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int, beside: bool
) -> None:
    """Between any two of the renames, or before either manifest; nothing is cleaned up, as after SIGKILL."""
    options = asked(chunk_rows=4, shard_mib=8 * 192 / 2**20)
    first, second = (build(tmp_path / name).folder for name in ("first", "second"))
    where = [(first, tmp_path / "a"), (second, tmp_path / "b")] if beside else [(first, None), (second, None)]
    reshard(*where[0], options)
    calls = 0

    class Killed(BaseException):
        pass

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            nonlocal calls
            if calls == after:
                raise Killed
            calls += 1
            return real(*arguments)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(Unfinished, "place", counted(Unfinished.place))
        patch.setattr("shardwright.datasets.manifest.replace_file", counted(_replace_file))
        patch.setattr("shardwright.convert.output.Output.abandon", lambda *_: None)
        with pytest.raises(Killed):
            reshard(*where[1], options)
    written = shards_written(monkeypatch)
    reshard(*where[1], options)
    assert written == []
    assert without_lock(where[1][1] or second) == without_lock(where[0][1] or first)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_everything(tmp_path: Path, number: signal.Signals, code: int) -> None:
    built, out = build(tmp_path / "src", rows=2000), tmp_path / "out"
    options = ["--chunk-rows", "4", "--shard-mib", "0.001"]
    mark = f"SHARDWRIGHT_TEST_{os.getpid()}_reshard_{code}"
    with subprocess.Popen(
        program(built.folder, out, *options), stderr=subprocess.PIPE, env={**os.environ, mark: "1"}, text=True
    ) as process:
        while not list(out.glob(".shardwright/run/record-*")):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        _, said = process.communicate(timeout=20)
    assert (process.returncode, said.count("Traceback"), "same command goes on" in said) == (code, 0, True)
    assert processes_naming(mark) == []
    assert not list(out.glob(".shardwright/work*"))
    assert not (out / "manifest.json").exists()
    assert read_manifest(built.folder).version == 1
    subprocess.run(program(built.folder, out, *options), check=True, capture_output=True)
    assert in_order(rows_of(out)) == in_order(rows_of(built.folder))


def test_two_at_once(tmp_path: Path, command: Command) -> None:
    built = build(tmp_path / "src")
    with one_writer(built.folder):
        ran = command("reshard", built.folder, "--chunk-rows", 4)
        assert (ran.code, f"held by process {os.getpid()}" in ran.err) == (4, True)
        assert command("reshard", built.folder, tmp_path / "out", "--jobs", 1).code == 0  # it only reads
    with one_writer(tmp_path / "out"), pytest.raises(LockedError):
        reshard(built.folder, tmp_path / "out", asked(chunk_rows=2))


def test_a_limit_of_file_size_is_said_and_then_gone_on_from(tmp_path: Path, storage: Storage) -> None:
    built, out = build(tmp_path / "src"), tmp_path / "out"

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))

    command = program(built.folder, out, "--format", storage, "--chunk-rows", 4)
    full = subprocess.run(command, preexec_fn=limited, capture_output=True, text=True, check=False)
    assert full.returncode == 1
    assert "a file would be larger than allowed" in full.stderr
    assert (full.stderr.count("shardwright: "), full.stderr.count("Traceback")) == (1, 0)
    assert not (out / "manifest.json").exists()
    subprocess.run(command, check=True, capture_output=True)
    assert in_order(rows_of(out)) == in_order(rows_of(built.folder))


def test_what_does_not_fit_is_not_begun(here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = build(tmp_path / "src", flat=0)
    monkeypatch.setattr("shardwright.convert.space.free_bytes", lambda _: 100)
    written = shards_written(monkeypatch)
    with pytest.raises(OutputError, match=r"needs .* its disk has 0.0 MB \(100 bytes\) free"):
        reshard(built.folder, tmp_path / "out", asked(chunk_rows=4))
    assert written == []
    assert not (tmp_path / "out").exists()


def test_a_worker_that_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = build(tmp_path / "src")
    monkeypatch.setattr(copying.CopyTask, "write", _end_this_process)
    with pytest.raises(ShardwrightError, match="killed or crashed 2 times: is there memory"):
        reshard(built.folder, tmp_path / "out", asked(chunk_rows=4))
    assert not (tmp_path / "out").exists()


def _end_this_process(*_: Any) -> None:
    os._exit(3)


def test_shards_of_another_environment_are_not_mixed_in(
    here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, options = build(tmp_path / "src"), asked(chunk_rows=4)
    reshard(built.folder, tmp_path / "undisturbed", options)
    now = copying.environment_of(False)
    with monkeypatch.context() as patch:
        patch.setattr(copying, "environment_of", lambda _: {**now, "h5py": "3.0"})
        stopped_after(1, monkeypatch, built.folder, tmp_path / "out", options)
    done = only(reshard(built.folder, tmp_path / "out", options))
    assert done.resumed == 0
    assert f"h5py is '3.0' there, '{now['h5py']}' here" in done.notes[0]
    assert everything(tmp_path / "out") == everything(tmp_path / "undisturbed")


def test_nothing_is_published_before_all_is_made(
    here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for split in ("train", "val"):
        build(tmp_path / "src" / split)
    reshard(tmp_path / "src", tmp_path / "undisturbed", asked(chunk_rows=4))
    last = read_manifest(tmp_path / "src" / "val").shards[-1].files[0]
    path = tmp_path / "src" / "val" / last.name
    content = path.read_bytes()
    os.truncate(path, last.bytes - 1)
    with pytest.raises(ShardError):
        reshard(tmp_path / "src", tmp_path / "out", asked(chunk_rows=4))
    assert not [*(tmp_path / "out").rglob("manifest*"), *(tmp_path / "out").rglob("shards/*")]
    path.write_bytes(content)  # repaired: the same command goes on
    reshard(tmp_path / "src", tmp_path / "out", asked(chunk_rows=4))
    assert everything(tmp_path / "out") == everything(tmp_path / "undisturbed")


def test_what_was_copied_from_a_damaged_shard_is_not_kept(here: None, tmp_path: Path) -> None:
    """An id has no checksum of its own: only the hash of the whole shard tells, and what was copied is made again."""
    built = build(tmp_path / "src", shard_rows=8)
    reshard(built.folder, tmp_path / "undisturbed", asked(chunk_rows=4))
    path = built.folder / built.manifest.shards[2].files[0].name
    content = path.read_bytes()
    at = content.index(built.ids[16].encode())
    path.write_bytes(content[:at] + b"X" + content[at + 1 :])
    with pytest.raises(ShardError, match=f"{path.name}': wrong SHA-256"):
        reshard(built.folder, tmp_path / "out", asked(chunk_rows=4))
    path.write_bytes(content)
    done = only(reshard(built.folder, tmp_path / "out", asked(chunk_rows=4)))
    assert done.resumed <= 6
    assert everything(tmp_path / "out") == everything(tmp_path / "undisturbed")


def test_nothing_that_was_asked_for_is_an_error(here: None, tmp_path: Path) -> None:
    built = build(tmp_path / "src")
    with pytest.raises(SourceError, match="1 of 1 ids are not among the rows"):
        reshard(built.folder, options=asked(ids=("nothing",)))
    gone = build(tmp_path / "gone", rows=8, shard_rows=8)
    republish(gone, rows=0, shards=(replace(gone.manifest.shards[0], dead_rows=tuple(range(8))),))
    with pytest.raises(SourceError, match="has no rows"):
        reshard(gone.folder, options=asked(chunk_rows=4))


def test_make_reshard(tmp_path: Path) -> None:
    """Spaces, quotes and dollars in names are safe; further options go through ARGS."""
    source, out = tmp_path / "it's $HOME's", tmp_path / 'o "u" t'
    build(source)
    (tmp_path / "ready").touch()
    told = [
        "make",
        f"BIN={Path(sys.executable).parent}",
        f"READY={tmp_path / 'ready'}",
        "-o",
        tmp_path / "ready",
    ]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}

    def make(*arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*told, "reshard", *arguments],
            cwd=Path(__file__).parents[1],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    where = [
        f"SRC={source}",
        f"OUT={out}",
        "ARGS=--chunk-rows 4 --only-classes 'c1,c2' --jobs 1",
    ]
    ran = make(*where)
    assert ran.returncode == 0, ran.stderr
    assert read_manifest(out).chunk_rows == 4
    assert make(where[0], "ARGS=--chunk-rows 4 --jobs 1").returncode == 0
    assert read_manifest(source).version == 2
    assert (make().returncode, "say which data set" in make().stderr) == (2, True)


# --- beside readers -------------------------------------------------------------------------------------------


_RESHARDS = """
import sys
from pathlib import Path
from conftest import _Here
from shardwright.convert import workers
from shardwright.convert.gc import GcOptions, gc
from shardwright.convert.layouts import LayoutOptions
from shardwright.convert.copy_plan import ReshardOptions
from shardwright.convert.reshard import reshard
workers.ProcessPoolExecutor = _Here
for turn in range(20):
    layout = LayoutOptions(("npy", "hdf5")[turn % 2], 8 + turn, 0.05)
    assert reshard(Path(sys.argv[1]), None, ReshardOptions(layout, seed=turn, jobs=1))[""].made
    gc(Path(sys.argv[1]), GcOptions(keep=3, min_age_seconds=0))
"""


@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_training_beside_it(tmp_path: Path, engine: Any) -> None:
    """Twenty reshards in place, and `gc` after each, while loops train: an epoch is of one version, or says which."""
    built = build(tmp_path / "src", rows=3000, shard_rows=400, chunk_rows=16, shape=(4, 4, 3))
    right = {
        id: (image.tobytes(), label)
        for id, image, label in zip(built.ids, built.images, built.labels.tolist(), strict=True)
    }
    told: list[tuple[int | None, str]] = []
    versions: list[int] = []
    job = subprocess.Popen(
        [sys.executable, "-c", _RESHARDS, built.folder],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        cwd=tmp_path,
    )
    with job:
        while job.poll() is None or versions[-1:] != [21]:
            dataset = open_dataset(built.folder, columns=("image", "label", "id"))
            options = LoaderOptions(engine=engine, quiet=True)
            loader = make_loader(dataset, 64, shuffle=True, options=options)
            try:
                for _ in range(3):
                    assert trained_on(loader) == right
                versions.append(dataset.manifest.version)
            except ShardwrightError as error:
                told.append((dataset.version, str(error)))
            # What a traceback kept of torch's iterator is not to be found by a process that is forked next.
            del loader
            garbage.collect()
    assert job.returncode == 0
    odd = [text for version, text in told if f"version {version} was removed" not in text]
    assert not odd, "\n".join(odd)
    assert versions == sorted(versions)
    assert sorted(p.name for p in built.folder.glob("manifest-*")) == [
        f"manifest-{version:06d}.json" for version in (19, 20, 21)
    ]


def trained_on(loader: Any) -> dict[str, tuple[bytes, int]]:
    """id -> (pixels, label) of one epoch; no id comes twice."""
    seen: dict[str, tuple[bytes, int]] = {}
    count = 0
    for images, labels, ids in loader:
        rows = images.permute(0, 2, 3, 1).contiguous().numpy()
        seen |= {
            id: (row.tobytes(), label) for id, row, label in zip(ids, rows, labels.tolist(), strict=True)
        }
        count += len(ids)
    assert count == len(seen)
    return seen
