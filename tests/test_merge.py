"""`merge` makes one data set of several: every row once, classes by name, ids all different."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from building import Built, build, republish
from test_one_writer import everything
from test_reshard import assert_whole, in_order, rows_of

from shardwright.convert import copying
from shardwright.convert.layouts import LayoutOptions
from shardwright.convert.lock import one_writer
from shardwright.convert.merge import MergeOptions, merge
from shardwright.datasets import open_dataset
from shardwright.datasets.layout import Column, Storage
from shardwright.errors import FormatError, OutputError, ShardError, SourceError, UsageError

Command = Callable[..., Any]
OPTIONS = MergeOptions(jobs=1)


@pytest.fixture(params=["hdf5", "npy"])
def storage(request: pytest.FixtureRequest) -> Storage:
    return request.param  # type: ignore[no-any-return]


def named(built: Built, *classes: str) -> Built:
    """``built`` with other names of its classes."""
    republish(built, classes=classes)
    return replace(built, manifest=replace(built.manifest, classes=classes))


@pytest.fixture
def two(tmp_path: Path, storage: Storage) -> tuple[Built, Built]:
    """Two data sets that have one class in common, under another number, and no id."""
    a = build(tmp_path / "a", storage, rows=50, classes=2, dead={0: (3,)})
    b = build(tmp_path / "b", "hdf5", rows=30, classes=3, compression="gzip")
    return named(a, "cat", "dog"), named(b, "dog", "ant", "bee")


def test_classes_are_joined_by_name(here: None, tmp_path: Path, two: tuple[Built, Built]) -> None:
    a, b = two
    done = merge([a.folder, b.folder], tmp_path / "out", replace(OPTIONS, prefix=True))
    dataset = open_dataset(tmp_path / "out")
    assert dataset.classes == ("cat", "dog", "ant", "bee")
    assert dataset.manifest.storage == a.manifest.storage
    name_of = {f"a/{id}": ("cat", "dog")[label] for id, label in zip(a.ids, a.labels.tolist(), strict=True)}
    name_of |= {
        f"b/{id}": ("dog", "ant", "bee")[label] for id, label in zip(b.ids, b.labels.tolist(), strict=True)
    }
    found = dict(zip(dataset.ids(), (dataset.classes[k] for k in dataset.labels().tolist()), strict=True))
    assert found == name_of
    order = np.random.Generator(np.random.PCG64(0)).permutation(len(name_of))
    assert dataset.ids() == [sorted(name_of)[i] for i in order]
    images = np.concatenate([a.images, b.images])
    assert np.allclose(dataset.manifest.stats.mean, images.mean(axis=(0, 1, 2)))
    assert np.allclose(dataset.manifest.stats.std, images.std(axis=(0, 1, 2)))
    before = rows_of(a.folder), rows_of(b.folder)
    pixels = {f"{k}/{id}": row[0] for k, rows in zip("ab", before, strict=True) for id, row in rows.items()}
    assert {id: row[0] for id, row in rows_of(tmp_path / "out").items()} == pixels
    assert_whole(tmp_path / "out")
    assert done.made
    assert not merge([a.folder, b.folder], tmp_path / "out", replace(OPTIONS, prefix=True)).made


def test_rows_in_their_order(tmp_path: Path, two: tuple[Built, Built], command: Command) -> None:
    folders = [built.folder for built in two]
    keep = ("--prefix", "--keep-order", "--format", "npy", "--jobs", 1)
    ran = command("merge", *folders, tmp_path / "out", *keep, "--json")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert (found["rows"], found["storage"], found["classes"]) == (79, "npy", 4)
    assert open_dataset(tmp_path / "out").ids() == [f"a/{id}" for id in two[0].ids] + [
        f"b/{id}" for id in two[1].ids
    ]
    assert "Nothing to do" in command("merge", *folders, tmp_path / "out", *keep).out
    ran = command("merge", *folders, tmp_path / "out", "--prefix", "--seed", 0)
    assert (ran.code, "seed is None there, 0 here" in ran.err) == (1, True)
    assert command("merge", *folders, tmp_path / "x", "--keep-order", "--seed", 3).code == 2
    before = everything(tmp_path / "out")
    dry = command("merge", *reversed(folders), tmp_path / "dry", "--prefix", "--dry-run")
    assert (dry.code, "would be 79 images" in dry.out, (tmp_path / "dry").exists()) == (0, True, False)
    ran = command("merge", *reversed(folders), tmp_path / "out", *keep)
    assert (ran.code, "made of another data set" in ran.err) == (1, True)
    assert everything(tmp_path / "out") == before
    assert command("merge", *reversed(folders), tmp_path / "out", *keep, "--new-version").code == 0
    assert open_dataset(tmp_path / "out").manifest.version == 2


def test_ids_that_are_in_two(here: None, tmp_path: Path) -> None:
    for name in "ab":
        build(tmp_path / name)
    with pytest.raises(
        SourceError, match=r"50 ids are in more than one data set: 'c0/.*, \.\.\.; .*--prefix"
    ):
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out", OPTIONS)
    assert not (tmp_path / "out").exists()
    done = merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out", replace(OPTIONS, prefix=True))
    assert done.manifest is not None
    assert sum(done.manifest.duplicates.values()) == 99  # all of them have the same hash of a source
    (tmp_path / "x").mkdir()
    shutil.copytree(tmp_path / "a", tmp_path / "x" / "a")
    with pytest.raises(SourceError, match="50 ids are in more than one data set: 'a/c0/"):
        merge([tmp_path / "a", tmp_path / "x" / "a"], tmp_path / "other", replace(OPTIONS, prefix=True))


@pytest.mark.parametrize(("one", "other"), [("Cat", "cat"), ("caf\u00e9", "cafe\u0301")])
def test_classes_that_are_nearly_the_same(here: None, tmp_path: Path, one: str, other: str) -> None:
    a = named(build(tmp_path / "a", classes=2), "dog", one)
    b = named(build(tmp_path / "b", classes=2, rows=30), "dog", other)
    with pytest.raises(SourceError, match="differ only in case or Unicode form"):
        merge([a.folder, b.folder], tmp_path / "out", replace(OPTIONS, prefix=True))


def test_what_does_not_go_together(here: None, tmp_path: Path, command: Command) -> None:
    a, b = build(tmp_path / "a"), build(tmp_path / "b", rows=30, shape=(4, 4, 3))
    with pytest.raises(SourceError, match="are 8x8x3, those of .* are 4x4x3"):
        merge([a.folder, b.folder], tmp_path / "out", OPTIONS)
    c = build(tmp_path / "c", rows=30)
    republish(c, columns=(*c.manifest.columns, Column("gaze", "gaze", "float32", (2,))))
    with pytest.raises(FormatError, match="have not the same column 'gaze'"):
        merge([a.folder, c.folder], tmp_path / "out", OPTIONS)
    with pytest.raises(UsageError, match="is given twice"):
        merge([a.folder, tmp_path / "b" / ".." / "a"], tmp_path / "out", OPTIONS)
    with pytest.raises(UsageError, match="lie in one another"):
        merge([a.folder, b.folder], b.folder / "out", OPTIONS)
    with pytest.raises(OutputError, match="which `merge` did not make"):
        merge(
            [a.folder, build(tmp_path / "d", rows=30).folder],
            build(tmp_path / "e").folder,
            replace(OPTIONS, prefix=True),
        )
    assert command("merge", a.folder, tmp_path / "out").code == 2
    assert (
        command("merge", a.folder, b.folder, tmp_path / "out", "--format", "npy", "--compression", "lzf").code
        == 2
    )
    assert command("merge", a.folder, tmp_path / "nothing", tmp_path / "out").code == 2
    assert not (tmp_path / "out").exists()


def test_what_is_said_of_the_pixels(here: None, tmp_path: Path) -> None:
    a, b = build(tmp_path / "a"), build(tmp_path / "b", rows=30)
    republish(
        a,
        options={"chunk_rows": 8, "fit": "crop", "orient": True},
        source={"files": 52},
        rejected={"damaged": 2},
    )
    republish(
        b,
        options={"chunk_rows": 8, "fit": "pad", "orient": True},
        source={"files": 31},
        rejected={"damaged": 1},
    )
    done = merge([a.folder, b.folder], tmp_path / "out", replace(OPTIONS, prefix=True))
    assert done.manifest is not None
    assert "fit" not in done.manifest.options
    assert done.manifest.options["orient"] is True
    assert (done.manifest.source["files"], done.manifest.rejected) == (83, {"damaged": 3})
    assert any("fit is 'crop' there, 'pad' here" in note for note in done.notes)


def test_it_goes_on_where_it_was(
    here: None, tmp_path: Path, two: tuple[Built, Built], monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [built.folder for built in two]
    options = replace(OPTIONS, prefix=True, layout=LayoutOptions(shard_mib=16 * 192 / 2**20))
    merge(folders, tmp_path / "undisturbed", options)
    real, calls = copying.copy_shard, 0

    def copy_shard(task: copying.CopyTask) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return real(task)

    monkeypatch.setattr(copying, "copy_shard", copy_shard)
    with pytest.raises(KeyboardInterrupt):
        merge(folders, tmp_path / "out", options)
    done = merge(folders, tmp_path / "out", options)
    assert (done.resumed, calls) == (2, 3 + 3)
    assert everything(tmp_path / "out") == everything(tmp_path / "undisturbed")


def test_bytes_do_not_depend_on_jobs(tmp_path: Path, two: tuple[Built, Built]) -> None:
    folders = [built.folder for built in two]
    for jobs in (1, 2):
        merge(folders, tmp_path / str(jobs), MergeOptions(prefix=True, jobs=jobs))
    assert everything(tmp_path / "1") == everything(tmp_path / "2")


def test_damage_and_locks(here: None, tmp_path: Path, two: tuple[Built, Built], command: Command) -> None:
    folders = [built.folder for built in two]
    with one_writer(tmp_path / "out"):
        assert command("merge", *folders, tmp_path / "out", "--prefix").code == 4
    last = two[1].manifest.shards[-1].files[0].name
    (folders[1] / last).write_bytes((folders[1] / last).read_bytes()[:-7] + b"changed")
    with pytest.raises(ShardError, match=last):
        merge(folders, tmp_path / "out", replace(OPTIONS, prefix=True))
    assert not (tmp_path / "out").exists()


def test_a_merge_of_parts_is_what_was_split(here: None, tmp_path: Path) -> None:
    from shardwright.convert.selection import parse_shares
    from shardwright.convert.split import SplitOptions, split

    built = build(tmp_path / "a", rows=200)
    split(built.folder, tmp_path / "parts", SplitOptions(parse_shares("train=0.7,val=0.3"), jobs=1))
    merge([tmp_path / "parts" / name for name in ("train", "val")], tmp_path / "again", OPTIONS)
    assert rows_of(tmp_path / "again") == rows_of(built.folder)
    assert in_order(rows_of(tmp_path / "again")) != in_order(rows_of(built.folder))
