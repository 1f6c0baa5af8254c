"""A data set follows its pictures: what is read back equals the tree, and nothing that stays is touched."""

import os
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from building import build as build_data_set
from drawing import encoded, jpeg, noise, png, put
from test_one_writer import everything
from trees import make_unreadable

from shardwright.convert import (
    ConvertOptions,
    PixelOptions,
    StoreOptions,
    convert,
    write,
)
from shardwright.convert import (
    hints as hints_module,
)
from shardwright.convert import (
    output as output_module,
)
from shardwright.convert import (
    scan as scan_module,
)
from shardwright.convert import (
    sync as sync_module,
)
from shardwright.convert.copy_plan import ReshardOptions
from shardwright.convert.gc import GcOptions, gc
from shardwright.convert.layouts import LayoutOptions
from shardwright.convert.lock import one_writer
from shardwright.convert.output import Output
from shardwright.convert.reshard import reshard
from shardwright.convert.selection import parse_shares
from shardwright.convert.split import SplitOptions, split
from shardwright.convert.sync import SyncOptions, dry_run, sync
from shardwright.convert.sync_plan import plan_sync
from shardwright.convert.sync_summary import Synced
from shardwright.convert.verify import verify
from shardwright.datasets import open_dataset
from shardwright.datasets.layout import Storage
from shardwright.datasets.manifest import read_manifest
from shardwright.errors import FormatError, LockedError, OutOfTimeError, OutputError, ShardError, SourceError

SIZE = 16
OPTIONS = ConvertOptions(
    PixelOptions(size=SIZE), StoreOptions(chunk_rows=4, shard_mib=8 * SIZE * SIZE * 3 / 2**20), jobs=1
)
SYNC = SyncOptions(jobs=1)
Command = Callable[..., Any]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return put(
        tmp_path / "src",
        {f"{c}/{k}.png": png(seed=100 * i + k) for i, c in enumerate("ab") for k in range(12)},
    )


@pytest.fixture(params=["hdf5", "npy"])
def storage(request: pytest.FixtureRequest) -> Storage:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def out(here: None, tree: Path, tmp_path: Path, storage: Storage) -> Path:
    convert(tree, tmp_path / "out", of(storage))
    return tmp_path / "out"


@pytest.fixture
def hdf5(here: None, tree: Path, tmp_path: Path) -> Path:
    convert(tree, tmp_path / "out", OPTIONS)
    return tmp_path / "out"


def of(storage: Storage) -> ConvertOptions:
    return replace(OPTIONS, store=replace(OPTIONS.store, format=storage))


@pytest.fixture(autouse=True)
def at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that a test has just written are believed to be at rest, and what is known of them to be no copy."""
    monkeypatch.setattr(hints_module, "_REST_NS", -60_000_000_000)
    monkeypatch.setattr(output_module, "_PUT_BACK_NS", -(1 << 62))


def only(found: dict[str, Any]) -> Any:
    (one,) = found.values()
    return one


def counts(done: Synced) -> dict[str, int]:
    return {kind: len(ids) for kind, ids in done.changes.items() if ids}


def samples_of(folder: Path, version: int | None = None) -> dict[str, tuple[str, bytes]]:
    """id -> (class, pixels)."""
    dataset = open_dataset(folder, version=version)
    return {
        id: (dataset.classes[int(dataset[k][1])], dataset[k][0].numpy().tobytes())
        for k, id in enumerate(dataset.ids())
    }


def assert_is_the_tree(tree: Path, folder: Path, fresh: Path, options: ConvertOptions) -> None:
    """It is what a conversion of the tree as it is now gives, but for order and class numbers."""
    shutil.rmtree(fresh, ignore_errors=True)
    convert(tree, fresh, options)
    assert samples_of(folder) == samples_of(fresh)
    now, other = read_manifest(folder), read_manifest(fresh)
    assert now.stats == other.stats
    assert (now.rejected, now.suspect, now.duplicates) == (other.rejected, other.suspect, other.duplicates)
    assert now.source["files"] == other.source["files"]
    assert verify(folder, full=True).damage == ()


def hashed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    real, found = sync_module._digest, []

    def digest(path: Path) -> bytes | None:
        found.append(path)
        return real(path)

    monkeypatch.setattr(sync_module, "_digest", digest)
    return found


def decoded(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    real, found = write.decode, []

    def decode(data: bytes, *rest: Any) -> Any:
        found.append(data)
        return real(data, *rest)

    monkeypatch.setattr(write, "decode", decode)
    return found


# --- the tree --------------------------------------------------------------------------------------------


def test_all_kinds_of_changes(tree: Path, out: Path, tmp_path: Path, storage: Storage) -> None:
    before, files, old = read_manifest(out), everything(out / "shards"), open_dataset(out)
    pixels_before = samples_of(out)
    for k in range(3):
        (tree / "a" / f"{k}.png").unlink()
    put(
        tree,
        {
            "a/3.png": png(seed=900),
            "b/0.png": png(seed=901),
            "b/new.png": png(seed=902),
            "c/1.png": png(seed=903),
        },
    )
    (tree / "b" / "5.png").rename(tree / "c" / "five.png")
    done = only(sync(tree, out, SYNC))
    assert counts(done) == {"added": 2, "changed": 2, "moved": 1, "removed": 3}
    assert (done.version, done.made, done.new_classes) == (2, True, ("c",))
    assert_is_the_tree(tree, out, tmp_path / "fresh", of(storage))
    now = read_manifest(out)
    assert now.classes == ("a", "b", "c")
    assert [shard.rows for shard in now.shards[len(before.shards) :]] == [4, 1]  # decoded, and copied
    assert {name: data for name, data in everything(out / "shards").items() if name in files} == files
    assert samples_of(out, version=1) == pixels_before
    assert [old[k][0].numpy().tobytes() for k in range(len(old))] == [p for _, p in pixels_before.values()]


@pytest.mark.parametrize("seed", range(6))
def test_any_changes(here: None, tmp_path: Path, seed: int, storage: Storage) -> None:
    """Night after night: the data set is the tree, whatever became of that, and class numbers stay."""
    rng = random.Random(seed)
    tree, out = tmp_path / "src", tmp_path / "out"
    names = [f"{c}/{k}.png" for c in "abc" for k in range(6)]
    put(tree, {name: png(seed=k) for k, name in enumerate(names)})
    put(tree, {"a/broken.jpg": jpeg()[:-60], "b/same.png": png(seed=0)})
    convert(tree, out, of(storage))
    number = {name: k for k, name in enumerate(read_manifest(out).classes)}
    for night in range(4):
        there = sorted(str(p.relative_to(tree)) for p in tree.rglob("*") if p.is_file())
        for name in rng.sample(there, rng.randint(0, 4)):
            match rng.choice(("remove", "replace", "move", "touch", "break", "swap")):
                case "remove":
                    (tree / name).unlink()
                case "replace":
                    (tree / name).write_bytes(png(seed=rng.randint(1000, 1 << 30)))
                case "move":
                    target = (
                        tree / rng.choice(["a", "c", f"new{night}"]) / f"moved{rng.randint(0, 1 << 30)}.png"
                    )
                    target.parent.mkdir(exist_ok=True)
                    (tree / name).rename(target)
                case "touch":
                    os.utime(tree / name)
                case "break":
                    (tree / name).write_bytes(jpeg(seed=night)[: rng.randint(1, 300)])
                case "swap":
                    other = rng.choice([p for p in tree.rglob("*") if p.is_file()])
                    one, two = (tree / name).read_bytes(), other.read_bytes()
                    (tree / name).write_bytes(two)
                    other.write_bytes(one)
        put(
            tree,
            {
                f"{rng.choice('abd')}/n{night}-{k}.png": png(seed=2000 + 10 * night + k)
                for k in range(rng.randint(0, 3))
            },
        )
        sync(tree, out, replace(SYNC, allow_shrink=True))
        assert_is_the_tree(tree, out, tmp_path / "fresh", of(storage))
        classes = read_manifest(out).classes
        assert {name: k for k, name in enumerate(classes) if name in number} == number
        number = {name: k for k, name in enumerate(classes)}
        files = everything(out)
        assert not only(sync(tree, out, SYNC)).made
        assert {n: d for n, d in everything(out).items() if "source-" not in n} == {
            n: d for n, d in files.items() if "source-" not in n
        }


def test_splits_have_one_class_map_after_a_run_that_ended_between_them(
    here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One split has the new class already, and then one comes that sorts before it."""
    tree, out = tmp_path / "src", tmp_path / "out"
    put(tree, {f"{part}/b/{k}.png": png(seed=k) for part in ("train", "val") for k in range(3)})
    convert(tree, out, OPTIONS)
    put(tree, {f"{part}/c/1.png": png(seed=9) for part in ("train", "val")})
    real = Output.publish

    def publish(self: Output, *rest: Any) -> None:
        if self.folder.name == "val":
            raise KeyboardInterrupt
        real(self, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Output, "publish", publish)
        with pytest.raises(KeyboardInterrupt):
            sync(tree, out, SYNC)
    assert read_manifest(out / "train").classes == ("b", "c")
    assert read_manifest(out / "val").classes == ("b",)
    put(tree, {"val/a/1.png": png(seed=10)})
    sync(tree, out, SYNC)
    for part in ("train", "val"):
        assert read_manifest(out / part).classes == ("b", "c", "a")
        dataset = open_dataset(out / part)
        assert [id.partition("/")[0] for id in dataset.ids()] == [
            dataset.classes[k] for k in dataset.labels().tolist()
        ]


def test_splits_have_one_class_map(here: None, tmp_path: Path, command: Command) -> None:
    tree, out = tmp_path / "src", tmp_path / "out"
    put(tree, {f"{s}/{c}/{k}.png": png(seed=k) for s in ("train", "val") for c in "ab" for k in range(4)})
    convert(tree, out, OPTIONS)
    put(tree, {"val/z/new.png": png(seed=77)})
    ran = command("sync", tree, out, "--json")
    assert ran.code == 0, ran.err
    for s in ("train", "val"):
        manifest = read_manifest(out / s)
        assert (manifest.version, manifest.classes) == (2, ("a", "b", "z"))
        assert_is_the_tree(
            tree / s, out / s, tmp_path / f"fresh-{s}", replace(OPTIONS, classes=("a", "b", "z"))
        )
    assert '"train": {' in ran.out
    put(tree, {"test/a/1.png": png(seed=5)})
    ran = command("sync", tree, out)
    assert (ran.code, "has the split 'test', which" in ran.err) == (1, True)
    shutil.rmtree(tree / "test")
    shutil.rmtree(tree / "val")
    ran = command("sync", tree, out)
    assert (ran.code, "has no longer the split 'val'" in ran.err) == (1, True)
    put(tree, {"train/a/other.png": png(seed=6)})
    assert command("sync", tree, out, "--allow-shrink").code == 0
    assert (read_manifest(out / "train").version, read_manifest(out / "val").version) == (3, 2)


# --- what is read -----------------------------------------------------------------------------------------


def test_nothing_is_read_where_nothing_changed(
    tree: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, seen = everything(out), hashed(monkeypatch)
    done = only(sync(tree, out, SYNC))
    assert (done.made, done.version, seen) == (False, None, [])
    assert everything(out) == files
    assert "is up to date: version 1, 24 images. Nothing to do." in done.in_words()[0]


def test_a_file_of_other_times_alone_is_read_once(
    tree: Path, hdf5: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.utime(tree / "a" / "1.png", (1, 1))
    seen = hashed(monkeypatch)
    assert not only(sync(tree, hdf5, SYNC)).made
    assert seen == [tree / "a" / "1.png"]
    seen.clear()
    assert not only(sync(tree, hdf5, SYNC)).made
    assert seen == []


def test_the_same_size_and_time_do_not_hide_other_bytes(tree: Path, hdf5: Path, tmp_path: Path) -> None:
    """Whoever gives a file its old time back changes when it was last changed."""
    path = tree / "a" / "1.png"
    status, data = path.stat(), bytearray(path.read_bytes())
    other = encoded(noise(SIZE, SIZE, 555), "PNG")
    assert len(other) == len(data)
    time.sleep(0.02)  # a tick of the file system's clock
    path.write_bytes(other)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert counts(only(sync(tree, hdf5, SYNC))) == {"changed": 1}
    assert_is_the_tree(tree, hdf5, tmp_path / "fresh", OPTIONS)


def test_class_folders_that_changed_places(tree: Path, hdf5: Path, tmp_path: Path) -> None:
    """Names, sizes and all times of the files are what they were, to the tick: the inodes are not."""
    stamp = 1_500_000_000_000_000_000
    for path in tree.rglob("*.png"):
        os.utime(path, ns=(stamp, stamp))
    sync(tree, hdf5, SYNC)
    hints = Output(hdf5).hints(read_manifest(hdf5))
    assert hints is not None
    found = scan_module.scan(tree)
    ticks = replace(found.stamps, ctimes=np.full(24, stamp))
    known = replace(hints, stamps=replace(hints.stamps, ctimes=np.full(24, stamp)))
    before = plan_sync(known, replace(found, stamps=ticks), lambda places: [None] * len(places))
    assert before.is_empty
    (tree / "a").rename(tree / "t")
    (tree / "b").rename(tree / "a")
    (tree / "t").rename(tree / "b")
    found = scan_module.scan(tree)
    assert found.sizes.tolist() == [found.sizes[0]] * 24
    digest = partial(sync_module._digests, found, lambda _: None)
    plan = plan_sync(known, replace(found, stamps=replace(found.stamps, ctimes=np.full(24, stamp))), digest)
    assert (len(plan.kept), len(plan.moved)) == (0, 24)
    assert counts(only(sync(tree, hdf5, SYNC))) == {"changed": 24}
    assert_is_the_tree(tree, hdf5, tmp_path / "fresh", OPTIONS)


def test_a_file_that_was_just_changed_is_read_again(
    tree: Path, here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may change once more within the same tick of its clock; and clocks may go back."""
    with monkeypatch.context() as patch:
        patch.setattr(scan_module.time, "time_ns", lambda: 0)  # the files are of the future
        convert(tree, tmp_path / "out", OPTIONS)
    seen = hashed(monkeypatch)
    assert not only(sync(tree, tmp_path / "out", SYNC)).made
    assert len(seen) == 24
    seen.clear()
    assert not only(sync(tree, tmp_path / "out", SYNC)).made
    assert seen == []


def test_moved_pictures_are_not_decoded(
    tree: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor are those that changed places, or came twice: their rows are copied."""
    (tree / "a").rename(tree / "aardvark")
    shutil.copy(tree / "aardvark" / "0.png", tree / "b" / "copy.png")
    one, two = (tree / "b" / "1.png").read_bytes(), (tree / "b" / "2.png").read_bytes()
    put(tree, {"b/1.png": two, "b/2.png": one})
    seen = decoded(monkeypatch)
    done = only(sync(tree, out, SYNC))
    assert seen == []
    assert counts(done) == {"moved": 13, "changed": 2}
    assert done.lost_classes == ("a",)
    assert read_manifest(out).classes == ("a", "b", "aardvark")
    dataset = open_dataset(out)
    pixels = {id: dataset[k][0].permute(1, 2, 0).numpy() for k, id in enumerate(dataset.ids())}
    for k in range(12):
        assert np.array_equal(pixels[f"aardvark/{k}.png"], noise(SIZE, SIZE, k))
    assert np.array_equal(pixels["b/1.png"], noise(SIZE, SIZE, 102))
    assert verify(out, full=True).damage == ()


def test_lost_hints_cost_a_reading(
    tree: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes and times are not in the shards, but the hashes are."""
    hints = out / ".shardwright" / "source-000001.npz"
    damaged = bytearray(hints.read_bytes())
    damaged[damaged.index(b"b/1.png")] ^= 1
    for content in (bytes(damaged), b"", b"PK", None):
        hints.write_bytes(content) if content is not None else hints.unlink()
        with monkeypatch.context() as patch:
            seen = hashed(patch)
            done = only(sync(tree, out, SYNC))
            assert (done.made, len(seen)) == (False, 24)
            assert "what was known of the pictures of version 1 is lost" in done.notes[0]
            seen.clear()
            assert (only(sync(tree, out, SYNC)).made, seen) == (False, [])
    hints.unlink()
    (tree / "a" / "0.png").rename(tree / "b" / "moved.png")
    put(tree, {"a/1.png": png(seed=321)})
    assert counts(only(sync(tree, out, SYNC))) == {"changed": 1, "moved": 1}


def test_no_damage_of_hints_is_an_error(tree: Path, hdf5: Path) -> None:
    """A flipped bit anywhere, half a file, a pipe in its place: nothing is known then, and that is all."""
    path, manifest = hdf5 / ".shardwright" / "source-000001.npz", read_manifest(hdf5)
    whole = path.read_bytes()
    rng = random.Random(0)
    for _ in range(400):
        data = bytearray(whole)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        Output(hdf5).hints(manifest)
    for end in range(0, len(whole), 97):
        path.write_bytes(whole[:end])
        assert Output(hdf5).hints(manifest) is None
    path.unlink()
    os.mkfifo(path)
    assert Output(hdf5).hints(manifest) is None
    path.unlink()
    path.symlink_to(tree / "a" / "1.png")
    assert Output(hdf5).hints(manifest) is None


def test_a_copy_of_a_data_set_does_not_know_when_files_were_at_rest(
    tree: Path, hdf5: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of what is known is when that was found out; of a plain copy it is the time of the copy."""
    monkeypatch.setattr(output_module, "_PUT_BACK_NS", 50_000_000)
    hints = Output(hdf5).hints(read_manifest(hdf5))
    began = time.time_ns() - 3_600_000_000_000
    assert hints is not None
    Output(hdf5).remember(read_manifest(hdf5), replace(hints, began_ns=began))
    now = Output(hdf5).hints(read_manifest(hdf5))
    assert now is not None
    assert now.began_ns == began
    shutil.copytree(hdf5, tmp_path / "copy", copy_function=shutil.copyfile)
    seen = hashed(monkeypatch)
    assert not only(sync(tree, tmp_path / "copy", SYNC)).made
    assert len(seen) == 24


def test_hints_of_another_version_are_none(tree: Path, hdf5: Path) -> None:
    hints = Output(hdf5).hints(read_manifest(hdf5))
    assert hints is not None
    manifest = read_manifest(hdf5)
    for other in (
        replace(manifest, version=2),
        replace(manifest, rows=23),
        replace(manifest, classes=("a",)),
    ):
        assert type(hints).from_bytes(hints.to_bytes(manifest), 0, other) is None
        bad = replace(hints, labels=hints.labels[1:])
        assert type(hints).from_bytes(bad.to_bytes(manifest), 0, manifest) is None


# --- rejects and doubts -----------------------------------------------------------------------------------


def test_rejects_stay_rejected_unread(
    tree: Path, here: None, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    put(tree, {"a/cut.jpg": jpeg()[:-60], "b/empty.jpg": b"", "root.png": png()})
    convert(tree, out, OPTIONS)
    rejected = read_manifest(out).rejected
    assert command("sync", tree, out).code == 0
    put(tree, {"a/new.png": png(seed=55)})
    seen = decoded(monkeypatch)
    ran = command("sync", tree, out)
    assert (ran.code, len(seen)) == (3, 1)
    assert read_manifest(out).rejected == rejected
    put(tree, {"a/cut.jpg": jpeg(seed=4)})
    (tree / "b" / "empty.jpg").unlink()
    assert command("sync", tree, out).code == 3  # the one without a class
    assert read_manifest(out).rejected == {"no-class": 1}
    assert_is_the_tree(tree, out, tmp_path / "fresh", OPTIONS)
    (tree / "root.png").unlink()
    put(tree, {"a/bad.jpg": jpeg()[:-60]})
    done = only(sync(tree, out, SYNC))
    assert counts(done) == {"added": 1, "rejected": 1}
    assert done.manifest.rejected == {"truncated": 1}


def test_a_reject_that_stays_one_makes_no_version(
    tree: Path, here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is looked at where its times changed, and once more where they had just done so."""
    out = tmp_path / "out"
    put(tree, {"a/cut.jpg": jpeg()[:-60]})
    convert(tree, out, OPTIONS)
    os.utime(tree / "a" / "cut.jpg", (1, 1))
    seen = decoded(monkeypatch)
    done = only(sync(tree, out, SYNC))
    assert (done.made, done.version, len(seen)) == (False, None, 1)
    assert not (out / ".shardwright" / "run").exists()
    assert not only(sync(tree, out, SYNC)).made
    assert len(seen) == 1
    put(tree, {"a/cut.jpg": jpeg()[:-70]})
    assert not only(sync(tree, out, SYNC)).made
    put(tree, {"a/another.jpg": jpeg()[:-60]})
    assert only(sync(tree, out, SYNC)).made  # it is in no report yet


def test_rejects_of_a_lost_report_are_looked_at_again(tree: Path, here: None, tmp_path: Path) -> None:
    out = tmp_path / "out"
    put(tree, {"a/cut.jpg": jpeg()[:-60]})
    convert(tree, out, OPTIONS)
    (out / "report-000001.jsonl").unlink()
    put(tree, {"a/new.png": png(seed=55)})
    done = only(sync(tree, out, SYNC))
    assert "what was rejected or suspect then is not known" in done.notes[0]
    assert_is_the_tree(tree, out, tmp_path / "fresh", OPTIONS)


def test_doubts_follow_their_pictures(tree: Path, here: None, tmp_path: Path) -> None:
    """A suspect that stays, or moves, is in the report of the next version; one that goes is not."""
    dark = [
        encoded(np.full((20, 20), k, np.uint16) + np.arange(20, dtype=np.uint16), "PNG") for k in (1, 2, 3)
    ]
    put(tree, {f"a/dark{k}.png": data for k, data in enumerate(dark)})
    out = tmp_path / "out"
    convert(tree, out, OPTIONS)
    assert sum(read_manifest(out).suspect.values()) == 3
    (tree / "a" / "dark0.png").unlink()
    (tree / "a" / "dark1.png").rename(tree / "b" / "elsewhere.png")
    done = only(sync(tree, out, SYNC))
    assert sorted(f.id for f in done.findings if f.verdict == "suspect") == ["a/dark2.png", "b/elsewhere.png"]
    assert_is_the_tree(tree, out, tmp_path / "fresh", OPTIONS)


def test_a_picture_that_cannot_be_read_keeps_its_row(
    tree: Path, hdf5: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its times changed with its permissions; what it holds is not known, so its row is not lost."""
    real = sync_module._digest
    os.utime(tree / "a" / "1.png", (1, 1))
    monkeypatch.setattr(sync_module, "_digest", lambda path: None if path.name == "1.png" else real(path))
    before = samples_of(hdf5)
    done = only(sync(tree, hdf5, SYNC))
    assert not done.made
    assert "1 picture cannot be read now, their rows stay as they were: 'a/1.png'" in "\n".join(
        done.in_words()
    )
    put(tree, {"b/new.png": png(seed=77)})
    assert only(sync(tree, hdf5, SYNC)).made
    assert before.items() <= samples_of(hdf5).items()


def test_pictures_that_are_too_new_keep_their_rows(
    tree: Path, hdf5: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = replace(SYNC, newer_than_grace=3600.0)
    latest = max(path.stat().st_ctime_ns for path in tree.rglob("*.png"))
    time.sleep(0.02)  # a tick of the file system's clock
    put(tree, {"a/1.png": png(seed=500), "a/brand-new.png": png(seed=501)})
    monkeypatch.setattr(sync_module, "time_ns", lambda: latest + 3_600_000_000_000)
    before = samples_of(hdf5)
    assert not only(sync(tree, hdf5, waiting)).made
    assert samples_of(hdf5) == before
    assert counts(only(sync(tree, hdf5, SYNC))) == {"added": 1, "changed": 1}


def test_a_file_that_changes_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of one picture and half of another may decode well: it is read again, or rejected."""
    path = put(tmp_path, {"a.png": png(seed=1)}) / "a.png"
    real, calls = os.fstat, 0

    class Touched:
        """The file's state after a write between the two looks at it."""

        def __init__(self, status: os.stat_result, later: int) -> None:
            self.st_size, self.st_mtime_ns = status.st_size, status.st_mtime_ns + later
            self.st_ctime_ns, self.st_ino = status.st_ctime_ns, status.st_ino

    def fstat(fd: int) -> Any:
        nonlocal calls
        calls += 1
        return Touched(real(fd), calls if calls <= unstable else 0)

    monkeypatch.setattr(write.os, "fstat", fstat)
    unstable = 2
    assert write._read(path)[0] == png(seed=1)
    assert calls == 4
    unstable, calls = 100, 0
    with pytest.raises(write.PictureError, match="^unstable: it was written to each of the 3 times"):
        write._read(path)


def test_a_conversion_does_not_believe_what_a_sync_did_not_see(
    tree: Path, hdf5: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that stayed because its picture could not be read is not up to date."""
    real = sync_module._digest
    put(tree, {"a/1.png": png(seed=500)})
    with monkeypatch.context() as patch:
        patch.setattr(sync_module, "_digest", lambda path: None if path.name == "1.png" else real(path))
        assert not only(sync(tree, hdf5, SYNC)).made
    (done,) = convert(tree, hdf5, OPTIONS)
    assert done.made
    assert done.changes is not None
    assert done.changes.changed == ("a/1.png",)


def test_rejects_for_passing_reasons_are_tried_again(
    tree: Path, here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of the disk says nothing of the picture, and leaves its times as they are."""
    with monkeypatch.context() as patch:
        make_unreadable(patch, lambda name: name == "3.png")
        convert(tree, tmp_path / "out", OPTIONS)
        assert not only(sync(tree, tmp_path / "out", SYNC)).made
    assert len(open_dataset(tmp_path / "out")) == 22
    assert counts(only(sync(tree, tmp_path / "out", SYNC))) == {"added": 2}
    assert_is_the_tree(tree, tmp_path / "out", tmp_path / "fresh", OPTIONS)


# --- what must not be lost --------------------------------------------------------------------------------


def test_a_source_that_is_gone_or_half_gone(tree: Path, hdf5: Path, command: Command) -> None:
    files = everything(hdf5)
    shutil.move(tree / "a", tree.parent / "a")
    for k in range(1, 4):
        (tree / "b" / f"{k}.png").unlink()
    ran = command("sync", tree, hdf5)
    assert (ran.code, "9 of the 24 rows of version 1" in ran.err, "--allow-shrink" in ran.err) == (
        1,
        True,
        True,
    )
    shutil.rmtree(tree / "b")
    for arguments in ([], ["--allow-shrink"]):
        ran = command("sync", tree, hdf5, *arguments)
        assert (ran.code, "Is its disk mounted?" in ran.err) == (1, True)
    tree.rmdir()
    assert command("sync", tree, hdf5).code == 2
    assert everything(hdf5) == files
    shutil.move(tree.parent / "a", put(tree, {"b/": b""}) / "a")
    assert command("sync", tree, hdf5, "--allow-shrink").code == 0
    assert "no picture is left of 1 class: 'b'" not in command("sync", tree, hdf5).out  # it was said once
    assert len(open_dataset(hdf5)) == 12


def test_a_class_that_cannot_be_read(
    tree: Path, hdf5: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, files = os.scandir, everything(hdf5)

    def scandir(path: Any) -> Any:
        if str(path).rstrip("/").endswith("/b"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    ran = command("sync", tree, hdf5)
    assert (ran.code, "cannot read the folder" in ran.err, "A class must not go missing" in ran.err) == (
        1,
        True,
        True,
    )
    monkeypatch.undo()
    assert everything(hdf5) == files


@pytest.mark.parametrize("place", ["a", "a/sub"])
@pytest.mark.parametrize("kind", ["dangling", "loop", "file"])
def test_what_lies_in_the_place_of_a_folder(
    tree: Path, here: None, tmp_path: Path, place: str, kind: str
) -> None:
    """A folder whose disk is not mounted: its pictures are not gone, they cannot be seen."""
    put(tree, {f"a/sub/{k}.png": png(seed=40 + k) for k in range(4)})
    out = tmp_path / "out"
    convert(tree, out, OPTIONS)
    files = everything(out)
    shutil.move(tree / place, tmp_path / "elsewhere")
    match kind:
        case "dangling":
            (tree / place).symlink_to("/nowhere/at/all")
        case "loop":
            (tree / place).symlink_to(tree / place)
        case "file":
            (tree / place).write_text("disk full")
    with pytest.raises(SourceError, match="mounted"):
        sync(tree, out, SYNC)
    assert everything(out) == files
    if place == "a" and kind != "file":
        with pytest.raises(SourceError, match="leads nowhere"):
            convert(tree, out, OPTIONS)


def test_a_picture_without_an_ending_that_cannot_be_read(
    tree: Path, here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tree, {"a/no ending": png(seed=44)})
    convert(tree, tmp_path / "out", OPTIONS)
    real = scan_module._is_sample
    monkeypatch.setattr(scan_module, "_is_sample", lambda entry: entry.name != "no ending" and real(entry))
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(SourceError, match="cannot read .*no ending', which was a picture"):
        sync(tree, tmp_path / "out", SYNC)


def test_a_missing_shard_is_not_up_to_date(tree: Path, out: Path) -> None:
    (out / read_manifest(out).shards[1].files[0].name).unlink()
    for new in ({}, {"a/new.png": png(seed=3)}):
        put(tree, new)
        with pytest.raises(ShardError, match="lacks a file"):
            sync(tree, out, SYNC)


def test_a_damaged_row_may_go(tree: Path, out: Path, tmp_path: Path, storage: Storage) -> None:
    """Nothing but its pixels' sums is asked of it."""
    dataset = open_dataset(out)
    id, first = dataset.ids([0])[0], dataset[0][0].permute(1, 2, 0).numpy().tobytes()
    path = out / read_manifest(out).shards[0].files[0].name
    data = bytearray(path.read_bytes())
    data[data.index(first)] ^= 1
    path.write_bytes(data)
    (tree / id).unlink()
    done = only(sync(tree, out, SYNC))
    assert "rows that go are damaged, so that all that stay were read" in done.notes[0]
    shutil.rmtree(tmp_path / "fresh", ignore_errors=True)
    convert(tree, tmp_path / "fresh", of(storage))
    assert samples_of(out) == samples_of(tmp_path / "fresh")
    assert done.manifest.stats == read_manifest(tmp_path / "fresh").stats


def test_classes_that_are_new(tree: Path, hdf5: Path, here: None, tmp_path: Path) -> None:
    put(tree, {"B/1.png": png(seed=50)})
    with pytest.raises(SourceError, match="differ only in case"):
        sync(tree, hdf5, SYNC)
    shutil.rmtree(tree / "B")
    (tree / "0 first").mkdir()
    done = only(sync(tree, hdf5, SYNC))  # a class without a picture is a class
    assert (done.made, done.manifest.classes) == (True, ("a", "b", "0 first"))
    assert [p.name for p in (hdf5 / "shards").iterdir() if p.name.startswith("000002")] == []
    convert(tree, tmp_path / "given", replace(OPTIONS, classes=("a", "b", "0 first")))
    put(tree, {"stranger/1.png": png(seed=50)})
    with pytest.raises(SourceError, match="does not name: 'stranger'. It was given by --classes"):
        sync(tree, tmp_path / "given", SYNC)


def test_a_conversion_says_that_it_numbers_classes_anew(tree: Path, hdf5: Path) -> None:
    """As a conversion does; a sync never does."""
    put(tree, {"aa/1.png": png(seed=50)})
    sync(tree, hdf5, SYNC)
    assert read_manifest(hdf5).classes == ("a", "b", "aa")
    put(tree, {"aa/2.png": png(seed=51)})
    (done,) = convert(tree, hdf5, OPTIONS)
    assert done.notes == (
        "classes have other numbers than in version 2: 'b' was 1, is 2; 'aa' was 2, is 1. `shardwright sync` keeps "
        "them",
    )


def test_removals_alone_write_no_shard(tree: Path, out: Path, tmp_path: Path, storage: Storage) -> None:
    files = sorted((out / "shards").iterdir())
    manifest = read_manifest(out)
    dataset = open_dataset(out)
    for id in dataset.ids(range(8)):  # the whole first shard
        (tree / id).unlink()
    (tree / dataset.ids([10])[0]).unlink()
    done = only(sync(tree, out, SYNC))
    assert sorted((out / "shards").iterdir()) == files
    assert [shard.dead_rows for shard in done.manifest.shards] == [(2,), ()]
    assert done.manifest.shards[1] == manifest.shards[2]
    assert_is_the_tree(tree, out, tmp_path / "fresh", of(storage))


def test_sums_that_are_not_known(tree: Path, hdf5: Path, tmp_path: Path) -> None:
    """A manifest of before they stood there: they are taken from the pixels once, and are exact all the same."""
    for name in ("manifest.json", "manifest-000001.json"):
        text = (hdf5 / name).read_text()
        start, end = text.index(',\n  "pixels": '), text.index("\n },\n", text.index('"squares"'))
        (hdf5 / name).write_text(text[:start] + text[end:])
    assert read_manifest(hdf5).stats.pixels == 0
    (tree / "a" / "3.png").unlink()
    sync(tree, hdf5, SYNC)
    assert_is_the_tree(tree, hdf5, tmp_path / "fresh", OPTIONS)


# --- what it may be used on ---------------------------------------------------------------------------------


def without_lock(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in everything(folder).items() if name != ".shardwright/lock"}


def test_data_sets_that_cannot_be_synced(tree: Path, hdf5: Path, tmp_path: Path) -> None:
    split(hdf5, tmp_path / "parts", SplitOptions(parse_shares("train=0.5,val=0.5"), jobs=1))
    reshard(hdf5, tmp_path / "some", ReshardOptions(only_classes=("a",), jobs=1))
    reshard(hdf5, tmp_path / "small", ReshardOptions(size=8, jobs=1))
    built = build_data_set(tmp_path / "built")
    for folder, why in (
        (tmp_path / "parts" / "train", "was made by `split`"),
        (tmp_path / "some", "was made by `reshard`, of a part of the rows"),
        (tmp_path / "small", "was made smaller by `reshard --size`"),
        (built.folder, "its pictures were decoded by None"),
    ):
        files = without_lock(folder)
        with pytest.raises(OutputError, match=why):
            sync(tree, folder, SYNC)
        assert {**everything(folder), ".shardwright/lock": b""} == {**files, ".shardwright/lock": b""}
    with pytest.raises(FormatError, match="no data set at"):
        sync(tree, tmp_path / "nothing", SYNC)
    assert not (tmp_path / "nothing").exists()
    put(tmp_path / "split tree", {"train/a/1.png": png(), "val/a/1.png": png()})
    with pytest.raises(SourceError, match="sync each split with a data set of its own"):
        sync(tmp_path / "split tree", hdf5, SYNC)


def test_after_a_reshard(tree: Path, hdf5: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known of the pictures follows the rows: nothing is read again."""
    reshard(hdf5, options=ReshardOptions(LayoutOptions(format="npy", chunk_rows=8), seed=3, jobs=1))
    seen = hashed(monkeypatch)
    assert not only(sync(tree, hdf5, SYNC)).made
    assert seen == []
    put(tree, {"a/1.png": png(seed=71), "b/new.png": png(seed=72)})
    (tree / "b" / "2.png").unlink()
    assert counts(only(sync(tree, hdf5, SYNC))) == {"added": 1, "changed": 1, "removed": 1}
    options = replace(OPTIONS, store=replace(OPTIONS.store, format="npy", chunk_rows=8))
    assert_is_the_tree(tree, hdf5, tmp_path / "fresh", options)
    (again,) = convert(tree, hdf5, replace(options, seed=3))
    assert not again.made  # it is up to date with its source


def test_dead_rows_and_a_poor_mix_are_said_and_restored(tree: Path, hdf5: Path, command: Command) -> None:
    for k in range(3):
        (tree / "b" / f"{k}.png").unlink()
    ran = command("sync", tree, hdf5)
    assert "12.5% of the rows on disk are dead: `shardwright reshard" in ran.out
    put(tree, {f"new/{k}.png": png(seed=800 + k) for k in range(16)})  # one class in chunks of its own
    ran = command("sync", tree, hdf5)
    assert "classes are mixed within chunks at 0." in ran.out
    assert command("reshard", hdf5, "--seed", 0).code == 0
    assert len(command("sync", tree, hdf5).out.splitlines()) == 1
    for night in range(12):
        put(tree, {f"{'ab'[night % 2]}/night{night}.png": png(seed=900 + night)})
        ran = command("sync", tree, hdf5)
    assert "shards, of which" in ran.out


def test_a_dry_run_changes_nothing(tree: Path, hdf5: Path, command: Command) -> None:
    put(tree, {"a/1.png": png(seed=71), "c/new.png": png(seed=72)})
    files = everything(hdf5)
    ran = command("sync", tree, hdf5, "--dry-run")
    assert (ran.code, everything(hdf5)) == (0, files)
    assert "version 2 would have 1 added ('c/new.png'), 1 changed ('a/1.png'), 1 new class ('c')" in ran.out
    assert only(dry_run(tree, hdf5, SYNC)).version == 2


# --- alone, killed, beside others ---------------------------------------------------------------------------


def test_beside_another_writer(tree: Path, hdf5: Path) -> None:
    with one_writer(hdf5), pytest.raises(LockedError):
        sync(tree, hdf5, SYNC)


def test_a_run_that_was_stopped_is_gone_on_with(
    tree: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted, or out of time, after each shard: the bytes are those of one run."""
    put(tree, {f"c/{k}.png": png(seed=600 + k) for k in range(13)})
    (tree / "a").rename(tree / "d")
    shutil.copytree(out, tmp_path / "undisturbed")
    sync(tree, tmp_path / "undisturbed", SYNC)
    in_time = replace(SYNC, max_runtime=1e-9)
    for finished in (1, 2, 3):
        with pytest.raises(OutOfTimeError, match=f"{finished} of 4 shards"):
            sync(tree, out, in_time)
        assert read_manifest(out).version == 1
    done = only(sync(tree, out, in_time))
    assert done.resumed == 3
    assert everything(out) == everything(tmp_path / "undisturbed")


@pytest.mark.parametrize("make", ["convert", "sync"])
def test_a_run_is_not_gone_on_with_over_other_pictures(
    tree: Path, here: None, tmp_path: Path, make: str
) -> None:
    """Of the same size, and given their old times: what was finished of them is made again."""
    out, stamp = tmp_path / "out", 1_500_000_000_000_000_000
    if make == "sync":
        convert(tree, out, OPTIONS)
    put(tree, {f"c/{k:02d}.png": png(seed=600 + k) for k in range(20)})
    for path in tree.rglob("*.png"):
        os.utime(path, ns=(stamp, stamp))

    def run(max_runtime: float | None) -> None:
        if make == "sync":
            sync(tree, out, replace(SYNC, max_runtime=max_runtime))
        else:
            convert(tree, out, replace(OPTIONS, max_runtime=max_runtime))

    with pytest.raises(OutOfTimeError):
        run(1e-9)
    time.sleep(0.02)
    for k in range(0, 20, 2):
        one, two = tree / "c" / f"{k:02d}.png", tree / "c" / f"{k + 1:02d}.png"
        one.rename(tree / "t")
        two.rename(one)
        (tree / "t").rename(two)
    run(None)
    assert_is_the_tree(tree, out, tmp_path / "fresh", OPTIONS)
    assert not only(sync(tree, out, SYNC)).made


def test_a_stopped_sync_of_changes_that_were_taken_back(tree: Path, hdf5: Path) -> None:
    before = everything(hdf5)
    put(tree, {f"c/{k}.png": png(seed=600 + k) for k in range(20)})
    with pytest.raises(OutOfTimeError):
        sync(tree, hdf5, replace(SYNC, max_runtime=1e-9))
    shutil.rmtree(tree / "c")
    assert not only(sync(tree, hdf5, SYNC)).made
    assert sorted(everything(hdf5)) == sorted(before)
    assert only(reshard(hdf5, options=ReshardOptions(LayoutOptions(chunk_rows=8), jobs=1))).made


def test_what_was_read_is_not_read_again_after_a_stop(
    tree: Path, hdf5: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (hdf5 / ".shardwright" / "source-000001.npz").unlink()
    put(tree, {f"c/{k}.png": png(seed=600 + k) for k in range(20)})
    seen = hashed(monkeypatch)
    for times in (24, 0):
        seen.clear()
        with pytest.raises(OutOfTimeError):
            sync(tree, hdf5, replace(SYNC, max_runtime=1e-9))
        assert len([path for path in seen if path.parent.name != "c"]) == times


def test_a_damaged_row_is_not_copied(tree: Path, out: Path) -> None:
    manifest, files = read_manifest(out), everything(out)
    path = out / manifest.shards[0].files[0].name
    data = bytearray(path.read_bytes())
    first = open_dataset(out)[0][0].permute(1, 2, 0).numpy().tobytes()
    data[data.index(first)] ^= 1
    path.write_bytes(data)
    (tree / "a").rename(tree / "z")
    (tree / "b").rename(tree / "y")
    with pytest.raises(ValueError, match="CRC-32"):
        sync(tree, out, SYNC)
    assert sorted(everything(out)) == sorted(files)


def test_the_old_version_goes_and_the_new_one_stays(tree: Path, out: Path) -> None:
    put(tree, {"a/1.png": png(seed=71)})
    sync(tree, out, SYNC)
    now = samples_of(out)
    gc(out, GcOptions(keep=1, min_age_seconds=0))
    assert samples_of(out) == now
    assert verify(out, full=True).damage == ()
    put(tree, {"a/2.png": png(seed=72)})
    assert counts(only(sync(tree, out, SYNC))) == {"changed": 1}
