"""Commands that do work, seen from outside: the log, job.json, niceness, and how many workers there are."""

import fcntl
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from building import build, publish_next
from drawing import jpeg, png, put
from hypothesis import given
from hypothesis import strategies as st

from shardwright import operation
from shardwright.convert import output, workers, write
from shardwright.convert.job import Job, told_in
from shardwright.convert.jobs import COPYING, Need, System, allowance, decoding, jobs_allowed
from shardwright.convert.lock import one_writer, running_job
from shardwright.datasets.manifest import read_manifest
from shardwright.log import as_json, as_pairs, plain

Command = Callable[..., Any]
Event = dict[str, Any]
FAST = ("--size", 16, "--chunk-rows", 16)
BROKEN = jpeg(40, 40)[:-30]
#: The installed command, by its whole path.
PROGRAM = Path(sys.executable).with_name("shardwright")
JOB = Path(".shardwright/job.json")
ROOT = Path(__file__).parents[1]
RUN_BOOK = (ROOT / "docs" / "operations.md").read_text("utf-8")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return put(tmp_path / "src", {f"{'ab'[k % 2]}/{k}.png": png(k) for k in range(10)})


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    """A tree that keeps workers busy for some seconds."""
    return put(tmp_path / "slow", {f"c{k % 3}/{k:04d}.jpg": jpeg(seed=k) for k in range(400)})


def pairs(line: str) -> Event:
    """What a reader of logfmt makes of a line."""
    found = re.findall(r'(\w+)=("(?:[^"\\]|\\.)*"|[^\s"]+)(?: |$)', line)
    assert " ".join(f"{key}={value}" for key, value in found) == line  # and of all of it
    return {key: json.loads(value) if value.startswith('"') else value for key, value in found}


def events(err: str, in_json: bool) -> list[Event]:
    """The events of a log; numbers as text, as in pairs. In JSON nothing else may be there."""
    if in_json:
        found = [json.loads(line) for line in err.splitlines()]
        return [{k: v if isinstance(v, str) else json.dumps(v) for k, v in event.items()} for event in found]
    return [pairs(line) for line in err.splitlines() if not line.startswith("shardwright: ")]


def names(found: list[Event]) -> list[str]:
    return [event["event"] for event in found]


@pytest.fixture(params=[False, True], ids=["pairs", "json"])
def logged(request: pytest.FixtureRequest, command: Command) -> Callable[..., tuple[int, list[Event]]]:
    """Runs a command, in either form of the log: its exit code and its events."""

    def run(*arguments: object) -> tuple[int, list[Event]]:
        ran = command(*arguments, *["--log-json"] * request.param)
        found = events(ran.err, request.param)
        assert all(
            re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", event.get("time", "")) for event in found
        )
        people = [line for line in ran.err.splitlines() if line.startswith("shardwright: ")]
        assert len(people) == (ran.code in (1, 2, 4, 130) and "damaged" not in ran.err and not request.param)
        return ran.code, found

    return run


# --- one line an event --------------------------------------------------------------------------------------


@given(st.text(st.characters() | st.characters(categories=["Cc", "Cs"])))
def test_any_text_comes_back_from_printable_ascii(text: str) -> None:
    for form, parse in ((as_pairs, pairs), (as_json, json.loads)):
        line = form({"event": "note", "note": text})
        assert re.fullmatch(r"[ -~]*", line)
        assert parse(line) == {"event": "note", "note": plain(text)}


def test_values_stand_bare_where_nothing_can_be_mistaken() -> None:
    said = {"out": Path("a/b-1.h5"), "rows": 3, "full": True, "none": None, "empty": "", "odd": 'a "b"=\\c'}
    assert as_pairs(said) == r'out=a/b-1.h5 rows=3 full=true empty="" odd="a \"b\"=\\c"'
    assert json.loads(as_json(said)) == {
        **{k: v for k, v in said.items() if v is not None},
        "out": "a/b-1.h5",
    }
    assert pairs(as_pairs({"reasons": {"truncated": 2}}))["reasons"] == '{"truncated": 2}'
    assert plain(os.fsdecode(b"caf\xe9 \xc3\xbc")) == r"caf\xe9 ü"


def test_the_run_book_lists_every_event() -> None:
    table = re.findall(r"^\| `([a-z-]+)`(?:, `([a-z-]+)`)? \| (?:info|warning|error) \|", RUN_BOOK, re.M)
    listed = {name for row in table for name in row if name}
    code = "".join(
        (ROOT / "shardwright" / f"{name}.py").read_text() for name in ("log", "operation", "outcome")
    )
    assert {name for name in listed if f'"{name}"' not in code} == set()
    assert set(re.findall(r'(?:\.event|Event|_line)\(\s*"([a-z-]+)"', code)) - listed == set()
    assert len(listed) >= 18


def test_the_run_book_lists_messages_that_are_said() -> None:
    recover = RUN_BOOK.partition("## Recover")[2].partition("## Clean up")[0]
    rows = re.findall(r"^\| (`.*?`) \| ", recover, re.M)
    messages = [message for row in rows for message in re.findall(r"`([^`]+)`", row)]
    said = [path.read_text() for path in ROOT.glob("*/*.py") if path.parent.name != "tests"]
    assert [message for message in messages if not any(message in text for text in said)] == []
    assert len(messages) > 20


def test_the_run_book_lists_every_exit_code() -> None:
    for text in (RUN_BOOK, (ROOT / "README.md").read_text("utf-8")):
        codes = re.findall(r"^\| (\d+(?:, \d+)?) \| ", text, re.M)
        assert set(", ".join(codes).split(", ")) >= {"0", "1", "2", "3", "4", "5", "130", "143"}


def test_a_conversion_in_events(logged: Any, source: Path, out: Path) -> None:
    put(source, {"a/cut.jpg": BROKEN, "a/404.jpg": b"<html>"})
    code, found = logged("convert", source, out, *FAST, "--jobs", 2)
    assert code == 3
    assert names(found) == ["start", *["stage"] * 4, "published", "rejected", "end"]
    start, scan, scanned, convert, converted, published, rejected, end = found
    assert (start["command"], start["source"], start["out"]) == ("convert", str(source), str(out))
    assert (start["jobs"], start["pid"], start["level"]) == ("2", str(os.getpid()), "info")
    assert [(e["stage"], e["state"]) for e in (scan, scanned)] == [("scan", "begin"), ("scan", "end")]
    assert (convert["state"], convert["total"], convert["unit"]) == ("begin", "12", "images")
    assert (converted["state"], converted["done"], float(converted["seconds"]) >= 0) == ("end", "12", True)
    manifest = read_manifest(out)
    said = {key: published[key] for key in ("version", "rows", "shards", "bytes", "out")}
    assert said == {
        "version": "1",
        "rows": "10",
        "shards": "1",
        "bytes": str(manifest.bytes),
        "out": str(out),
    }
    assert (rejected["level"], rejected["count"]) == ("warning", "2")
    assert rejected["report"] == str(out / "report-000001.jsonl")
    assert json.loads(rejected["reasons"]) == {"not-a-picture": 1, "truncated": 1}
    assert (end["code"], end["level"]) == ("3", "info")
    code, found = logged("convert", source, out, *FAST)
    assert (code, names(found)) == (0, ["start", "stage", "stage", "nothing-to-do", "end"])
    assert (found[3]["version"], found[3]["rows"]) == ("1", "10")


def test_a_conversion_that_fails_and_goes_on(
    logged: Any, source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(output, "write_manifest", full)
        code, found = logged("convert", source, out, *FAST)
    assert (code, names(found)[-2:]) == (1, ["error", "end"])
    assert (found[-2]["level"], found[-2]["code"], found[-2]["kind"]) == ("error", "1", "OutputError")
    assert "the disk is full" in found[-2]["message"]
    assert found[-1]["code"] == "1"
    code, found = logged("convert", source, out, *FAST)
    (resumed,) = (event for event in found if event["event"] == "resumed")
    assert (code, resumed["shards"], resumed["of_shards"]) == (0, "1", "1")


def test_a_conversion_that_is_interrupted(
    logged: Any, source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(write, "write_shard", interrupted)
    code, found = logged("convert", source, out, *FAST)
    assert (code, names(found)[-3:]) == (130, ["stage", "stopped", "end"])
    assert found[-3]["state"] == "broken-off"
    assert (found[-2]["code"], found[-2]["level"], found[-1]["code"]) == ("130", "warning", "130")


def test_an_output_that_is_held(command: Command, source: Path, out: Path) -> None:
    with one_writer(out):
        ran = command("convert", source, out, *FAST, "--log-json")
        found = events(ran.err, True)
        assert (ran.code, names(found)) == (4, ["start", "locked", "end"])
        assert (found[1]["level"], found[1]["code"]) == ("warning", "4")
        assert f"held by process {os.getpid()}" in found[1]["message"]
        plainly = command("convert", source, out, *FAST)  # nothing began: there is nothing else to say
        assert (plainly.code, plainly.err.count("\n")) == (4, 1)
        assert plainly.err.startswith("shardwright: the output ")


def test_a_reshard_in_events(logged: Any, tmp_path: Path, out: Path) -> None:
    built = build(tmp_path / "data")
    code, found = logged("reshard", built.folder, out, "--chunk-rows", 4)
    assert (code, names(found)) == (0, ["start", "stage", "stage", "published", "end"])
    assert (found[0]["command"], found[0]["source"]) == ("reshard", str(built.folder))
    assert (found[2]["done"], found[3]["images"], found[3]["version"]) == ("50", "50", "1")
    code, found = logged("reshard", built.folder, out, "--chunk-rows", 4)
    assert (code, names(found)) == (0, ["start", "nothing-to-do", "end"])
    code, found = logged("reshard", built.folder, "--chunk-rows", 4)
    assert (code, found[0]["out"], found[3]["version"]) == (0, str(built.folder), "2")


def test_a_reshard_that_fails_and_goes_on(
    logged: Any, tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = build(tmp_path / "data")
    with monkeypatch.context() as broken:
        broken.setattr(output, "write_manifest", lambda *_: (_ for _ in ()).throw(OSError(5, "I/O error")))
        code, found = logged("reshard", built.folder, out, "--chunk-rows", 4)
    assert (code, names(found)[-2:], found[-1]["code"]) == (1, ["error", "end"], "1")
    assert "I/O error" in found[-2]["message"]
    code, found = logged("reshard", built.folder, out, "--chunk-rows", 4)
    assert (code, names(found)) == (0, ["start", "stage", "stage", "resumed", "published", "end"]) or (
        code,
        names(found),
    ) == (0, ["start", "resumed", "published", "end"])


def test_the_other_commands_in_events(logged: Any, source: Path, out: Path, tmp_path: Path) -> None:
    code, _ = logged("convert", source, out, *FAST)
    assert code == 0
    code, found = logged("verify", out, "--full")
    assert (code, names(found)) == (0, ["start", "stage", "stage", "verified", "end"])
    assert (found[3]["rows"], found[3]["full"]) == ("10", "true")
    shard = out / read_manifest(out).shards[0].files[0].name
    os.truncate(shard, 100)
    code, found = logged("verify", out)
    assert (code, found[-2]["event"], found[-2]["level"], found[-2]["places"]) == (1, "damaged", "error", "1")
    assert str(shard) in found[-2]["first"]
    code, found = logged("repair", out, "--source", source)
    assert (code, found[-2]["event"], found[-2]["files"]) == (0, "repaired", "1")
    code, found = logged("repair", out, "--source", source)
    assert (code, names(found)[-2:]) == (0, ["nothing-to-do", "end"])
    os.truncate(shard, 100)
    (source / "a" / "0.png").unlink()
    code, found = logged("repair", out, "--source", source)
    assert (code, found[-2]["event"], found[-2]["level"]) == (1, "still-damaged", "error")
    assert found[-2]["why"]
    built = build(tmp_path / "data")
    code, found = logged("split", built.folder, tmp_path / "split", "--by", "train=0.6,val=0.4")
    made = [event for event in found if event["event"] == "published"]
    assert (code, [event["split"] for event in made]) == (0, ["train", "val"])
    code, found = logged("merge", tmp_path / "split/train", tmp_path / "split/val", tmp_path / "merged")
    assert (code, found[-2]["event"], found[-2]["rows"]) == (0, "published", "50")
    assert json.loads(found[0]["source"])[0] == str(tmp_path / "split/train")
    publish_next(built, 1)
    for dry in (["--dry-run"], []):
        code, found = logged("gc", built.folder, "--keep", 1, "--min-age", 0, *dry)
        assert (code, names(found)) == (0, ["start", "end"] if dry else ["start", "removed", "end"])
    assert (found[1]["versions"], int(found[1]["bytes"]) > 0) == ("[1]", True)
    code, found = logged("gc", built.folder)
    assert (code, names(found)) == (0, ["start", "nothing-to-do", "end"])


def test_how_far_it_is_now_and_then(
    logged: Any, source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operation.LoggedStage, "seconds", 0.0)
    _, found = logged("convert", source, out, *FAST)
    far = [event for event in found if event["event"] == "progress" and event["stage"] == "convert"]
    assert (far[-1]["done"], far[-1]["total"], far[-1]["seconds_left"]) == ("10", "10", "0")
    assert float(far[-1]["per_second"]) > 0


def test_an_error_with_its_traceback_in_json(command: Command, tmp_path: Path, out: Path) -> None:
    put(tmp_path, {"empty/a/": b""})
    ran = command("convert", tmp_path / "empty", out, "--log-json", "--debug")
    (error,) = (event for event in events(ran.err, True) if event["event"] == "error")
    assert (ran.code, "Traceback" in error["traceback"]) == (1, True)


def test_quiet_says_what_is_wrong_alone(command: Command, source: Path, out: Path) -> None:
    ran = command("convert", source, out, *FAST, "--quiet")
    assert (ran.code, ran.out, ran.err) == (0, "", "")
    put(source, {"a/cut.jpg": BROKEN})
    ran = command("convert", source, out, *FAST, "--quiet", "--json")
    assert (ran.code, json.loads(ran.out)["version"]) == (3, 2)
    assert names(events(ran.err, False)) == ["rejected"]
    for quiet in (["--quiet"], ["--quiet", "--log-json"]):
        ran = command("convert", source, out, "--size", 32, *quiet)
        assert (ran.code, ran.out, ran.err.count("\n")) == (1, "", 1)
        assert "size is 16 there, 32 here" in ran.err
    os.truncate(out / read_manifest(out).shards[0].files[0].name, 100)
    ran = command("verify", out, "--with", out, "--quiet")
    assert (ran.code, ran.out, names(events(ran.err, False))) == (1, "", ["damaged"])


def test_usage(command: Command, source: Path, out: Path) -> None:
    for nice in ("20", "-1", "x"):
        ran = command("convert", source, out, "--nice", nice)
        assert (ran.code, "--nice" in ran.err) == (2, True)
    assert not out.exists()


# --- as cron and a terminal run it --------------------------------------------------------------------------


def bare(*arguments: object, **options: Any) -> "subprocess.CompletedProcess[bytes]":
    """As from a scheduler at its barest: `env -i LC_ALL=C`, no PATH, no terminal."""
    given = {"env": {"LC_ALL": "C"}, "stdin": subprocess.DEVNULL, "cwd": "/", "check": False, **options}
    if "stderr" not in given:
        given["capture_output"] = True
    return subprocess.run([PROGRAM, *map(str, arguments)], **given)


@pytest.mark.parametrize("in_json", [False, True])
def test_names_of_any_bytes_in_a_bare_environment(tmp_path: Path, in_json: bool) -> None:
    evil = 'n\nl "q" a=b \x1b[31m\x7f ü' + ("" if sys.platform == "darwin" else os.fsdecode(b" \xe9\xff"))
    folder = tmp_path / evil
    put(folder / "src", {f"{evil}/{k}{evil}.png": png(k) for k in range(6)} | {f"{evil}/cut.jpg": BROKEN})
    log = ["--log-json"] * in_json
    runs = {
        ("convert", folder / "src", folder / "out", "--size", 16, "--jobs", 1): 3,
        ("sync", folder / "later", folder / "out", "--jobs", 1): 3,
        ("sync", folder / "empty", folder / "out"): 1,
        ("verify", folder / "out", "--full"): 0,
        ("reshard", folder / "out", folder / "two", "--chunk-rows", 2, "--jobs", 1): 0,
        ("reshard", folder / "out", folder / "two", "--chunk-rows", 3): 1,
        ("reshard", folder / "out", "--seed", 5, "--jobs", 1): 0,
        ("gc", folder / "out", "--keep", 1, "--min-age", 0): 0,
        ("export", folder / "out", folder / "pictures", "--to", "folder", "--jobs", 1): 0,
        ("export", folder / "out", folder / "pictures", "--to", "webdataset"): 1,
        ("repair", folder / "out", "--source", folder / "later"): 0,
        ("convert", folder / "gone", folder / "out"): 2,
    }
    shutil.copytree(folder / "src", folder / "later")
    put(folder / "later", {f"{evil}/more{evil}.png": png(7), f"{evil} 2/one.png": png(8)})
    (folder / "empty").mkdir()
    for arguments, code in runs.items():
        ran = bare(*arguments, *log)
        assert ran.returncode == code, ran.stderr
        assert re.fullmatch(rb"([ -~]*\n)*", ran.stderr), ran.stderr
        assert not set(ran.stdout) & {*range(32), 127} - {10}
        found = events(ran.stderr.decode(), in_json)
        if code in (0, 3):
            assert (found[0]["event"], found[-1]["event"], found[-1]["code"]) == ("start", "end", str(code))
            assert found[0]["out"] == plain(str(_out(*arguments)))
    assert (read_manifest(folder / "out").rows, read_manifest(folder / "two").rows) == (8, 8)
    assert len(list((folder / "pictures").rglob("*.png"))) == 8


def _out(command: str, first: Path, second: Any = None, *_: Any) -> Any:
    return second if isinstance(second, Path) else first


def test_a_log_that_cannot_be_written_ends_no_job(source: Path, out: Path) -> None:
    with open("/dev/full", "wb") as full:
        ran = bare("convert", source, out, *FAST, "--jobs", 1, stderr=full)
    assert ran.returncode == 0


@pytest.mark.parametrize("closed", ["2>&-", "<&- 2>&-", "<&- >&- 2>&-"])
def test_streams_may_be_closed(source: Path, out: Path, closed: str) -> None:
    script = f'"{PROGRAM}" convert "$1" "$2" --size 16 --jobs 1 {closed}'
    done = subprocess.run(["/bin/sh", "-c", script, "sh", source, out], env={}, check=False)
    assert (done.returncode, read_manifest(out).rows) == (0, 10)


def on_terminal(*arguments: object) -> tuple[int, bytes]:
    """Run with a terminal as stderr: exit code, and what it shows."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    with subprocess.Popen(
        [PROGRAM, *map(str, arguments)], stdin=theirs, stdout=subprocess.DEVNULL, stderr=theirs
    ) as process:
        os.close(theirs)
        shown = bytearray()
        try:
            while part := os.read(ours, 4096):
                shown += part
        except OSError:  # its other end was closed
            pass
        os.close(ours)
    return process.returncode, bytes(shown)


def test_a_terminal_has_a_bar_and_no_log(source: Path, out: Path) -> None:
    code, shown = on_terminal("convert", source, out, *FAST, "--jobs", 1)
    assert (code, b"event=" in shown) == (0, False)
    assert re.search(rb"\rconvert: .*\| 10/10 ", shown)
    code, shown = on_terminal("convert", source, out, *FAST, "--log-json")
    assert (code, names(events(shown.decode(), True))[-2:]) == (0, ["nothing-to-do", "end"])
    assert on_terminal("convert", source, out, *FAST, "--quiet") == (0, b"")


def test_niceness_reaches_the_workers(slow: Path, out: Path) -> None:
    nice = min(19, os.getpriority(os.PRIO_PROCESS, 0) + 7)
    arguments = ["convert", slow, out, "--size", "8", "--shard-mib", "0.002", "--jobs", "1", "--nice", nice]
    with subprocess.Popen(
        [PROGRAM, *map(str, arguments)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        _until(lambda: list(out.glob(".shardwright/work-*/*")), process)
        found = {child.nice() for child in psutil.Process(process.pid).children(recursive=True)}
        assert (found, os.getpriority(os.PRIO_PROCESS, process.pid)) == ({nice}, nice)
        process.terminate()


def test_a_niceness_that_is_refused_is_said(
    command: Command, source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "setpriority", refuse)
    ran = command("convert", source, out, *FAST, "--nice", 5)
    (warning,) = (event for event in events(ran.err, False) if event["level"] == "warning")
    assert (ran.code, warning["message"]) == (0, "--nice 5 cannot be set: Operation not permitted")


# --- job.json -----------------------------------------------------------------------------------------------


def _until(there: Callable[[], Any], process: "subprocess.Popen[Any]") -> Any:
    end = time.monotonic() + 60
    while not (found := there()):
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.01)
    return found


@pytest.fixture
def running(slow: Path, out: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A conversion of some seconds, in a process of its own."""
    arguments = ["convert", slow, out, "--size", "8", "--shard-mib", "0.002", "--jobs", "1"]
    with subprocess.Popen(
        [PROGRAM, *map(str, arguments)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        yield process
        process.kill()


def told(out: Path) -> Any:
    try:
        return json.loads((out / JOB).read_bytes())  # whole whenever it is looked at
    except FileNotFoundError:
        return None


def test_what_runs_is_told_while_it_runs(running: Any, slow: Path, out: Path) -> None:
    job = _until(lambda: (told(out) or {}).get("stage") == "convert" and told(out), running)
    assert (job["command"], job["pid"], job["source"]) == ("convert", running.pid, str(slow))
    assert "dry_run" not in job
    assert (job["total"], job["unit"], 0 <= job["done"] <= 400) == (400, "images", True)
    for key in ("since", "updated"):
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", job[key])
    assert running_job(out)["pid"] == running.pid  # type: ignore[index]
    running.send_signal(signal.SIGTERM)
    assert running.wait(30) == 143
    assert not (out / JOB).exists()


def test_what_a_killed_process_told_is_replaced(
    running: Any, slow: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _until(lambda: list(out.glob(".shardwright/run/record-*")), running)
    running.kill()
    running.wait()
    assert told(out)["pid"] == running.pid
    assert running_job(out) is None  # nobody holds the lock
    monkeypatch.setattr(Job, "seconds", 0.0)
    seen = []

    def see(*_: Any, begin: Any = Job.begin) -> None:
        begin(*_)
        seen.append(told(out))

    monkeypatch.setattr(Job, "begin", see)
    from shardwright.cli import main

    with pytest.raises(SystemExit) as end:
        main(["convert", str(slow), str(out), "--size", "8", "--shard-mib", "0.002", "--jobs", "1"])
    assert end.value.code == 0
    assert [(job["pid"], job["stage"]) for job in seen] == [(os.getpid(), "scan"), (os.getpid(), "convert")]
    assert [path.name for path in (out / ".shardwright").glob("job*")] == []


def test_a_library_call_removes_what_a_killed_process_told(out: Path) -> None:
    put(out, {str(JOB): b"{}", ".shardwright/lock": b"", "manifest.json": b""})
    with one_writer(out):
        assert not (out / JOB).exists()  # nobody tells here


def test_info_says_what_runs(command: Command, tmp_path: Path) -> None:
    built = build(tmp_path / "data")
    assert json.loads(command("info", built.folder, "--json").out)["job"] is None
    job = Job({"command": "reshard"})
    with job.present(), one_writer(built.folder):
        job.seconds = 0.0
        with job("reshard", 50, "images", 20) as stage:
            stage.update(5)
            found = json.loads(command("info", built.folder, "--json").out)["job"]
            assert (found["command"], found["done"], found["total"]) == ("reshard", 25, 50)
            said = command("info", built.folder).out
            assert f"now: reshard, process {os.getpid()} on " in said
            assert "reshard: 25 of 50 images" in said
    put(built.folder, {str(JOB): b'{"command": "reshard"}'})  # left by a killed process
    assert "now:" not in command("info", built.folder).out


def test_it_is_told_at_most_once_in_a_while(tmp_path: Path) -> None:
    job = Job({"command": "x"})
    with job.present(), told_in(tmp_path):
        first = (tmp_path / "job.json").stat().st_ino
        with job("scan", None, "files") as stage:
            for _ in range(100):
                stage.update(1)
        assert (tmp_path / "job.json").stat().st_ino == first
        job.seconds = 0.0
        stage.update(1)
        assert json.loads((tmp_path / "job.json").read_bytes())["done"] == 101
    assert list(tmp_path.iterdir()) == []


def test_each_output_that_is_held_is_told(
    command: Command, tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set()

    def see(job: Job, states: Any, write: Any = Job._write) -> None:
        write(job, states)
        seen.update(out.rglob("job.json"))

    monkeypatch.setattr(Job, "_write", see)
    put(tmp_path / "src", {"train/a/0.png": png(0), "val/a/1.png": png(1)})
    assert command("convert", tmp_path / "src", out, *FAST).code == 0
    assert seen == {out / JOB, out / "train" / JOB, out / "val" / JOB}
    assert list(out.rglob("job*")) == []


def test_nothing_is_told_where_nothing_is_held(
    command: Command, source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Job, states: Any) -> None:
        assert not states

    monkeypatch.setattr(Job, "_write", refuse)
    monkeypatch.setattr(Job, "seconds", 0.0)
    assert command("convert", source, out, *FAST, "--dry-run").code == 0
    assert not out.exists()
    built = build(source.parent / "data")
    assert command("verify", built.folder).code == 0
    with pytest.raises(AssertionError):
        command("convert", source, out, *FAST)


def test_an_empty_output_goes_with_what_was_told(command: Command, tmp_path: Path, out: Path) -> None:
    put(tmp_path, {"broken/a/x.jpg": BROKEN})
    assert command("convert", tmp_path / "broken", out, *FAST).code == 1
    assert not out.exists()


def test_what_cannot_be_told_ends_no_job(command: Command, source: Path, out: Path) -> None:
    put(out, {".shardwright/job.partial/full": b""})  # in the place of the file
    assert command("convert", source, out, *FAST).code == 0


def test_who_only_looks_holds_nobody_up(out: Path) -> None:
    with one_writer(out):
        pass
    (out / ".shardwright").mkdir(parents=True)
    lock = out / ".shardwright" / "lock"
    with open(lock, "w") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        later = threading.Timer(0.08, lambda: fcntl.flock(looking, fcntl.LOCK_UN))
        later.start()
        with one_writer(out):
            pass
        later.join()


# --- how many workers ---------------------------------------------------------------------------------------

GB = 1_000_000_000
UNLIMITED = {"memory.max": "max", "memory.current": "5000000000", "cpu.max": "max 100000"}


def system(
    root: Path, groups: str = "0::/\n", *, cpus: int = 16, free: int = 64 * GB, address: int | None = None
) -> System:
    put(root, {"proc/self/cgroup": groups.encode()})
    return System(root, lambda: cpus, lambda: free, lambda: address)


def group(root: Path, path: str, **files: str) -> None:
    put(root / "sys/fs/cgroup" / path, {name: f"{text}\n".encode() for name, text in files.items()})


def test_cpus_decide_where_there_is_memory(tmp_path: Path) -> None:
    group(tmp_path, "", **UNLIMITED)
    found = allowance(Need(GB), system(tmp_path))
    assert (found.jobs, found.cpus, found.short_of_memory) == (16, 16, False)


def test_memory_that_is_free(tmp_path: Path) -> None:
    found = allowance(Need(GB, GB // 2), system(tmp_path, free=4 * GB))
    assert (found.jobs, found.memory_bytes, found.short_of_memory) == (3, 4 * GB, True)
    assert jobs_allowed(Need(GB), system(tmp_path, free=GB // 2)) == 1
    assert jobs_allowed(Need(GB), system(tmp_path, address=6 * GB)) == 6


def test_every_group_above_limits_too(tmp_path: Path) -> None:
    here = system(tmp_path, "0::/system.slice/job.service/inner\n")
    group(tmp_path, "system.slice/job.service/inner", **UNLIMITED)
    group(tmp_path, "system.slice/job.service", **{"memory.max": f"{8 * GB}", "memory.current": f"{GB}"})
    group(tmp_path, "system.slice", **{"memory.max": "max", "memory.high": f"{9 * GB}"})
    assert jobs_allowed(Need(GB), here) == 7
    group(tmp_path, "system.slice/job.service", **{"cpu.max": "250000 100000"})
    assert jobs_allowed(Need(GB), here) == 3


def test_page_cache_gives_way(tmp_path: Path) -> None:
    stat = f"anon {GB}\ninactive_file {4 * GB}\nactive_file {2 * GB}\n"
    group(tmp_path, "", **{"memory.max": f"{8 * GB}", "memory.current": f"{7 * GB}", "memory.stat": stat})
    assert jobs_allowed(Need(GB), system(tmp_path)) == 7


def test_groups_of_version_1(tmp_path: Path) -> None:
    here = system(tmp_path, "5:cpu,cpuacct:/slurm/job\n4:memory:/slurm/job\n1:name=systemd:/x\n0::/\n")
    huge = {"memory.limit_in_bytes": "9223372036854771712", "memory.usage_in_bytes": "0"}
    group(tmp_path, "memory", **huge)
    group(tmp_path, "memory/slurm/job", **huge)
    stat = f"inactive_file 0\ntotal_inactive_file {GB}\ntotal_active_file 0\n"
    limits = {"memory.limit_in_bytes": f"{5 * GB}", "memory.usage_in_bytes": f"{2 * GB}", "memory.stat": stat}
    group(tmp_path, "memory/slurm", **limits)
    group(tmp_path, "cpu/slurm/job", **{"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"})
    assert jobs_allowed(Need(GB), here) == 4
    group(tmp_path, "cpu/slurm", **{"cpu.cfs_quota_us": "150000", "cpu.cfs_period_us": "100000"})
    assert jobs_allowed(Need(GB), here) == 2


@pytest.mark.parametrize("shown", ["0::/docker/0123\n", "0::/../../outside\n", "0::/\n"])
def test_a_container_sees_its_group_as_the_root(tmp_path: Path, shown: str) -> None:
    group(tmp_path, "", **{"memory.max": f"{3 * GB}", "memory.current": "0"})
    put(tmp_path, {"sys/fs/outside/memory.max": b"1\n"})
    assert jobs_allowed(Need(GB), system(tmp_path, shown)) == 3


def test_no_groups_and_odd_files_limit_nothing(tmp_path: Path) -> None:
    assert jobs_allowed(Need(GB), System(tmp_path, lambda: 2, lambda: 9 * GB, lambda: None)) == 2
    group(tmp_path, "", **{"memory.max": "what", "cpu.max": "1", "memory.stat": "?"})
    assert jobs_allowed(Need(GB), system(tmp_path, cpus=2)) == 2


def test_this_machine() -> None:
    assert 1 <= jobs_allowed(COPYING) <= (os.cpu_count() or 1)
    assert decoding(10).spare_bytes < decoding().spare_bytes


def test_the_log_says_that_memory_is_short(
    logged: Any, source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardwright.convert import jobs

    small = system(out.parent / "root", cpus=7, free=GB)
    monkeypatch.setattr(jobs, "System", lambda: small)
    asked = []
    monkeypatch.setattr(workers, "_Worker", lambda kind=workers._Worker: asked.append(1) or kind())
    _, found = logged("convert", source, out, *FAST)
    said = {key: found[0].get(key) for key in ("jobs", "jobs_limited_by", "memory_bytes")}
    assert said == {"jobs": "2", "jobs_limited_by": "memory", "memory_bytes": str(GB)}
    assert len(asked) == 2
    shutil.rmtree(out)
    _, found = logged("convert", source, out, *FAST, "--jobs", 3)
    assert (found[0]["jobs"], "jobs_limited_by" in found[0], len(asked)) == ("3", False, 5)


@pytest.mark.parametrize("when", ["end", "exit"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_behind_the_end_changes_nothing(
    python: Callable[..., Any], tmp_path: Path, number: signal.Signals, when: str
) -> None:
    """The log has said what the command ends with."""
    code = """
import atexit, os, sys
from shardwright.cli import main
from shardwright.log import Log
real, number, when = Log.event, int(sys.argv.pop()), sys.argv.pop()
if when == "exit":
    atexit.register(os.kill, os.getpid(), number)
def event(self, name, *rest, **values):
    real(self, name, *rest, **values)
    if name == when:
        os.kill(os.getpid(), number)
Log.event = event
main(sys.argv[1:], prog_name="shardwright")
"""
    tree = put(tmp_path / "src", {"a/1.png": png()})
    arguments = ["convert", str(tree), str(tmp_path / "out"), "--size", "8", "--jobs", "1"]
    ran = python(code, *arguments, when, str(int(number)))
    assert (ran.returncode, "event=end code=0" in ran.stderr) == (0, True), ran.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_in_a_destructor_is_heard(
    python: Callable[..., Any], tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """Python throws an exception away that is raised there, and would go on."""
    script = """
import os, sys, time
from shardwright.cli import main
from shardwright.convert import run
number = int(sys.argv.pop())
class Dying:
    def __del__(self):
        os.kill(os.getpid(), number)
        for _ in range(1000):
            pass
def find_splits(_):
    Dying()
    time.sleep(60)
run.find_splits = find_splits
main(sys.argv[1:], prog_name="shardwright")
"""
    tree = put(tmp_path / "src", {"a/1.png": png()})
    ran = python(script, "convert", str(tree), str(tmp_path / "out"), str(int(number)))
    assert (ran.returncode, "Traceback" in ran.stderr, "same command goes on" in ran.stderr) == (
        code,
        False,
        True,
    ), ran
