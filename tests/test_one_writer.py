"""One writer at a time; what a killed, terminated or failed run leaves; what the next one makes of it."""

import errno
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from drawing import jpeg, png, put

from shardwright.convert import ConvertOptions, PixelOptions, convert, lock, output
from shardwright.convert.lock import data_sets_of, one_writer, sole_writer, split_writer
from shardwright.convert.space import unwritable
from shardwright.convert.starting import starting_processes
from shardwright.convert.workers import Workers
from shardwright.datasets import open_dataset
from shardwright.datasets.manifest import read_manifest, replace_file
from shardwright.errors import LockedError, OutputError, ShardwrightError, SourceError

OPTIONS = ConvertOptions(pixels=PixelOptions(size=8))
COMMAND = [
    sys.executable,
    "-m",
    "shardwright",
    "convert",
    "--size",
    "8",
    "--shard-mib",
    "0.002",
    "--jobs",
    "2",
]


def draw_tree(root: Path, pictures: int = 12) -> Path:
    return put(root, {f"class{i % 3}/{i:04d}.jpg": jpeg(seed=i) for i in range(pictures)})


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return draw_tree(tmp_path / "tree")


def everything(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def processes_naming(text: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if any(os.fsencode(text) in (entry / name).read_bytes() for name in ("cmdline", "environ")):
                    found.append(int(entry.name))
            except OSError:
                continue
    return [pid for pid in found if pid != os.getpid()]


def test_a_held_output_names_its_holder(tree: Path, tmp_path: Path, command: Callable[..., Any]) -> None:
    with one_writer(tmp_path / "out"):
        with pytest.raises(LockedError, match=rf"held by process {os.getpid()} on .*, since 20"):
            convert(tree, tmp_path / "out", OPTIONS)
        assert command("convert", tree, tmp_path / "out").code == 4
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    with one_writer(tmp_path / "out"):
        pass
    assert list((tmp_path / "out").iterdir()) == []  # it was there before: it stays, as it was


@pytest.mark.parametrize("make", ["convert", "reshard", "split"])
def test_a_split_that_is_being_written_alone_is_held(
    here: None, tmp_path: Path, command: Callable[..., Any], make: str
) -> None:
    """Whoever writes all splits holds each of them; and a folder that was not there is not there after it."""
    out = tmp_path / "out"
    for split in ("train", "val"):
        draw_tree(tmp_path / "tree" / split)
    convert(tmp_path / "tree", tmp_path / "src", OPTIONS)
    arguments = {
        "convert": (tmp_path / "tree", out, "--size", 8),
        "reshard": (tmp_path / "src", out, "--chunk-rows", 4),
        "split": (tmp_path / "src" / "train", out, "--by", "train=0.5,val=0.5"),
    }
    with one_writer(out / "val"):
        ran = command(make, *arguments[make])
        assert ran.code == 4
        assert f"the output '{out / 'val'}' is held by process {os.getpid()} on " in ran.err
        assert sorted(path.name for path in out.iterdir()) == ["val"]
    assert not (out / "train").exists()


@pytest.mark.parametrize("name", ["val", ".shardwright"])
@pytest.mark.parametrize("make", ["convert", "reshard", "reshard in place", "split", "gc", "repair"])
def test_a_split_that_is_a_link_is_another_s_place(
    here: None, tmp_path: Path, command: Callable[..., Any], make: str, name: str
) -> None:
    out = tmp_path / "out"
    for split in ("train", "val"):
        draw_tree(tmp_path / "tree" / split)
    convert(tmp_path / "tree", tmp_path / "src", OPTIONS)
    elsewhere = tmp_path / "elsewhere"
    arguments: dict[str, tuple[object, ...]] = {
        "convert": (tmp_path / "tree", out, "--size", 8),
        "reshard": (tmp_path / "src", out, "--chunk-rows", 4),
        "reshard in place": (out, "--chunk-rows", 4),
        "split": (tmp_path / "src" / "train", out, "--by", "train=0.5,val=0.5"),
        "gc": (out, "--min-age", 0),
        "repair": (out, "--source", tmp_path / "tree"),
    }
    if make in ("reshard in place", "gc", "repair"):
        convert(tmp_path / "tree", out, OPTIONS)
        next(out.glob("train/shards/*")).write_bytes(b"damage") if make == "repair" else None
    (out / name).mkdir(parents=True, exist_ok=True)
    (out / name).rename(elsewhere)
    (out / name).symlink_to(elsewhere)
    before = everything(tmp_path)
    ran = command(make.split()[0], *arguments[make])
    assert (ran.code, f"'{out / name}' is a link" in ran.err) == (1, True)
    assert everything(tmp_path) == before


def test_two_splits_may_be_converted_at_once(here: None, tree: Path, tmp_path: Path) -> None:
    convert(tree, tmp_path / "out" / "val", OPTIONS)
    with split_writer(tmp_path / "out" / "val", []):
        assert convert(tree, tmp_path / "out" / "train", OPTIONS)[0].made


def test_the_folder_of_splits_is_found_through_a_link(here: None, tree: Path, tmp_path: Path) -> None:
    convert(tree, tmp_path / "out" / "train", OPTIONS)
    (tmp_path / "alias").symlink_to(tmp_path / "out" / "train")
    with one_writer(tmp_path / "out"), pytest.raises(LockedError), sole_writer(tmp_path / "alias", []):
        pass


def test_a_lock_file_alone_holds_nobody(here: None, tree: Path, tmp_path: Path) -> None:
    convert(tree, tmp_path / "out", OPTIONS)
    (tmp_path / "out" / ".shardwright" / "lock").write_text(
        json.dumps({"process": 1, "host": "x", "since": "y"})
    )
    assert not convert(tree, tmp_path / "out", OPTIONS)[0].made


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (errno.ENOSPC, "the disk is full, .* has .* free.* make room"),
        (errno.EDQUOT, "the quota is used up.* make room"),
        (errno.EROFS, "Read-only file system. See to .* use another output"),
    ],
)
def test_a_lock_that_cannot_be_made(
    here: None, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, says: str
) -> None:
    """What, where and the cure; nothing is left, and nothing is held."""
    out, real = tmp_path / "made" / "out", os.open

    def failing(where: Any, *arguments: Any) -> Any:
        if not str(where).endswith("/lock"):
            return real(where, *arguments)
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as broken:
        broken.setattr(lock.os, "open", failing)
        with pytest.raises(OutputError, match=f"cannot write '{re.escape(str(out))}': {says}"):
            convert(tree, out, OPTIONS)
    assert not (tmp_path / "made").exists()
    assert convert(tree, out, OPTIONS)[0].made


def test_a_lock_that_cannot_be_written_is_a_lock(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk `gc` is what makes room."""

    def failing(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(lock.os, "pwrite", failing)
    with (
        one_writer(tmp_path / "out"),
        pytest.raises(LockedError, match="held by another process"),
        one_writer(tmp_path / "out"),
    ):
        pass


def test_a_lock_that_cannot_be_emptied_is_no_failure(
    here: None, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was published is; what stays in the file is what a killed process leaves."""

    def failing(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(lock.os, "ftruncate", failing)
        assert convert(tree, tmp_path / "out", OPTIONS)[0].made
    with one_writer(tmp_path / "out"):
        pass


@pytest.mark.parametrize("step", ["rename", "sync_folder", "replace_file", "write_manifest"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_at_any_step_of_publishing(
    here: None, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: BaseException
) -> None:
    convert(tree, tmp_path / "undisturbed", OPTIONS)

    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as broken:
        broken.setattr(output.os if step == "rename" else output, step, fail)
        with pytest.raises((OutputError, KeyboardInterrupt)):
            convert(tree, tmp_path / "out", OPTIONS)
    assert not (tmp_path / "out" / "manifest.json").exists()
    convert(tree, tmp_path / "out", OPTIONS)
    assert everything(tmp_path / "out") == everything(tmp_path / "undisturbed")


@pytest.mark.parametrize("splits", [(), ("train", "val")])
def test_folders_that_were_made_are_synced_before_a_version_is_published(
    here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, splits: tuple[str, ...]
) -> None:
    """Else the power may take the name of the output, or of a folder around it, with all that was synced inside."""
    for split in splits or ("",):
        draw_tree(tmp_path / "tree" / split)
    out = tmp_path / "there" / "made" / "too" / "out"
    (tmp_path / "there").mkdir()
    order: list[str] = []
    fsync, replace = os.fsync, os.replace

    def syncing(fd: int) -> None:
        order.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    def replacing(old: Path, new: Path) -> None:
        order.append(str(new))
        replace(old, new)

    monkeypatch.setattr(os, "fsync", syncing)
    monkeypatch.setattr(os, "replace", replacing)
    convert(tmp_path / "tree", out, OPTIONS)
    for split in splits or ("",):
        published = order.index(str(out / split / "manifest-000001.json"))
        made = [out / split / "shards", out / split, out, out.parent, out.parent.parent]
        parents = {folder.parent for folder in made}
        assert {str(folder) for folder in parents} <= {*order[:published]}


def test_a_version_whose_publishing_was_cut_short_is_finished(here: None, tree: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(tree, out, OPTIONS)
    before = everything(out)
    (out / "manifest.json").unlink()  # as if the process had ended between the two
    assert not convert(tree, out, OPTIONS)[0].made
    assert everything(out) == before


def test_pictures_lost_behind_links_are_not_published_away(here: None, tmp_path: Path) -> None:
    behind = draw_tree(tmp_path / "behind")
    for picture in sorted(behind.rglob("*.jpg")):
        link = tmp_path / "tree" / picture.parent.name / picture.name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(picture)
    convert(tmp_path / "tree", tmp_path / "out", OPTIONS)
    rows = read_manifest(tmp_path / "out").rows
    for picture in sorted(behind.rglob("*.jpg"))[1:]:
        picture.unlink()
    with pytest.raises(SourceError, match=f"only 1 of the {rows} .*--allow-shrink"):
        convert(tmp_path / "tree", tmp_path / "out", OPTIONS)
    assert read_manifest(tmp_path / "out").version == 1


def test_strict_looks_at_what_is_there_already(here: None, tree: Path, tmp_path: Path) -> None:
    next(tree.rglob("*.jpg")).write_bytes(b"no picture")
    convert(tree, tmp_path / "out", OPTIONS)
    with pytest.raises(SourceError, match="version 1 of .* was made without 1 pictures"):
        convert(tree, tmp_path / "out", ConvertOptions(pixels=PixelOptions(size=8), strict=True))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_everything(tmp_path: Path, number: signal.Signals, code: int) -> None:
    tree = draw_tree(tmp_path / "tree", pictures=400)
    mark = f"SHARDWRIGHT_TEST_{os.getpid()}_{code}"
    out = tmp_path / "out"
    with subprocess.Popen(
        [*COMMAND, str(tree), str(out)], stderr=subprocess.PIPE, env={**os.environ, mark: "1"}, text=True
    ) as process:
        while not list(out.glob(".shardwright/work-*/*")):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        start = time.monotonic()
        _, said = process.communicate(timeout=20)
        seconds = time.monotonic() - start
    assert process.returncode == code
    assert seconds < 5
    assert "Traceback" not in said
    assert said.count("shardwright: ") == 1
    assert "same command goes on" in said
    assert processes_naming(mark) == []
    # Finished shards are kept, out of sight; of what was half-made nothing is.
    assert not list(out.glob(".shardwright/work*"))
    assert not any(path.is_file() for path in out.rglob("*") if ".shardwright" not in path.parts)
    subprocess.run([*COMMAND, str(tree), str(out)], check=True, capture_output=True)
    subprocess.run([*COMMAND, str(tree), str(tmp_path / "undisturbed")], check=True, capture_output=True)
    assert everything(out) == everything(tmp_path / "undisturbed")


def test_a_killed_parent_takes_its_workers_along(tmp_path: Path) -> None:
    tree = draw_tree(tmp_path / "tree", pictures=400)
    mark = f"SHARDWRIGHT_TEST_{os.getpid()}_kill"
    out = tmp_path / "out"
    with subprocess.Popen(
        [*COMMAND, str(tree), str(out)], stderr=subprocess.DEVNULL, env={**os.environ, mark: "1"}
    ) as process:
        while not list(out.glob(".shardwright/work-*/*")):
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
    end = time.monotonic() + 5
    while processes_naming(mark) and time.monotonic() < end:
        time.sleep(0.05)
    assert processes_naming(mark) == []
    assert not (out / "manifest.json").exists()
    subprocess.run([*COMMAND, str(tree), str(out)], check=True, capture_output=True)
    assert len(open_dataset(out)) == 400
    assert list(out.glob(".shardwright/work-*")) == []


@pytest.mark.parametrize("damage", ["gone", "short"])
def test_a_damaged_version_is_not_up_to_date(here: None, tree: Path, tmp_path: Path, damage: str) -> None:
    out = tmp_path / "out"
    first = convert(tree, out, OPTIONS)[0].manifest
    file = out / first.shards[0].files[0].name
    if damage == "gone":
        file.unlink()
    else:
        os.truncate(file, 100)
    (again,) = convert(tree, out, OPTIONS)
    assert (again.made, again.manifest.version) == (True, 2)
    assert len(open_dataset(out).read_batch(range(12))) == 12


def test_an_interrupt_while_modules_are_imported(python: Callable[..., Any]) -> None:
    """One line and its exit code; in the background, where it is ignored, it stays so."""
    code = """
import os, signal, sys
from shardwright.__main__ import run
class Interrupting:
    def find_spec(self, name, *_):
        if name == "click":
            os.kill(os.getpid(), signal.SIGINT)
if "ignored" in sys.argv:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.meta_path.insert(0, Interrupting())
sys.argv = ["shardwright", "--version"]
run()
"""
    ran = python(code)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "shardwright: interrupted\n")
    ran = python(code, "ignored")
    assert (ran.returncode, ran.stderr) == (0, "")


def test_a_ctrl_c_does_not_reach_workers() -> None:
    """From their first instant: a Python that is still starting would show a traceback. And it reaches us."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with Workers(1) as workers:
        blocked = workers.call(signal.pthread_sigmask, signal.SIG_BLOCK, [])
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
    assert signal.SIGINT in blocked


@pytest.mark.parametrize("limit", [14, 22, 40])
def test_too_few_open_files(tree: Path, tmp_path: Path, python: Callable[..., Any], limit: int) -> None:
    """Before the first process is started, or one of the others."""
    code = """
import resource, sys
limit = int(sys.argv.pop())
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
from shardwright.cli import main
main(sys.argv[1:], prog_name="shardwright")
"""
    small = ["--size", "8", "--shard-mib", "0.0001", "--chunk-rows", "1", "--jobs", "8"]
    ran = python(code, "convert", str(tree), str(tmp_path / "out"), *small, str(limit))
    assert ran.returncode == 1, ran.stderr
    assert (
        f"too few files may be open at once to start worker processes: at most {limit}. Raise" in ran.stderr
    )
    assert "Traceback" not in ran.stderr
    assert limit == 40 or not (tmp_path / "out").exists()  # else a shard may have been finished


def test_looking_for_descriptors_takes_none_from_others() -> None:
    """Threads that open files meanwhile never find that there are too many."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    ended, failed = threading.Event(), []

    def others() -> None:
        while not ended.is_set():
            try:
                os.close(os.open(os.devnull, os.O_RDONLY))
            except OSError as error:
                failed.append(error)

    thread = threading.Thread(target=others)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 8, limits[1]))
    try:
        thread.start()
        for _ in range(2000):
            with pytest.raises(ShardwrightError, match="too few files"), starting_processes():
                pass
    finally:
        ended.set()
        thread.join()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert failed == []


def test_an_output_that_is_only_being_made_is_held(tmp_path: Path, command: Callable[..., Any]) -> None:
    """By its first conversion: who comes too early need not think that it is no data set."""
    tree, out = put(tmp_path / "src", {"a/1.png": png()}), tmp_path / "out"
    for arguments in (["sync", tree, out], ["gc", out], ["reshard", out], ["repair", out, "--source", tree]):
        with one_writer(out):
            ran = command(*arguments)
            assert (ran.code, "is held by process" in ran.err) == (4, True), ran
        assert not out.exists()
        assert command(*arguments).code in (1, 2)  # nothing is there


def test_an_output_that_was_made_while_it_was_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock was held, and is gone when it is to be read who holds it."""
    out, real = tmp_path / "out", lock._is_held

    def ended(path: Path) -> bool:
        held = real(path)
        path.unlink()
        put(out, {"train/manifest.json": b"{}"})
        return held

    with one_writer(out):
        monkeypatch.setattr(lock, "_is_held", ended)
        assert data_sets_of(out) == {"train": out / "train"}
        (out / ".shardwright" / "lock").touch()  # as its end removes it


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    error = unwritable(PermissionError(errno.EACCES, "Permission denied", "out/shards/1.h5"), Path("out"))
    assert str(error).startswith("cannot write 'out': 'out/shards/1.h5': Permission denied. See to its disk")
    assert "'out': Input/output error. See" in str(
        unwritable(OSError(errno.EIO, "Input/output error"), Path("out"))
    )


def test_what_was_half_written_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="No space"):
        replace_file(tmp_path / "manifest.json", b"{}", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_removed_either_hides_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that failed is made read-only by some systems."""

    def unlink(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    def fsync(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "unlink", unlink)
    with pytest.raises(OSError, match="Input/output error"):
        replace_file(tmp_path / "manifest.json", b"{}", tmp_path)
