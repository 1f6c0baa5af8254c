"""A conversion that was killed, or met a dead worker or a full disk, and the same command after it."""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawing import encoded, jpeg, png, put
from test_one_writer import draw_tree, everything, processes_naming

from shardwright.convert import (
    ConvertOptions,
    PixelOptions,
    StoreOptions,
    convert,
    output,
    unfinished,
    workers,
    write,
)
from shardwright.convert.unfinished import Unfinished
from shardwright.datasets import open_dataset
from shardwright.datasets.layout import Storage
from shardwright.datasets.manifest import read_manifest
from shardwright.errors import FormatError, OutputError, ShardwrightError

#: 16 pictures a shard.
OPTIONS = ConvertOptions(
    pixels=PixelOptions(size=8), store=StoreOptions(chunk_rows=8, shard_mib=16 * 8 * 8 * 3 / (1 << 20))
)
PICTURES, SHARDS = 100, 7


def command(tree: Path, out: Path, storage: Storage = "hdf5") -> list[str]:
    size = ["--size", "8", "--chunk-rows", "8", "--shard-mib", str(OPTIONS.store.shard_mib)]
    program = [sys.executable, "-P", "-m", "shardwright", "convert", str(tree), str(out)]
    return [*program, *size, "--format", storage, "--jobs", "2"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return draw_tree(tmp_path / "tree", PICTURES)


def stopped_after(
    shards: int, monkeypatch: pytest.MonkeyPatch, tree: Path, out: Path, **options: Any
) -> None:
    """Convert, and be interrupted once so many shards are finished."""
    real, calls = write.write_shard, 0

    def write_shard(task: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > shards:
            raise KeyboardInterrupt
        return real(task)

    with monkeypatch.context() as patch:
        patch.setattr(write, "write_shard", write_shard)
        with pytest.raises(KeyboardInterrupt):
            convert(tree, out, replace(OPTIONS, jobs=1, **options))


def shards_written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows by the number of each shard that is written from now on."""
    real, found = write.write_shard, []

    def write_shard(task: Any) -> Any:
        found.append(task.number)
        return real(task)

    monkeypatch.setattr(write, "write_shard", write_shard)
    return found


# --- killed at any instant ------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", ["hdf5", "npy"])
def test_killed_at_random_instants(tmp_path: Path, tree: Path, storage: Storage, kills: int) -> None:
    """SIGKILL, every other time to the parent alone, until the command ends by itself: the same bytes."""
    subprocess.run(command(tree, tmp_path / "undisturbed", storage), check=True, capture_output=True)
    right = everything(tmp_path / "undisturbed")
    images = [image.numpy().tobytes() for image, _ in open_dataset(tmp_path / "undisturbed")]
    mark = f"SHARDWRIGHT_TEST_{os.getpid()}_{storage}"
    chance = random.Random(0)
    out = tmp_path / "out"
    longest, killed, ended = 2.0, 0, 0
    while killed < kills:
        start = time.monotonic()
        process = subprocess.Popen(
            command(tree, out, storage),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, mark: "1"},
            start_new_session=True,
        )
        try:
            if killed % 4 < 2:  # most of the time goes into starting: every other pair falls where it writes
                while process.poll() is None and not list(out.glob(".shardwright/run/*")):
                    time.sleep(0.005)
                process.wait(chance.uniform(0, longest / 2))
            else:
                process.wait(chance.uniform(0, longest))
        except subprocess.TimeoutExpired:
            killed += 1
            if killed % 2:
                process.kill()
            else:
                os.killpg(process.pid, signal.SIGKILL)
                for pid in processes_naming(mark):  # loky gives workers a session of their own
                    os.kill(pid, signal.SIGKILL)
            process.wait()
            wait_for_none(mark)
            assert_all_or_nothing(out, images)
            continue
        assert process.returncode == 0
        longest = time.monotonic() - start
        ended += 1
        assert everything(out) == right
        subprocess.run(["rm", "-r", out], check=True)
    subprocess.run(command(tree, out, storage), check=True, capture_output=True)
    assert everything(out) == right


def wait_for_none(mark: str) -> None:
    end = time.monotonic() + 5
    while (alive := processes_naming(mark)) and time.monotonic() < end:
        time.sleep(0.02)
    assert not alive, "a writer is alive 5 s after its parent was killed"


def assert_all_or_nothing(out: Path, images: list[bytes]) -> None:
    try:
        dataset = open_dataset(out)
    except FormatError:
        return
    assert [image.numpy().tobytes() for image, _ in dataset] == images


@pytest.mark.parametrize("storage", ["hdf5", "npy"])
@pytest.mark.parametrize("finished", [0, 1, SHARDS - 1])
def test_finished_shards_are_not_made_again(
    here: None, tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch, storage: Storage, finished: int
) -> None:
    options = replace(OPTIONS, store=replace(OPTIONS.store, format=storage))
    convert(tree, tmp_path / "undisturbed", options)
    stopped_after(finished, monkeypatch, tree, tmp_path / "out", store=options.store)
    written = shards_written(monkeypatch)
    (done,) = convert(tree, tmp_path / "out", options)
    assert sorted(written) == list(range(finished, SHARDS))
    assert done.resumed == finished
    assert everything(tmp_path / "out") == everything(tmp_path / "undisturbed")


@pytest.mark.parametrize(
    "damage",
    ["record", "no record", "short", "gone", "empty record", "a bit of the record", "a bit", "zeros", "deep"],
)
def test_what_is_not_whole_is_not_finished(
    here: None, tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    convert(tree, tmp_path / "undisturbed", OPTIONS)
    stopped_after(3, monkeypatch, tree, tmp_path / "out")
    kept = tmp_path / "out" / ".shardwright" / "run"
    record, shard = kept / "record-00001.json", kept / "000001-00001.h5"
    match damage:
        case "record":
            record.write_text(record.read_text()[:-20])
        case "empty record":
            record.write_text("")
        case "a bit of the record":
            record.write_text(record.read_text().replace('"pixels": ', '"pixels": 1'))
        case "deep":
            record.write_text("[" * 200_000)
        case "a bit":
            data = bytearray(shard.read_bytes())
            data[len(data) // 2] ^= 1
            shard.write_bytes(data)
        case "zeros":
            size = shard.stat().st_size
            os.truncate(shard, size // 2)
            os.truncate(shard, size)
        case "no record":
            record.unlink()
        case "short":
            os.truncate(shard, shard.stat().st_size - 1)
        case "gone":
            shard.unlink()
    written = shards_written(monkeypatch)
    convert(tree, tmp_path / "out", OPTIONS)
    assert sorted(written) == [1, *range(3, SHARDS)]
    assert everything(tmp_path / "out") == everything(tmp_path / "undisturbed")


@pytest.mark.parametrize("after", range(SHARDS + 2))
def test_killed_while_publishing(
    here: None, tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """Between any two of the renames, or before the manifest; nothing is cleaned up, as after SIGKILL."""
    convert(tree, tmp_path / "undisturbed", OPTIONS)
    placed = 0

    class Killed(BaseException):
        pass

    def place(self: Unfinished, file: Any) -> None:
        nonlocal placed
        if placed == after:
            raise Killed
        placed += 1
        real(self, file)

    def write_manifest(*_: Any) -> None:
        raise Killed

    real = Unfinished.place
    with monkeypatch.context() as patch:
        patch.setattr(Unfinished, "place", place)
        patch.setattr(output, "write_manifest", write_manifest)
        patch.setattr(output.Output, "abandon", lambda *_: None)
        with pytest.raises(Killed):
            convert(tree, tmp_path / "out", OPTIONS)
    written = shards_written(monkeypatch)
    convert(tree, tmp_path / "out", OPTIONS)
    assert written == []
    assert everything(tmp_path / "out") == everything(tmp_path / "undisturbed")


@pytest.mark.parametrize(
    "change",
    [
        {"shard": {"files": [{"name": "../../victim", "bytes": 6, "sha256": "0" * 64}]}},
        {"shard": {"files": [{"name": "/tmp/victim.h5", "bytes": 6, "sha256": "0" * 64}]}},
        {"shard": {"rows": 17}},
        {"shard": {"rows": "16"}},
        {"number": 77},
        {"number": 2},
        {"findings": 3},
        {"sums": {"pixels": "x"}},
        {"shard": 5},
    ],
)
def test_a_record_that_is_not_of_the_plan_is_none(
    here: None, tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    convert(tree, tmp_path / "undisturbed", OPTIONS)
    stopped_after(3, monkeypatch, tree, tmp_path / "out")
    kept = tmp_path / "out" / ".shardwright" / "run"
    put(tmp_path, {"victim": b"victim", "out/.shardwright/victim": b"victim"})
    found = json.loads((kept / "record-00001.json").read_text())["values"]
    for key, value in change.items():
        found[key] = {**found[key], **value} if isinstance(value, dict) and key == "shard" else value
    unfinished._write(kept / "record-00001.json", found)
    (kept / "record-00001.copy.json").write_bytes((kept / "record-00000.json").read_bytes())
    written = shards_written(monkeypatch)
    convert(tree, tmp_path / "out", OPTIONS)
    assert sorted(written) == [1, *range(3, SHARDS)]
    assert (tmp_path / "victim").read_bytes() == b"victim"
    (tmp_path / "out" / ".shardwright" / "victim").unlink()
    assert everything(tmp_path / "out") == everything(tmp_path / "undisturbed")


@pytest.mark.parametrize(
    "request_", ["", "[]", '{"version": "x"}', '{"version": 1, "options": []}', '{"version": null}']
)
def test_a_request_that_is_none_begins_anew(
    here: None, tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch, request_: str
) -> None:
    stopped_after(3, monkeypatch, tree, tmp_path / "out")
    path = tmp_path / "out" / ".shardwright" / "run" / "request.json"
    if request_:
        unfinished._write(path, json.loads(request_))
    else:
        path.write_text("")
    assert convert(tree, tmp_path / "out", OPTIONS)[0].resumed == 0


def test_a_file_that_is_gone_is_not_published(
    here: None, tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = output.Output.place

    def place(self: output.Output, manifest: Any) -> None:
        next((tmp_path / "out" / ".shardwright" / "run").glob("*.h5")).unlink()
        real(self, manifest)

    with monkeypatch.context() as patch:
        patch.setattr(output.Output, "place", place)
        with pytest.raises(OutputError, match="a finished file is gone: .* Run the same command again"):
            convert(tree, tmp_path / "out", OPTIONS)
    assert not (tmp_path / "out" / "manifest.json").exists()
    written = shards_written(monkeypatch)
    convert(tree, tmp_path / "out", OPTIONS)
    assert len(written) == 1


def test_environments_that_changed_in_the_middle_are_no_dead_end(
    here: None, tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardwright.convert import write

    convert(tree, tmp_path / "undisturbed", OPTIONS)
    now, calls = write.environment(), 0

    def environment() -> dict[str, str]:
        nonlocal calls
        calls += 1
        return now if calls > 3 else {**now, "torch": "2.0.0"}

    with monkeypatch.context() as patch:
        patch.setattr(write, "environment", environment)
        with pytest.raises(OutputError, match="different library versions"):
            convert(tree, tmp_path / "out", OPTIONS)
    (done,) = convert(tree, tmp_path / "out", OPTIONS)
    assert done.resumed == SHARDS - 3
    assert everything(tmp_path / "out") == everything(tmp_path / "undisturbed")


def test_options_may_be_others_where_nothing_is_finished(
    here: None, tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output.Output, "abandon", lambda *_: None)  # as after SIGKILL
    stopped_after(0, monkeypatch, tree, tmp_path / "out")
    assert (tmp_path / "out" / ".shardwright" / "run" / "request.json").exists()
    assert convert(tree, tmp_path / "out", replace(OPTIONS, seed=1))[0].manifest.seed == 1


def test_the_hidden_folder_may_be_removed(
    here: None, tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(tree, tmp_path / "undisturbed", OPTIONS)
    monkeypatch.setattr(output.Output, "abandon", lambda *_: None)  # as after SIGKILL
    stopped_after(2, monkeypatch, tree, tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / ".shardwright")
    assert (tmp_path / "out" / "shards").exists()
    convert(tree, tmp_path / "out", OPTIONS)
    assert everything(tmp_path / "out") == everything(tmp_path / "undisturbed")


def test_splits_are_gone_on_with(here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for split in ("train", "val"):
        draw_tree(tmp_path / "tree" / split, 40)
    convert(tmp_path / "tree", tmp_path / "undisturbed", OPTIONS)
    stopped_after(4, monkeypatch, tmp_path / "tree", tmp_path / "out")
    put(tmp_path, {"out/.shardwright/lock": b""})  # as after SIGKILL
    train, val = convert(tmp_path / "tree", tmp_path / "out", OPTIONS)
    assert (train.resumed, val.resumed) == (3, 1)
    assert everything(tmp_path / "out") == everything(tmp_path / "undisturbed")


def test_files_beside_do_not_stand_in_for_python(tmp_path: Path, tree: Path) -> None:
    put(tmp_path / "beside", {"json.py": b"raise SystemExit('not me')", "random.py": b"x = 1"})
    program = [arg for arg in command(tree, tmp_path / "out") if arg != "-P"]
    program[:3] = [str(Path(sys.executable).with_name("shardwright"))]
    done = subprocess.run(program, cwd=tmp_path / "beside", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Traceback") == 0


@pytest.mark.parametrize("name", ["shards", ".shardwright"])
def test_a_link_to_elsewhere_is_not_written_through(
    here: None, tmp_path: Path, tree: Path, name: str
) -> None:
    convert(tree, tmp_path / "other", OPTIONS)
    before = everything(tmp_path / "other")
    put(tmp_path, {"out/.shardwright/": b"", "out/shards/": b""})
    (tmp_path / "out" / name).rmdir()
    (tmp_path / "out" / name).symlink_to(tmp_path / "other" / name)
    with pytest.raises(OutputError, match="is a link"):
        convert(tree, tmp_path / "out", OPTIONS)
    assert everything(tmp_path / "other") == before


def test_other_options_do_not_throw_finished_shards_away(
    here: None, tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped_after(3, monkeypatch, tree, tmp_path / "out")
    before = everything(tmp_path / "out")
    other = replace(OPTIONS, seed=1)
    with pytest.raises(OutputError, match="unfinished `convert` with other options: seed is 0 there, 1 here"):
        convert(tree, tmp_path / "out", other)
    assert {**everything(tmp_path / "out"), ".shardwright/lock": b""} == {**before, ".shardwright/lock": b""}
    (done,) = convert(tree, tmp_path / "out", replace(other, new_version=True))
    assert (done.manifest.version, done.manifest.seed, done.resumed) == (1, 1, 0)
    convert(tree, tmp_path / "undisturbed", other)
    assert everything(tmp_path / "out") == everything(tmp_path / "undisturbed")


def test_shards_of_another_environment_are_not_mixed_in(
    here: None, tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(tree, tmp_path / "undisturbed", OPTIONS)
    from shardwright.convert import write

    now = write.environment()
    with monkeypatch.context() as patch:
        patch.setattr(write, "environment", lambda: {**now, "torch": "2.0.0"})
        stopped_after(3, monkeypatch, tree, tmp_path / "out")
    written = shards_written(monkeypatch)
    (done,) = convert(tree, tmp_path / "out", OPTIONS)
    assert sorted(written) == list(range(SHARDS))
    assert done.resumed == 0
    assert f"torch is '2.0.0' there, '{now['torch']}' here" in done.notes[0]
    assert everything(tmp_path / "out") == everything(tmp_path / "undisturbed")


def test_the_next_version_is_taken_up_too(
    here: None, tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(tree, tmp_path / "out", OPTIONS)
    put(tree, {"class0/new.jpg": jpeg(seed=999), "class1/0001.jpg": jpeg(seed=998)})
    (tree / "class2" / "0002.jpg").unlink()
    first = open_dataset(tmp_path / "out").manifest
    stopped_after(2, monkeypatch, tree, tmp_path / "out")
    assert open_dataset(tmp_path / "out").manifest == first
    (done,) = convert(tree, tmp_path / "out", OPTIONS)
    assert (done.manifest.version, done.resumed) == (2, 2)
    assert done.changes is not None
    assert done.changes.added == ("class0/new.jpg",)
    assert done.changes.removed == ("class2/0002.jpg",)
    assert done.changes.changed == ("class1/0001.jpg",)
    assert done.changes.counts() == {"added": 1, "removed": 1, "changed": 1, "relabelled": 0}
    assert list((tmp_path / "out" / ".shardwright").glob("run*")) == []


@pytest.mark.parametrize("storage", ["hdf5", "npy"])
@pytest.mark.parametrize("damage", ["an id", "all ids", "gone"])
def test_damage_of_the_version_before_is_a_note_and_no_standstill(
    here: None, tmp_path: Path, tree: Path, storage: Storage, damage: str
) -> None:
    """HDF5 goes round in circles over some damaged ids, and gives others than were written over more."""
    options = replace(OPTIONS, store=replace(OPTIONS.store, format=storage))
    convert(tree, tmp_path / "out", options)
    files = [file.name for shard in read_manifest(tmp_path / "out").shards for file in shard.files]
    path = tmp_path / "out" / next(name for name in files if storage == "hdf5" or name.endswith(".id.npy"))
    content = bytearray(path.read_bytes())
    if damage == "an id":
        content[content.index(b".jpg")] ^= 1
    elif damage == "all ids":
        at = content.index(b"GCOL") + 16 if storage == "hdf5" else len(content) // 2
        content[at : at + 4080] = b"\1" * len(content[at : at + 4080])
    path.unlink() if damage == "gone" else path.write_bytes(content)
    put(tree, {"class0/new.jpg": jpeg(seed=999)})
    (done,) = convert(tree, tmp_path / "out", options)
    assert (done.made, done.manifest.version, done.changes) == (True, 2, None)
    (note,) = done.notes
    assert note.startswith("what changed cannot be said: ")
    assert str(path) in note
    assert "\n" not in note


def test_another_class_map_relabels(here: None, tmp_path: Path) -> None:
    put(tmp_path / "src", {"b/x.png": png(1), "c/y.png": png(2)})
    convert(tmp_path / "src", tmp_path / "out", OPTIONS)
    put(tmp_path / "src", {"a/z.png": png(3)})
    (done,) = convert(tmp_path / "src", tmp_path / "out", OPTIONS)
    assert done.changes is not None
    assert done.changes.relabelled == ("b/x.png", "c/y.png")
    assert "1 added ('a/z.png'), 2 relabelled ('b/x.png', 'c/y.png')" in done.changes.in_words()


# --- workers that die -----------------------------------------------------------------------------------

# What Python runs first in every process of the conversion: reading a picture called poison ends the process, one
# called unlucky does so once, or once for each y in its name.
_SITE = """
import builtins, os, signal
real = builtins.open
def reading(path, mode="r", *rest, **options):
    name = os.path.basename(path) if mode == "rb" and isinstance(path, (str, os.PathLike)) else ""
    if name.startswith("poison"):
        os.kill(os.getpid(), signal.{signal})
    if name.startswith("unlucky") and len(os.listdir({once!r})) < name.count("y"):
        real(os.path.join({once!r}, str(os.getpid())), "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return real(path, mode, *rest, **options)
builtins.open = reading
"""


def run_with_site(tmp_path: Path, tree: Path, number: str = "SIGKILL") -> subprocess.CompletedProcess[str]:
    (tmp_path / "once").mkdir()
    put(
        tmp_path / "site",
        {"sitecustomize.py": _SITE.format(signal=number, once=str(tmp_path / "once")).encode()},
    )
    return subprocess.run(
        [arg for arg in command(tree, tmp_path / "out") if arg != "-P"],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.parametrize("number", ["SIGKILL", "SIGSEGV"])
def test_a_picture_that_kills_is_named_and_all_else_is_converted(
    tmp_path: Path, tree: Path, number: str
) -> None:
    put(tree, {"class0/poison.jpg": jpeg(seed=1), "class1/poison too.jpg": jpeg(seed=2)})
    done = run_with_site(tmp_path, tree, number)
    assert done.returncode == 3, done.stderr
    dataset = open_dataset(tmp_path / "out")
    assert len(dataset) == PICTURES
    assert dict(dataset.manifest.rejected) == {"crash": 2}
    report = (tmp_path / "out" / "report-000001.jsonl").read_text()
    assert '"class0/poison.jpg", "verdict": "rejected", "reason": "crash"' in report
    assert ["rejected", "crash", "2"] in [line.split() for line in done.stdout.splitlines()]


@pytest.mark.parametrize("name", ["unlucky", "unluckyyy"])
def test_a_worker_that_died_by_chance_costs_nothing(tmp_path: Path, tree: Path, name: str) -> None:
    """Once while its shard is written; twice so, and once more while the picture is tried by itself."""
    put(tree, {f"class0/{name}.jpg": jpeg(seed=1)})
    done = run_with_site(tmp_path, tree)
    assert done.returncode == 0, done.stderr
    assert len(open_dataset(tmp_path / "out")) == PICTURES + 1
    subprocess.run(command(tree, tmp_path / "undisturbed"), check=True, capture_output=True)
    assert everything(tmp_path / "out") == everything(tmp_path / "undisturbed")


def test_a_poisonous_first_chunk_where_room_is_tight(tmp_path: Path, tree: Path) -> None:
    """What is tried to see whether there is room may be what kills."""
    put(tree, {f"class0/poison {k}.jpg": jpeg(seed=k) for k in range(2)})
    (tmp_path / "once").mkdir()
    put(
        tmp_path / "site",
        {"sitecustomize.py": _SITE.format(signal="SIGKILL", once=str(tmp_path / "once")).encode()},
    )
    script = (
        "import sys; from pathlib import Path; from shardwright.convert import run, space\n"
        "def free(_): return 100\n"
        "space.free_bytes = free\n"
        "from test_resume import OPTIONS\n"
        "if __name__ == '__main__':\n"
        "    try: run.convert(Path(sys.argv[1]), Path(sys.argv[2]), OPTIONS)\n"
        "    except Exception as error: print(type(error).__name__, error)\n"
    )
    put(tmp_path, {"script.py": script.encode()})
    said = subprocess.run(
        [sys.executable, tmp_path / "script.py", tree, tmp_path / "out"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path / 'site'}{os.pathsep}{Path(__file__).parent}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    ).stdout
    assert said.startswith("OutputError '"), said
    assert "its disk has 0.0 MB (100 bytes) free" in said


def test_a_worker_that_dies_of_no_picture_is_an_error(
    tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers._Worker, "_written", lambda worker, _: worker.call(_end_this_process))
    with pytest.raises(ShardwrightError, match="killed or crashed 3 times, and none of its 16 pictures"):
        convert(tree, tmp_path / "out", replace(OPTIONS, jobs=1))
    assert not (tmp_path / "out").exists()


def _end_this_process(*_: Any) -> None:
    os._exit(3)


# --- no room --------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_not_begun(
    here: None, tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("shardwright.convert.space.free_bytes", lambda _: 100)
        written = shards_written(patch)
        with pytest.raises(
            OutputError, match=r"needs .*\(\d+,\d+ bytes\), its disk has 0.0 MB \(100 bytes\) free"
        ):
            convert(tree, tmp_path / "out", OPTIONS)
        assert written == []
    assert not (tmp_path / "out").exists()


def test_pixels_that_compress_need_less_room(
    here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "src", {f"a/{k}.png": encoded(np.zeros((8, 8, 3), np.uint8), "PNG") for k in range(32)})
    room = 32 * 8 * 8 * 3 // 2
    monkeypatch.setattr("shardwright.convert.space.free_bytes", lambda _: room)
    assert convert(tmp_path / "src", tmp_path / "out", OPTIONS)[0].made
    with pytest.raises(OutputError, match="needs"):
        convert(
            tmp_path / "src",
            tmp_path / "raw",
            replace(OPTIONS, store=replace(OPTIONS.store, compression="none")),
        )


@pytest.mark.parametrize("storage", ["hdf5", "npy"])
def test_a_limit_of_file_size_is_said_and_then_gone_on_from(
    tmp_path: Path, tree: Path, storage: Storage
) -> None:
    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))

    full = subprocess.run(
        command(tree, tmp_path / "out", storage),
        preexec_fn=limited,
        capture_output=True,
        text=True,
        check=False,
    )
    assert full.returncode == 1
    assert "a file would be larger than allowed" in full.stderr
    assert full.stderr.count("shardwright: ") == 1
    assert "Traceback" not in full.stderr
    with pytest.raises(FormatError):
        open_dataset(tmp_path / "out")
    subprocess.run(command(tree, tmp_path / "out", storage), check=True, capture_output=True)
    subprocess.run(command(tree, tmp_path / "undisturbed", storage), check=True, capture_output=True)
    assert everything(tmp_path / "out") == everything(tmp_path / "undisturbed")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 400 kB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "none", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("to mount a tmpfs takes root")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.parametrize("storage", ["hdf5", "npy"])
def test_a_disk_that_fills_up_in_the_middle(small_disk: Path, tmp_path: Path, storage: Storage) -> None:
    tree = draw_tree(tmp_path / "tree", 2000)  # 384 kB of pixels, and what is around them
    out = small_disk / "out"
    full = subprocess.run(command(tree, out, storage), capture_output=True, text=True, check=False)
    assert full.returncode == 1, full.stderr
    assert "the disk is full" in full.stderr
    assert full.stderr.splitlines()[-1].count(" bytes)") == 2
    assert "Traceback" not in full.stderr, full.stderr
    with pytest.raises(FormatError):
        open_dataset(out)
    assert list(out.glob(".shardwright/run/record-*"))
    subprocess.run(["mount", "-o", "remount,size=20m", small_disk], check=True)
    done = subprocess.run(command(tree, out, storage), capture_output=True, text=True, check=True)
    assert "shards had been finished" in done.stdout
    subprocess.run(command(tree, tmp_path / "undisturbed", storage), check=True, capture_output=True)
    assert everything(out) == everything(tmp_path / "undisturbed")


def test_a_full_disk_leaves_the_version_before(
    here: None, tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(tree, tmp_path / "out", OPTIONS)
    before = everything(tmp_path / "out")
    put(tree, {"class0/new.jpg": jpeg(seed=999)})
    with monkeypatch.context() as patch:
        patch.setattr("shardwright.convert.store.GuardedFile.check", _no_space)
        with pytest.raises(OutputError, match="quota is used up.*goes on from there"):
            convert(tree, tmp_path / "out", OPTIONS)
    after = everything(tmp_path / "out")
    assert {name: after[name] for name in before} == before
    assert convert(tree, tmp_path / "out", OPTIONS)[0].manifest.version == 2


def _no_space(*_: Any) -> None:
    raise OSError(122, "Disk quota exceeded")
