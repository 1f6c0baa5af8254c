"""`gc` removes old versions and nothing else, and may be killed at any instant."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from building import Built, build, publish_next
from drawing import png, put
from test_one_writer import everything as with_lock

from shardwright.convert import ConvertOptions, PixelOptions, StoreOptions, convert
from shardwright.convert import gc as of
from shardwright.convert.gc import GcOptions, gc
from shardwright.convert.lock import one_writer
from shardwright.convert.options import seconds_of
from shardwright.convert.verify import verify
from shardwright.convert.versions import versions
from shardwright.datasets import open_dataset
from shardwright.datasets.layout import Storage
from shardwright.datasets.manifest import versions_of
from shardwright.errors import FormatError, LockedError, OutputError, UsageError

Command = Callable[..., Any]
DAY = 86400.0
NOW = GcOptions(min_age_seconds=0)


@pytest.fixture(params=["hdf5", "npy"])
def storage(request: pytest.FixtureRequest) -> Storage:
    return request.param  # type: ignore[no-any-return]


def everything(folder: Path) -> dict[str, bytes]:
    """All files but the lock, which stays where a writer was."""
    return {name: data for name, data in with_lock(folder).items() if name != ".shardwright/lock"}


def aged(folder: Path, days: float) -> None:
    """Let all that lies in ``folder`` be so many days older than it is."""
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            status = path.stat()
            os.utime(path, (status.st_atime, status.st_mtime - days * DAY))


def four_versions(folder: Path, storage: Storage = "hdf5") -> Built:
    """Each shares two shards with the one before, which of version 1 has three, and has one of its own."""
    built = build(folder, storage, rows=50, shard_rows=20)
    for _ in range(3):
        publish_next(built, keep=2)
    return built


@pytest.fixture
def four(tmp_path: Path, storage: Storage) -> Built:
    return four_versions(tmp_path / "out", storage)


def assert_versions_are_whole(folder: Path) -> None:
    """Every version that has a manifest can be read to the last row."""
    assert versions_of(folder)
    for version in versions_of(folder):
        dataset = open_dataset(folder, version=version, columns=("image", "label", "id"))
        assert len(dataset.read_batch(range(len(dataset)))) == len(dataset)
    assert verify(folder).damage == ()


def test_beyond_keep_goes_and_shared_shards_stay(four: Built, storage: Storage, command: Command) -> None:
    before = everything(four.folder)
    dry = command("gc", four.folder, "--min-age", "0", "--dry-run")
    assert everything(four.folder) == before
    found = json.loads(command("gc", four.folder, "--min-age", "0", "--dry-run", "--json").out)
    said = command("gc", four.folder, "--min-age", "0")
    after = everything(four.folder)
    gone = sorted(before.keys() - after.keys())
    ending = "h5" if storage == "hdf5" else "id.npy"
    assert {name for name in gone if not name.startswith("shards/")} == {
        f"{name}-00000{version}.{end}"
        for version in (1, 2)
        for name, end in (("manifest", "json"), ("report", "jsonl"), (".shardwright/source", "npz"))
    }
    assert {name for name in gone if name.endswith(ending)} == {
        f"shards/00000{version}-00002.{ending}" for version in (1, 2)
    }
    assert after == {name: before[name] for name in before if name not in gone}
    assert sorted(found["files"]) == gone
    assert found["bytes"] == sum(len(before[name]) for name in gone)
    assert (found["removed"], found["kept"], found["dry_run"]) == ([1, 2], [3, 4], True)
    assert f"{len(gone)} files would be removed" in dry.out
    assert f"'{four.folder}': {len(gone)} files removed, {found['bytes'] / 1e6:.1f} MB" in said.out
    assert "version 1 is gone" in said.out
    assert "version 4 stays: the newest" in said.out
    assert_versions_are_whole(four.folder)
    again = command("gc", four.folder, "--min-age", "0")
    assert (again.code, again.out.splitlines()[0]) == (0, f"'{four.folder}': nothing to remove")
    assert everything(four.folder) == after


def test_the_newest_stays_whatever_is_asked_for(four: Built) -> None:
    aged(four.folder, 1000)
    gc(four.folder, GcOptions(keep=1, min_age_seconds=0))
    assert versions_of(four.folder) == [4]
    assert_versions_are_whole(four.folder)
    for keep in (0, -1, True, 1.5):
        with pytest.raises(UsageError, match="never removed"):
            GcOptions(keep=keep)  # type: ignore[arg-type]


def test_age_counts_from_when_another_became_the_newest(four: Built) -> None:
    """Made 300, 200, 100 and 10 days ago: version 2 was the newest until 100 days ago."""
    for version, days in ((1, 300), (2, 200), (3, 100), (4, 10)):
        when = time.time() - days * DAY
        os.utime(four.folder / f"manifest-00000{version}.json", (when, when))
    os.utime(four.folder / "manifest.json", (when, when))
    found = gc(four.folder, GcOptions(1, 150 * DAY, dry_run=True))[""]
    assert found.versions == (1,)
    assert {v: s and round(s / DAY) for v, s in found.stay.items()} == {2: 100, 3: 10, 4: None}
    assert gc(four.folder, GcOptions(1, 250 * DAY, dry_run=True))[""].versions == ()
    assert gc(four.folder, GcOptions(1, 11 * DAY, dry_run=True))[""].versions == (1, 2)
    assert gc(four.folder, GcOptions(1, 9 * DAY, dry_run=True))[""].versions == (1, 2, 3)


def test_what_is_young_stays(four: Built) -> None:
    before = everything(four.folder)
    found = gc(four.folder)[""]
    assert (found.files, found.versions, list(found.stay)) == ({}, (), [1, 2, 3, 4])
    aged(four.folder, 13.9)
    assert gc(four.folder)[""].files == {}
    aged(four.folder, 0.2)
    orphan = four.folder / "shards" / "000002-00099.h5"
    orphan.write_bytes(b"young")
    found = gc(four.folder)[""]
    assert found.versions == (1, 2)
    assert found.young == 1
    assert orphan.exists()
    assert before.keys() - everything(four.folder).keys() == set(found.files)


def test_a_time_to_come_is_young(four: Built) -> None:
    aged(four.folder, -30)
    assert gc(four.folder, GcOptions(1, 10))[""].files == {}


def test_files_that_are_not_ours_stay(four: Built, tmp_path: Path) -> None:
    """Foreign names, links and folders; and what a link leads to."""
    put(tmp_path, {"victim/file": b"victim", "victim/000001-00077.h5": b"victim"})
    foreign = {
        "notes.txt": b"mine",
        "manifest-1.json": b"mine",
        "report-000001.jsonl.bak": b"mine",
        "report-000003.txt": b"mine",
        "shards/README": b"mine",
        "shards/000001-00007.h5.bak": b"mine",
        "shards/1-2.h5": b"mine",
        "shards/000001-00007.hdf5": b"mine",
        "shards/my-000001-00007.h5": b"mine",
        "shards/000001-00008.h5/inside": b"mine",
        "shards/deep/000001-00007.h5": b"mine",
        ".shardwright/source-1.npz": b"mine",
    }
    put(four.folder, foreign)
    (four.folder / "shards" / "000001-00077.h5").symlink_to(tmp_path / "victim" / "000001-00077.h5")
    (four.folder / "shards" / "000001-00078.h5").symlink_to(tmp_path / "victim")
    (four.folder / "report-000002.jsonl").unlink()
    (four.folder / "report-000002.jsonl").symlink_to(tmp_path / "victim" / "file")
    gc(four.folder, GcOptions(1, 0))
    assert versions_of(four.folder) == [4]
    assert {name: (four.folder / name).read_bytes() for name in foreign} == foreign
    assert everything(tmp_path / "victim") == {"file": b"victim", "000001-00077.h5": b"victim"}
    assert (four.folder / "shards" / "000001-00077.h5").is_symlink()
    assert (four.folder / "report-000002.jsonl").is_symlink()
    assert_versions_are_whole(four.folder)


@pytest.mark.parametrize("name", ["shards", ".shardwright"])
def test_folders_that_are_links_are_refused(four: Built, tmp_path: Path, name: str) -> None:
    (four.folder / name).rename(tmp_path / "elsewhere")
    (four.folder / name).symlink_to(tmp_path / "elsewhere")
    before = everything(tmp_path / "elsewhere")
    with pytest.raises(OutputError, match="is a link"):
        gc(four.folder, NOW)
    assert everything(tmp_path / "elsewhere") == before
    assert versions_of(four.folder) == [1, 2, 3, 4]


def test_a_link_that_comes_up_meanwhile_is_not_followed(
    four: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = of._remove

    def swapped(garbage: of.Garbage) -> None:
        (four.folder / "shards").rename(tmp_path / "elsewhere")
        (four.folder / "shards").symlink_to(tmp_path / "elsewhere")
        real(garbage)

    monkeypatch.setattr(of, "_remove", swapped)
    before = everything(four.folder / "shards")
    with pytest.raises(OutputError, match="cannot remove"):
        gc(four.folder, NOW)
    assert everything(tmp_path / "elsewhere") == before


def test_a_manifest_that_is_a_link_is_not_removed(four: Built, tmp_path: Path) -> None:
    manifest = four.folder / "manifest-000001.json"
    manifest.rename(tmp_path / "mine.json")
    manifest.symlink_to(tmp_path / "mine.json")
    assert gc(four.folder, GcOptions(1, 0))[""].versions == (2, 3)
    assert (tmp_path / "mine.json").exists()
    assert_versions_are_whole(four.folder)  # of which version 1 is one, through its link


@pytest.mark.parametrize("version", [1, 3, 4])
@pytest.mark.parametrize(
    "text",
    ["", "{}", "[" * 100_000, '{"format": "shardwright", "format_version": 2}', "folder", "pipe", "link"],
)
def test_a_manifest_that_cannot_be_read_keeps_all(four: Built, version: int, text: str) -> None:
    """What its version needs is not known: a later version of this program may have made it."""
    manifest = four.folder / f"manifest-00000{version}.json"
    manifest.unlink()
    match text:
        case "folder":
            manifest.mkdir()
        case "pipe":
            os.mkfifo(manifest)
        case "link":
            manifest.symlink_to(four.folder / "nowhere")
        case _:
            manifest.write_text(text)
    before = everything(four.folder)
    with pytest.raises(FormatError, match="nothing was removed|no version"):
        gc(four.folder, NOW)
    assert everything(four.folder) == before


@pytest.mark.parametrize(
    "name", ["../victim", "/victim", "shards/../../victim", "manifest-000004.json", "other/x.h5"]
)
def test_a_hostile_manifest_removes_nothing_else(four: Built, tmp_path: Path, name: str) -> None:
    put(tmp_path, {"victim": b"victim", "out/other/x.h5": b"victim"})
    path = four.folder / "manifest-000001.json"
    found = json.loads(path.read_text())
    found["shards"][0]["files"][0]["name"] = name
    path.write_text(json.dumps(found))
    try:
        gc(four.folder, NOW)
    except FormatError:
        assert versions_of(four.folder) == [1, 2, 3, 4]
    assert (tmp_path / "victim").exists()
    assert (four.folder / "other/x.h5").exists()
    assert_whole_but_first(four.folder)


def assert_whole_but_first(folder: Path) -> None:
    assert all(version.whole for version in versions(folder) if version.version > 1)
    assert verify(folder).damage == ()


def test_a_version_that_is_not_published_yet_stays(four: Built) -> None:
    """Killed between its own manifest and manifest.json: version 4 counts as none, and needs its shards."""
    shutil.copy(four.folder / "manifest-000003.json", four.folder / "manifest.json")
    found = gc(four.folder, GcOptions(1, 0))[""]
    assert found.versions == (1, 2)
    assert versions_of(four.folder) == [3, 4]
    assert_versions_are_whole(four.folder)
    assert "version 4 stays: unpublished" in "\n".join(of.in_words(found, False))


def test_shards_that_an_unfinished_run_placed_stay(four: Built) -> None:
    """And go where no unfinished run is there to want them."""
    put(four.folder, {"shards/000005-00000.h5": b"placed", ".shardwright/run/request.json": b"{}"})
    aged(four.folder, 100)
    assert "shards/000005-00000.h5" not in gc(four.folder)[""].files
    assert (four.folder / "shards/000005-00000.h5").exists()
    shutil.rmtree(four.folder / ".shardwright/run")
    assert list(gc(four.folder)[""].files) == ["shards/000005-00000.h5"]


def test_without_its_own_manifest_the_newest_stays(four: Built) -> None:
    (four.folder / "manifest-000004.json").unlink()
    assert gc(four.folder, GcOptions(1, 0))[""].versions == (1, 2, 3)
    assert verify(four.folder).damage == ()


def test_without_a_hidden_folder(four: Built) -> None:
    shutil.rmtree(four.folder / ".shardwright")
    assert gc(four.folder, GcOptions(1, 0))[""].versions == (1, 2, 3)
    assert_versions_are_whole(four.folder)


def test_a_locked_output(four: Built, command: Command) -> None:
    before = everything(four.folder)
    with one_writer(four.folder):
        with pytest.raises(LockedError, match="is held by process"):
            gc(four.folder, NOW)
        assert command("gc", four.folder, "--min-age", "0").code == 4
        assert gc(four.folder, GcOptions(1, 0, dry_run=True))[""].versions == (1, 2, 3)
    assert everything(four.folder) == before


def test_splits_go_under_one_lock(tmp_path: Path, command: Command) -> None:
    for split in ("train", "val"):
        four_versions(tmp_path / "out" / split)
    for folder in ("out", "out/val"):
        with one_writer(tmp_path / folder):
            assert command("gc", tmp_path / "out", "--min-age", "0").code == 4
            assert command("gc", tmp_path / "out" / "val", "--min-age", "0").code == 4
    assert versions_of(tmp_path / "out" / "train") == [1, 2, 3, 4]
    found = json.loads(command("gc", tmp_path / "out", "--min-age", "0", "--json").out)
    assert {split: each["removed"] for split, each in found.items()} == {"train": [1, 2], "val": [1, 2]}
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["train", "val"]
    (tmp_path / "out" / "val" / "manifest-000003.json").write_text("")
    assert command("gc", tmp_path / "out", "--keep", 1, "--min-age", "0").code == 1
    assert versions_of(tmp_path / "out" / "train") == [3, 4]  # decided for all before anything is removed
    (tmp_path / "out" / "val").rename(tmp_path / "val")
    (tmp_path / "out" / "val").symlink_to(tmp_path / "val")
    with pytest.raises(OutputError, match="is a link"):
        gc(tmp_path / "out", NOW)


def test_what_is_no_data_set_is_left_alone(tmp_path: Path, command: Command) -> None:
    put(tmp_path, {"folder/shards/000001-00000.h5": b"mine", "folder/manifest-000001.json": b"{}"})
    for folder in ("folder", "nothing"):
        assert command("gc", tmp_path / folder, "--min-age", "0").code == 1
    assert sorted(everything(tmp_path)) == ["folder/manifest-000001.json", "folder/shards/000001-00000.h5"]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("14d", 14 * DAY), ("36h", 1.5 * DAY), ("90m", 5400.0), ("30s", 30.0), ("0", 0.0), ("1.5d", 1.5 * DAY)],
)
def test_ages(text: str, seconds: float) -> None:
    assert seconds_of(text, "min_age") == seconds


@pytest.mark.parametrize(
    "text", ["", "14", "d", "-1d", "14 days", "1e3s", "١d", "nan", "inf", "0x1d", "9" * 400 + "d"]
)
def test_what_is_no_age(text: str, command: Command, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="such as 14d"):
        seconds_of(text, "min_age")
    assert command("gc", tmp_path, f"--min-age={text}").code == 2
    assert command("gc", tmp_path, "--keep", 0).code == 2


# --- killed, and beside readers -------------------------------------------------------------------------


class Killed(BaseException):
    """As SIGKILL: nothing that would clean up is done."""


def test_killed_between_any_two_steps(
    tmp_path: Path, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    four_versions(tmp_path / "whole", storage)
    gc_done = shutil.copytree(tmp_path / "whole", tmp_path / "done")
    steps = len(gc(gc_done, NOW)[""].files)
    right = everything(gc_done)
    real = os.unlink
    for after in range(steps):
        out = shutil.copytree(tmp_path / "whole", tmp_path / f"killed after {after}")
        done = 0

        def unlink(name: str, *, dir_fd: int, after: int = after) -> None:
            nonlocal done
            if done == after:
                raise Killed
            done += 1
            real(name, dir_fd=dir_fd)

        with monkeypatch.context() as patch:
            patch.setattr(of.os, "unlink", unlink)
            with pytest.raises(Killed):
                gc(out, NOW)
        assert_versions_are_whole(out)
        gc(out, NOW)
        assert everything(out) == right


_GC = [sys.executable, "-P", "-m", "shardwright", "gc", "--keep", "1", "--min-age", "0"]


def test_killed_at_random_instants(tmp_path: Path, kills: int) -> None:
    """SIGKILL while it removes some hundred files: what has a manifest is whole, and the next one finishes."""
    built = build(tmp_path / "whole", "npy", rows=240, shard_rows=4, chunk_rows=4)
    publish_next(built, keep=30)
    publish_next(built, keep=1)
    gc_done = shutil.copytree(tmp_path / "whole", tmp_path / "done")
    gc(gc_done, GcOptions(1, 0))
    right = everything(gc_done)
    chance = random.Random(0)
    shards = len(list((tmp_path / "whole" / "shards").iterdir()))
    cut = 0
    for _ in range(kills):
        out = shutil.copytree(tmp_path / "whole", tmp_path / "out")
        process = subprocess.Popen([*_GC, str(out)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        left = chance.randint(len(right), shards + 10)  # from before the first shard goes to the last one
        while process.poll() is None and len(os.listdir(out / "shards")) > left:
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
        cut += len(right) < len(everything(out)) < shards + len(right)
        assert_versions_are_whole(out)
        gc(out, GcOptions(1, 0))
        assert everything(out) == right
        shutil.rmtree(out)
    assert cut  # some fell in the middle


def test_reading_beside_it(four: Built) -> None:
    """A reader of what stays notices nothing; one of a version that goes goes on with what it has open."""
    stays, goes = open_dataset(four.folder, version=3), open_dataset(four.folder, version=1)
    goes.read_batch(range(50))
    gc(four.folder, NOW)
    assert len(stays.read_batch(range(50))) == 50
    assert len(goes.read_batch(range(50))) == 50
    with pytest.raises(FormatError, match="has no version 1, it has 3, 4: version 1 was removed"):
        open_dataset(four.folder, version=1)


def test_a_reader_has_the_least_age_from_when_its_version_was_the_newest(tmp_path: Path) -> None:
    """A version made long ago, opened just before the next one was published."""
    built = build(tmp_path / "out", rows=50, shard_rows=20)
    aged(built.folder, 100)
    reader = open_dataset(built.folder)
    publish_next(built, keep=0)
    assert gc(built.folder, GcOptions(keep=1))[""].versions == ()
    assert len(reader.read_batch(range(50))) == 50


def test_conversions_before_and_after_it(here: None, tmp_path: Path, storage: Storage) -> None:
    """What is up to date stays so, and numbers are not given again."""
    options = ConvertOptions(pixels=PixelOptions(size=8), store=StoreOptions(storage), jobs=1)
    source, out = tmp_path / "source", tmp_path / "out"
    for version in range(1, 4):
        put(source, {f"class{version % 2}/{version}.png": png(version)})
        convert(source, out, options)
    assert gc(out, GcOptions(1, 0))[""].versions == (1, 2)
    assert not convert(source, out, options)[0].made
    put(source, {"class0/new.png": png(9)})
    (done,) = convert(source, out, options)
    assert done.manifest.version == 4
    assert done.changes is not None
    assert done.changes.added == ("class0/new.png",)
    assert_versions_are_whole(out)
