"""`repair` gives damaged files their bytes back from the pictures, or says why it cannot and leaves all as it is."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import pytest
from building import build
from drawing import jpeg, png, put
from test_one_writer import everything as with_lock
from test_one_writer import processes_naming
from test_verify import flip

from shardwright.convert import ConvertOptions, PixelOptions, StoreOptions, convert, write
from shardwright.convert.gc import GcOptions, gc
from shardwright.convert.lock import one_writer
from shardwright.convert.output import Output
from shardwright.convert.repair import Repair, repair
from shardwright.convert.sync import SyncOptions, sync
from shardwright.convert.verify import verify
from shardwright.datasets import open_dataset
from shardwright.datasets.layout import Manifest, Stats, Storage
from shardwright.datasets.manifest import read_manifest
from shardwright.errors import FormatError, LockedError, OutputError, ShardError, UsageError

Command = Callable[..., Any]
PICTURES, SHARD_ROWS = 60, 16


@pytest.fixture(params=["hdf5", "npy"])
def storage(request: pytest.FixtureRequest) -> Storage:
    return request.param  # type: ignore[no-any-return]


def options(storage: Storage = "hdf5", **others: Any) -> ConvertOptions:
    """16 pictures a shard, in chunks of 8."""
    store = StoreOptions(storage, 8, shard_mib=SHARD_ROWS * 8 * 8 * 3 / 2**20)
    return ConvertOptions(pixels=PixelOptions(size=8), store=store, jobs=2, **others)


def draw(root: Path, pictures: int = PICTURES) -> Path:
    """Pictures of three classes, of which some are broken: shards of fewer rows than were planned."""
    put(root, {f"class{i % 3}/{i:04d}.png": png(i) for i in range(pictures)})
    put(root, {f"class1/{i:04d}.jpg": b"\xff\xd8\xff no more" for i in (7, 22, 41)})
    return put(root, {"no class.png": png(1), "class2/notes.txt": b""})


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return draw(tmp_path / "source")


@pytest.fixture
def out(here: None, tmp_path: Path, source: Path, storage: Storage) -> Path:
    """What was known of the pictures beside the version is lost: the shards and the plan have to tell."""
    convert(source, tmp_path / "out", options(storage))
    for hints in (tmp_path / "out" / ".shardwright").glob("source-*"):
        hints.unlink()
    return tmp_path / "out"


@pytest.fixture
def hinted(here: None, tmp_path: Path, source: Path, storage: Storage) -> Path:
    convert(source, tmp_path / "hinted", options(storage))
    return tmp_path / "hinted"


def lose(folder: Path, shard: int) -> None:
    """Remove all files of a shard."""
    for file in read_manifest(folder).shards[shard].files:
        (folder / file.name).unlink()


def everything(folder: Path) -> dict[str, bytes]:
    """All files but the lock, which stays where a writer was, and what one that was killed told of itself."""
    no_data = {f".shardwright/{name}" for name in ("lock", "job.json", "job.partial")}
    return {name: data for name, data in with_lock(folder).items() if name not in no_data}


def image_file(folder: Path, shard: int, column: str = "image") -> Path:
    manifest = read_manifest(folder)
    names = [file.name for file in manifest.shards[shard].files]
    return folder / next(name for name in names if name.endswith((".h5", f".{column}.npy")))


def flip_pixel(folder: Path, shard: int, row: int = 3) -> Path:
    """Flip a byte of a row; the file that it lies in."""
    path = image_file(folder, shard)
    if path.suffix == ".h5":
        with h5py.File(path) as file:
            flip(path, file["image"].id.get_chunk_info(row // 8).byte_offset + row % 8 * 192 + 5)
    else:
        flip(path, 128 + row * 192 + 5)
    return path


def only(found: dict[str, Repair]) -> Repair:
    (done,) = found.values()
    return done


def names(folder: Path, *paths: Path) -> tuple[str, ...]:
    return tuple(str(path.relative_to(folder)) for path in paths)


# --- it gives the same bytes ----------------------------------------------------------------------------


def test_two_flipped_bytes(out: Path, source: Path, command: Command) -> None:
    before = everything(out)
    damaged = [flip_pixel(out, 1, row=3), flip_pixel(out, 2, row=9)]
    said = command("verify", out)
    assert said.code == 1
    for path, row in zip(damaged, (3, 9), strict=True):
        lines = [line for line in said.out.splitlines() if f"'{path}': rows " in line]
        assert any(rows in line for line in lines for rows in (f"rows {row}:", f"rows {row // 8 * 8} to "))
    dry = everything(out)
    assert {name for name in before if dry[name] != before[name]} == set(names(out, *damaged))
    ran = command("repair", out, "--source", source)
    assert ran.code == 0, ran.err
    assert everything(out) == before
    files = sum(len(shard.files) for shard in read_manifest(out).shards)
    assert ran.out.splitlines() == [
        f"'{out}': version 1",
        *(f"  repaired '{name}'" for name in names(out, *damaged)),
        f"  checked: sizes and hashes of all {files} files are right",
    ]
    assert command("verify", out, "--full").code == 0


def test_with_worker_processes(tmp_path: Path, source: Path, storage: Storage) -> None:
    out = tmp_path / "out"
    convert(source, out, options(storage))
    before = everything(out)
    flip_pixel(out, 0)
    flip_pixel(out, 3)
    assert len(only(repair(out, source)).repaired) == 2
    assert everything(out) == before


def test_nothing_to_repair(out: Path, source: Path, command: Command) -> None:
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    contents = with_lock(out)
    ran = command("repair", out, "--source", source)
    assert ran.code == 0
    assert ran.out.endswith("files are right: nothing to repair\n")
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
    assert with_lock(out) == contents
    found = json.loads(command("repair", out, "--source", source, "--json").out)
    assert (found["version"], found["repaired"], found["failed"]) == (1, [], [])


@pytest.mark.parametrize("damage", ["gone", "short", "long", "empty", "zeros", "link", "all gone", "pipe"])
def test_files_of_any_damage(out: Path, source: Path, tmp_path: Path, damage: str) -> None:
    before = everything(out)
    path = image_file(out, 2)
    size = path.stat().st_size
    match damage:
        case "gone":
            path.unlink()
        case "short":
            os.truncate(path, size - 1)
        case "long":
            path.write_bytes(path.read_bytes() + b"1")
        case "empty":
            path.write_bytes(b"")
        case "zeros":
            path.write_bytes(bytes(size))
        case "link":
            path.rename(tmp_path / "elsewhere")
            path.symlink_to(tmp_path / "elsewhere")
        case "pipe":
            path.unlink()
            os.mkfifo(path)
        case "all gone":
            shutil.rmtree(out / "shards")
    done = only(repair(out, source))
    assert done.failures == ()
    assert everything(out) == before
    assert not path.is_symlink()
    assert verify(out).damage == ()


def test_every_file_is_repaired_for_itself(out: Path, source: Path) -> None:
    """A byte anywhere, in headers and columns too; whole files of the shard are left alone."""
    before = everything(out)
    for file in read_manifest(out).shards[1].files:
        for offset in range(0, file.bytes, max(1, file.bytes // 6)):
            flip(out / file.name, offset)
            times = {path: path.stat().st_mtime_ns for path in (out / "shards").iterdir()}
            assert only(repair(out, source)).repaired == (file.name,)
            assert everything(out) == before
            changed = [path for path in times if path.stat().st_mtime_ns != times[path]]
            assert changed == [out / file.name]


def test_an_unlucky_id_in_hdf5(here: None, source: Path, tmp_path: Path) -> None:
    """Ids have no checksum there: a wrong one is read without a word, and must not get into what is made."""
    convert(source, tmp_path / "out", options())
    before = everything(tmp_path / "out")
    path = image_file(tmp_path / "out", 1)
    for added in ({}, {"class0/new.png": png(999)}):
        put(source, added)
        data = path.read_bytes()
        path.write_bytes(data.replace(b"class1/00", b"class1/99", 1))
        assert path.read_bytes() != data
        assert only(repair(tmp_path / "out", source)).failures == ()
        assert everything(tmp_path / "out") == before


@pytest.mark.parametrize("column", ["label", "source_sha256"])
def test_a_column_that_reads_as_zeros(
    out: Path, source: Path, monkeypatch: pytest.MonkeyPatch, column: str
) -> None:
    """As HDF5 reads a chunk that its damaged index does not name: nothing that a damaged shard says is believed."""
    from shardwright.convert import repair as module

    before = everything(out)
    real = module.column_of_damaged

    def zeros(folder: Path, manifest: Manifest, shard: int, name: str) -> Any:
        found = real(folder, manifest, shard, name)
        return [[0] * 32 if name == "source_sha256" else 0 for _ in found or ()] if name == column else found

    monkeypatch.setattr(module, "column_of_damaged", zeros)
    flip_pixel(out, 1)
    assert only(repair(out, source)).failures == ()
    assert everything(out) == before


def test_hdf5_that_goes_round_in_circles(out: Path, python: Callable[..., Any]) -> None:
    """It ends the process that reads, while it holds the interpreter's lock."""
    code = """
import ctypes, sys
from pathlib import Path
from shardwright.convert import origin
from shardwright.datasets import shards
from shardwright.datasets.manifest import read_manifest
origin.PATIENCE_SECONDS = 0.2
shards.H5Shard.column = shards.NpyShard.column = lambda *_: ctypes.PyDLL(None).sleep(60)
folder = Path(sys.argv[1])
origin.column_of_damaged(folder, read_manifest(folder), 1, "id")
"""
    ran = python(code, str(out))
    assert (ran.returncode, ran.stderr) == (1, "")


def test_splits_and_one_of_them(here: None, tmp_path: Path, storage: Storage, command: Command) -> None:
    for split in ("train", "val"):
        draw(tmp_path / "source" / split)
    out, source = tmp_path / "out", tmp_path / "source"
    convert(source, out, options(storage))
    before = {name: data for name, data in everything(out).items() if "lock" not in name}
    flip_pixel(out / "train", 1)
    flip_pixel(out / "val", 0)
    found = json.loads(command("repair", out, "--source", source, "--json").out)
    assert {split: len(each["repaired"]) for split, each in found.items()} == {"train": 1, "val": 1}
    assert {name: data for name, data in everything(out).items() if "lock" not in name} == before
    path = flip_pixel(out / "val", 2)
    assert only(repair(out / "val", source / "val")).repaired == names(out / "val", path)
    flip_pixel(out / "val", 2)
    shutil.rmtree(source / "val")
    done = repair(out, source)
    assert "missing or changed" in done["val"].failures[0].why
    assert done["train"].failures == ()


def test_with_other_options(here: None, tmp_path: Path, source: Path) -> None:
    """All that decides the bytes is taken from the manifest."""
    put(tmp_path, {"map": b"class2\nnone\nclass1\nclass0\n"})
    given = ConvertOptions(
        PixelOptions(
            size=9, fit="pad", resample="bicubic", channels=1, bits=12, orient=False, suspect="reject"
        ),
        StoreOptions(chunk_rows=4, compression="gzip"),
        seed=5,
        classes=("class2", "none", "class1", "class0"),
        jobs=1,
    )
    convert(source, tmp_path / "out", given)
    before = everything(tmp_path / "out")
    image_file(tmp_path / "out", 3).unlink()
    flip_pixel(tmp_path / "out", 0, row=1)
    assert only(repair(tmp_path / "out", source)).failures == ()
    assert everything(tmp_path / "out") == before


def test_a_later_version(out: Path, source: Path, storage: Storage) -> None:
    put(source, {"class0/new.png": png(999)})
    convert(source, out, options(storage))
    before = everything(out)
    image_file(out, 1).unlink()
    done = only(repair(out, source))
    assert (done.manifest.version, done.failures) == (2, ())
    assert everything(out) == before


def test_a_shard_that_a_later_version_took_over(out: Path, source: Path) -> None:
    """As one that only marks rows as dead: the shard was made by the version that its name says."""
    first = read_manifest(out)
    shards = (replace(first.shards[1], dead_rows=(2, 5)), first.shards[2])
    stats = Stats(first.stats.mean, first.stats.std)  # the sums would be those of all rows
    rows = sum(s.living_rows for s in shards)
    republish(out, replace(first, version=2, shards=shards, rows=rows, stats=stats))
    before = everything(out)
    image_file(out, 0).unlink()
    assert only(repair(out, source)).failures == ()
    assert everything(out) == before


def republish(out: Path, manifest: Manifest) -> None:
    for name in ("manifest.json", f"manifest-{manifest.version:06d}.json"):
        (out / name).write_text(manifest.to_json())


# --- a source that is no longer the same ----------------------------------------------------------------


def taken(folder: Path, shard: int) -> list[str]:
    """Ids of the pictures in a shard."""
    dataset = open_dataset(folder, columns=("id",))
    first = int(dataset.reader.rows.first_slot[shard])
    return dataset.ids(range(first, first + dataset.manifest.shards[shard].rows))


@pytest.mark.parametrize("damage", ["a byte", "gone"])
def test_pictures_that_came_and_went(out: Path, source: Path, damage: str) -> None:
    """Those that other shards hold may be gone, and new ones be there."""
    before = everything(out)
    (source / taken(out, 0)[3]).unlink()
    (source / taken(out, 3)[1]).unlink()
    path = flip_pixel(out, 1)
    if damage == "gone":
        path.unlink()
    time.sleep(0.02)  # what is newer than the version was not in it
    put(source, {f"class0/new {k}.png": png(1000 + k) for k in range(5)})
    assert only(repair(out, source)).failures == ()
    assert everything(out) == before


def test_pictures_that_were_renamed(out: Path, source: Path) -> None:
    before = everything(out)
    for id in taken(out, 1)[2:5]:
        (source / id).rename(source / "class0" / f"renamed {Path(id).name}")
    flip_pixel(out, 1)
    assert only(repair(out, source)).failures == ()
    assert everything(out) == before


def test_a_picture_that_is_there_under_another_id_too(here: None, tmp_path: Path, storage: Storage) -> None:
    """It is gone where it was, and a copy that another shard holds has its bytes."""
    source = draw(tmp_path / "source")
    put(source, {f"class0/copy of {i:04d}.png": png(i) for i in range(PICTURES)})
    out = tmp_path / "out"
    convert(source, out, options(storage))
    before = everything(out)
    other = {Path(id).name for number in (0, 2, 3) for id in taken(out, number) if "copy" in id}
    lost = next(id for id in taken(out, 1) if f"copy of {Path(id).name}" in other)
    (source / lost).unlink()
    flip_pixel(out, 1)
    assert only(repair(out, source)).failures == ()
    assert everything(out) == before


def test_pictures_that_are_gone_are_named(out: Path, source: Path, command: Command) -> None:
    """One shard can be repaired, the other not."""
    whole = everything(out)
    damaged = [flip_pixel(out, 1), flip_pixel(out, 2)]
    lost = taken(out, 2)[4]
    (source / lost).unlink()
    before = everything(out)
    ran = command("repair", out, "--source", source)
    assert ran.code == 1
    (name,) = names(out, damaged[0])
    (other,) = names(out, damaged[1])
    assert f"  repaired '{name}'\n" in ran.out
    assert (
        f"  still damaged: '{other}': pictures that are missing or changed in '{source}' (1): '{lost}'"
        in ran.out
    )
    files = sum(len(shard.files) for shard in read_manifest(out).shards)
    assert (
        ran.out.splitlines()[-1] == f"  checked: sizes and hashes of {files - 1} of {files} files are right"
    )
    assert everything(out) == {**before, name: whole[name]}
    found = json.loads(command("repair", out, "--source", source, "--json").out)
    assert found["repaired"] == []
    assert [each["files"] for each in found["failed"]] == [[other]]
    put(source, {lost: whole_picture(lost)})
    assert command("repair", out, "--source", source).code == 0
    assert everything(out) == whole


def whole_picture(id: str) -> bytes:
    return png(int(Path(id).stem))


def test_pictures_that_changed_are_named(out: Path, source: Path) -> None:
    flip_pixel(out, 1)
    changed = taken(out, 1)[6]
    put(source, {changed: png(999)})
    before = everything(out)
    (failure,) = only(repair(out, source)).failures
    assert f"pictures that are missing or changed in '{source}' (1): '{changed}'" in failure.why
    assert everything(out) == before


def test_pictures_that_changed_where_nothing_is_left_of_the_shard(out: Path, source: Path) -> None:
    changed = taken(out, 1)[6]
    for file in read_manifest(out).shards[1].files:
        (out / file.name).unlink()
    time.sleep(0.02)
    put(source, {changed: png(999)})
    before = everything(out)
    done = only(repair(out, source))
    (failure,) = done.failures
    assert set(done.repaired) | set(failure.files) == {f.name for f in done.manifest.shards[1].files}
    assert f"pictures were changed since: '{changed}'" in failure.why
    after = everything(out)
    assert {name: after[name] for name in before} == before


def test_nothing_is_known_of_the_rows(out: Path, source: Path) -> None:
    for file in read_manifest(out).shards[1].files:
        (out / file.name).unlink()
    (source / next(iter({*ids_of(source)} - {*others(out, 1)}))).unlink()
    before = everything(out)
    (failure,) = only(repair(out, source)).failures
    assert failure.why == (
        f"its rows are not known: what is left of it cannot be read, and the pictures in '{source}' are not those "
        "that it was made from"
    )
    assert everything(out) == before


def ids_of(source: Path) -> list[str]:
    return [str(path.relative_to(source)) for path in source.rglob("*/*.png")]


def others(out: Path, shard: int) -> list[str]:
    return [
        id for number in range(len(read_manifest(out).shards)) if number != shard for id in taken(out, number)
    ]


def test_a_reject_that_was_mended_since_stays_out(out: Path, source: Path) -> None:
    before = everything(out)
    put(source, {f"class1/{i:04d}.jpg": jpeg(seed=i) for i in (7, 22, 41)})
    shards = read_manifest(out).shards
    for file in (file for shard in shards for file in shard.files):
        (out / file.name).unlink()
    done = only(repair(out, source))
    assert done.failures == ()
    assert everything(out) == before


def test_without_the_report(out: Path, source: Path) -> None:
    """The pictures that were rejected are rejected again."""
    (out / "report-000001.jsonl").write_text("[}")
    before = everything(out)
    for file in (file for shard in read_manifest(out).shards for file in shard.files):
        (out / file.name).unlink()
    assert only(repair(out, source)).failures == ()
    assert everything(out) == before


# --- what cannot be the same ----------------------------------------------------------------------------


def test_another_environment_is_named(out: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flip_pixel(out, 1)
    before = everything(out)
    now = write.environment()
    real = write.decode

    def other(data: bytes, options: PixelOptions) -> Any:
        picture = real(data, options)
        return replace(picture, pixels=picture.pixels ^ 1)

    monkeypatch.setattr(write, "decode", other)
    monkeypatch.setattr(write, "environment", lambda: {**now, "torch": "9.9"})
    (failure,) = only(repair(out, source)).failures
    assert failure.why == (
        "its pictures give other bytes now: it was made by other versions of libraries: "
        f"torch is '{now['torch']}' there, '9.9' here"
    )
    assert everything(out) == before


def test_another_environment_that_gives_the_same_bytes_will_do(
    out: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = everything(out)
    flip_pixel(out, 1)
    now = write.environment()
    monkeypatch.setattr(write, "environment", lambda: {**now, "torch": "9.9"})
    assert only(repair(out, source)).failures == ()
    assert everything(out) == before


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"pixel_path": "another"}, "decoded by 'another'"),
        ({"colour": "ok"}, r"options that are unknown here \(colour\): install a newer"),
        ({"size": "8"}, "option size is '8'"),
        ({"size": 9}, "its options are not those of its images"),
        ({"format": "other"}, "format is 'other'"),
        ({"chunk_rows": 1 << 40}, "chunk_rows is"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": True}, "option seed is True"),
        ({"shard_mib": float("nan")}, "shard_mib is nan"),
        ({"shard_mib": 0.0001}, "do not give a shard of so many rows"),
        ({"seed": 7}, "missing or changed|give other bytes now"),
    ],
)
def test_manifests_of_other_tools_and_hostile_ones(
    out: Path, source: Path, change: dict[str, Any], why: str, command: Command
) -> None:
    import re

    manifest = read_manifest(out)
    for file in manifest.shards[1].files:
        (out / file.name).unlink()
    republish(out, replace(manifest, options={**manifest.options, **change}))
    before = everything(out)
    ran = command("repair", out, "--source", source)
    assert ran.code == 1
    assert re.search(why, ran.out), ran.out
    after = everything(out)
    assert {name: after[name] for name in before} == before


@pytest.mark.parametrize("source_", [{}, {"files": 1 << 60}, {"files": 3}])
def test_counts_that_do_not_fit(out: Path, source: Path, source_: dict[str, int]) -> None:
    flip_pixel(out, 1)
    republish(out, replace(read_manifest(out), source=source_))
    assert "does not say from how many pictures" in only(repair(out, source)).failures[0].why


@pytest.mark.parametrize("name", ["victim", "other/000001-00001.h5", "shards/mine.h5", "report-000001.jsonl"])
def test_names_that_are_not_a_conversions_are_not_written(out: Path, source: Path, name: str) -> None:
    put(out, {"victim": b"victim", "other/000001-00001.h5": b"victim", "shards/mine.h5": b"victim"})
    manifest = read_manifest(out)
    shard = manifest.shards[1]
    hostile = replace(shard, files=(replace(shard.files[0], name=name), *shard.files[1:]))
    republish(out, replace(manifest, shards=(manifest.shards[0], hostile, *manifest.shards[2:])))
    before = everything(out)
    (failure,) = only(repair(out, source)).failures
    assert "not named as a conversion names them" in failure.why
    assert everything(out) == before


def test_a_later_format_is_refused(out: Path, source: Path, command: Command) -> None:
    flip_pixel(out, 1)
    found = json.loads((out / "manifest.json").read_text())
    for change in ({"format_version": 2}, {"needs": ["tiles"]}):
        (out / "manifest.json").write_text(json.dumps({**found, **change}))
        before = everything(out)
        with pytest.raises(FormatError, match="install a newer shardwright"):
            repair(out, source)
        assert command("repair", out, "--source", source).code == 1
        assert everything(out) == before


def test_a_data_set_that_no_conversion_made(
    here: None, tmp_path: Path, source: Path, storage: Storage
) -> None:
    built = build(tmp_path / "out", storage)
    (built.folder / built.manifest.shards[0].files[0].name).unlink()
    assert "decoded by None" in only(repair(tmp_path / "out", source)).failures[0].why


def test_ids_that_lead_out_of_the_source_are_not_followed(
    here: None, tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardwright.convert.origin import Pictures

    put(tmp_path, {"secret": b"secret"})
    pictures = Pictures(source)
    for path in ("../secret", str(tmp_path / "secret"), "class0/../../secret", "", "/", "."):
        assert pictures.digests([path]) == [None]


def test_a_folder_in_its_place(out: Path, source: Path) -> None:
    path = image_file(out, 1)
    path.unlink()
    put(out, {f"{path.relative_to(out)}/mine": b"mine"})
    assert "a folder lies in its place" in only(repair(out, source)).failures[0].why
    assert (path / "mine").read_bytes() == b"mine"


@pytest.mark.parametrize("name", ["shards", ".shardwright"])
def test_folders_that_are_links_are_refused(out: Path, source: Path, tmp_path: Path, name: str) -> None:
    flip_pixel(out, 1)
    (out / name).rename(tmp_path / "elsewhere")
    (out / name).symlink_to(tmp_path / "elsewhere")
    before = with_lock(tmp_path / "elsewhere")
    with pytest.raises(OutputError, match="is a link"):
        repair(out, source)
    assert with_lock(tmp_path / "elsewhere") == before


def test_a_locked_output(out: Path, source: Path, command: Command) -> None:
    flip_pixel(out, 1)
    before = everything(out)
    with one_writer(out):
        with pytest.raises(LockedError, match="is held by process"):
            repair(out, source)
        assert command("repair", out, "--source", source).code == 4
    assert everything(out) == before


def test_usage(out: Path, source: Path, tmp_path: Path, command: Command) -> None:
    assert command("repair", out).code == 2
    assert command("repair", out, "--source", tmp_path / "nothing").code == 2
    assert command("repair", out, "--source", out / "shards").code == 2
    assert command("repair", tmp_path / "nothing", "--source", source).code == 1
    with pytest.raises(UsageError):
        repair(out, out)


def test_no_room(out: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flip_pixel(out, 1)
    before = everything(out)
    with monkeypatch.context() as patch:
        patch.setattr("shardwright.convert.space.free_bytes", lambda _: 100)
        with pytest.raises(OutputError, match="needs"):
            repair(out, source)
    with monkeypatch.context() as patch:
        patch.setattr("shardwright.convert.store.GuardedFile.check", _no_space)
        with pytest.raises(OutputError, match="quota is used up"):
            repair(out, source)
    assert everything(out) == before


def _no_space(*_: Any) -> None:
    raise OSError(122, "Disk quota exceeded")


# --- killed, and beside readers -------------------------------------------------------------------------


def test_killed_at_random_instants(tmp_path: Path, source: Path, storage: Storage, kills: int) -> None:
    """Each file is the damaged one or the repaired one, and the next run finishes."""
    out, damaged_copy = tmp_path / "out", tmp_path / "damaged"
    convert(source, out, options(storage))
    right = everything(out)
    for shard in range(4):
        flip_pixel(out, shard)
    shutil.copytree(out, damaged_copy)
    wrong = everything(out)
    mark = f"SHARDWRIGHT_TEST_{os.getpid()}_repair_{storage}"
    chance = random.Random(1)
    command = [
        sys.executable,
        "-P",
        "-m",
        "shardwright",
        "repair",
        str(out),
        "--source",
        str(source),
        "--jobs",
        "2",
    ]
    longest = 2.0
    for number in range(max(4, kills // 3)):
        start = time.monotonic()
        process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, mark: "1"},
            start_new_session=True,
        )
        try:
            if number % 2:  # most of the time goes into starting
                while process.poll() is None and not list(out.glob(".shardwright/work-*/*")):
                    time.sleep(0.002)
                process.wait(chance.uniform(0, 0.3))
            else:
                process.wait(chance.uniform(0, longest))
            assert process.returncode == 0
            longest = time.monotonic() - start
        except subprocess.TimeoutExpired:
            process.kill() if number % 4 < 2 else os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        end = time.monotonic() + 5
        while processes_naming(mark) and time.monotonic() < end:
            time.sleep(0.02)
        now = {
            name: data for name, data in everything(out).items() if not name.startswith(".shardwright/work-")
        }
        assert now.keys() == right.keys()
        assert all(data in (right[name], wrong[name]) for name, data in now.items())
        if now == right:
            shutil.rmtree(out)
            shutil.copytree(damaged_copy, out)
    assert only(repair(out, source)).failures == ()
    assert everything(out) == right


def test_terminated(tmp_path: Path, source: Path) -> None:
    convert(source, tmp_path / "out", options())
    for shard in range(4):
        flip_pixel(tmp_path / "out", shard)
    mark = f"SHARDWRIGHT_TEST_{os.getpid()}_repair_end"
    command = [sys.executable, "-P", "-m", "shardwright", "repair", tmp_path / "out", "--source", source]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, env={**os.environ, mark: "1"}, text=True
    ) as process:
        while not list(tmp_path.glob("out/.shardwright/work-*")):
            assert process.poll() is None
            time.sleep(0.005)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=20)
    assert process.returncode == 143
    assert "terminated; the same command goes on" in said
    assert "Traceback" not in said
    assert processes_naming(mark) == []
    assert not list(tmp_path.glob("out/.shardwright/work-*"))


class Killed(BaseException):
    """As SIGKILL: nothing that would clean up is done."""


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", [0, 1])
def test_killed_around_a_rename(
    out: Path, source: Path, monkeypatch: pytest.MonkeyPatch, when: str, step: int
) -> None:
    from shardwright.convert import repair as module

    right = everything(out)
    damaged = [flip_pixel(out, shard) for shard in (1, 2)]
    real, calls = os.replace, 0

    def rename(old: Path, new: Path) -> None:
        nonlocal calls
        if calls == step and when == "before":
            raise Killed
        real(old, new)
        calls += 1
        if calls > step and when == "after":
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(module.os, "replace", rename)
        patch.setattr(module.Output, "forget_work", lambda self: None)
        with pytest.raises(Killed):
            repair(out, source)
    done = step + (when == "after")
    assert [path.read_bytes() == right[str(path.relative_to(out))] for path in damaged].count(True) == done
    assert len(only(repair(out, source)).repaired) == 2 - done
    assert everything(out) == right


def test_readers_beside_it(out: Path, source: Path) -> None:
    """Who has a damaged file open keeps it; who opens it after that has the repaired one."""
    dataset = open_dataset(out)
    whole = [image.numpy().tobytes() for image, _ in dataset]
    image_file(out, 0).unlink()
    os.truncate(image_file(out, 1), 1000)
    repair(out, source)
    assert [image.numpy().tobytes() for image, _ in open_dataset(out)] == whole
    assert dataset[0][0].numpy().tobytes() == whole[0]
    with pytest.raises(ShardError, match="it ends before.*`shardwright repair` makes it again"):
        dataset[SHARD_ROWS + 10]


def test_an_unfinished_conversion_is_left_alone(out: Path, source: Path, command: Command) -> None:
    flip_pixel(out, 1)
    put(out, {".shardwright/run/000002-00000.h5": b"kept", ".shardwright/run/request.json": b"{}"})
    assert command("repair", out, "--source", source).code == 0
    assert (out / ".shardwright/run/000002-00000.h5").read_bytes() == b"kept"


def test_convert_does_nothing_after_it(hinted: Path, source: Path, storage: Storage) -> None:
    image_file(hinted, 1).unlink()
    repair(hinted, source)
    assert not convert(source, hinted, options(storage))[0].made


# --- what is known beside the version -----------------------------------------------------------------------


def test_lost_shards_are_known_by_what_is_beside_the_version(
    hinted: Path, source: Path, tmp_path: Path
) -> None:
    """Whatever became of the source since: other pictures came, and some have moved."""
    before = everything(hinted)
    put(source, {f"class0/new {k}.png": png(900 + k) for k in range(5)})
    (source / "class0" / "0000.png").rename(source / "class2" / "elsewhere.png")
    for shard in range(len(read_manifest(hinted).shards)):
        lose(hinted, shard)
    assert only(repair(hinted, source)).failures == ()
    assert everything(hinted) == before


def test_lost_shards_and_a_changed_picture(hinted: Path, source: Path) -> None:
    lose(hinted, 0)
    known = Output(hinted).hints(read_manifest(hinted))
    assert known is not None
    (source / known.ids[0]).write_bytes(png(12345))
    (failure,) = only(repair(hinted, source)).failures
    assert failure.why.startswith(f"pictures that are missing or changed in '{source}' (1): '{known.ids[0]}'")


def test_a_data_set_that_was_synced(
    tmp_path: Path, here: None, source: Path, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards of each sync, those with pixels that were copied, and old ones whose own version is gone."""
    monkeypatch.setattr("shardwright.convert.hints._REST_NS", -60_000_000_000)  # the files are at rest
    monkeypatch.setattr("shardwright.convert.output._PUT_BACK_NS", -(1 << 62))
    hinted = tmp_path / "hinted"
    convert(source, hinted, options(storage))
    lacking = next(k for k in range(4) if "class0/0000.png" in taken(hinted, k))
    put(source, {"class0/0000.png": png(700), "new/1.png": png(701), "new/2.png": png(702)})
    for k in (3, 6, 9):
        (source / "class0" / f"{k:04d}.png").rename(source / "new" / f"moved{k}.png")
    sync(source, hinted, SyncOptions(jobs=1))
    manifest, before = read_manifest(hinted), everything(hinted)
    whole = [k for k, shard in enumerate(manifest.shards) if not shard.dead_rows]
    assert len(whole) >= 3  # an old one, the new pictures, and those that moved
    for shard in whole:
        lose(hinted, shard)
    assert only(repair(hinted, source)).failures == ()
    assert everything(hinted) == before
    gc(hinted, GcOptions(keep=1, min_age_seconds=0))
    before = everything(hinted)
    for shard in whole:
        lose(hinted, shard)
    flip_pixel(hinted, lacking)
    failures = only(repair(hinted, source)).failures
    assert [failure.files[0] for failure in failures] == [manifest.shards[lacking].files[0].name]
    now = everything(hinted)
    assert {name for name in before if before[name] != now[name]} == {failures[0].files[0]}


@pytest.mark.parametrize(("new", "broken"), [(3, 1), (10, 6), (20, 3)])
def test_a_synced_shard_with_rejects(
    tmp_path: Path,
    here: None,
    source: Path,
    storage: Storage,
    monkeypatch: pytest.MonkeyPatch,
    new: int,
    broken: int,
) -> None:
    """Its bytes depend on how many rows were planned."""
    monkeypatch.setattr("shardwright.convert.hints._REST_NS", -60_000_000_000)  # the files are at rest
    monkeypatch.setattr("shardwright.convert.output._PUT_BACK_NS", -(1 << 62))
    out = tmp_path / "out"
    convert(source, out, options(storage))
    put(source, {f"new/{k}.png": png(800 + k) if k >= broken else png(k)[:-30] for k in range(new)})
    sync(source, out, SyncOptions(jobs=1))
    before = everything(out)
    for number, shard in enumerate(read_manifest(out).shards):
        if shard.files[0].name.startswith("shards/000002"):
            lose(out, number)
    assert only(repair(out, source)).failures == ()
    assert everything(out) == before
