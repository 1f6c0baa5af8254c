"""From a tree to a data set, end to end: read back by h5py, NumPy and json alone."""

import errno
import hashlib
import io
import json
import os
import pickle
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import h5py
import numpy as np
import pytest
from drawing import Pixels, encoded, jpeg, noise, photograph, png, put
from PIL import Image
from trees import make_unreadable

from shardwright.convert import (
    Conversion,
    ConvertOptions,
    PixelOptions,
    StoreOptions,
    convert,
    picture_build,
    write,
)
from shardwright.convert.output import Output
from shardwright.convert.picture_build import PictureBuild
from shardwright.convert.records import ShardRecord
from shardwright.convert.store import shard_writer
from shardwright.convert.write import ShardTask, write_shard
from shardwright.datasets.ids import id_to_path, path_to_id
from shardwright.datasets.layout import Storage
from shardwright.datasets.manifest import read_manifest
from shardwright.datasets.pixels import decode
from shardwright.errors import OutputError, ShardwrightError, SourceError, UsageError

SIZE = 16
LATIN_1 = "é" if sys.platform == "darwin" else os.fsdecode(b"caf\xe9")
CLASSES = ("10", "2", "B", "a", LATIN_1, "ü")
SMALL = ConvertOptions(PixelOptions(size=SIZE), StoreOptions(chunk_rows=8))

JPEG = jpeg(40, 40)
BROKEN = {
    "10/cut.jpg": (JPEG[:-30], "truncated"),
    "2/zeroed.jpg": (JPEG[:-300] + bytes(300), "truncated"),
    "B/404.jpg": (b"<!DOCTYPE html><title>404</title>", "not-a-picture"),
    "a/no bytes.jpg": (b"", "empty"),
}
SUSPECT = {
    "2/junk.jpg": JPEG[:-2] + b"junk" * 10 + JPEG[-2:],
    "ü/junk.jpg": JPEG[:-2] + b"junk" * 9 + JPEG[-2:],
}


def pictures() -> dict[str, Pixels]:
    """Path -> pixels: noise, which stays raw, and flat pictures, which LZF packs."""
    found = {}
    for k in range(120):
        flat = np.full((SIZE, SIZE, 3), k, np.uint8)
        found[f"{CLASSES[k % 6]}/{k // 12}/{k:03d} -\\.png"] = flat if k % 5 < 2 else noise(SIZE, SIZE, k)
    return found


PICTURES = pictures()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("source")
    put(root, {path: encoded(pixels, "PNG") for path, pixels in PICTURES.items()})
    put(root, {path: data for path, (data, _) in BROKEN.items()} | SUSPECT)
    put(root, {"no class.png": png(), "README.md": b"# All", ".DS_Store": b"", "a/Thumbs.db": b""})
    (root / "a/gone.jpg").symlink_to("nowhere")
    return root


def options_for(storage: Storage, jobs: int | None = None) -> ConvertOptions:
    """Shards of three chunks of eight rows."""
    three_chunks = 3 * 8 * SMALL.row_bytes / 2**20
    return replace(SMALL, store=StoreOptions(storage, 8, shard_mib=three_chunks), jobs=jobs)


@pytest.fixture(scope="module", params=get_args(Storage))
def storage(request: pytest.FixtureRequest) -> Storage:
    return request.param


@pytest.fixture(scope="module")
def done(storage: Storage, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Conversion:
    """One conversion with worker processes; nothing may change it."""
    (found,) = convert(source, tmp_path_factory.mktemp("out") / "made", options_for(storage, jobs=2))
    return found


def hashes(folder: Path) -> dict[str, str]:
    """Path -> SHA-256 of every file below ``folder``; folders are there too."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        if path.is_file()
        else "folder"
        for path in sorted(folder.rglob("*"))
    }


def rows(folder: Path) -> Iterator[dict[str, Any]]:
    """Every row, column by name, through h5py or NumPy alone."""
    manifest = json.loads((folder / "manifest.json").read_bytes())
    for shard in manifest["shards"]:
        paths = [folder / file["name"] for file in shard["files"]]
        if manifest["storage"] == "hdf5":
            with h5py.File(paths[0]) as file:
                columns = {name: (file[name].asstr() if name == "id" else file[name])[...] for name in file}
        else:
            columns = {path.suffixes[-2][1:]: np.load(path) for path in paths}
            columns["id"] = [id.decode() for id in columns["id"]]
        assert {len(values) for values in columns.values()} == {shard["rows"]}
        for k in range(shard["rows"]):
            yield {name: values[k] for name, values in columns.items()} | {
                "class": manifest["classes"][columns["label"][k]]
            }


def made(folder: Path) -> dict[str, str]:
    """Id -> class name of every row, each once."""
    found = [(row["id"], row["class"]) for row in rows(folder)]
    assert len(dict(found)) == len(found)
    return dict(found)


# --- one law, over both formats -----------------------------------------------------------------------


def test_every_picture_is_there_once(done: Conversion) -> None:
    found = {row["id"]: row for row in rows(done.folder)}
    assert (
        sum(1 for _ in rows(done.folder)) == len(found) == done.manifest.rows == len(PICTURES) + len(SUSPECT)
    )
    assert found.keys() == {path_to_id(path) for path in (*PICTURES, *SUSPECT)}
    for path, pixels in PICTURES.items():
        row = found[path_to_id(path)]
        assert np.array_equal(row["image"], pixels), path
        assert row["class"] == path_to_id(path.split("/")[0])


def test_the_small_columns_are_right(done: Conversion, source: Path) -> None:
    files = {path_to_id(path): source / path for path in (*PICTURES, *SUSPECT)}
    for row in rows(done.folder):
        data = files[row["id"]].read_bytes()
        image = Image.open(io.BytesIO(data))
        assert row["crc32"] == zlib.crc32(row["image"].tobytes())
        assert row["source_sha256"].tobytes() == hashlib.sha256(data).digest()
        assert row["source_shape"].tolist() == [image.height, image.width]


def test_the_manifest_is_right(done: Conversion, storage: Storage) -> None:
    found = json.loads((done.folder / "manifest.json").read_bytes())
    assert (found["version"], found["storage"], found["rows"]) == (1, storage, 122)
    assert found["classes"] == [path_to_id(name) for name in sorted(CLASSES)]
    assert found["rejected"] == {
        "empty": 1,
        "no-class": 1,
        "not-a-picture": 1,
        "truncated": 2,
        "unreadable": 1,
    }
    assert found["suspect"] == {"decoder-warning": 2}
    assert found["skipped"] == {"hidden": 1, "not-a-picture": 1, "system": 1}
    assert found["source"]["files"] == 122 + 6
    assert found["options"]["size"] == SIZE
    assert found["environment"].keys() >= {"h5py", "hdf5", "numpy", "pillow", "torch", "cpu_capability"}
    for file in (file for shard in found["shards"] for file in shard["files"]):
        data = (done.folder / file["name"]).read_bytes()
        assert (file["bytes"], file["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())


def test_stats_are_those_of_all_pixels(done: Conversion) -> None:
    pixels = np.stack([row["image"] for row in rows(done.folder)]).reshape(-1, 3)
    assert done.manifest.stats.mean == pytest.approx(pixels.mean(0), abs=1e-9)
    assert done.manifest.stats.std == pytest.approx(pixels.std(0), abs=1e-9)


def test_the_report_says_what_and_why(done: Conversion, source: Path) -> None:
    lines = [json.loads(line) for line in (done.folder / "report-000001.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == sorted(line["id"] for line in lines)
    assert {(line["id"], line["reason"]) for line in lines if line["verdict"] == "rejected"} == {
        *((id, reason) for id, (_, reason) in BROKEN.items()),
        ("a/gone.jpg", "unreadable"),
        ("no class.png", "no-class"),
    }
    assert {line["id"] for line in lines if line["verdict"] == "suspect"} == set(SUSPECT)
    assert all(line["message"] for line in lines)
    sizes = {line["id"]: line["bytes"] for line in lines}
    assert sizes["10/cut.jpg"] == len(BROKEN["10/cut.jpg"][0])
    assert (done.rejected, len(done.findings)) == (6, 8)


def test_shards_are_whole_chunks_and_some_are_packed(done: Conversion, storage: Storage) -> None:
    shards = done.manifest.shards
    assert [shard.files[0].name.split(".")[0] for shard in shards] == [
        f"shards/000001-{k:05d}" for k in range(6)
    ]
    assert [shard.chunks for shard in shards] == [3, 3, 3, 3, 3, 1]
    assert all(16 < shard.rows <= 24 for shard in shards[:-1])
    packed = sum(shard.compressed_chunks for shard in shards)
    assert packed == 0 if storage == "npy" else 0 < packed < 16


def test_chunks_end_with_zeros(done: Conversion, storage: Storage) -> None:
    """Where a picture was rejected, the last chunk of its shard has rows to spare."""
    spare = 0
    for shard in done.manifest.shards if storage == "hdf5" else ():
        with h5py.File(done.folder / shard.files[0].name) as file:
            image = file["image"]
            first = (shard.chunks - 1) * image.chunks[0]
            mask, payload = image.id.read_direct_chunk((first, 0, 0, 0))
        if mask:  # raw, with a checksum of four bytes
            pixels = np.frombuffer(payload[:-4], np.uint8).reshape(-1, SIZE, SIZE, 3)
            assert not pixels[shard.rows - first :].any()
            spare += len(pixels) - (shard.rows - first)
    assert spare > 0 or storage == "npy"


def test_nothing_else_is_left(done: Conversion) -> None:
    files = {file.name for shard in done.manifest.shards for file in shard.files}
    state = {".shardwright", ".shardwright/source-000001.npz", ".shardwright/lock", "shards"}
    assert hashes(done.folder).keys() == {
        "manifest.json",
        "manifest-000001.json",
        "report-000001.jsonl",
        *files,
        *state,
    }


def test_the_bytes_depend_on_no_number_of_jobs(
    done: Conversion, source: Path, storage: Storage, tmp_path: Path
) -> None:
    convert(source, tmp_path / "out", options_for(storage, jobs=1))
    assert hashes(tmp_path / "out") == hashes(done.folder)


def test_the_bytes_depend_on_no_process_and_no_leftovers(
    here: None, done: Conversion, source: Path, storage: Storage, tmp_path: Path
) -> None:
    """A run that was killed leaves work in progress, and shards that no manifest names."""
    out = put(
        tmp_path / "out",
        {".shardwright/work-1-x/000001-00003.h5": b"half", "shards/000001-00000.h5": b"half"},
    )
    convert(source, out, options_for(storage))
    assert hashes(out) == hashes(done.folder)


def test_the_same_again_does_nothing(here: None, done: Conversion, source: Path, storage: Storage) -> None:
    def times() -> dict[Path, int]:
        return {p: p.stat().st_mtime_ns for p in done.folder.rglob("*") if p.name != "lock"}

    before = times()
    (again,) = convert(source, done.folder, options_for(storage))
    assert (again.made, again.manifest) == (False, done.manifest)
    assert times() == before


# --- versions -----------------------------------------------------------------------------------------


@pytest.fixture
def small(here: None, tmp_path: Path) -> Path:
    """A folder with the tree ``src``, of ten pictures, and ``out``, which was made of it."""
    put(tmp_path / "src", {f"{'ab'[k % 2]}/{k}.png": png(k) for k in range(10)})
    convert(tmp_path / "src", tmp_path / "out", SMALL)
    return tmp_path


def test_another_source_makes_the_next_version(small: Path) -> None:
    before = hashes(small / "out")
    put(small / "src", {"a/new.png": png(99), "c/0.png": png(98)})
    (small / "src/b/1.png").unlink()
    (second,) = convert(small / "src", small / "out", SMALL)
    assert (second.made, second.manifest.version, second.manifest.classes) == (True, 2, ("a", "b", "c"))
    assert made(small / "out").keys() == {f"{'ab'[k % 2]}/{k}.png" for k in range(10)} - {"b/1.png"} | {
        "a/new.png",
        "c/0.png",
    }
    after = hashes(small / "out")
    kept = before.keys() - {"manifest.json", ".shardwright/source-000001.npz"}
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (replace(SMALL, seed=1), "seed is 0 there, 1 here"),
        (replace(SMALL, pixels=PixelOptions(size=8)), "size is 16 there, 8 here"),
        (replace(SMALL, classes=("b", "a")), "class map"),
    ],
)
def test_other_options_need_to_be_meant(small: Path, options: ConvertOptions, says: str) -> None:
    before = hashes(small)
    with pytest.raises(OutputError, match=says):
        convert(small / "src", small / "out", options)
    assert hashes(small) == before
    (second,) = convert(small / "src", small / "out", replace(options, new_version=True))
    assert (second.manifest.version, second.manifest.options) == (2, options.recorded())


def test_a_source_that_lost_most_is_refused(small: Path) -> None:
    before = hashes(small / "out")
    for path in sorted((small / "src/a").iterdir()) + sorted((small / "src/b").iterdir())[:1]:
        path.unlink()
    with pytest.raises(OutputError, match="has 4 pictures.* made from 10.*--allow-shrink"):
        convert(small / "src", small / "out", SMALL)
    assert hashes(small / "out") == before
    (second,) = convert(small / "src", small / "out", replace(SMALL, allow_shrink=True))
    assert second.manifest.rows == 4


def test_pictures_without_a_class_have_not_gone(here: None, tmp_path: Path) -> None:
    put(tmp_path / "src", {"a/x.png": png(1), "1.png": png(2), "2.png": png(3)})
    convert(tmp_path / "src", tmp_path / "out", SMALL)
    put(tmp_path / "src", {"a/x.png": png(4) + b" "})
    (second,) = convert(tmp_path / "src", tmp_path / "out", SMALL)
    assert second.manifest.version == 2


# --- what is refused, and leaves all as it was ---------------------------------------------------------


def test_strict_publishes_nothing(here: None, tmp_path: Path) -> None:
    put(tmp_path / "src", {"a/x.png": png(), "a/cut.jpg": JPEG[:-30]})
    with pytest.raises(SourceError, match="nothing was published: 'a/cut.jpg': truncated: Premature end"):
        convert(tmp_path / "src", tmp_path / "out", replace(SMALL, strict=True))
    assert os.listdir(tmp_path) == ["src"]


def test_strict_leaves_the_version_before(small: Path) -> None:
    before = hashes(small / "out")
    put(small / "src", {"a/cut.jpg": JPEG[:-30]})
    with pytest.raises(SourceError, match="1 pictures were rejected"):
        convert(small / "src", small / "out", replace(SMALL, strict=True))
    assert hashes(small / "out") == before


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"a/": b""}, "no pictures"),
        ({}, "no pictures"),
        ({"x.png": png()}, "none in a class folder"),
        ({"a/cut.jpg": JPEG[:-30], "b/empty.jpg": b""}, "not one of the 2 pictures .* could be taken"),
        ({"train/a/x.png": png(), "val/a/cut.jpg": JPEG[:-30]}, "not one of the 1 pictures in '.*val'"),
        ({"train/a/x.png": png(), "val/a/": b""}, "val' has no pictures"),
    ],
)
def test_a_source_without_pictures_makes_nothing(
    here: None, tmp_path: Path, files: dict[str, bytes], says: str
) -> None:
    source = put(tmp_path / "src", files)
    source.mkdir(exist_ok=True)
    with pytest.raises(SourceError, match=says):
        convert(source, tmp_path / "out", SMALL)
    # What was finished of another split is kept, out of sight: that one may be right.
    left = [
        path for path in (tmp_path / "out").rglob("*") if path.is_file() and ".shardwright" not in path.parts
    ]
    assert left == []
    assert (tmp_path / "out").exists() == ("val/a/cut.jpg" in files)


@pytest.mark.parametrize(
    ("there", "says"),
    [
        ({"notes.txt": b"mine"}, "holds what is not ours: 'notes.txt'"),
        ({"shards/mine.h5": b"mine"}, "not ours: 'shards'"),
        ({"a/x.png": b"mine"}, "not ours: 'a'"),
        ({"train/manifest.json": b"{}"}, "holds the splits train"),
    ],
)
@pytest.mark.parametrize("splits", [False, True])
def test_a_foreign_output_is_left_alone(
    here: None, tmp_path: Path, there: dict[str, bytes], says: str, splits: bool
) -> None:
    put(tmp_path / "src", {"train/a/x.png": png()} if splits else {"a/x.png": png()})
    put(tmp_path / "out", there)
    before = hashes(tmp_path)
    if splits and "train/manifest.json" in there:
        there, says = {}, "is no manifest"
        with pytest.raises(ShardwrightError, match=says):
            convert(tmp_path / "src", tmp_path / "out", SMALL)
    else:
        with pytest.raises(OutputError, match=says):
            convert(tmp_path / "src", tmp_path / "out", SMALL)
    assert hashes(tmp_path) == before


def test_a_data_set_becomes_no_folder_of_splits(small: Path) -> None:
    put(small / "other", {"train/a/x.png": png(), "val/a/x.png": png()})
    before = hashes(small)
    with pytest.raises(OutputError, match="holds one data set, the source has splits"):
        convert(small / "other", small / "out", SMALL)
    assert hashes(small) == before


def test_an_output_that_is_a_file(here: None, tmp_path: Path) -> None:
    put(tmp_path, {"src/a/x.png": png(), "out": b"mine"})
    for out in ("out", "out/below"):
        with pytest.raises(OutputError, match="is not a folder|cannot write"):
            convert(tmp_path / "src", tmp_path / out, SMALL)
    assert (tmp_path / "out").read_bytes() == b"mine"


@pytest.mark.parametrize(
    ("source", "out", "says"),
    [
        ("missing", "out", "the source .* is missing"),
        ("file", "out", "is not a folder"),
        ("src", "src", "lie in one another"),
        ("src", "src/out", "lie in one another"),
        ("src/a", "src", "lie in one another"),
        ("src", "link/out", "lie in one another"),
        ("src", "out/../src/b", "lie in one another"),
    ],
)
def test_impossible_paths_are_a_usage_error(
    here: None, tmp_path: Path, source: str, out: str, says: str
) -> None:
    put(tmp_path, {"src/a/x.png": png(), "file": b""})
    (tmp_path / "link").symlink_to("src")
    before = hashes(tmp_path)
    with pytest.raises(UsageError, match=says):
        convert(tmp_path / source, tmp_path / out, SMALL)
    assert hashes(tmp_path) == before


@pytest.mark.parametrize("failing", ["write.write_shard", "output.sync_folder", "output.write_manifest"])
def test_a_run_that_fails_leaves_the_version_before(
    small: Path, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> ShardRecord:
        if failing == "write.write_shard":  # in a worker: it raises nothing
            return ShardRecord(0, error=(errno.ENOSPC, "No space left on device"))
        raise OSError(errno.ENOSPC, "No space left on device")

    before = hashes(small / "out")
    put(small / "src", {"a/new.png": png(99)})
    with monkeypatch.context() as patch:
        patch.setattr(f"shardwright.convert.{failing}", full)
        with pytest.raises(OutputError, match="cannot write '.*out': the disk is full. .* bytes. free"):
            convert(small / "src", small / "out", SMALL)
    after = hashes(small / "out")
    assert {name: after[name] for name in before} == before
    assert {name.split("/")[0] for name in after.keys() - before.keys()} <= {
        "shards",
        "report-000002.jsonl",
        ".shardwright",
    }
    (again,) = convert(small / "src", small / "out", SMALL)
    assert (again.manifest.version, len(made(small / "out"))) == (2, 11)


def test_an_interrupt_leaves_nothing(here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    put(tmp_path / "src", {"a/x.png": png()})
    monkeypatch.setattr(write, "write_shard", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert(tmp_path / "src", tmp_path / "out", SMALL)
    assert os.listdir(tmp_path) == ["src"]


# --- splits and class maps ------------------------------------------------------------------------------


def test_splits_share_one_class_map(here: None, tmp_path: Path) -> None:
    put(tmp_path / "src", {"train/10/x.png": png(1), "train/b/x.png": png(2), "README.md": b""})
    put(tmp_path / "src", {"val/b/x.png": png(3), "val/a/x.png": png(4), "val/empty/": b""})
    done = convert(tmp_path / "src", tmp_path / "out", SMALL)
    assert [c.split for c in done] == ["train", "val"]
    assert {c.manifest.classes for c in done} == {("10", "a", "b", "empty")}
    assert made(tmp_path / "out/train") == {"10/x.png": "10", "b/x.png": "b"}
    assert made(tmp_path / "out/val") == {"b/x.png": "b", "a/x.png": "a"}
    assert sorted(os.listdir(tmp_path / "out")) == ["train", "val"]
    put(tmp_path / "src", {"val/b/y.png": png(5)})
    assert [(c.made, c.manifest.version) for c in convert(tmp_path / "src", tmp_path / "out", SMALL)] == [
        (False, 1),
        (True, 2),
    ]


def test_split_names_may_be_classes(here: None, tmp_path: Path) -> None:
    put(tmp_path / "src", {"train/x.png": png(1), "test/y/z.png": png(2)})
    convert(tmp_path / "src", tmp_path / "out", replace(SMALL, splits=False))
    assert made(tmp_path / "out") == {"train/x.png": "train", "test/y/z.png": "test"}


def test_a_class_map_is_kept(here: None, tmp_path: Path) -> None:
    put(tmp_path / "src", {"a/x.png": png(1), "b/x.png": png(2)})
    (done,) = convert(tmp_path / "src", tmp_path / "out", replace(SMALL, classes=("b", "none", "a")))
    assert done.manifest.classes == ("b", "none", "a")
    assert {row["id"]: int(row["label"]) for row in rows(tmp_path / "out")} == {"a/x.png": 2, "b/x.png": 0}


# --- the work of one process ------------------------------------------------------------------------------


def task(tmp_path: Path, root: Path, options: ConvertOptions) -> ShardTask:
    paths = tuple(sorted(os.listdir(root)))
    return ShardTask(0, "shards/0", tmp_path / "0", root, paths, paths, (0,) * len(paths), options)


@pytest.mark.parametrize("storage_of_shard", get_args(Storage))
def test_a_shard_of_rejects_is_none(tmp_path: Path, storage_of_shard: Storage) -> None:
    put(tmp_path / "src", {"1.jpg": b"", "2.jpg": b"no"})
    (tmp_path / "src/3.jpg").mkdir()
    record = write_shard(task(tmp_path, tmp_path / "src", options_for(storage_of_shard)))
    assert (record.shard, record.temporary, record.error) == (None, (), None)
    assert [finding.reason for finding in record.findings] == ["empty", "not-a-picture", "unreadable"]
    assert os.listdir(tmp_path) == ["src"]


def test_a_worker_returns_what_the_disk_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "src", {"1.png": png()})
    record = write_shard(task(tmp_path / "missing", tmp_path / "src", SMALL))
    assert record.error is not None
    assert record.error[0] == errno.ENOENT
    writer = shard_writer(tmp_path / "taken", 1, (SIZE, SIZE, 3), SMALL.store)
    monkeypatch.setattr(writer, "write", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    monkeypatch.setattr("shardwright.convert.write.shard_writer", lambda *_: writer)
    record = write_shard(task(tmp_path, tmp_path / "src", SMALL))
    assert record.error == (errno.ENOSPC, "full")
    assert os.listdir(tmp_path) == ["src"]


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_memory_is_that_of_a_chunk_and_a_picture(tmp_path: Path, python: Any) -> None:
    large = Image.fromarray(photograph(750, 1000)).resize((4000, 3000))
    files = {"1.jpg": encoded(large), "2.png": encoded(large, "PNG", compress_level=0)}
    files["3.png"] = encoded(Image.new("P", (4000, 3000)), "PNG", transparency=0)
    files["4.jpg"] = encoded(Image.new("RGB", (60000, 1)))
    files["5.png"] = encoded(Image.new("RGB", (1, 60000)), "PNG")
    put(tmp_path / "src", files)
    code = """
import os, pickle, re, sys
import torch
from shardwright.convert.write import write_shard
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1e3
before = peak()
record = write_shard(pickle.loads(bytes.fromhex(sys.argv[1])))
print(record.shard.rows, round(peak() - before))
"""
    options = ConvertOptions(PixelOptions(size=1024), StoreOptions(chunk_rows=4), jobs=1)
    found = python(code, pickle.dumps(task(tmp_path, tmp_path / "src", options)).hex())
    assert found.returncode == 0, found.stderr
    count, megabytes = map(int, found.stdout.split())
    assert count == len(files)
    assert megabytes < 300


def test_progress_counts_every_picture(small: Path) -> None:
    told: dict[str, list[int]] = {}

    class Count:
        def __init__(self, stage: str, total: int | None, unit: str, done: int = 0) -> None:
            self.told = told.setdefault(stage, [])

        def __enter__(self) -> "Count":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def update(self, more: int) -> None:
            self.told.append(more)

    put(small / "src", {"a/new.png": png(99)})
    convert(small / "src", small / "out", SMALL, Count)
    assert sum(told["scan"]) == sum(told["convert"]) == 11
    assert min(told["convert"]) >= 0


def test_copies_of_a_data_set_are_data_sets(small: Path) -> None:
    """Nothing in it says where it lay, nor needs the hints."""
    shutil.copytree(small / "out", small / "copy", ignore=shutil.ignore_patterns(".shardwright"))
    assert made(small / "copy") == made(small / "out")
    (again,) = convert(small / "src", small / "copy", SMALL)
    assert (again.made, again.manifest.version) == (True, 2)  # without hints, it cannot know


# --- names ----------------------------------------------------------------------------------------------


def test_any_names_are_read_back_through_h5py(here: None, tmp_path: Path) -> None:
    """Spaces, newlines, not UTF-8, 255 bytes, a leading dash, links, nested folders, capitals, several dots."""
    names = [
        "a b/c d.png",
        "new\nline/x\ty.png",
        "-rf/--help.png",
        "q'\"/\\back\\slash.PNG",
        "é/ü.tar.gz.png",
    ]
    names += [f"{'n' * 255}/{'p' * 251}.png", "deep/1/2/3/4.png", "*?[]/$(x) `y`.png", "deep/no ending"]
    if sys.platform != "darwin":
        names += [os.fsdecode(b"caf\xe9/\xff\xfe.png")]
    pictures = {name: png(k) for k, name in enumerate(names)}
    put(tmp_path / "src", {**pictures, "empty/": b"", "a b/.hidden.png": png(), "a b/._c d.png": b"x"})
    put(tmp_path / "behind", {"linked/l.png": png(90)})
    (tmp_path / "src" / "linked").symlink_to(tmp_path / "behind" / "linked")
    (tmp_path / "src" / "deep" / "loop").symlink_to(tmp_path / "src" / "deep")
    pictures["linked/l.png"] = png(90)
    (done,) = convert(tmp_path / "src", tmp_path / "out", SMALL)
    found = {}
    for shard in done.manifest.shards:
        with h5py.File(tmp_path / "out" / shard.files[0].name) as h5:
            for id, image, label in zip(h5["id"].asstr()[:], h5["image"][:], h5["label"][:], strict=True):
                found[id_to_path(id)] = (image, id_to_path(done.manifest.classes[label]))
    assert found.keys() == pictures.keys()
    assert id_to_path("empty") in done.manifest.classes
    for name, (image, class_name) in found.items():
        assert class_name == name.split("/")[0]
        np.testing.assert_array_equal(image, decode(pictures[name], SMALL.pixels).pixels)
    assert dict(done.manifest.skipped) == {"hidden": 2, "link-loop": 1}


def test_a_picture_that_can_be_read_again_is_taken(
    here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Callable[..., Any]
) -> None:
    """A right that was given changes neither size nor time. One that still cannot be read makes no version."""
    tree = put(tmp_path / "src", {f"a/{k}.png": png(seed=k) for k in range(4)})
    (tree / "a" / "gone.png").symlink_to("nowhere")
    with monkeypatch.context() as patch:
        make_unreadable(patch, lambda name: name == "2.png")
        assert command("convert", tree, tmp_path / "out", "--size", 8).code == 3
    ran = command("convert", tree, tmp_path / "out", "--size", 8)
    assert (ran.code, "1 can be now, such as 'a/2.png'" in ran.err + ran.out) == (3, True), ran
    manifest = read_manifest(tmp_path / "out")
    assert (manifest.version, manifest.rows, manifest.rejected) == (2, 4, {"unreadable": 1})
    assert command("convert", tree, tmp_path / "out", "--size", 8).code == 0
    (tmp_path / "out" / "report-000002.jsonl").unlink()  # then it is not known which they were
    assert command("convert", tree, tmp_path / "out", "--size", 8).code == 0
    assert read_manifest(tmp_path / "out").version == 2


def test_splits_are_published_together(here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that takes time lies between the manifests of two of them."""
    tree = put(
        tmp_path / "src", {f"{part}/a/{k}.png": png(seed=k) for part in ("train", "val") for k in range(3)}
    )
    options = ConvertOptions(PixelOptions(size=8), jobs=1)
    convert(tree, tmp_path / "out", options)
    put(tree, {f"{part}/a/new.png": png(seed=9) for part in ("train", "val")})
    steps = []

    def noted(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def note(self: Any, *rest: Any) -> Any:
            steps.append(name)
            return real(self, *rest)

        monkeypatch.setattr(owner, name, note)

    for name in ("place", "accompany", "publish"):
        noted(Output, name)
    noted(PictureBuild, "look_back")
    convert(tree, tmp_path / "out", options)
    made = ["place", "accompany"]
    assert steps == [*made, *made, "publish", "publish", "look_back", "look_back"]


def test_a_picture_of_which_the_end_cannot_be_read_makes_no_version(
    here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk gives the first bytes of it each night, and no more."""

    class Failing(io.FileIO):
        def read(self, size: int | None = -1) -> bytes:
            if self.tell():
                raise OSError(errno.EIO, "Input/output error")
            return super().read(4)

    def opened(path: Path, *arguments: Any, **options: Any) -> Any:
        return Failing(path) if Path(path).name == "2.png" else open(path, *arguments, **options)

    tree = put(tmp_path / "src", {f"a/{k}.png": png(seed=k) for k in range(4)})
    make_unreadable(monkeypatch, lambda name: name == "2.png")
    monkeypatch.setattr(picture_build, "open", opened, raising=False)
    assert convert(tree, tmp_path / "out", SMALL)[0].manifest.rejected == {"unreadable": 1}
    again = convert(tree, tmp_path / "out", SMALL)[0]
    assert (again.made, again.manifest.version) == (False, 1)
