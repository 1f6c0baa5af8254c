"""A tree that changes from night to night, and a run that takes several: it comes to its end, and is the tree."""

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawing import png, put
from test_one_writer import everything
from test_sync import OPTIONS, SYNC, assert_is_the_tree, at_rest, of, only, storage
from trees import make_unreadable

from shardwright.convert import convert
from shardwright.convert import unfinished as unfinished_module
from shardwright.convert.copy_plan import ReshardOptions
from shardwright.convert.copy_summary import Copied
from shardwright.convert.gc import GcOptions, gc
from shardwright.convert.layouts import LayoutOptions
from shardwright.convert.merge import MergeOptions, merge
from shardwright.convert.output import Output
from shardwright.convert.records import ShardRecord
from shardwright.convert.repair import repair
from shardwright.convert.reshard import reshard
from shardwright.convert.salvage import salvage
from shardwright.convert.selection import parse_shares
from shardwright.convert.split import SplitOptions, split
from shardwright.convert.sync import sync
from shardwright.datasets import open_dataset
from shardwright.datasets.layout import Shard, Storage
from shardwright.datasets.manifest import read_manifest
from shardwright.errors import OutOfTimeError, OutputError

__all__ = ["at_rest", "storage"]

SHORT = 1e-9  # seconds: one shard a night


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return put(
        tmp_path / "src",
        {f"{c}/{k:02d}.png": png(seed=100 * i + k) for i, c in enumerate("ab") for k in range(32)},
    )


class Job:
    """`convert` or `sync` of a tree, a shard a night."""

    def __init__(self, command: str, tree: Path, out: Path, storage: Storage = "hdf5") -> None:
        self.command, self.tree, self.out, self.options = command, tree, out, of(storage)
        if command == "sync":
            put(tree, {"a/first.png": png(seed=1), "b/first.png": png(seed=2)})
            for path in tree.glob("?/[0-9]*"):
                path.rename(tree.parent / f"{path.parent.name}-{path.name}")
            convert(tree, out, self.options)
            for path in tree.parent.glob("?-*"):
                path.rename(tree / path.name.replace("-", "/"))

    def night(self, seconds: float | None = SHORT) -> Any:
        """What became of it; None where it was not finished."""
        try:
            if self.command == "sync":
                return only(sync(self.tree, self.out, replace(SYNC, max_runtime=seconds)))
            return convert(self.tree, self.out, replace(self.options, max_runtime=seconds))[0]
        except OutOfTimeError:
            return None

    def finished(self) -> dict[str, bytes]:
        """Finished shards that are not published yet."""
        run = self.out / ".shardwright" / "run"
        return {path.name: path.read_bytes() for path in run.iterdir() if path.name[:1] == "0"}


@pytest.fixture(params=["convert", "sync"])
def command(request: pytest.FixtureRequest) -> str:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def job(here: None, command: str, tree: Path, tmp_path: Path, storage: Storage) -> Job:
    return Job(command, tree, tmp_path / "out", storage)


def test_it_comes_to_its_end_though_pictures_come_each_night(job: Job, tree: Path, tmp_path: Path) -> None:
    kept: dict[str, bytes] = {}
    for night in range(30):
        done = job.night()
        if done is not None:
            break
        assert kept.items() <= job.finished().items()
        kept = job.finished()
        if night < 20:
            put(tree, {f"a/{night:02d}-new.png": png(seed=900 + night)})
    assert done is not None
    assert done.resumed == len(read_manifest(job.out).shards) - (job.command == "sync") - 1
    assert "of its" in done.notes[0] or night > 20
    assert_is_the_tree(tree, job.out, tmp_path / "fresh", job.options)
    assert job.night() is not None
    assert not job.night().made


def test_a_shard_is_made_again_if_a_picture_has_changed(job: Job, tree: Path, tmp_path: Path) -> None:
    for _ in range(3):
        assert job.night() is None
    before = job.finished()
    record = unfinished_module.Unfinished(job.out).records()[1]
    put(tree, {record.ids[2]: png(seed=700)})
    done = job.night(None)
    assert done.resumed == 2
    assert "of its 3 finished shards 2 are kept" in done.notes[0]
    shards = read_manifest(job.out).shards
    again = {file.name for shard in shards for file in shard.files if Path(file.name).name in before}
    assert len(again) == len(before)
    same = [Path(n).name for n in again if (job.out / n).read_bytes() == before[Path(n).name]]
    assert len(before) > len(same) > 0
    assert_is_the_tree(tree, job.out, tmp_path / "fresh", job.options)


def test_a_picture_that_is_gone(job: Job, tree: Path, tmp_path: Path) -> None:
    """Its shard is dropped, and the number of it given to another: of its old files nothing is taken."""
    for _ in range(3):
        assert job.night() is None
    record = unfinished_module.Unfinished(job.out).records()[0]
    (tree / record.ids[2]).unlink()
    (tree / record.ids[3]).rename(tree / "a" / "elsewhere.png")
    assert job.night() is None
    assert len(unfinished_module.Unfinished(job.out).records()) == 3
    assert job.night(None).resumed == 3
    assert_is_the_tree(tree, job.out, tmp_path / "fresh", job.options)


def test_a_new_class_begins_anew(job: Job, tree: Path, tmp_path: Path) -> None:
    """All numbers of classes may be others now."""
    for _ in range(3):
        assert job.night() is None
    put(tree, {"aa/1.png": png(seed=800)})
    done = job.night(None)
    assert done.resumed == 0
    assert "begun anew" in " ".join(done.notes)
    assert_is_the_tree(tree, job.out, tmp_path / "fresh", job.options)


def test_the_same_tree_again_after_it_was_another(here: None, tree: Path, tmp_path: Path) -> None:
    """What the second night finished is of another plan than that of the tree alone."""
    job = Job("convert", tree, tmp_path / "out")
    for _ in range(3):
        assert job.night() is None
    put(tree, {"a/new.png": png(seed=900)})
    for _ in range(2):
        assert job.night() is None
    (tree / "a" / "new.png").unlink()
    assert job.night(None).resumed >= 4
    assert_is_the_tree(tree, job.out, tmp_path / "fresh", job.options)


def test_rejects_and_duplicates_are_of_the_tree(job: Job, tree: Path, tmp_path: Path) -> None:
    put(tree, {f"b/bad{k:02d}.png": png(seed=k)[:100] for k in range(12)})
    put(tree, {f"b/twin{k:02d}.png": png(seed=k) for k in range(12)})
    for _ in range(5):
        assert job.night() is None
    (tree / "b" / "bad03.png").unlink()
    put(tree, {"b/bad04.png": png(seed=555), "a/new.png": png(seed=900)})
    assert job.night() is None
    assert job.night(None) is not None
    assert_is_the_tree(tree, job.out, tmp_path / "fresh", job.options)


def test_other_options_are_refused_over_another_tree_too(here: None, tree: Path, tmp_path: Path) -> None:
    job = Job("convert", tree, tmp_path / "out")
    assert job.night() is None
    put(tree, {"a/new.png": png(seed=900)})
    with pytest.raises(OutputError, match="other options"):
        convert(tree, job.out, replace(OPTIONS, seed=1))


def test_a_damaged_finished_shard_is_made_again(job: Job, tree: Path, tmp_path: Path) -> None:
    for _ in range(3):
        assert job.night() is None
    put(tree, {"a/new.png": png(seed=900)})
    name = sorted(job.finished())[0]
    path = job.out / ".shardwright" / "run" / name
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert job.night(None).resumed == 2
    assert_is_the_tree(tree, job.out, tmp_path / "fresh", job.options)


@pytest.mark.parametrize("how", ["mended", "replaced"])
def test_a_picture_that_could_not_be_read_then_can_be_read_now(
    job: Job, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Its permissions were mended, or another file was put in its place: it is none of the rejects."""
    with monkeypatch.context() as patch:
        make_unreadable(patch, lambda name: name == "07.png")
        while not any(r.findings for r in unfinished_module.Unfinished(job.out).records()):
            assert job.night() is None
    if how == "mended":
        for path in tree.glob("?/07.png"):
            path.chmod(0o600)
    else:
        put(tree, {f"{c}/07.png": png(seed=777 + k) for k, c in enumerate("ab")})
    job.night(None)
    assert not read_manifest(job.out).rejected
    assert_is_the_tree(tree, job.out, tmp_path / "fresh", job.options)


def test_a_picture_that_can_never_be_read_costs_nothing(
    job: Job, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_unreadable(monkeypatch, lambda name: name[0] == "0")
    for night in range(3):
        assert job.night() is None
        put(tree, {f"a/new{night}.png": png(seed=900 + night)})
    assert job.night(None).resumed == 3
    assert read_manifest(job.out).rejected == {"unreadable": 20}


def test_a_picture_that_changes_every_night(job: Job, tree: Path, tmp_path: Path) -> None:
    """Its shard is made again last: else each night would make that one, and no other."""
    assert job.night() is None
    (first,) = unfinished_module.Unfinished(job.out).records()
    for night in range(40):
        put(tree, {first.ids[0]: png(seed=1000 + night)})
        if job.night() is not None:
            break
    assert night < 30
    assert_is_the_tree(tree, job.out, tmp_path / "fresh", job.options)


def test_copies_of_moved_pictures_are_kept_too(
    here: None, tree: Path, tmp_path: Path, storage: Storage
) -> None:
    out = tmp_path / "out"
    convert(tree, out, of(storage))
    for path in tree.glob("?/[012]*"):
        path.rename(path.with_name(f"moved-{path.name}"))
    job = Job("convert", tree, out, storage)
    job.command = "sync"
    for night in range(30):
        put(tree, {f"a/new{night}.png": png(seed=900 + night)} if night < 4 else {})
        done = job.night()
        if done is not None:
            break
    assert done is not None
    made = [shard for shard in done.manifest.shards if "000002-" in shard.files[0].name]
    assert done.resumed == len(made) - 1
    assert_is_the_tree(tree, out, tmp_path / "fresh", job.options)


def test_a_copy_of_another_row_is_not_taken(here: None, tree: Path, tmp_path: Path) -> None:
    """Two moved pictures change places: both are moved still, each from the other's row."""
    out = tmp_path / "out"
    convert(tree, out, OPTIONS)
    for path in tree.glob("?/[012]*"):
        path.rename(path.with_name(f"moved-{path.name}"))
    job = Job("convert", tree, out)
    job.command = "sync"
    assert job.night() is None
    (record,) = unfinished_module.Unfinished(out).records()
    one, two = tree / record.ids[0], tree / record.ids[1]
    one.rename(tmp_path / "aside")
    two.rename(one)
    (tmp_path / "aside").rename(two)
    put(tree, {"a/new.png": png(seed=900)})
    assert job.night(None).resumed == 0
    assert_is_the_tree(tree, out, tmp_path / "fresh", job.options)


def test_what_is_not_ours_in_the_run_is_in_nobodys_way(job: Job, tree: Path, tmp_path: Path) -> None:
    for _ in range(2):
        assert job.night() is None
    run = job.out / ".shardwright" / "run"
    for name in ("a folder", "record-00077.json", "000001-00007.h5"):
        put(run / name, {"x": b""})
    record = json.loads((run / "record-00001.json").read_text())["values"]
    unfinished_module._write(run / "record--0001.json", {**record, "number": -1})
    put(tree, {"a/new.png": png(seed=900)})
    assert job.night(None).resumed == 2
    assert_is_the_tree(tree, job.out, tmp_path / "fresh", job.options)


def test_shards_of_which_all_pictures_are_rejected_are_finished_too(
    job: Job, tree: Path, tmp_path: Path
) -> None:
    """Else a run that has the time for one shard would make the same one again and again."""
    for path in tree.glob("?/[0-9]*"):
        path.unlink()
    put(tree, {f"a/bad{k:02d}.png": b"no picture" for k in range(40)})
    put(tree, {"a/good.png": png(seed=3), "b/good.png": png(seed=4)})
    for night in range(20):
        if job.night() is not None:
            break
        assert night > 0 or unfinished_module.Unfinished(job.out).records()[0].shard is None
    assert night == 5
    assert_is_the_tree(tree, job.out, tmp_path / "fresh", job.options)


@pytest.mark.parametrize("when", ["records", "request", "begun"])
def test_killed_while_it_is_taken_up(
    job: Job, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    for _ in range(3):
        assert job.night() is None
    begun = unfinished_module.Unfinished(job.out).begun_ns()
    (tree / unfinished_module.Unfinished(job.out).records()[0].ids[0]).unlink()
    put(tree, {"a/new.png": png(seed=900)})

    class Killed(BaseException):
        pass

    def killed(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        what = {"records": "_remove_unpublished", "request": "begin"}.get(when)
        if what is not None:
            patch.setattr(unfinished_module.Unfinished, what, killed)
        else:
            patch.setattr(unfinished_module, "_write", killed)
        with pytest.raises(Killed):
            job.night()
    assert unfinished_module.Unfinished(job.out).begun_ns() == begun
    assert job.night(None).resumed == 2
    assert_is_the_tree(tree, job.out, tmp_path / "fresh", job.options)


def test_its_shards_can_be_repaired(job: Job, tree: Path) -> None:
    for _ in range(3):
        assert job.night() is None
    put(tree, {f"a/new{k}.png": png(seed=900 + k) for k in range(9)})
    assert job.night(None) is not None
    files = everything(job.out)
    for name in list(files):
        if name.startswith("shards/"):
            path = job.out / name
            path.write_bytes(path.read_bytes()[:-64] + bytes(64))
    repair(job.out, tree)
    assert everything(job.out) == files


def test_many_nights(here: None, command: str, tmp_path: Path) -> None:
    """Any changes to any tree: what is read back is the tree of the last night."""
    for seed in range(6):
        rng = random.Random(seed)
        home = tmp_path / str(seed)
        tree = put(
            home / "src",
            {f"{c}/{k:02d}.png": png(seed=rng.randrange(10**6)) for c in "ab" for k in range(24)},
        )
        job = Job(command, tree, home / "out")
        for _ in range(8):
            if job.night() is not None:
                break
            for _ in range(rng.randrange(4)):
                pictures = sorted(tree.rglob("*.png"))
                match rng.randrange(4):
                    case 0:
                        put(
                            tree,
                            {
                                f"{rng.choice('ab')}/{rng.randrange(99):02d}n.png": png(
                                    seed=rng.randrange(10**6)
                                )
                            },
                        )
                    case 1:
                        rng.choice(pictures).unlink()
                    case 2:
                        one, two = rng.sample(pictures, 2)
                        one.replace(two)
                    case 3:
                        rng.choice(pictures).write_bytes(png(seed=rng.randrange(10**6)))
        job.night(None)
        assert_is_the_tree(tree, job.out, home / "fresh", job.options)
        dataset = open_dataset(job.out)
        assert len(set(dataset.ids(range(len(dataset))))) == len(dataset)


def test_salvage_takes_each_picture_once() -> None:
    def record(number: int, *ids: str, bad: str = "") -> ShardRecord:
        stamps = dict.fromkeys(ids, (1, 1, 1, 1))
        unread = {bad: (1, 1, 1, 1)} if bad else {}
        return ShardRecord(number, Shard(len(ids), (), (), 1, 0), stamps=stamps, unread=unread)

    records = [
        record(4, "d", "c"),
        record(1, "b", "a"),
        record(2, "a", "e"),
        record(3, "f", bad="g"),
        record(5, "z"),
        ShardRecord(6, unread={"h": (1, 1, 1, 1)}),
        ShardRecord(7),
    ]
    plans = salvage(records, list("abcdefghz"), np.arange(8), 7)
    assert [(p.number, p.stem, p.samples.tolist()) for p in plans] == [
        (1, "shards/000007-00001", [1, 0]),
        (3, "shards/000007-00003", [5, 6]),
        (4, "shards/000007-00004", [3, 2]),
        (6, "shards/000007-00006", [7]),
    ]


@pytest.mark.parametrize("command", ["reshard", "merge", "split"])
def test_a_copy_goes_on_though_its_source_has_a_new_version(
    here: None, tree: Path, tmp_path: Path, command: str
) -> None:
    """With the version that it was begun with; once more, with the new one."""
    source, other, out = tmp_path / "source", tmp_path / "other", tmp_path / "out"
    convert(tree, source, OPTIONS)
    convert(put(tmp_path / "others", {f"c/{k}.png": png(seed=k) for k in range(9)}), other, OPTIONS)
    layout = LayoutOptions(chunk_rows=2, shard_mib=OPTIONS.store.shard_mib)

    def night(seconds: float | None = SHORT) -> Copied | None:
        run = {"max_runtime": seconds, "jobs": 1}
        try:
            if command == "reshard":
                return only(reshard(source, out, ReshardOptions(layout, **run)))  # type: ignore[no-any-return]
            if command == "merge":
                return merge([source, other], out, MergeOptions(layout, **run))
            parts = split(source, out, SplitOptions(parse_shares("train=0.5,val=0.5"), **run))
            return parts["train"]
        except OutOfTimeError:
            return None

    assert night() is None
    put(tree, {"a/new.png": png(seed=900)})
    sync(tree, source, SYNC)
    assert night() is None
    done = night(None)
    assert done is not None
    assert done.resumed == 2
    assert "goes on with version 1" in " ".join(done.notes)
    made = done.manifest.source["made_of"]["data_sets"]
    assert [entry["version"] for entry in made] == [1] * len(made)
    after = night(None)
    assert after is not None
    assert after.manifest.source["made_of"]["data_sets"][0]["version"] == 2
    assert not after.notes


@pytest.mark.parametrize("why", ["gone", "given up"])
def test_a_copy_begins_anew_with_the_newest_version(here: None, tree: Path, tmp_path: Path, why: str) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    convert(tree, source, OPTIONS)
    options = ReshardOptions(LayoutOptions(chunk_rows=2, shard_mib=OPTIONS.store.shard_mib), jobs=1)
    with pytest.raises(OutOfTimeError):
        reshard(source, out, replace(options, max_runtime=SHORT))
    put(tree, {"a/new.png": png(seed=900)})
    sync(tree, source, SYNC)
    if why == "gone":
        gc(source, GcOptions(keep=1, min_age_seconds=0))
    done = only(reshard(source, out, replace(options, new_version=why == "given up")))
    assert done.resumed == 0
    assert done.manifest.source["made_of"]["data_sets"][0]["version"] == 2


def test_changes_that_were_taken_back(job: Job, tree: Path) -> None:
    """Nothing is to be done, and what the night made keeps no other command from the output."""
    if job.command == "convert":
        job.night(None)
    else:
        for path in tree.glob("?/[0-9]*"):
            path.unlink()
    before = everything(job.out)
    put(tree, {"a/new.png": png(seed=900), "a/newer.png": png(seed=901), "b/bad.png": b""})
    put(tree, {f"b/more{k}.png": png(seed=910 + k) for k in range(8)})
    assert job.night() is None
    for path in (*tree.glob("a/new*"), *tree.glob("b/bad*"), *tree.glob("b/more*")):
        path.unlink()
    assert not job.night().made
    assert sorted(everything(job.out)) == sorted(before)
    assert only(reshard(job.out, options=ReshardOptions(LayoutOptions(chunk_rows=8), jobs=1))).made


def test_what_other_options_began_is_not_given_up(here: None, tree: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(tree, out, OPTIONS)
    other = replace(OPTIONS, seed=1, new_version=True, max_runtime=SHORT)
    with pytest.raises(OutOfTimeError):
        convert(tree, out, other)
    assert not convert(tree, out, OPTIONS)[0].made
    assert convert(tree, out, replace(other, max_runtime=None))[0].resumed == 1


def test_all_splits_of_a_copy_go_on_with_what_they_were_begun_with(
    here: None, tree: Path, tmp_path: Path
) -> None:
    """Those too of which no shard is finished: a picture that moved to another split would be in two, or in none."""
    source, out = tmp_path / "source", tmp_path / "out"
    for split_name in ("train", "val"):
        shutil.copytree(tree, tmp_path / "splits" / split_name)
    tree = tmp_path / "splits"
    convert(tree, source, OPTIONS)
    options = ReshardOptions(LayoutOptions(chunk_rows=2, shard_mib=OPTIONS.store.shard_mib), jobs=1)
    with pytest.raises(OutOfTimeError):
        reshard(source, out, replace(options, max_runtime=SHORT))
    for moved in tree.glob("val/a/0*"):
        moved.rename(tree / "train" / "a" / f"moved-{moved.name}")
    sync(tree, source, SYNC)
    for version in (1, 2):
        done = reshard(source, out, options)
        found = {
            name: each.manifest.source["made_of"]["data_sets"][0]["version"] for name, each in done.items()
        }
        assert found == {"train": version, "val": version}


def test_the_tree_changes_after_publishing_was_cut_short(
    job: Job, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards that had their names already are kept; that of pictures that are gone is not left lying there."""
    with monkeypatch.context() as patch:
        patch.setattr(Output, "publish", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        with pytest.raises(OutputError):
            job.night(None)
    records = unfinished_module.Unfinished(job.out).records()
    lost = next(record for record in records if record.number == 7)
    for id in lost.ids:
        (tree / id).unlink()
    done = job.night(None)
    assert done.resumed == len(records) - 1
    shards = read_manifest(job.out).shards
    named = {file.name for shard in shards for file in shard.files}
    assert named == {f"shards/{path.name}" for path in (job.out / "shards").iterdir()}
    assert_is_the_tree(tree, job.out, tmp_path / "fresh", job.options)
