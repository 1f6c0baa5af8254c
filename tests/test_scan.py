"""From a tree to samples: what is taken, what is passed over, what is refused."""

import os
import shutil
import sys
import time
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from building import build
from drawing import encoded, jpeg, noise, put

from shardwright.convert import scan as scan_module
from shardwright.convert.options import ConvertOptions
from shardwright.convert.run import scan_source
from shardwright.convert.scan import Scan, class_map_of, find_splits, read_class_map, scan
from shardwright.datasets import open_dataset
from shardwright.datasets.ids import path_to_id
from shardwright.errors import FormatError, SourceError, UsageError

JPEG = jpeg()


def labelled(found: Scan) -> dict[str, str]:
    """Path -> name of its class."""
    return {path: found.classes[k] for path, k in zip(found.paths, found.labels, strict=True)}


def test_classes_are_numbered_as_torchvision_does(tmp_path: Path) -> None:
    put(tmp_path, {f"{name}/x.jpg": JPEG for name in ("a", "10", "B", "2", "é", "ab", "a b")})
    found = scan(tmp_path)
    expected = sorted(entry.name for entry in os.scandir(tmp_path) if entry.is_dir())  # as its find_classes
    assert list(found.classes) == expected == ["10", "2", "B", "a", "a b", "ab", "é"]
    assert labelled(found) == {f"{name}/x.jpg": name for name in expected}


def test_an_empty_class_keeps_its_number(tmp_path: Path) -> None:
    put(tmp_path, {"a/x.jpg": JPEG, "b/": b"", "c/x.jpg": JPEG, "d/readme.txt": b"none"})
    found = scan(tmp_path)
    assert found.classes == ("a", "b", "c", "d")
    assert found.labels.tolist() == [0, 2]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a/b/c/x.jpg", JPEG),
        ("a/X.JPG", JPEG),
        ("a/x.Jpeg", JPEG),
        ("a/x.tar.v2.jpg", JPEG),
        ("a/of two dots..jpg", JPEG),
        ("a/a PNG.JPEG", encoded(noise(4, 4), "PNG")),
        ("a/jpeg", JPEG),
        ("a/png.txt", encoded(noise(4, 4), "PNG")),
        ("a/webp", encoded(noise(4, 4), "WEBP")),
        ("a/gif", encoded(noise(4, 4, channels=1), "GIF")),
        ("a/tiff", encoded(noise(4, 4), "TIFF")),
        ("a/bmp", encoded(noise(4, 4), "BMP")),
        ("a/not one.jpg", b"<!DOCTYPE html>"),
        ("a/empty.jpg", b""),
        ("a/with space.jpg", JPEG),
        ("a/new\nline.jpg", JPEG),
        ("a/-rf.jpg", JPEG),
        ("a/ü日本.jpg", JPEG),
        ("a/back\\slash.jpg", JPEG),
        ("-v/x.jpg", JPEG),
        ("new\nline/x.jpg", JPEG),
    ],
)
def test_this_is_a_sample(tmp_path: Path, name: str, data: bytes) -> None:
    found = scan(put(tmp_path, {name: data}))
    assert found.paths == (name,)
    assert found.classes == (name.split("/")[0],)
    assert found.sizes.tolist() == [len(data)]
    assert not found.skipped


@pytest.mark.skipif(sys.platform == "darwin", reason="its file names are UTF-8")
def test_names_that_are_not_utf8(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9/\xff.jpg")
    put(tmp_path, {name: JPEG, "b\\c/x.jpg": JPEG})
    found = scan(tmp_path)
    assert found.paths == ("b\\c/x.jpg", name)
    assert found.classes == (r"b\\c", r"caf\xE9")
    assert labelled(found)[name] == r"caf\xE9"


def test_what_is_no_sample_is_counted(tmp_path: Path) -> None:
    junk = {
        ".DS_Store": b"",
        "a/._x.jpg": JPEG,
        "a/.hidden.jpg": JPEG,
        ".git/x.jpg": JPEG,
        "a/.ipynb_checkpoints/x.jpg": JPEG,
    }
    system = {"a/Thumbs.db": b"", "a/desktop.ini": b"", "__MACOSX/a/x.jpg": JPEG}
    other = {"README.md": b"# Cats", "a/labels.csv": b"a,b", "a/half": b"\xff\xd8", "a/nothing": b""}
    found = scan(put(tmp_path, {"a/x.jpg": JPEG, **junk, **system, **other}))
    assert found.paths == ("a/x.jpg",)
    assert found.classes == ("a",)
    assert found.skipped == {"hidden": len(junk), "system": len(system), "not-a-picture": len(other)}


def test_a_pipe_is_no_sample(tmp_path: Path) -> None:
    put(tmp_path, {"a/x.jpg": JPEG})
    os.mkfifo(tmp_path / "a/pipe.jpg")
    found = scan(tmp_path)
    assert (found.paths, found.skipped) == (("a/x.jpg",), {"not-a-picture": 1})


def test_pictures_without_a_class(tmp_path: Path) -> None:
    found = scan(put(tmp_path, {"a/x.jpg": JPEG, "z.jpg": JPEG, "b": JPEG}))
    assert (found.paths, found.no_class) == (("a/x.jpg",), ("b", "z.jpg"))


def test_links_are_followed_and_loops_are_not(tmp_path: Path) -> None:
    elsewhere = put(tmp_path / "elsewhere", {"deep/y.jpg": JPEG, "one.jpg": JPEG})
    root = put(tmp_path / "root", {"a/x.jpg": JPEG, "b/": b""})
    (root / "a/file.jpg").symlink_to(elsewhere / "one.jpg")
    (root / "a/up").symlink_to(root)
    (root / "a/self").symlink_to(root / "a")
    (root / "b/folder").symlink_to(elsewhere)
    (root / "c").symlink_to(elsewhere / "deep")
    found = scan(root)
    assert found.classes == ("a", "b", "c")
    assert found.paths == ("a/file.jpg", "a/x.jpg", "b/folder/deep/y.jpg", "b/folder/one.jpg", "c/y.jpg")
    assert found.skipped == {"link-loop": 2}


@pytest.mark.parametrize("target", ["nowhere", "gone.jpg"], ids=["broken", "itself"])
def test_a_link_to_nothing(tmp_path: Path, target: str) -> None:
    put(tmp_path, {"a/x.jpg": JPEG})
    for name in ("a/gone.jpg", "a/gone.txt", "a/gone"):
        (tmp_path / name).symlink_to(Path(name).name if target != "nowhere" else target)
    found = scan(tmp_path)
    assert found.paths == ("a/gone.jpg", "a/x.jpg")  # to be rejected as unreadable, not passed over
    assert found.classes == ("a",)
    assert found.skipped == {"dangling-link": 2}
    assert find_splits(tmp_path) == []
    (tmp_path / "gone").symlink_to("gone" if target != "nowhere" else target)
    with pytest.raises(
        SourceError, match="gone' is a link that leads nowhere: a class whose disk is not mounted"
    ):
        scan(tmp_path)


def test_a_folder_that_cannot_be_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, {"a/x.jpg": JPEG, "b/c/x.jpg": JPEG})
    scandir = os.scandir

    def refuse(folder: Path) -> "os._ScandirIterator[str]":
        if Path(folder).name == "c":
            raise PermissionError(13, "Permission denied")
        return scandir(folder)

    monkeypatch.setattr(scan_module.os, "scandir", refuse)
    with pytest.raises(SourceError, match="cannot read the folder '.*b/c': Permission denied"):
        scan(tmp_path)


@pytest.mark.parametrize(
    "twin", ["Straße", "STRASSE", unicodedata.normalize("NFD", "straße")], ids=["case", "folded", "form"]
)
def test_classes_that_are_one_elsewhere_are_refused(tmp_path: Path, twin: str) -> None:
    first = (
        unicodedata.normalize("NFC", "straße")
        if twin != unicodedata.normalize("NFD", "straße")
        else "strasse"
    )
    put(tmp_path, {f"train/{first}/x.jpg": JPEG, f"train/{twin}/x.jpg": JPEG})
    if len(os.listdir(tmp_path / "train")) < 2:
        pytest.skip("one folder on this file system")
    with pytest.raises(SourceError, match="differ only in case or Unicode form"):
        scan(tmp_path / "train")


def test_twins_in_two_splits_are_refused(tmp_path: Path) -> None:
    composed, apart = "caf\u00e9", "cafe\u0301"
    put(tmp_path, {f"train/{composed}/x.jpg": JPEG, f"val/{apart}/x.jpg": JPEG})
    with pytest.raises(SourceError, match="differ only in case or Unicode form"):
        class_map_of(tmp_path, ["train", "val"])


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (["train/", "val/"], ["train", "val"]),
        (["validation/", "test/", "valid/"], ["test", "valid", "validation"]),
        (["train/", "README.md", ".cache/", "__MACOSX/", "labels.csv"], ["train"]),
        (["train/", "val/", "extra/"], []),
        (["Train/", "val/"], []),
        (["cat/", "dog/"], []),
        (["train.jpg", "cat/"], []),
        ([], []),
    ],
)
def test_splits_are_known_by_their_names(tmp_path: Path, names: list[str], splits: list[str]) -> None:
    assert find_splits(put(tmp_path, dict.fromkeys(names, b""))) == splits


def test_pictures_beside_splits_belong_to_none(tmp_path: Path) -> None:
    put(tmp_path, {"train/a/x.jpg": JPEG, "val/a/x.jpg": JPEG, "x.jpg": JPEG})
    with pytest.raises(SourceError, match=r"1 pictures beside them \(such as 'x.jpg'\).*--no-splits"):
        scan_source(tmp_path, ConvertOptions())
    found = scan_source(tmp_path, ConvertOptions(splits=False))[""]
    assert (found.classes, found.no_class) == (("train", "val"), ("x.jpg",))


def test_splits_share_the_union_of_their_classes(tmp_path: Path) -> None:
    put(tmp_path, {"train/b/x.jpg": JPEG, "train/10/x.jpg": JPEG, "val/b/x.jpg": JPEG, "val/a/x.jpg": JPEG})
    found = scan_source(tmp_path, ConvertOptions())
    assert found["train"].classes == found["val"].classes == ("10", "a", "b")
    assert found["train"].labels.tolist() == [0, 2]
    assert found["val"].labels.tolist() == [1, 2]


def test_a_class_map_gives_the_numbers(tmp_path: Path) -> None:
    put(tmp_path, {"src/a/x.jpg": JPEG, "src/b/x.jpg": JPEG})
    (tmp_path / "map").write_bytes("\ufeffb\n\nnobody's \u2028\na\r\n".encode())
    names = read_class_map(tmp_path / "map")
    assert names == ("b", "nobody's \u2028", "a")
    found = scan(tmp_path / "src", names)
    assert found.classes == names
    assert labelled(found) == {"a/x.jpg": "a", "b/x.jpg": "b"}
    with pytest.raises(SourceError, match="the class map does not name: a"):
        scan(tmp_path / "src", ("b", "c"))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"a\nb\na\n", "'a' stands twice"),
        (b"\n \n", "is empty"),
        (b"\xff\n", "cannot read"),
        (None, "cannot read"),
    ],
)
def test_a_bad_class_map_is_a_usage_error(tmp_path: Path, data: bytes | None, says: str) -> None:
    if data is not None:
        (tmp_path / "map").write_bytes(data)
    with pytest.raises(UsageError, match=says):
        read_class_map(tmp_path / "map")


def test_samples_are_sorted_and_counted(tmp_path: Path) -> None:
    names = [f"{k % 3}/{k:04d}.jpg" for k in range(1500)]
    told: list[int] = []
    found = scan(put(tmp_path, dict.fromkeys(names, b"")), found=told.append)
    assert list(found.paths) == sorted(names, key=path_to_id)
    assert sum(told) == len(found) == 1500


@pytest.mark.parametrize("change", ["content", "time", "name", "new", "class", "no-class"])
def test_the_fingerprint_sees_a_change(tmp_path: Path, change: str) -> None:
    put(tmp_path, {"a/x.jpg": JPEG, "a/y.jpg": JPEG})
    before = scan(tmp_path).fingerprint()
    assert scan(tmp_path).fingerprint() == before
    path = tmp_path / "a/x.jpg"
    match change:
        case "content":
            path.write_bytes(JPEG + b"1")
        case "time":
            os.utime(path, ns=(0, 1))
        case "name":
            path.rename(tmp_path / "a/z.jpg")
        case "new":
            put(tmp_path, {"a/z.jpg": JPEG})
        case "class":
            put(tmp_path, {"b/": b""})
        case "no-class":
            put(tmp_path, {"z.jpg": JPEG})
    assert scan(tmp_path).fingerprint() != before


def test_an_empty_source_is_refused(tmp_path: Path) -> None:
    for files, says in [
        ({"a/": b""}, "no pictures: is it the right folder, is its disk mounted"),
        ({"a/": b"", "x.jpg": JPEG}, "1 pictures, such as 'x.jpg', but none in a class folder"),
        ({"train/a/x.jpg": JPEG, "val/": b""}, "val' has no pictures"),
    ]:
        root = tmp_path / str(len(files)) / str(len(says))
        with pytest.raises(SourceError, match=says):
            scan_source(put(root, files), ConvertOptions())


def test_labels_are_int64(tmp_path: Path) -> None:
    found = scan(put(tmp_path, {"a/": b""}))
    assert (found.labels.dtype, found.sizes.dtype, found.stamps.mtimes.dtype) == (np.int64,) * 3


# --- files that are still coming --------------------------------------------------------------------------


def test_what_was_changed_within_the_grace_is_left(tmp_path: Path) -> None:
    put(
        tmp_path, {"a/old.jpg": b"x", "a/new.jpg": b"x", "a/copied with its times.jpg": b"x", "top.jpg": b"x"}
    )
    for name in ("a/old.jpg", "a/copied with its times.jpg"):
        os.utime(tmp_path / name, (1, 1))
    latest = max(p.stat().st_ctime_ns for p in [tmp_path / "a/old.jpg"])
    time.sleep(0.05)  # the clock of a file system has coarse ticks
    os.utime(tmp_path / "a/new.jpg")  # changed after that, as are the others but the old one
    os.utime(tmp_path / "a/copied with its times.jpg", (1, 1))
    os.utime(tmp_path / "top.jpg")
    found = scan(tmp_path, latest_ns=latest)
    assert found.paths == ("a/old.jpg",)
    assert found.no_class == ()
    assert found.skipped == {"too-new": 3}
    assert len(scan(tmp_path)) == 3


def test_thousands_of_classes_and_names_of_any_length(tmp_path: Path) -> None:
    names = [f"{k:05d}" for k in range(2500)] + ["x" * 255, "é" * 127, "-rf", "a b\nc", " ", "ﬀ"]
    put(tmp_path, {f"{name}/{'p' * 251}.jpg": b"x" for name in names})
    put(tmp_path, {f"{'deep/' * 40}y.jpg": b"x"})
    found = scan(tmp_path)
    assert list(found.classes) == sorted(path_to_id(name) for name in [*names, "deep"])
    assert len(found) == len(names) + 1
    assert [found.classes[k] for k in found.labels] == [
        path_to_id(path.split("/")[0]) for path in found.paths
    ]


def test_the_class_map_of_a_data_set(tmp_path: Path) -> None:
    build(tmp_path / "set", classes=7)
    known = open_dataset(tmp_path / "set").classes
    assert read_class_map(tmp_path / "set") == known
    (tmp_path / "set").rename(tmp_path / "train")
    put(tmp_path, {"splits/": b""})
    (tmp_path / "train").rename(tmp_path / "splits" / "train")
    assert read_class_map(tmp_path / "splits") == known
    with pytest.raises(FormatError, match="no data set"):
        read_class_map(put(tmp_path / "none", {"x": b""}))


def test_a_path_that_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the source, and said so: no picture goes missing in it."""
    put(tmp_path, {"src/a/x.jpg": jpeg()})
    monkeypatch.chdir(tmp_path / "src" / "a")
    for _ in range(20):
        os.mkdir("d" * 250)
        os.chdir("d" * 250)
    try:
        with pytest.raises(SourceError, match="cannot .*/src/a/ddd.*File name too long"):
            scan(tmp_path / "src")
    finally:
        os.chdir(tmp_path)
        shutil.rmtree("src")
