"""`export` writes a data set for other tools: every pixel, label and picture, whole, or nothing to be seen."""

import io
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from building import Built, build, republish
from drawing import encoded, jpeg, noise, photograph, png, put
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from test_one_writer import everything, processes_naming
from test_resume import wait_for_none
from test_verify import flip

from shardwright.convert import (
    ConvertOptions,
    PixelOptions,
    StoreOptions,
    convert,
    export_part,
    export_task,
    workers,
)
from shardwright.convert import export as export_module
from shardwright.convert.export import ExportOptions, dry_run, export
from shardwright.convert.export_names import class_folders, class_map_text, folders_of, picture_paths
from shardwright.convert.export_state import ExportState
from shardwright.convert.export_summary import Exported
from shardwright.convert.jobs import COPYING, Need
from shardwright.convert.lock import one_writer
from shardwright.convert.merge import MergeOptions, merge
from shardwright.convert.picturefile import PictureFile
from shardwright.convert.scan import read_class_map
from shardwright.datasets import open_dataset
from shardwright.datasets.layout import Storage
from shardwright.errors import (
    FormatError,
    LockedError,
    OutputError,
    ShardError,
    ShardwrightError,
    SourceError,
    UsageError,
)

Command = Callable[..., Any]
FOLDER, TARS = ExportOptions("folder", jobs=1), ExportOptions("webdataset", jobs=1)
SIZE = 16


@pytest.fixture(params=["hdf5", "npy"])
def storage(request: pytest.FixtureRequest) -> Storage:
    return request.param


@pytest.fixture(params=["folder", "webdataset"])
def to(request: pytest.FixtureRequest) -> Any:
    return request.param


def only(found: dict[str, Exported]) -> Exported:
    assert list(found) == [""]
    return found[""]


def visible(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in everything(folder).items() if not name.startswith(".shardwright")}


def rows_of(folder: Path) -> list[tuple[str, int, bytes]]:
    """(id, label, pixels) of each row, in order."""
    dataset = open_dataset(folder, columns=("image", "label", "id"))
    return [(id, int(label), image.numpy().tobytes()) for image, label, id in dataset]


def with_other_endings(rows: list[tuple[str, int, bytes]]) -> list[tuple[str, int, bytes]]:
    return sorted((id.rpartition(".")[0], label, pixels) for id, label, pixels in rows)


def tree_of_pngs(root: Path, channels: int = 3, pictures: int = 40) -> Path:
    """Pictures of the target size, which a conversion keeps; some in deeper folders, some names no UTF-8."""
    files = {}
    for k in range(pictures):
        deeper = "deeper/" if k % 5 == 0 else ""
        files[f"{('owl', 'dög', 'cat')[k % 3]}/{deeper}ü {k:02d}.{('png', 'jpg', 'PNG')[k % 4 % 3]}"] = (
            encoded(noise(SIZE, SIZE, k, channels), "PNG")
        )
    put(root, files)
    for k, name in enumerate((b"cat/\xff\xfe.png", b"owl/a\\b \xe9.png")):
        Path(os.fsdecode(os.fsencode(root) + b"/" + name)).write_bytes(
            encoded(noise(SIZE, SIZE, 90 + k, channels), "PNG")
        )
    return root


def converting(channels: int = 3, storage: Storage = "hdf5", **options: Any) -> ConvertOptions:
    store = StoreOptions(storage, chunk_rows=4, shard_mib=16 * SIZE * SIZE * channels / 2**20)
    return ConvertOptions(PixelOptions(SIZE, channels=channels), store, jobs=1, **options)  # type: ignore[arg-type]


# --- there and back ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3])
def test_there_and_back(
    here: None, tmp_path: Path, storage: Storage, channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folder, shards, folder, shards: the same pixels, labels and number of pictures."""
    monkeypatch.setattr(export_part, "_UNIT_BYTES", 1)  # several units
    tree = tree_of_pngs(tmp_path / "tree", channels)
    convert(tree, tmp_path / "shards", converting(channels, storage))
    done = only(export(tmp_path / "shards", tmp_path / "out", FOLDER))
    assert (done.made, done.files, done.written) == (True, 42, 42)
    before = {os.path.splitext(path.relative_to(tree))[0]: path for path in tree.rglob("*") if path.is_file()}
    after = [path for path in (tmp_path / "out").rglob("*") if path.suffix == ".png"]
    assert len(before) == len(after) == 42
    for path in after:
        with Image.open(path) as new, Image.open(before[str(path.relative_to(tmp_path / "out"))[:-4]]) as old:
            assert new.mode == ("L" if channels == 1 else "RGB")
            assert np.array_equal(np.asarray(new), np.asarray(old))
    assert done.bytes == sum(path.stat().st_size for path in after)
    convert(tmp_path / "out", tmp_path / "again", converting(channels, storage))
    first, second = rows_of(tmp_path / "shards"), rows_of(tmp_path / "again")
    assert with_other_endings(first) == with_other_endings(second)
    assert open_dataset(tmp_path / "again").classes == open_dataset(tmp_path / "shards").classes


@pytest.mark.parametrize("quality", [None, 70])
@pytest.mark.parametrize("channels", [1, 3])
def test_jpeg_is_near(here: None, tmp_path: Path, channels: int, quality: int | None) -> None:
    pixels = {f"{k % 2}/{k}.png": photograph(64, 64, k, channels) for k in range(6)}
    put(tmp_path / "tree", {id: encoded(image, "PNG") for id, image in pixels.items()})
    convert(tmp_path / "tree", tmp_path / "src", ConvertOptions(PixelOptions(64, channels=channels)))
    file = PictureFile("jpeg", quality)
    export(tmp_path / "src", tmp_path / "out", ExportOptions("folder", file))
    for id, image in pixels.items():
        with Image.open(tmp_path / "out" / id.replace(".png", ".jpg")) as found:
            assert (found.format, found.mode) == ("JPEG", "L" if channels == 1 else "RGB")
            sampling = [(part[1], part[2]) for part in found.layer]  # type: ignore[attr-defined]
            if channels == 3:
                assert sampling[0] == ((2, 2) if quality else (1, 1))
            error = np.abs(np.asarray(found).astype(int) - image.squeeze().astype(int)).mean()
            assert 0 < error < (12 if quality else 3)


@given(
    st.integers(1, 9),
    st.integers(1, 9),
    st.sampled_from([1, 3]),
    st.integers(0, 2**32 - 1),
    st.sampled_from([1, 256]),
)
def test_png_keeps_every_pixel(height: int, width: int, channels: int, seed: int, levels: int) -> None:
    pixels = np.random.default_rng(seed).integers(0, levels, (height, width, channels), np.uint8)
    with Image.open(io.BytesIO(PictureFile().encode(pixels))) as found:
        found.verify()
    with Image.open(io.BytesIO(PictureFile().encode(pixels))) as found:
        assert np.array_equal(np.asarray(found).reshape(pixels.shape), pixels)


def samples_in(tar: Path) -> list[dict[str, bytes]]:
    """The samples of a tar, by WebDataset's rule: members of one key that follow on one another."""
    samples: list[dict[str, bytes]] = []
    with tarfile.open(tar) as members:
        for member in members:
            assert (member.mtime, member.uid, member.gid, member.uname, member.mode) == (0, 0, 0, "", 0o644)
            key, _, ending = member.name.partition(".")
            if not samples or samples[-1]["key"] != key.encode():
                samples.append({"key": key.encode()})
            samples[-1][ending] = members.extractfile(member).read()  # type: ignore[union-attr]
    return samples


def test_tars(here: None, tmp_path: Path, storage: Storage) -> None:
    convert(tree_of_pngs(tmp_path / "tree"), tmp_path / "src", converting(storage=storage))
    done = only(export(tmp_path / "src", tmp_path / "out", TARS))
    tars = sorted((tmp_path / "out").glob("*.tar"))
    assert [tar.name for tar in tars] == ["data-000000.tar", "data-000001.tar"]
    assert (done.files, done.bytes) == (2, sum(tar.stat().st_size for tar in tars))
    samples = [sample for tar in tars for sample in samples_in(tar)]
    assert len({sample["key"] for sample in samples}) == len(samples)
    dataset = open_dataset(
        tmp_path / "src", columns=("id", "label", "crc32", "source_sha256", "source_shape")
    )
    for sample, (id, label, crc32, sha256, shape) in zip(samples, dataset, strict=True):  # in their order
        assert set(sample) == {"key", "png", "cls", "json"}
        assert int(sample["cls"]) == label
        assert json.loads(sample["json"]) == {
            "id": id,
            "label": label,
            "class": dataset.classes[label],
            "crc32": int(crc32),
            "source_sha256": bytes(sha256.tolist()).hex(),
            "source_shape": shape.tolist(),
        }
        with Image.open(io.BytesIO(sample["png"])) as picture:
            assert zlib.crc32(np.asarray(picture)) == crc32


def test_tars_do_not_depend_on_jobs_and_are_about_as_large_as_asked(tmp_path: Path, storage: Storage) -> None:
    built = build(tmp_path / "src", storage, rows=300, shape=(32, 32, 3))
    for jobs in (1, 2):
        export(built.folder, tmp_path / f"{jobs}", ExportOptions("webdataset", shard_mib=0.1, jobs=jobs))
    tars = visible(tmp_path / "1")
    assert tars == visible(tmp_path / "2")
    sizes = [len(data) / 2**20 for name, data in tars.items() if name.endswith(".tar")]
    assert len(sizes) > 5
    assert all(0.05 < size < 0.15 for size in sizes[:-1])


def test_dead_rows_are_left_behind(here: None, tmp_path: Path, storage: Storage, to: Any) -> None:
    built = build(tmp_path / "src", storage, dead={0: (0, 3), 2: (1, 9)})
    export(built.folder, tmp_path / "out", ExportOptions(to, jobs=1))
    if to == "folder":
        names = [str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*.png")]
        assert sorted(names) == sorted(id.replace(".jpg", ".png") for id in built.ids)
        return
    samples = [s for tar in sorted((tmp_path / "out").glob("*.tar")) for s in samples_in(tar)]
    assert [json.loads(sample["json"])["id"] for sample in samples] == built.ids
    assert [int(sample["cls"]) for sample in samples] == built.labels.tolist()


def test_an_older_version(here: None, tmp_path: Path) -> None:
    tree = tree_of_pngs(tmp_path / "tree")
    convert(tree, tmp_path / "src", converting())
    put(tree, {"cat/later.png": png(5)})
    convert(tree, tmp_path / "src", converting())
    export(tmp_path / "src", tmp_path / "2", FOLDER)
    export(tmp_path / "src", tmp_path / "1", ExportOptions("folder", version=1))
    assert {*visible(tmp_path / "2")} - {*visible(tmp_path / "1")} == {"cat/later.png"}
    with pytest.raises(OutputError, match="version is 1 there, 2 here"):
        export(tmp_path / "src", tmp_path / "1", FOLDER)
    with pytest.raises(FormatError, match="has no version 3"):
        export(tmp_path / "src", tmp_path / "3", ExportOptions("folder", version=3))


def test_splits(tmp_path: Path, command: Command, to: str) -> None:
    for split in ("train", "val"):
        put(tmp_path / "tree" / split, {f"{c}/{split} {c}.jpg": jpeg(seed=ord(c)) for c in "ab"})
    convert(tmp_path / "tree", tmp_path / "src", converting())
    ran = command("export", tmp_path / "src", tmp_path / "out", "--to", to, "--json")
    assert (ran.code, set(json.loads(ran.out))) == (0, {"train", "val"})
    for split, found in json.loads(ran.out).items():
        assert (found["rows"], found["made"], found["out"]) == (2, True, str(tmp_path / "out" / split))
        name = "a/{split} a.png" if to == "folder" else "{split}-000000.tar"
        assert (tmp_path / "out" / split / name.format(split=split)).is_file()
    again = command("export", tmp_path / "src", tmp_path / "out", "--to", to)
    assert (again.code, again.out.count("Nothing to do")) == (0, 2)
    assert command("export", tmp_path / "src" / "val", tmp_path / "out", "--to", to).code == 1
    alone = command("export", tmp_path / "src" / "val", tmp_path / "out" / "val", "--to", to)
    assert (alone.code, "Nothing to do" in alone.out) == (0, True)
    if to == "folder":
        convert(tmp_path / "out", tmp_path / "again", converting())
        for split in ("train", "val"):
            pairs = (with_other_endings(rows_of(tmp_path / name / split)) for name in ("src", "again"))
            assert next(pairs) == next(pairs)


# --- class numbers ----------------------------------------------------------------------------------------


def test_classes_without_pictures_keep_the_numbers(here: None, tmp_path: Path) -> None:
    tree = tree_of_pngs(tmp_path / "tree")
    names = ("cat", "cow", "dög", "owl")
    convert(tree, tmp_path / "src", converting(classes=names))
    done = only(export(tmp_path / "src", tmp_path / "out", FOLDER))
    assert (list((tmp_path / "out" / "cow").iterdir()), done.notes) == ([], ())
    convert(tmp_path / "out", tmp_path / "again", converting())
    assert open_dataset(tmp_path / "again").classes == names
    assert with_other_endings(rows_of(tmp_path / "src")) == with_other_endings(rows_of(tmp_path / "again"))


def test_numbers_that_no_folder_tells(here: None, tmp_path: Path) -> None:
    """Classes in another order than that of their names: the class map beside them says so."""
    names = ("owl", "n/a", "cat", "dög")
    convert(tree_of_pngs(tmp_path / "tree"), tmp_path / "src", converting(classes=names))
    done = only(export(tmp_path / "src", tmp_path / "out", FOLDER))
    assert "class numbers are not those that the folders' names give" in done.warnings[0]
    assert read_class_map(tmp_path / "out" / "classes.txt") == names
    again = converting(classes=read_class_map(tmp_path / "out" / "classes.txt"))
    convert(tmp_path / "out", tmp_path / "again", again)
    assert with_other_endings(rows_of(tmp_path / "src")) == with_other_endings(rows_of(tmp_path / "again"))


def test_what_a_person_should_know_is_logged(tmp_path: Path, command: Command) -> None:
    """Numbers that are not those of the folders would be wrong labels: a warning, which --quiet lets through."""
    built, out = build(tmp_path / "src"), tmp_path / "out"
    classes = ("z", "a\nb", *built.manifest.classes[2:])
    republish(built, classes=classes)
    ran = command("export", built.folder, out, "--to", "folder")
    notes = [line for line in ran.err.splitlines() if " event=note " in line]
    assert [("level=warning" in line, "class numbers are not" in line) for line in notes] == [
        (True, True),
        (False, False),
    ]
    assert "there is no classes.txt" in notes[1]
    assert all(text in ran.out for text in ("class numbers are not", "there is no classes.txt"))
    ran = command("export", built.folder, tmp_path / "quiet", "--to", "folder", "--quiet")
    assert ["class numbers are not" in line for line in ran.err.splitlines()] == [True]


def test_as_many_workers_as_rows_need(here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They copy rows, and decode nothing: more of them fit into the memory. The dry run counts as the run does."""
    built = build(tmp_path / "src")
    asked: list[Need | None] = []

    def allowed(need: Need) -> int:
        asked.append(need)
        return 3

    monkeypatch.setattr(workers, "jobs_allowed", allowed)
    monkeypatch.setattr(export_module, "jobs_allowed", allowed)
    for run in (dry_run, export):
        run(built.folder, tmp_path / "out", ExportOptions("folder"))
    assert asked == [COPYING, COPYING]


def test_a_class_map_is_not_taken_for_a_picture(here: None, tmp_path: Path) -> None:
    """BMW begins as a bitmap does."""
    put(tmp_path / "tree", {"BMW/1.png": png(1), "Audi/1.png": png(2)})
    convert(tmp_path / "tree", tmp_path / "src", converting(classes=("BMW", "Audi")))
    export(tmp_path / "src", tmp_path / "out", FOLDER)
    (done,) = convert(tmp_path / "out", tmp_path / "again", converting())
    assert (done.manifest.rejected, done.manifest.rows) == ({}, 2)
    assert read_class_map(tmp_path / "out" / "classes.txt") == ("BMW", "Audi")


def test_class_names_that_are_no_lines() -> None:
    assert class_map_text(("a", "b c")) == "a\nb c\n"
    for name in ("a\nb", "a\rb", " ", "", "\ud800"):
        assert class_map_text(("a", name)) is None


# --- names ------------------------------------------------------------------------------------------------


def named(*ids: str, folders: tuple[str, ...] = ("cat", "dog"), longest: int = 255) -> list[str]:
    labels = [int(id.startswith("dog")) for id in ids]
    return picture_paths(ids, labels, folders, ".png", longest)


def test_names_say_what_the_bytes_are() -> None:
    assert named("cat/1.jpg", "cat/x/1.JPEG", "dog/1.png", "cat/2.5", "cat/no ending") == [
        "cat/1.png",
        "cat/x/1.png",
        "dog/1.png",
        "cat/2.5.png",
        "cat/no ending.png",
    ]


def test_pictures_that_differ_in_their_ending_stay_two() -> None:
    assert named("cat/a.jpg", "cat/a.png", "cat/b.jpg") == [
        "cat/a.jpg.png",
        "cat/a.png.png",
        "cat/b.png",
    ]
    assert len({*named("cat/a.jpg", "cat/a.png", "cat/a.jpg.jpg", "cat/a", "a.jpg", "a")}) == 6


def test_ids_that_do_not_begin_with_their_class() -> None:
    assert named("photos/cat/1.jpg", "1.jpg", "cat/1.jpg") == [
        "cat/photos/cat/1.png",
        "cat/1.jpg.png",
        "cat/cat/1.jpg.png",
    ]


def test_a_file_that_would_be_a_folder() -> None:
    assert named("cat/a.jpg", "cat/a.png/b.jpg") == ["cat/a.jpg.png", "cat/a.png/b.png"]


def test_names_that_even_whole_ids_do_not_tell_apart() -> None:
    first, second = named("a", "a.png/a")
    assert (first[:6], len(first), second) == ("cat/a~", len("cat/a~12345678.png"), "cat/a.png/a.png")


def test_names_that_are_too_long_are_cut() -> None:
    long = "ü" * 126 + "xyz"
    (name,) = named(f"cat/{long}")
    assert len(name.removeprefix("cat/").encode()) <= 255
    assert name.startswith("cat/" + "ü" * 100)
    both = named(f"cat/{long}.jpg.x", f"cat/{long}.jpg.y")
    assert len({*both}) == 2


@pytest.mark.parametrize(
    "id",
    [
        "/etc/cat.jpg",
        "cat/../../x.jpg",
        "..",
        "cat//x.jpg",
        "",
        "cat/",
        "cat/.x.jpg",
        ".shardwright/lock",
        "cat/a\0b.jpg",
        "cat/\\x2E\\x2E/x.jpg",
        "cat/\\x00.jpg",
        "cat/a\\b.jpg",
        "cat/\\x2F.jpg/../../x",
        f"cat/{'x' * 300}/1.jpg",
    ],
)
def test_hostile_ids_are_refused_by_name(id: str) -> None:
    with pytest.raises(FormatError, match="webdataset") as error:
        named(id)
    assert repr(id)[1:10] in str(error.value)


def test_an_id_that_stands_twice_is_refused() -> None:
    with pytest.raises(FormatError, match=r"id 'cat/1.jpg' stands twice"):
        named("cat/1.jpg", "cat/1.jpg")


def test_class_names_that_are_no_folders() -> None:
    assert class_folders(("a", "n/a", "", "..", "b"), {0, 4}, 255) == ["a", None, None, None, "b"]
    for name in (
        "n/a",
        "",
        "..",
        ".",
        ".x",
        "a\0b",
        "classes.txt",
        ".shardwright",
        "\\x2F",
        "\\q",
        "x" * 256,
    ):
        with pytest.raises(FormatError, match="cannot be a folder"):
            class_folders(("a", name), {1}, 255)


PARTS = st.sampled_from(["a", "a.jpg", "a.png", "a.jpg.png", "cat", "b.png", "ü" * 126])


@given(st.sets(st.lists(PARTS, min_size=1, max_size=3).map("/".join), max_size=12).map(sorted))
def test_names_are_different_and_no_folders(ids: list[str]) -> None:
    paths = named(*ids)
    assert len({*paths}) == len(ids)
    assert not {*paths} & folders_of(paths)
    assert all(path.startswith("cat/") and path.endswith(".png") for path in paths)
    assert all(len(part.encode()) <= 255 for path in paths for part in path.split("/")[1:][-1:])


def test_ids_with_prefixes(here: None, tmp_path: Path) -> None:
    for name in ("one", "two"):
        put(tmp_path / name, {f"{c}/1.png": png(len(name) + ord(c)) for c in "ab"})
        convert(tmp_path / name, tmp_path / f"{name} src", converting())
    sources = [tmp_path / "one src", tmp_path / "two src"]
    merge(sources, tmp_path / "all", MergeOptions(prefix=True))
    export(tmp_path / "all", tmp_path / "out", FOLDER)
    assert sorted(visible(tmp_path / "out")) == sorted(
        ["classes.txt", *(f"{c}/{n} src/{c}/1.png" for c in "ab" for n in ("one", "two"))]
    )


def test_hostile_ids_in_shards(tmp_path: Path, storage: Storage, command: Command) -> None:
    ids = [f"c0/{k}.jpg" for k in range(49)] + ["../../escaped.jpg"]
    built = build(tmp_path / "in" / "src", storage, classes=1, ids=ids)
    ran = command("export", built.folder, tmp_path / "in" / "out", "--to", "folder")
    assert (ran.code, "id '../../escaped.jpg' cannot be a path: '..' begins with a dot" in ran.err) == (
        1,
        True,
    )
    assert not (tmp_path / "in" / "out").exists()
    assert command("export", built.folder, tmp_path / "in" / "out", "--to", "webdataset").code == 0
    assert not list(tmp_path.rglob("escaped*"))


def test_names_that_the_file_system_holds_to_be_one(
    here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "tree", {"a/x.png": png(1), "a/X.png": png(2), "b/\u00e9.png": png(3)})
    convert(tmp_path / "tree", tmp_path / "src", converting())
    with monkeypatch.context() as patch:
        patch.setattr(export_part, "_tells_apart", lambda _: False)
        with pytest.raises(OutputError, match="are one name on the output's file system"):
            export(tmp_path / "src", tmp_path / "out", FOLDER)
    assert not (tmp_path / "out").exists()
    with monkeypatch.context() as patch:  # and where that is not found out: a file went over another
        real = os.replace
        patch.setattr(export_task.os, "replace", lambda a, b: real(a, str(b).replace("X.png", "x.png")))
        with pytest.raises(OutputError, match="holds 3 files, 4 were written"):
            export(tmp_path / "src", tmp_path / "out", FOLDER)
    assert visible(tmp_path / "out") == {}
    export(tmp_path / "src", tmp_path / "out", FOLDER)
    assert {"a/x.png", "a/X.png"} <= {*visible(tmp_path / "out")}


# --- what there is in OUT ---------------------------------------------------------------------------------


def test_nothing_to_do(tmp_path: Path, command: Command, storage: Storage, to: str) -> None:
    built, out = build(tmp_path / "src", storage), tmp_path / "out"
    first = command("export", built.folder, out, "--to", to)
    assert (first.code, "from version 1 of" in first.out) == (0, True)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    again = command("export", built.folder, out, "--to", to, "--json")
    found = json.loads(again.out)
    assert (again.code, found["made"], found["rows"], found["files"] > 0) == (
        0,
        False,
        50,
        True,
    )
    after = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.name != "lock"}
    assert after == {path: time for path, time in before.items() if path.name != "lock"} | {
        out / ".shardwright": after[out / ".shardwright"]
    }
    assert [path.name for path in (out / ".shardwright").iterdir() if path.name != "lock"] == ["export.json"]


@pytest.mark.parametrize("option", [["--encode", "jpeg"], ["--to", "webdataset"]])
def test_an_export_of_something_else_is_refused(tmp_path: Path, command: Command, option: list[str]) -> None:
    built, out = build(tmp_path / "src"), tmp_path / "out"
    assert command("export", built.folder, out, "--to", "folder").code == 0
    before = visible(out)
    ran = command("export", built.folder, out, "--to", "folder", *option)
    assert (ran.code, "holds the export of something else: " in ran.err) == (1, True)
    other = build(tmp_path / "other", rows=49)
    ran = command("export", other.folder, out, "--to", "folder")
    assert (ran.code, "rows is 50 there, 49 here; source is" in ran.err) == (1, True)
    assert visible(out) == before


def test_what_is_not_ours_is_named_and_left(tmp_path: Path, command: Command) -> None:
    built = build(tmp_path / "src")
    put(tmp_path / "file", {"mine.txt": b"1"})
    put(tmp_path / "hidden", {".shardwright/run/request.json": b"{}"})
    put(tmp_path / "damaged", {".shardwright/export.json": b"{}"})
    build(tmp_path / "data")
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / ".shardwright").symlink_to(tmp_path / "file")
    (tmp_path / "plain").write_bytes(b"1")
    what = {
        "file": "mine.txt",
        "hidden": "run",
        "damaged": "export.json",
        "data": "manifest.json",
        "link": "a link",
    }
    before = everything(tmp_path)
    for name, named in {**what, "plain": "not a folder"}.items():
        ran = command("export", built.folder, tmp_path / name, "--to", "folder")
        assert (ran.code, named in ran.err) == (1, True), ran.err
    assert everything(tmp_path) == before
    put(
        tmp_path / "empty", {".shardwright/job.json": b"{", ".shardwright/job.partial": b""}
    )  # of a killed run
    assert command("export", built.folder, tmp_path / "empty", "--to", "folder").code == 0


def test_a_finished_export_that_lost_something(here: None, tmp_path: Path) -> None:
    built = build(tmp_path / "src")
    export(built.folder, tmp_path / "out", FOLDER)
    shutil.rmtree(tmp_path / "out" / "c1")
    for run in (export, dry_run):
        with pytest.raises(OutputError, match="'c1' is gone since"):
            run(built.folder, tmp_path / "out", FOLDER)


def test_a_finished_export_that_lost_pictures(here: None, tmp_path: Path) -> None:
    built, out = build(tmp_path / "src"), tmp_path / "out"
    export(built.folder, out, FOLDER)
    put(out, {"c0/notes.txt": b"mine"})  # the user's: no picture
    assert not only(export(built.folder, out, FOLDER)).made
    for picture in sorted(out.glob("c0/*.png"))[:2]:
        picture.unlink()
    before = everything(out)
    for run in (export, dry_run):
        with pytest.raises(
            OutputError, match="'.*out' was finished, and 2 of its 50 pictures are gone since.*empty"
        ):
            run(built.folder, out, FOLDER)
    assert everything(out) == before


@pytest.mark.parametrize("damage", ["gone", "short"])
def test_a_finished_export_that_lost_a_tar(here: None, tmp_path: Path, damage: str) -> None:
    built, out = build(tmp_path / "src"), tmp_path / "out"
    assert only(export(built.folder, out, TARS)).files > 1
    assert not only(export(built.folder, out, TARS)).made
    tar = min(out.glob("*.tar"))
    if damage == "gone":
        tar.unlink()
    else:
        os.truncate(tar, 512)
    for run in (export, dry_run):
        with pytest.raises(
            OutputError, match=r"'data-000000.tar' is gone|its tars have \d+ bytes, not \d+ as then"
        ):
            run(built.folder, out, TARS)


@pytest.mark.parametrize("out", ["src/out", ".", "src"])
def test_nested_paths(tmp_path: Path, command: Command, out: str) -> None:
    built = build(tmp_path / "src")
    ran = command("export", built.folder, tmp_path / out, "--to", "folder")
    assert (ran.code, "lie in one another" in ran.err) == (2, True)


def test_no_data_set(tmp_path: Path, command: Command) -> None:
    assert command("export", tmp_path / "missing", tmp_path / "out", "--to", "folder").code == 2
    (tmp_path / "src").mkdir()
    assert command("export", tmp_path / "src", tmp_path / "out", "--to", "folder").code == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "options",
    [
        ["--to", "zip"],
        [],
        ["--to", "folder", "--shard-mib", 3],
        ["--to", "webdataset", "--shard-mib", 0],
        ["--to", "webdataset", "--shard-mib", "nan"],
        ["--to", "folder", "--quality", 90],
        ["--to", "folder", "--encode", "jpeg", "--quality", 0],
        ["--to", "folder", "--encode", "jpeg", "--quality", 101],
        ["--to", "folder", "--jobs", 0],
        ["--to", "folder", "--version", 0],
    ],
)
def test_options_that_make_no_sense(tmp_path: Path, command: Command, options: list[Any]) -> None:
    built = build(tmp_path / "src")
    assert command("export", built.folder, tmp_path / "out", *options).code == 2
    assert not (tmp_path / "out").exists()


def test_images_that_cannot_be_encoded(here: None, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="to is 'zip', expected one of folder, webdataset"):
        ExportOptions("zip")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="encoding is 'gif'"):
        PictureFile("gif")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="images of 4 channels"):
        export(build(tmp_path / "4", shape=(8, 8, 4)).folder, tmp_path / "out", FOLDER)
    wide = build(tmp_path / "wide", shape=(1, 65_536, 1), rows=2)
    with pytest.raises(UsageError, match="images are 1x65536: use png"):
        export(wide.folder, tmp_path / "out", ExportOptions("folder", PictureFile("jpeg")))
    empty = build(tmp_path / "empty", rows=2)
    republish(empty, shards=(), rows=0)
    with pytest.raises(SourceError, match="has no rows"):
        export(empty.folder, tmp_path / "out", FOLDER)
    assert not (tmp_path / "out").exists()


def test_a_dry_run_changes_nothing(tmp_path: Path, command: Command, to: str) -> None:
    built, out = build(tmp_path / "src", rows=300), tmp_path / "out"
    before = everything(tmp_path)
    told = command("export", built.folder, out, "--to", to, "--dry-run", "--json")
    assert everything(tmp_path) == before
    assert command("export", built.folder, out, "--to", to, "--dry-run").out.count("about") == 2
    foreseen, done = json.loads(told.out), only(export(built.folder, out, ExportOptions(to, jobs=1)))  # type: ignore[arg-type]
    assert (foreseen["dry_run"], foreseen["made"], foreseen["files"]) == (True, False, done.files)
    assert foreseen["bytes"] == pytest.approx(done.bytes, rel=0.2) or to == "folder"
    again = only(dry_run(built.folder, out, ExportOptions(to)))  # type: ignore[arg-type]
    assert (again.made, "Nothing to do" in again.in_words()[0]) == (False, True)


# --- damage -----------------------------------------------------------------------------------------------


def offset_of_row(built: Built, shard: int, row: int) -> int:
    """Of a byte of the row's pixels; all chunks are raw."""
    data = (built.folder / built.manifest.shards[shard].files[0].name).read_bytes()
    return data.index(built.images[20 * shard + row].tobytes()) + 5


def test_a_damaged_row_is_named_and_nothing_is_seen(
    tmp_path: Path, storage: Storage, to: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, out = build(tmp_path / "src", storage, flat=0), tmp_path / "out"
    monkeypatch.setattr(export_part, "_UNIT_BYTES", 1)
    file = built.folder / built.manifest.shards[1].files[0].name
    whole, at = file.read_bytes(), offset_of_row(built, 1, 11)
    flip(file, at)
    ran = command("export", built.folder, out, "--to", to, "--jobs", 1)
    assert ran.code == 1
    assert f"'{file}'" in ran.err
    assert any(rows in ran.err for rows in ("rows 8 to 15", "row 11")), ran.err
    assert "shardwright repair" in ran.err
    assert not out.exists() or visible(out) == {}
    file.write_bytes(whole)
    assert command("export", built.folder, out, "--to", to).code == 0


def test_a_damaged_id_is_not_exported(here: None, tmp_path: Path, storage: Storage, to: Any) -> None:
    built = build(tmp_path / "src", storage)
    path = next(p for p in sorted((built.folder / "shards").iterdir()) if p.name.endswith((".h5", ".id.npy")))
    path.write_bytes(path.read_bytes().replace(b"00003.jpg", b"00093.jpg"))
    with pytest.raises(ShardError, match="SHA-256"):
        export(built.folder, tmp_path / "out", ExportOptions(to, jobs=1))
    assert not (tmp_path / "out").exists()


def test_labels_beyond_the_class_map(here: None, tmp_path: Path, to: Any) -> None:
    built = build(tmp_path / "src")
    republish(built, classes=("c0", "c1"))
    with pytest.raises(ShardError, match="the data set has 2 classes"):
        export(built.folder, tmp_path / "out", ExportOptions(to, jobs=1))


# --- killed, interrupted, full ----------------------------------------------------------------------------

#: The command, with small units of pictures.
PROGRAM = """
from shardwright.convert import export_part
export_part._UNIT_BYTES = 1
from shardwright.cli import main
main(prog_name="shardwright")
"""


def program(*arguments: object) -> list[str]:
    command = [sys.executable, "-P", "-c", PROGRAM, "export", *map(str, arguments), "--jobs", "2"]
    return command + (["--shard-mib", "0.03"] if "webdataset" in arguments else [])


def without_lock(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in everything(folder).items() if name != ".shardwright/lock"}


def test_killed_at_random_instants(tmp_path: Path, to: str, kills: int) -> None:
    """SIGKILL, every other time to the parent alone, until the command ends by itself: the same bytes."""
    built, out = build(tmp_path / "src", rows=600), tmp_path / "out"
    start = time.monotonic()
    subprocess.run(program(built.folder, tmp_path / "right", "--to", to), check=True, capture_output=True)
    longest = time.monotonic() - start
    right = without_lock(tmp_path / "right")
    mark = f"SHARDWRIGHT_TEST_{os.getpid()}_export_{to}"
    chance = random.Random(0)
    killed = 0
    while killed < kills // 2:
        process = subprocess.Popen(
            program(built.folder, out, "--to", to),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, mark: "1"},
            start_new_session=True,
        )
        try:
            if killed % 4 < 3:  # most of the time goes into starting
                while process.poll() is None and not list(out.glob(".shardwright/export/*")):
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
            status = ExportState(out).status()
            assert (status is not None and status.stage != "making") or visible(out) == {}
            continue
        assert process.returncode == 0
        assert without_lock(out) == right
        shutil.rmtree(out)
    subprocess.run(program(built.folder, out, "--to", to), check=True, capture_output=True)
    assert without_lock(out) == right


def stopped_after(units: int, monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> None:
    """Export, and be interrupted once so many units are finished."""
    real, calls = export_task._recorded, 0

    def recorded(*task: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > units:
            raise KeyboardInterrupt
        return real(*task)

    with monkeypatch.context() as patch:
        patch.setattr(export_task, "_recorded", recorded)
        with pytest.raises(KeyboardInterrupt):
            export(*arguments)


def units_written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows by the number of each unit that is written from now on."""
    real, found = export_task._recorded, []

    def recorded(number: int, write: Any) -> Any:
        found.append(number)
        return real(number, write)

    monkeypatch.setattr(export_task, "_recorded", recorded)
    return found


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_part, "_UNIT_BYTES", 1)
    monkeypatch.setattr(export_part, "_LEAST_TAR_ROWS", 8)


def test_finished_units_are_not_made_again(
    here: None, small_units: None, tmp_path: Path, storage: Storage, to: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, out, asked = build(tmp_path / "src", storage), tmp_path / "out", ExportOptions(to, jobs=1)
    export(built.folder, tmp_path / "right", asked)
    stopped_after(3, monkeypatch, built.folder, out, asked)
    assert visible(out) == {}
    written = units_written(monkeypatch)
    done = only(export(built.folder, out, asked))
    assert (written, done.resumed, done.written) == ([3, 4, 5, 6], 24, 26)
    assert "24 rows had been written" in done.in_words()[-1]
    assert without_lock(out) == without_lock(tmp_path / "right")


@pytest.mark.parametrize("damage", ["file", "record", "no record", "cut record", "copied record"])
def test_what_is_not_whole_is_not_finished(
    here: None, small_units: None, tmp_path: Path, to: Any, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, out, asked = build(tmp_path / "src"), tmp_path / "out", ExportOptions(to, jobs=1)
    export(built.folder, tmp_path / "right", asked)
    stopped_after(3, monkeypatch, built.folder, out, asked)
    run = out / ".shardwright" / "export"
    record = run / "unit-000001.json"
    match damage:
        case "file":  # as after a loss of power
            paths = sorted(p for p in (run / "tree").rglob("*") if p.suffix in (".png", ".tar"))
            os.truncate(paths[0], 0)
        case "record":
            record.write_text(record.read_text().replace('"rows": 8', '"rows": 9'))
        case "no record":
            record.unlink()
        case "cut record":
            os.truncate(record, 20)
        case "copied record":
            shutil.copy(run / "unit-000002.json", record)
    written = units_written(monkeypatch)
    export(built.folder, out, asked)
    assert len(written) == 5
    assert without_lock(out) == without_lock(tmp_path / "right")


def test_other_options_do_not_throw_finished_units_away(
    here: None, small_units: None, tmp_path: Path, to: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, out, asked = build(tmp_path / "src"), tmp_path / "out", ExportOptions(to, jobs=1)
    other = ExportOptions(to, PictureFile("jpeg"), jobs=1)
    stopped_after(2, monkeypatch, built.folder, out, asked)
    with pytest.raises(OutputError, match="an unfinished export of something else: encoding is 'png' there"):
        export(built.folder, out, other)
    assert only(export(built.folder, out, asked)).resumed == 16
    stopped_after(0, monkeypatch, built.folder, tmp_path / "none", asked)
    assert not (tmp_path / "none").exists()
    # Killed before the first unit was finished: nothing is lost by others.
    shutil.copytree(out, tmp_path / "killed")
    shutil.rmtree(tmp_path / "killed")
    with monkeypatch.context() as patch:
        patch.setattr(ExportState, "abandon", lambda *_: None)
        stopped_after(0, monkeypatch, built.folder, tmp_path / "killed", asked)
    assert ExportState(tmp_path / "killed").status() is not None
    export(built.folder, tmp_path / "killed", other)
    export(built.folder, tmp_path / "right", other)
    assert without_lock(tmp_path / "killed") == without_lock(tmp_path / "right")


def test_killed_while_placing(
    here: None, small_units: None, tmp_path: Path, to: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted at any rename of the last step: the same command gives the rest its names, and encodes nothing."""
    built, asked = build(tmp_path / "src"), ExportOptions(to, jobs=1)
    export(built.folder, tmp_path / "right", asked)
    right = without_lock(tmp_path / "right")
    real, left = os.rename, 0

    def rename(source: Any, target: Any) -> None:
        nonlocal left
        if left == 0:
            raise KeyboardInterrupt
        left -= 1
        real(source, target)

    entries = len(list((tmp_path / "right").iterdir())) - 1
    written = units_written(monkeypatch)
    for steps in range(entries):
        out, left = tmp_path / f"{steps}", steps
        with monkeypatch.context() as patch:
            patch.setattr("shardwright.convert.export_state.os.rename", rename)
            with pytest.raises(KeyboardInterrupt):
                export(built.folder, out, asked)
        assert len([name for name in os.listdir(out) if not name.startswith(".")]) == steps
        del written[:]
        if steps == 1:  # and somebody puts something in the way
            entry = sorted(os.listdir(out / ".shardwright" / "export" / "tree"))[0]
            put(out, {f"{entry}/mine" if to == "folder" else entry: b"mine"})
            with pytest.raises(OutputError, match=f"'{out / entry}' is in the way"):
                export(built.folder, out, asked)
            shutil.move(out / entry, tmp_path / "moved")
        export(built.folder, out, asked)
        assert (written, without_lock(out)) == ([], right)


def test_a_failure_in_one_split_shows_none(
    here: None, small_units: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for split in ("train", "val"):
        build(tmp_path / "src" / split)
    stopped_after(9, monkeypatch, tmp_path / "src", tmp_path / "out", FOLDER)
    assert not [p for p in (tmp_path / "out").rglob("*.png") if ".shardwright" not in p.parts]
    done = export(tmp_path / "src", tmp_path / "out", FOLDER)
    assert [each.resumed for each in done.values()] == [50, 16]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_everything(tmp_path: Path, number: signal.Signals, code: int) -> None:
    built, out = build(tmp_path / "src", rows=1600), tmp_path / "out"
    arguments = [built.folder, out, "--to", "folder"]
    mark = f"SHARDWRIGHT_TEST_{os.getpid()}_export_{code}"
    with subprocess.Popen(
        program(*arguments), stderr=subprocess.PIPE, env={**os.environ, mark: "1"}, text=True
    ) as process:
        while not list(out.glob(".shardwright/export/unit-*")):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        _, said = process.communicate(timeout=20)
    assert (process.returncode, said.count("Traceback"), "same command goes on" in said) == (code, 0, True)
    assert processes_naming(mark) == []
    assert not list(out.glob(".shardwright/export/work*"))
    assert visible(out) == {}
    subprocess.run(program(*arguments), check=True, capture_output=True)
    assert len(visible(out)) == 1601


def test_two_at_once(tmp_path: Path, command: Command) -> None:
    built = build(tmp_path / "src")
    with one_writer(tmp_path / "out"):
        ran = command("export", built.folder, tmp_path / "out", "--to", "folder")
        assert (ran.code, f"held by process {os.getpid()}" in ran.err) == (4, True)
        with pytest.raises(LockedError):
            export(built.folder, tmp_path / "out", TARS)
    with one_writer(built.folder):
        assert command("export", built.folder, tmp_path / "out", "--to", "folder").code == 0  # it only reads


def test_a_limit_of_file_size_is_said_and_then_gone_on_from(tmp_path: Path, to: str) -> None:
    built, out = build(tmp_path / "src", shape=(16, 16, 3)), tmp_path / "out"

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (400, resource.RLIM_INFINITY))

    arguments = [built.folder, out, "--to", to, "--encode", "png"]
    full = subprocess.run(
        program(*arguments), preexec_fn=limited, capture_output=True, text=True, check=False
    )
    assert full.returncode == 1
    assert "a file would be larger than allowed" in full.stderr
    assert (full.stderr.count("shardwright: "), full.stderr.count("Traceback")) == (1, 0)
    assert not out.exists() or visible(out) == {}
    subprocess.run(program(*arguments), check=True, capture_output=True)
    assert len(visible(out)) > 1


def test_what_does_not_fit_is_not_begun(
    here: None, tmp_path: Path, to: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = build(tmp_path / "src", flat=0)
    monkeypatch.setattr("shardwright.convert.space.free_bytes", lambda _: 100)
    written = units_written(monkeypatch)
    with pytest.raises(OutputError, match=r"needs .* its disk has 0.0 MB \(100 bytes\) free"):
        export(built.folder, tmp_path / "out", ExportOptions(to, jobs=1))
    assert (written, (tmp_path / "out").exists()) == ([], False)


def test_a_worker_that_dies(tmp_path: Path, to: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    built = build(tmp_path / "src")
    for task in (export_task.PicturesTask, export_task.TarTask):
        monkeypatch.setattr(task, "write", _end_this_process)
    with pytest.raises(ShardwrightError, match="killed or crashed 2 times: is there memory"):
        export(built.folder, tmp_path / "out", ExportOptions(to, jobs=1))
    assert not (tmp_path / "out").exists()


def _end_this_process(*_: Any) -> None:
    os._exit(3)


def test_another_library_is_named(
    here: None, small_units: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, out = build(tmp_path / "src"), tmp_path / "out"
    stopped_after(2, monkeypatch, built.folder, out, FOLDER)
    monkeypatch.setattr(PictureFile, "library", {"imagecodecs": "9999.1.1"})
    done = only(export(built.folder, out, FOLDER))
    assert (done.resumed, "gone on with {'imagecodecs': '9999.1.1'}" in done.notes[0]) == (16, True)


def test_names_that_are_no_utf8(tmp_path: Path, command: Command) -> None:
    """They are bytes again, as they were."""
    convert(tree_of_pngs(tmp_path / "tree"), tmp_path / "src", converting())
    assert command("export", tmp_path / "src", tmp_path / "out", "--to", "folder").code == 0
    for name in (b"/cat/\xff\xfe.png", b"/owl/a\\b \xe9.png"):
        assert os.path.exists(os.fsencode(tmp_path / "out") + name)
