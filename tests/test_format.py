"""docs/format.md is true: its reader reads what `convert` writes, its tables name what lies on disk."""

import ast
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import h5py
import imagecodecs
import numpy as np
import numpy.typing as npt
import pytest
from trees import CLASSES, SIZE, STORE, Pictures, draw_tree

from shardwright.convert import ConvertOptions, PixelOptions, StoreOptions, convert
from shardwright.datasets import H5Dataset

TEXT = (Path(__file__).parents[1] / "docs" / "format.md").read_text("utf-8")
READER = next(code for code in re.findall(r"```python\n(.*?)```", TEXT, re.S) if "def samples" in code)
CHUNK_ROWS = STORE["chunk_rows"]

Sample = tuple[npt.NDArray[np.uint8], int, str]
Reader = Callable[[Path], Iterator[Sample]]


@pytest.fixture(scope="module")
def samples() -> Reader:
    names: dict[str, Any] = {}
    exec(compile(READER, "docs/format.md", "exec"), names)
    return names["samples"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("format")


@pytest.fixture(scope="module")
def pictures(folder: Path) -> Pictures:
    return draw_tree(folder / "source")


@pytest.fixture(scope="module")
def made(folder: Path, pictures: Pictures) -> Path:
    options = ConvertOptions(PixelOptions(size=SIZE), StoreOptions(**STORE), jobs=1)
    convert(folder / "source", folder / "made", options)
    return folder / "made"


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "copy")


def manifest_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_bytes())


def publish(folder: Path, manifest: dict[str, Any]) -> None:
    for name in ("manifest.json", "manifest-000001.json"):
        (folder / name).write_text(json.dumps(manifest))


def shards_of(folder: Path) -> Iterator[h5py.File]:
    for shard in manifest_of(folder)["shards"]:
        with h5py.File(folder / shard["files"][0]["name"]) as h5:
            yield h5


def assert_same(found: Iterable[Sample], expected: Iterable[Sample]) -> None:
    for (image, label, id), (expected_image, expected_label, expected_id) in zip(
        list(found), list(expected), strict=True
    ):
        assert (label, id) == (expected_label, expected_id)
        assert image.dtype == np.uint8
        np.testing.assert_array_equal(image, expected_image)


def by_dataset(folder: Path) -> Iterator[Sample]:
    for image, label, id in H5Dataset(folder, columns=("image", "label", "id")):
        yield image.permute(1, 2, 0).numpy(), label, id


def test_reader_is_short_and_plain() -> None:
    assert len(READER.splitlines()) <= 20
    imports = [node for node in ast.walk(ast.parse(READER)) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert {ast.unparse(node) for node in imports} == {"import json", "import h5py"}


def test_reader_yields_every_picture(made: Path, pictures: Pictures, samples: Reader) -> None:
    found = list(samples(made))
    assert sorted(id for _, _, id in found) == sorted(pictures)
    assert_same(found, ((pictures[id][1], pictures[id][0], id) for _, _, id in found))


def test_reader_agrees_with_plain_h5py_and_the_dataset(made: Path, samples: Reader) -> None:
    def by_h5py() -> Iterator[Sample]:
        for h5 in shards_of(made):
            yield from zip(h5["image"][:], h5["label"][:], h5["id"].asstr()[:], strict=True)

    assert_same(samples(made), by_h5py())
    assert_same(samples(made), by_dataset(made))


def test_reader_skips_dead_rows(copy: Path, samples: Reader) -> None:
    everything = list(samples(copy))
    manifest = manifest_of(copy)
    first, last = manifest["shards"]
    first["dead_rows"], last["dead_rows"] = [0, 3, 7, 8], [last["rows"] - 1]
    manifest["rows"] -= 5
    for key in ("pixels", "total", "squares"):  # they would be those of rows that are no more
        del manifest["stats"][key]
    publish(copy, manifest)
    dead = {0, 3, 7, 8, len(everything) - 1}
    living = [sample for row, sample in enumerate(everything) if row not in dead]
    assert_same(samples(copy), living)
    assert_same(by_dataset(copy), living)


@pytest.mark.parametrize(
    "change", [{"format": "other"}, {"format_version": 2}, {"needs": ["holograms"]}, {"storage": "npy"}]
)
def test_reader_refuses_what_it_does_not_know(change: dict[str, Any], copy: Path, samples: Reader) -> None:
    publish(copy, manifest_of(copy) | change)
    with pytest.raises(ValueError, match=re.escape(repr(next(iter(change.values()))))):
        next(samples(copy))


def test_reader_ignores_unknown_keys(copy: Path, samples: Reader) -> None:
    manifest = manifest_of(copy)
    manifest["shards"][0]["colour"] = manifest["colour"] = "green"
    publish(copy, manifest)
    assert_same(samples(copy), by_dataset(copy))


def test_every_key_of_the_manifest_is_documented(made: Path) -> None:
    manifest = manifest_of(made)
    tables = [block for block in TEXT.split("\n\n") if block.startswith("| key |")]
    documented = [set(re.findall(r"^\| `(\w+)`", table, re.M)) for table in tables]
    assert documented == [set(manifest), set(manifest["columns"][0]), set(manifest["shards"][0])]
    nested = (manifest["shards"][0]["files"][0], manifest["stats"], manifest["source"], manifest["options"])
    for key in (*nested[0], *nested[1], *nested[2], *nested[3]):
        assert f"`{key}`" in TEXT, key
    report = (made / "report-000001.jsonl").read_text().splitlines()
    assert len(report) == 1
    for key in json.loads(report[0]):
        assert f"`{key}`" in TEXT, key


def test_columns_are_those_documented(made: Path) -> None:
    documented = re.findall(r"^\| `(\w+)` \| `(\w+)` \| `(\w+)` \| \((.*?)\) \|", TEXT, re.M)
    columns = manifest_of(made)["columns"]
    assert [row[:3] for row in documented] == [(c["name"], c["kind"], c["dtype"]) for c in columns]
    for h5 in shards_of(made):
        assert Path(h5.filename).read_bytes()[:9] == b"\x89HDF\r\n\x1a\n\0"  # superblock 0
        assert set(h5) == {c["name"] for c in columns}
        sizes = {"N": len(h5["label"]), "H": SIZE, "W": SIZE, "C": 3}
        for column, (*_, shape) in zip(columns, documented, strict=True):
            dataset = h5[column["name"]]
            expected = [sizes.get(n) or int(n) for n in shape.replace(",", " ").split()]
            assert list(dataset.shape) == expected == [len(h5["label"]), *column["shape"]]
            assert not dataset.attrs
            if column["dtype"] == "utf8":
                assert h5py.check_string_dtype(dataset.dtype) == ("utf-8", None)
            else:
                assert dataset.dtype == column["dtype"]
                assert dataset.fletcher32


def test_chunks_of_images_are_as_documented(made: Path) -> None:
    masks = []
    for h5 in shards_of(made):
        image = h5["image"]
        plist = image.id.get_create_plist()
        assert [plist.get_filter(i)[0] for i in range(plist.get_nfilters())] == [32000, 3]
        assert image.chunks == (CHUNK_ROWS, SIZE, SIZE, 3)
        for first in range(0, len(image), CHUNK_ROWS):
            mask, stored = image.id.read_direct_chunk((first, 0, 0, 0))
            masks.append(mask)
            payload, checksum = stored[:-4], stored[-4:]
            assert int.from_bytes(checksum, "little") == imagecodecs.h5checksum_fletcher32(payload)
            chunk_bytes = CHUNK_ROWS * SIZE * SIZE * 3
            whole = payload if mask else imagecodecs.lzf_decode(payload, out=chunk_bytes)
            rows = np.frombuffer(whole, np.uint8).reshape(image.chunks)
            valid = len(image) - first
            np.testing.assert_array_equal(rows[:valid], image[first : first + CHUNK_ROWS])
            assert not rows[valid:].any()
    assert masks == [0, 1, 1, 0]
    shards = manifest_of(made)["shards"]
    assert [(shard["chunks"], shard["compressed_chunks"]) for shard in shards] == [(2, 1), (2, 1)]


def test_rejects_leave_the_maximal_shape_larger(made: Path) -> None:
    planned = [h5["image"].maxshape[0] for h5 in shards_of(made)]
    stored = [len(h5["image"]) for h5 in shards_of(made)]
    assert (sum(planned), sum(stored)) == (28, 27)
    assert manifest_of(made)["classes"] == list(CLASSES)
    assert sum(manifest_of(made)["rejected"].values()) == 1
