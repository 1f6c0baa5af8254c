"""Manifests: what is written is read again, and nothing hostile is believed."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.convert.describe import describe, in_words
from shardwright.datasets.layout import Manifest, Shard, ShardFile, Stats, columns_of, manifest_name
from shardwright.datasets.manifest import read_manifest, versions_of, write_manifest
from shardwright.errors import FormatError, ShardwrightError

MANIFEST = Manifest(
    version=3,
    storage="hdf5",
    rows=11,
    classes=("2", "10", "é"),
    columns=columns_of(8, 8, 3),
    shards=(
        Shard(8, (ShardFile("shards/000003-00000.h5", 4096, "0" * 64),), (0, 5), 2, 1),
        Shard(5, (ShardFile("shards/000003-00001.h5", 4000, "f" * 64),), (), 2, 0),
    ),
    seed=7,
    stats=Stats((1.5, 2.0, 3.0), (0.0, 0.25, 60.0)),
    rejected={"truncated": 2},
    suspect={"decoder-warning": 1},
    skipped={"hidden": 4},
    source={"files": 13, "bytes": 12345},
    options={"size": 8, "chunk_rows": 4, "shard_mib": None},
    environment={"numpy": "2.4"},
)
VALID: dict[str, Any] = json.loads(MANIFEST.to_json())


def read(folder: Path, text: str | bytes) -> Manifest:
    """What is read where manifest.json holds ``text``."""
    (folder / "manifest.json").write_bytes(text.encode() if isinstance(text, str) else text)
    return read_manifest(folder)


def changed(path: str, value: Any) -> str:
    """The valid manifest with ``value`` at ``path``, such as ``shards/0/rows``."""
    found = copy.deepcopy(VALID)
    *parents, last = [int(key) if key.isdecimal() else key for key in path.split("/")]
    place: Any = found
    for key in parents:
        place = place[key]
    place[last] = value
    return json.dumps(found)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    (tmp_path / ".shardwright").mkdir()
    write_manifest(tmp_path, MANIFEST)
    assert read_manifest(tmp_path) == MANIFEST
    assert read_manifest(tmp_path, 3) == MANIFEST
    assert (tmp_path / "manifest.json").read_bytes() == (tmp_path / manifest_name(3)).read_bytes()
    assert versions_of(tmp_path) == [3]


def test_unknown_keys_are_ignored(tmp_path: Path) -> None:
    text = changed("shards/0/files/0/mode", "0600").replace('"rows"', '"extra": {"a": 1}, "rows"', 1)
    assert read(tmp_path, text) == MANIFEST


def test_what_may_be_missing_is_empty(tmp_path: Path) -> None:
    optional = ("needs", "seed", "rejected", "suspect", "skipped", "source", "options", "environment")
    found = read(tmp_path, json.dumps({k: v for k, v in VALID.items() if k not in optional}))
    assert (found.seed, found.rejected, found.options) == (0, {}, {})


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../x.h5", "shards/../../x", "shards/./x", "a//b", "", ".hidden"]
)
@pytest.mark.parametrize("more", ["", "\n"])
def test_file_names_are_plain_relative_paths(tmp_path: Path, name: str, more: str) -> None:
    with pytest.raises(FormatError, match="not a plain relative path"):
        read(tmp_path, changed("shards/0/files/0/name", name + more))


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("format", "other", "format is 'other', expected 'shardwright'"),
        ("format_version", 2, "newer than 1: install a newer"),
        ("format_version", 0, "at least 1"),
        ("format_version", True, "bool, expected int"),
        ("needs", ["delta", "zstd"], "needs delta, zstd, unknown here: install a newer"),
        ("storage", "zip", "'zip', expected 'hdf5' or 'npy'"),
        ("version", 0, "at least 1"),
        ("rows", 12, "rows is 12, its shards have 11"),
        ("rows", 10, "rows is 10, its shards have 11"),
        ("rows", True, "bool, expected int"),
        ("rows", -1, "at least 0"),
        ("rows", 11.0, "float, expected int"),
        ("classes", ["a", "b", "a"], "class name stands twice"),
        ("classes", [1], "something else than str"),
        ("columns", [], "columns"),
        ("columns/1/name", "image", "columns: a name stands twice"),
        ("columns/1/name", "class", "expected one each of crc32, id, image, label"),
        ("columns/1/name", "a/b", "no name for a column"),
        ("columns/1/dtype", "float64", "is float64, expected int64"),
        ("columns/1/shape", [5], "label"),
        ("columns/0/shape", [8, 8], "expected \\[height, width, channels\\]"),
        ("columns/0/shape", [1 << 20, 1 << 20, 3], "under 2 GiB"),
        ("columns/0/shape", [8, 0, 3], "shape"),
        ("shards/1", "shards/x.h5", "'shards' holds something else than dict"),
        ("shards/0/rows", 0, "at least 1"),
        ("shards/0/rows", 1 << 70, "rows"),
        ("shards/0/files", [], "shard 0 has no file"),
        ("shards/0/files/0/name", "shards/000003-00001.h5", "stands in two shards"),
        ("shards/0/files/0/sha256", "F" * 64, "64 hexadecimal digits"),
        ("shards/0/files/0/bytes", -1, "at least 0"),
        ("shards/0/dead_rows", [5, 0], "dead_rows"),
        ("shards/0/dead_rows", [5, 5], "dead_rows"),
        ("shards/0/dead_rows", [-1, 5], "dead_rows"),
        ("shards/0/dead_rows", [0, 8], "dead_rows"),
        ("shards/0/dead_rows", [0, True], "something else than int"),
        ("shards/0/chunks", 9, "chunks"),
        ("shards/0/compressed_chunks", 3, "compressed_chunks"),
        ("stats", {"mean": [1, 2, 3]}, "stats has no 'std'"),
        ("stats/mean", ["1", "2", "3"], "something else than float"),
        ("stats/std", [1.0], "mean and std of 3 channels"),
        ("stats/mean", [1.0, float("nan"), 2.0], "grey levels 0 to 255"),
        ("rejected", {"truncated": "two"}, "'rejected' holds something else than counts"),
        ("source", {"files": None}, "'files' is NoneType"),
        ("options/chunk_rows", 0, "chunk_rows"),
        ("options/chunk_rows", "32", "chunk_rows"),
    ],
)
def test_a_hostile_value_is_named(tmp_path: Path, path: str, value: Any, says: str) -> None:
    with pytest.raises(FormatError, match=says):
        read(tmp_path, changed(path, value))


SUMS = {"pixels": 11 * 64, "total": [704, 0, 255 * 704], "squares": [704, 0, 255**2 * 704]}


def with_sums(**sums: Any) -> str:
    """The valid manifest with sums of its pixels, but for ``sums``."""
    return changed("stats", {**VALID["stats"], **SUMS, **sums})


def test_sums_of_pixels_are_believed(tmp_path: Path) -> None:
    assert read(tmp_path, with_sums()).stats.pixels == 704


@pytest.mark.parametrize(
    ("sums", "says"),
    [
        ({"pixels": 703}, "pixels is 703, 11 rows of 8x8 have 704"),
        ({"pixels": 0}, "total and squares of 3 channels"),
        ({"pixels": 704.0}, "'pixels' is float"),
        ({"total": [704, 0]}, "total and squares of 3 channels"),
        ({"total": [704, False, 0]}, "'total' holds something else than int"),
        ({"total": [-1, 0, 0]}, "no 704 grey levels 0 to 255 have the total -1"),
        ({"total": [255 * 704 + 1, 0, 0]}, "no 704 grey levels"),
        ({"squares": [703, 0, 255**2 * 704]}, "the total 704 and the squares 703"),  # a variance below zero
        ({"squares": [255 * 704 + 1, 0, 255**2 * 704]}, "no 704 grey levels"),
        ({"squares": [704, 1, 255**2 * 704]}, "the total 0 and the squares 1"),
        ({"total": [10**4000, 0, 0]}, "of more than 128 bits"),
    ],
)
def test_sums_that_no_pixels_have(tmp_path: Path, sums: dict[str, Any], says: str) -> None:
    """The next version would be made with them, and be one that nobody can read."""
    with pytest.raises(FormatError, match=says):
        read(tmp_path, with_sums(**sums))


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": 12},
        {"stats": Stats((float("nan"),) * 3, (0.0,) * 3)},
        {"stats": Stats((1.0,) * 3, (0.0,) * 3, 704, (1408,) * 3, (0,) * 3)},
        {"classes": ("a", "a")},
    ],
)
def test_what_no_reader_takes_is_not_published(tmp_path: Path, wrong: dict[str, Any]) -> None:
    (tmp_path / ".shardwright").mkdir()
    write_manifest(tmp_path, MANIFEST)
    with pytest.raises(FormatError, match=r"version 4 of '.*' was not published, no reader would take"):
        write_manifest(tmp_path, replace(MANIFEST, version=4, **wrong))
    assert (read_manifest(tmp_path), versions_of(tmp_path)) == (MANIFEST, [3])


@pytest.mark.parametrize("kind", ["image", "label", "id", "crc32"])
def test_a_column_that_readers_need_is_missed(tmp_path: Path, kind: str) -> None:
    columns = [column for column in VALID["columns"] if column["kind"] != kind]
    with pytest.raises(FormatError, match=kind):
        read(tmp_path, changed("columns", columns))


@pytest.mark.parametrize(
    "key", ["format", "format_version", "version", "rows", "classes", "columns", "shards"]
)
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    with pytest.raises(FormatError, match=f"has no '{key}'"):
        read(tmp_path, json.dumps({k: v for k, v in VALID.items() if k != key}))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda some: st.lists(some, max_size=4) | st.dictionaries(st.text(max_size=8), some, max_size=4),
    max_leaves=8,
)


def places(value: Any, path: tuple[str, ...] = ()) -> list[str]:
    """Paths of all values in ``value``."""
    inner = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else ()
    return ["/".join(path)] * bool(path) + [p for key, v in inner for p in places(v, (*path, str(key)))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("garbage")


@given(st.binary(max_size=64) | JSON.map(json.dumps) | st.just("[" * 100_000) | st.just("9" * 5000))
def test_garbage_is_a_format_error(folder: Path, text: str | bytes) -> None:
    with pytest.raises(FormatError, match=r"manifest\.json"):
        read(folder, text)


@given(st.sampled_from(places(VALID)), JSON | st.just(10**400) | st.just("\ud800"))
def test_a_value_of_any_kind_anywhere_is_believed_or_refused(folder: Path, path: str, value: Any) -> None:
    try:
        read(folder, changed(path, value))
        in_words(describe(folder))
        in_words(describe(folder, files=True, stats=True))
    except ShardwrightError:  # refused, or, as there are no shards, missing them
        pass


def test_a_folder_of_splits_names_them(tmp_path: Path) -> None:
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "manifest.json").write_text(MANIFEST.to_json())
    with pytest.raises(FormatError, match="one data set a split: open one of them.*train'.*val'"):
        read_manifest(tmp_path)


def test_a_missing_version_names_those_there(tmp_path: Path) -> None:
    for version in (1, 12):
        (tmp_path / manifest_name(version)).write_text(MANIFEST.to_json())
    with pytest.raises(FormatError, match="no version 4, it has 1, 12"):
        read_manifest(tmp_path, 4)


def test_no_data_set_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder, says in [
        ("missing", "no such folder"),
        ("file", "it is not a folder"),
        (".", "holds no manifest"),
    ]:
        with pytest.raises(FormatError, match=says):
            read_manifest(tmp_path / folder)


def test_a_manifest_under_the_name_of_another_version(tmp_path: Path) -> None:
    """A stray copy would be taken for the newest, and published over."""
    (tmp_path / manifest_name(1000)).write_text(MANIFEST.to_json())
    with pytest.raises(FormatError, match=f"of version {MANIFEST.version}, by its name of version 1000"):
        read_manifest(tmp_path, 1000)


def test_names_of_columns_are_names_of_files_too(tmp_path: Path) -> None:
    text = MANIFEST.to_json().replace('"source_shape"', '"größe"')
    with pytest.raises(FormatError, match="is no name for a column"):
        read(tmp_path, text)
