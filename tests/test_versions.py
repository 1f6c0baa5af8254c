"""`versions`, and what a reader is told whose version was removed."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from building import Built, build, publish_next, send_first_or_error

from shardwright.convert.versions import versions
from shardwright.datasets import open_dataset
from shardwright.datasets.layout import Storage
from shardwright.datasets.manifest import data_sets_in
from shardwright.errors import FormatError, ShardError
from shardwright.loaders import LoaderOptions, make_loader

Command = Callable[..., Any]
GONE = "has no version 1, it has 2: version 1 was removed, as `shardwright gc` does.*Open the newest"


@pytest.fixture(params=["hdf5", "npy"])
def storage(request: pytest.FixtureRequest) -> Storage:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def two(tmp_path: Path, storage: Storage) -> Built:
    """Version 1 of three shards; version 2 shares the first with it, and has one of its own."""
    built = build(tmp_path / "out", storage, rows=50, shard_rows=20, flat=0)
    publish_next(built, keep=1)
    return built


def remove_first(built: Built) -> None:
    """Do as `gc` does with version 1."""
    (built.folder / "manifest-000001.json").unlink()
    for file in (file for shard in built.manifest.shards[1:] for file in shard.files):
        (built.folder / file.name).unlink()


def test_what_each_version_is(two: Built, storage: Storage, command: Command) -> None:
    first, second = versions(two.folder)
    assert (first.version, first.newest, second.version, second.newest) == (1, False, 2, True)
    assert (first.rows, first.shards, second.rows, second.shards) == (50, 3, 30, 2)
    sizes = [sum(file.bytes for file in shard.files) for shard in two.manifest.shards]
    assert first.bytes == sum(sizes)
    assert first.own_bytes == sum(sizes[1:])
    assert second.bytes == sizes[0] + sizes[2]
    assert second.own_bytes == sizes[2]
    assert first.whole
    assert second.whole
    os.utime(two.folder / "manifest-000001.json", (0, 86400))
    assert versions(two.folder)[0].made == "1970-01-02T00:00:00+00:00"
    said = command("versions", two.folder)
    assert said.code == 0
    lines = [line.split() for line in said.out.splitlines()]
    assert lines[0] == [f"'{two.folder}':", "2", "versions"]
    assert lines[2][:5] == ["1", "1970-01-02T00:00:00Z", "50", storage, "3"]
    assert lines[3][0] == "2"
    assert lines[3][-1] == "newest"
    found = json.loads(command("versions", two.folder, "--json").out)
    assert found["newest"] == 2
    assert [v["whole"] for v in found["versions"]] == [True, True]
    assert found["versions"][0]["own_bytes"] == sum(sizes[1:])


def test_files_that_are_not_there(two: Built) -> None:
    shared, own = (two.folder / two.manifest.shards[n].files[-1].name for n in (0, 1))
    elsewhere = two.folder / "elsewhere"
    shared.rename(elsewhere)
    shared.symlink_to(elsewhere)
    os.truncate(own, 3)
    first, second = versions(two.folder)
    assert len(first.missing) == 2
    assert second.missing == (two.manifest.shards[0].files[-1].name,)
    assert not first.whole


def test_a_version_that_cannot_be_read(two: Built, command: Command) -> None:
    (two.folder / "manifest-000001.json").write_text("[" * 100_000)
    first, second = versions(two.folder)
    assert "is no manifest that this version can read" in first.error
    assert not first.whole
    assert second.own_bytes is None  # the other one may name the same files
    assert second.whole
    assert command("versions", two.folder).code == 0
    (two.folder / "manifest.json").write_text("{}")
    assert command("versions", two.folder).code == 1


def test_a_version_without_its_own_manifest(two: Built, command: Command) -> None:
    (two.folder / "manifest-000002.json").unlink()
    first, second = versions(two.folder)
    assert (first.made is None, second.made is None) == (False, True)
    assert (second.newest, second.rows, second.whole, second.missing) == (True, 30, False, ())
    assert "manifest-000002.json' is gone: copy manifest.json to it" in second.error
    assert "newest, '" in command("versions", two.folder).out
    assert len(open_dataset(two.folder, version=2)) == 30  # until then it is read from manifest.json


def test_splits(tmp_path: Path, command: Command) -> None:
    for split in ("train", "val"):
        build(tmp_path / "out" / split, rows=10)
    assert list(data_sets_in(tmp_path / "out")) == ["train", "val"]
    said = command("versions", tmp_path / "out").out
    assert said.count(": 1 version\n") == 2
    assert set(json.loads(command("versions", tmp_path / "out", "--json").out)) == {"train", "val"}


def test_what_is_no_data_set(tmp_path: Path, command: Command) -> None:
    said = command("versions", tmp_path / "nothing")
    assert said.code == 1
    assert "no data set at" in said.err


def test_a_version_that_is_missing_names_those_that_are_there(two: Built) -> None:
    for version in (3, 0, -1):
        with pytest.raises(FormatError, match=f"has no version {version}, it has 1, 2$"):
            open_dataset(two.folder, version=version)
    remove_first(two)
    with pytest.raises(FormatError, match=GONE):
        open_dataset(two.folder, version=1)
    assert len(open_dataset(two.folder)) == 30


# --- a reader whose version was removed -----------------------------------------------------------------


def test_files_that_are_open_go_on_and_others_say_why(two: Built) -> None:
    dataset = open_dataset(two.folder, version=1)
    assert len(dataset.read_batch(range(20, 40))) == 20  # opens the second shard
    remove_first(two)
    image, _ = dataset[21]
    assert torch.equal(image.permute(1, 2, 0), torch.from_numpy(two.images[21]))
    assert len(dataset.read_batch(range(20))) == 20  # the first one is version 2's too
    with pytest.raises(ShardError, match=f"cannot open '.*000001-00002.*': .*{GONE}"):
        dataset[45]
    with pytest.raises(ShardError, match=GONE):
        dataset.ids()
    with pytest.raises(ShardError, match=GONE):
        dataset.labels()


def test_files_that_were_closed_meanwhile(two: Built) -> None:
    """As in a data set of more shards than files may be open."""
    dataset = open_dataset(two.folder, version=1)
    dataset.reader._files.limit = 1
    dataset.read_batch(range(50))
    remove_first(two)
    dataset.read_batch(range(45, 50))  # the one that is open
    with pytest.raises(ShardError, match=GONE):
        dataset.read_batch(range(20, 50))


def test_a_lost_file_of_a_version_that_is_there_is_damage(two: Built) -> None:
    dataset = open_dataset(two.folder, version=1)
    (two.folder / two.manifest.shards[1].files[0].name).unlink()
    with pytest.raises(ShardError, match="No such file or directory. `shardwright verify`"):
        dataset[20]
    shutil.rmtree(two.folder)
    with pytest.raises(ShardError, match="No such file or directory. `shardwright verify`"):
        dataset[0]


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_processes_started_later(two: Built, method: str) -> None:
    dataset = open_dataset(two.folder, version=1)
    dataset[0]
    remove_first(two)
    context = get_context(method)
    queue = context.Queue()
    process = context.Process(target=send_first_or_error, args=(pickle.dumps(dataset), queue))
    process.start()
    kind, text = queue.get(timeout=60)
    process.join()
    assert kind == "FormatError"
    assert "version 1 was removed" in text


@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_loaders(two: Built, engine: Any) -> None:
    dataset = open_dataset(two.folder, version=1)
    options = LoaderOptions(quiet=True, engine=engine, workers=1, prefetch_batches=1, start_method="fork")
    loader = make_loader(dataset, 10, options=replace(options))
    remove_first(two)
    with pytest.raises((ShardError, FormatError), match="version 1 was removed"):
        list(loader)
