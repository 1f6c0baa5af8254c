"""`verify` finds every damage, and names the file and, where it can, the rows."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import h5py
import pytest
from building import Built, build

from shardwright.convert.repair import repair
from shardwright.convert.verify import verify
from shardwright.datasets.layout import Storage
from shardwright.errors import FormatError, OutputError

ROW_BYTES = 8 * 8 * 3


@pytest.fixture(scope="module", params=["hdf5", "npy"])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Two shards of 24 and 21 rows in chunks of 8, of noise and of flat pictures."""
    return build(tmp_path_factory.mktemp("whole") / request.param, request.param, rows=45, shard_rows=24)


@pytest.fixture
def copy(whole: Built, tmp_path: Path) -> Path:
    return shutil.copytree(whole.folder, tmp_path / "copy")


@pytest.fixture
def storage(whole: Built) -> Storage:
    return whole.manifest.storage


def flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def damage(folder: Path, full: bool = False) -> list[str]:
    return list(verify(folder, full=full).damage)


@pytest.mark.parametrize("full", [False, True])
def test_what_is_whole_is_right(copy: Path, full: bool) -> None:
    found = verify(copy, full=full)
    assert found.damage == ()
    assert found.in_words() == [
        f"'{copy}': version 1, 45 images in 2 shards: "
        f"{'every chunk and row' if full else 'sizes and hashes'} are right"
    ]


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("row", [0, 7, 8, 20])
def test_a_byte_of_a_row(copy: Path, storage: Storage, row: int, full: bool) -> None:
    """The file is named, and the row; in a compressed chunk, the rows of the chunk."""
    ending = "h5" if storage == "hdf5" else "image.npy"
    path = copy / f"shards/000001-00001.{ending}"
    chunk, first, last = row // 8, row // 8 * 8, min(row // 8 * 8 + 7, 20)
    if storage == "npy":
        flip(path, 128 + row * ROW_BYTES + 5)
        expected = [f"'{path}': rows {row}: wrong CRC-32"]
    else:
        with h5py.File(path) as file:
            info = file["image"].id.get_chunk_info(chunk)
        if info.filter_mask:
            flip(path, info.byte_offset + (row - first) * ROW_BYTES + 5)
            expected = [
                f"'{path}': rows {first} to {last}: wrong fletcher32 of their chunk",
                f"'{path}': rows {row}: wrong CRC-32",
            ]
        else:
            flip(path, info.byte_offset + info.size // 2)
            expected = [f"'{path}': rows {first} to {last}: wrong fletcher32 of their chunk"]
    found = damage(copy, full)
    assert found[0] == f"'{path}': wrong SHA-256"
    assert found[1 : 1 + len(expected)] == expected
    assert all(place.startswith(f"'{path}'") for place in found)


def test_both_kinds_of_chunk_were_flipped(whole: Built) -> None:
    if whole.manifest.storage == "hdf5":
        with h5py.File(whole.folder / "shards/000001-00001.h5") as file:
            masks = [file["image"].id.get_chunk_info(k).filter_mask for k in range(3)]
        assert masks == [1, 0, 1]


def test_every_file_is_looked_at(whole: Built, tmp_path: Path) -> None:
    """A byte anywhere, in headers and columns too: always found, never more than an entry of the list."""
    copy = shutil.copytree(whole.folder, tmp_path / "copy")
    for file in (file for shard in whole.manifest.shards[:1] for file in shard.files):
        for offset in range(0, file.bytes, max(1, file.bytes // 50)):
            flip(copy / file.name, offset)
            assert damage(copy)[0] == f"'{copy / file.name}': wrong SHA-256"
            flip(copy / file.name, offset)
    assert damage(copy, full=True) == []


@pytest.mark.parametrize("full", [False, True])
def test_files_that_are_short_or_long(copy: Path, whole: Built, full: bool) -> None:
    short, long = (copy / shard.files[-1].name for shard in whole.manifest.shards)
    size = short.stat().st_size
    os.truncate(short, size - 1)
    long.write_bytes(long.read_bytes() + b"1")
    assert damage(copy, full) == [
        f"'{short}' has {size - 1} bytes, expected {size}",
        f"'{long}' has {long.stat().st_size} bytes, expected {long.stat().st_size - 1}",
    ]


def test_files_that_are_gone(copy: Path, whole: Built) -> None:
    gone = [copy / file.name for shard in whole.manifest.shards for file in shard.files]
    shutil.rmtree(copy / "shards")
    assert damage(copy) == [f"'{path}': No such file or directory" for path in gone]


def test_a_shard_of_another_version(copy: Path, whole: Built) -> None:
    """Of the right size, and whole in itself."""
    one, other = whole.manifest.shards[0].files[0], whole.manifest.shards[1].files[0]
    shutil.copy(copy / other.name, copy / one.name)
    found = damage(copy)
    assert any(place.startswith(f"'{copy / one.name}'") for place in found)


def test_a_folder_where_a_shard_should_be(copy: Path, whole: Built) -> None:
    path = copy / whole.manifest.shards[0].files[0].name
    path.unlink()
    path.mkdir()
    assert damage(copy) == [f"'{path}': Is a directory"]


def test_full_believes_no_hash(copy: Path, whole: Built) -> None:
    """Damage from before the hash was taken: memory that flipped a bit in the writer."""
    path = copy / whole.manifest.shards[0].files[0].name
    if whole.manifest.storage == "hdf5":
        with h5py.File(path) as file:
            info = file["image"].id.get_chunk_info(0)
        flip(path, info.byte_offset + 5)
    else:
        flip(path, 128 + 5)
    found = json.loads((copy / "manifest.json").read_bytes())
    found["shards"][0]["files"][0]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (copy / "manifest.json").write_text(json.dumps(found))
    assert damage(copy) == []
    assert any("rows 0" in place for place in damage(copy, full=True))


def test_what_is_no_data_set(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="holds no manifest.json"):
        verify(tmp_path)


def test_a_folder_of_shards_that_is_a_link(tmp_path: Path) -> None:
    built = build(tmp_path / "set")
    (built.folder / "shards").rename(built.folder / "elsewhere")
    (built.folder / "shards").symlink_to("elsewhere")
    (tmp_path / "pictures").mkdir()
    assert len(verify(built.folder).damage) == len(built.manifest.shards)
    assert "is a link" in verify(built.folder).damage[0]
    with pytest.raises(OutputError, match="is a link"):
        repair(built.folder, tmp_path / "pictures")
