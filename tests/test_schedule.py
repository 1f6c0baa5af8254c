"""The examples in `examples/schedule`, run by real schedulers where that can be, else as these run them."""

import configparser
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest
from building import build
from drawing import jpeg, png, put
from schedulers import Missing, running_cron, systemd_analyze
from test_one_writer import everything, processes_naming

from shardwright.convert import ConvertOptions, PixelOptions, StoreOptions, convert
from shardwright.datasets.manifest import read_manifest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples" / "schedule"
UNITS = sorted([*EXAMPLES.glob("*.service"), *EXAMPLES.glob("*.timer")])
PROGRAM = Path(sys.executable).with_name("shardwright")
OPTIONS = ConvertOptions(PixelOptions(size=8), StoreOptions(chunk_rows=4, shard_mib=0.002), jobs=1)
BROKEN = jpeg(40, 40)[:-30]
#: Which leaves what tests have just drawn for the next night.
GRACE = "--newer-than-grace 60"


@pytest.fixture
def shards(here: None, tmp_path: Path) -> Path:
    """A data set of twelve pictures, in a folder with a space; the tree in ``my photos`` has grown since."""
    return grown(tmp_path, {"a/new.png": png(99, 8)})


def grown(folder: Path, files: dict[str, bytes]) -> Path:
    tree = put(folder / "my photos", {f"{'ab'[k % 2]}/{k:02d}.png": png(k, 8) for k in range(12)})
    convert(tree, folder / "my shards", OPTIONS)
    put(tree, files)
    return folder / "my shards"


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout as `make` leaves it, in a folder with a space; its environment is the one of this test."""
    folder = tmp_path_factory.mktemp("check out")
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copyfile(ROOT / name, folder / name)
    (folder / ".venv").mkdir()
    (folder / ".venv" / "bin").symlink_to(Path(sys.executable).parent)
    (folder / ".venv" / ".ready").touch()
    return folder


def edited(text: str, **values: object) -> str:
    """A file of the examples as a user edits it: each of ``values`` stands at the begin of one line of it."""
    for name, value in values.items():
        text, found = re.subn(rf"^{name}=.*$", lambda _, line=f"{name}={value}": line, text, flags=re.M)
        assert found == 1, name
    return text


def missing(why: str) -> NoReturn:
    """Skip a test for want of a scheduler; where the project's own checks run it can be had, and is to be."""
    if os.environ.get("CI") and os.geteuid() == 0:
        pytest.fail(why)
    pytest.skip(why)


def wait_for(there: Callable[[], Any], seconds: float = 60) -> Any:
    end = time.monotonic() + seconds
    while not (found := there()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return found


# --- cron -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Night:
    """A night under cron: the data sets that it brings up to date and lays out anew, and the mails of either job."""

    synced: Path
    resharded: Path
    sync_mails: Path
    reshard_mails: Path


@pytest.fixture(scope="module", autouse=True)
def night(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Night | str]:
    """Cron, begun before all tests here: up to a minute passes until it does something. Or why there is none."""
    if not any("cron_does" in item.name for item in request.session.items):
        yield "it is not asked for"
        return
    folder = tmp_path_factory.mktemp("cron night")
    checkout = request.getfixturevalue("checkout")
    crontab = edited(
        (EXAMPLES / "crontab").read_text(),
        PROGRAM=PROGRAM,
        CHECKOUT=checkout,
        PHOTOS=folder / "my photos",
        SHARDS=folder / "my shards",
    )
    pictures = put(folder / "my photos", {f"{'ab'[k % 2]}/{k}.png": png(k) for k in range(12)})
    converting = [
        PROGRAM,
        "convert",
        pictures,
        folder / "my shards",
        "--size",
        "16",
        "--jobs",
        "1",
        "--quiet",
    ]
    subprocess.run(converting, check=True)
    put(pictures, {"a/cut.jpg": BROKEN, "a/new.png": png(99)})
    time.sleep(2.1)  # what is written within the time that clocks of files are exact to is looked at again
    other = build(folder / "other shards").folder
    lines = crontab.splitlines(keepends=True)
    jobs = [line for line in lines if re.match(r"[\d*]", line)]
    assert [re.match(r"\d+ \d+ \* \* [\d*] ", job) is not None for job in jobs] == [True, True]
    assert GRACE in jobs[0]
    every_minute = [re.sub(r"^(\S+ ){4}\S+", "* * * * *", job) for job in jobs]
    said = {
        "sync": every_minute[0].replace(GRACE, ""),
        "reshard": every_minute[1].replace("2 --min-age 14d", "1 --min-age 0"),
    }
    head = "".join(line for line in lines if line not in jobs)
    (folder / "sync").write_text(head + said["sync"])
    (folder / "reshard").write_text(edited(head, SHARDS=other) + said["reshard"])
    with ExitStack() as daemons:
        try:
            for name in said:
                daemons.enter_context(running_cron(folder / name, folder / f"{name} mails"))
        except Missing as why:
            yield str(why)
            return
        yield Night(folder / "my shards", other, folder / "sync mails", folder / "reshard mails")


# --- systemd --------------------------------------------------------------------------------------------------


def analyze(*arguments: object) -> "subprocess.CompletedProcess[str]":
    try:
        program = systemd_analyze()
    except Missing as why:
        missing(str(why))
    return subprocess.run(
        [program, *map(str, arguments)],
        env={"PATH": "/usr/bin:/bin", "LC_ALL": "C"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_systemd_takes_the_units(tmp_path: Path) -> None:
    assert len(UNITS) == 4
    ran = analyze("verify", "--man=no", *UNITS)
    assert ran.returncode == 0
    assert [
        line for line in ran.stderr.splitlines() if "shardwright" in line
    ] == []  # of others it may say something
    for unit in UNITS:
        shutil.copy(unit, tmp_path)
    wrong = tmp_path / "shardwright-sync.service"
    wrong.write_text(wrong.read_text().replace("KillMode=mixed", "KillMod=mixed"))
    assert "KillMod" in analyze("verify", "--man=no", wrong).stderr


def test_timers_name_times_and_their_services() -> None:
    for timer in (unit for unit in UNITS if unit.suffix == ".timer"):
        assert timer.with_suffix(".service").exists()
        (when,) = read_unit(timer)["Timer"]["OnCalendar"]
        ran = analyze("calendar", when)
        assert (ran.returncode, "Next elapse: " in ran.stdout) == (0, True), ran.stderr
        assert read_unit(timer)["Timer"]["Persistent"] == ["true"]


def read_unit(path: Path) -> dict[str, dict[str, list[str]]]:
    """Section -> key -> values, as they stand."""
    found: dict[str, dict[str, list[str]]] = {}
    for line in path.read_text().splitlines():
        if line.startswith("["):
            section = found.setdefault(line.strip("[]"), {})
        elif line and not line.startswith("#"):
            key, _, value = line.partition("=")
            section.setdefault(key, []).append(value)
    return found


def command_lines(unit: str, **values: object) -> list[list[str]]:
    """What systemd would start of a service, with ``values`` in its configuration; see systemd.service(5)."""
    lines = edited((EXAMPLES / "shardwright.conf").read_text(), **{k: f'"{v}"' for k, v in values.items()})
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string("[all]\n" + lines)
    known = {key: "".join(shlex.split(value)) for key, value in parser["all"].items()}
    service = read_unit(EXAMPLES / unit)["Service"]
    assert service["EnvironmentFile"] == ["/etc/shardwright.conf"]
    started = []
    for line in service["ExecStart"]:
        words: list[str] = []
        for word in shlex.split(line):
            if re.fullmatch(r"\$\w+", word):  # alone and without braces it is split
                words += known[word[1:]].split()
            else:
                words.append(re.sub(r"\$\{(\w+)\}", lambda m: known[m[1]], word))
        started.append(words)
    return started


def bare(command: list[str]) -> "subprocess.CompletedProcess[str]":
    """As from a service without a locale: no terminal, no PATH."""
    return subprocess.run(
        command,
        env={"LC_ALL": "C"},
        cwd="/",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_service_that_syncs(shards: Path, tmp_path: Path) -> None:
    put(tmp_path / "my photos", {"a/cut.jpg": BROKEN})
    values = {"PROGRAM": PROGRAM, "PHOTOS": tmp_path / "my photos", "SHARDS": shards}
    time.sleep(2.1)  # what is written within the time that clocks of files are exact to is looked at again
    (command,) = command_lines("shardwright-sync.service", **values, SYNC_OPTIONS="--max-runtime 5h --jobs 1")
    ran = bare(command)
    assert (ran.returncode, read_manifest(shards).version, read_manifest(shards).rows) == (3, 2, 13), (
        ran.stderr
    )
    assert bare(command).returncode == 0
    put(tmp_path / "my photos", {f"a/more {k}.png": png(500 + k, 8) for k in range(30)})
    (short,) = command_lines(
        "shardwright-sync.service", **values, SYNC_OPTIONS="--max-runtime 0.001s --jobs 1"
    )
    assert bare(short).returncode == 5
    assert bare(command).returncode == 3  # the rejected one is not in this version either
    assert read_manifest(shards).rows == 43
    for unit in EXAMPLES.glob("*.service"):
        assert read_unit(unit)["Service"]["SuccessExitStatus"] == ["3 5"]


def test_the_options_that_the_services_come_with(shards: Path, tmp_path: Path) -> None:
    """As they stand in the file: pictures that came within the last minute are left for the next night."""
    (command,) = command_lines(
        "shardwright-sync.service", PROGRAM=PROGRAM, PHOTOS=tmp_path / "my photos", SHARDS=shards
    )
    assert "--newer-than-grace" in command
    ran = bare(command)
    assert (ran.returncode, "event=nothing-to-do" in ran.stderr) == (0, True), ran.stderr


def test_the_service_that_reshards(shards: Path, checkout: Path) -> None:
    values = {
        "PROGRAM": PROGRAM,
        "SHARDS": shards,
        "CHECKOUT": checkout,
        "GC_OPTIONS": "--keep 1 --min-age 0",
    }
    commands = command_lines("shardwright-reshard.service", **values, RESHARD_OPTIONS="--seed 7 --jobs 1")
    assert [bare(command).returncode for command in commands] == [0, 0]
    assert (read_manifest(shards).version, (shards / "manifest-000001.json").exists()) == (2, False)
    assert [bare(command).returncode for command in commands] == [0, 0]
    assert read_manifest(shards).version == 2  # nothing was to do


# --- make -----------------------------------------------------------------------------------------------------


def make(checkout: Path, source: Path, options: str) -> list[str]:
    return ["/usr/bin/env", "make", "-C", str(checkout), "reshard", f"SRC={source}", f"ARGS={options}"]


def test_make_reshard_tells_what_failed_from_what_goes_on(
    shards: Path, checkout: Path, tmp_path: Path
) -> None:
    """Make's own exit code for whatever fails is 2."""
    path = {"PATH": os.environ["PATH"]}

    def run(source: Path, options: str) -> "subprocess.CompletedProcess[str]":
        command = make(checkout, source, options)
        return subprocess.run(command, env=path, capture_output=True, text=True, check=False)

    shutil.copytree(shards, tmp_path / "right")
    ran = run(shards, "--seed 7 --jobs 1 --max-runtime 0.001s")
    assert (ran.returncode, read_manifest(shards).version) == (0, 1)
    assert "make reshard: not finished, its time is over: the same command goes on" in ran.stderr
    assert "event=stopped code=5" in ran.stderr
    ran = run(shards, "--seed 7 --jobs 1")
    assert (ran.returncode, "not finished" in ran.stderr, "event=resumed" in ran.stderr) == (0, False, True)
    assert run(tmp_path / "right", "--seed 7 --jobs 1").returncode == 0
    assert visible(shards) == visible(tmp_path / "right")
    ran = run(tmp_path / "gone", "")
    assert (ran.returncode, "Error 2" in ran.stderr, "not finished" in ran.stderr) == (2, True, False)
    os.truncate(shards / read_manifest(shards).shards[0].files[0].name, 100)
    ran = run(shards, "--seed 8 --jobs 1")
    assert (ran.returncode, "Error 1" in ran.stderr) == (2, True)


def visible(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in everything(folder).items() if not name.startswith(".")}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_make_ends_the_command(checkout: Path, tmp_path: Path, number: signal.Signals) -> None:
    """SIGTERM to make alone, as from systemd and `kill`; SIGINT to all, as from a terminal."""
    built = build(tmp_path / "data", rows=4000, shard_rows=400)
    mark = f"SHARDWRIGHT_TEST_{os.getpid()}_make_{number}"
    with subprocess.Popen(
        make(checkout, built.folder, "--seed 1 --shard-mib 0.002 --jobs 1"),
        env={"PATH": os.environ["PATH"], mark: "1"},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as process:
        wait_for(lambda: list(built.folder.glob(".shardwright/run/record-*.json")))
        (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
        _, said = process.communicate(timeout=20)
    assert process.returncode == -number
    assert processes_naming(mark) == []
    assert f"Error {128 + number}" in said
    assert (read_manifest(built.folder).version, list(built.folder.glob(".shardwright/job.json"))) == (1, [])
    ran = bare(make(checkout, built.folder, "--seed 1 --shard-mib 0.002 --jobs 2"))
    assert (ran.returncode, "event=resumed" in ran.stderr) == (0, True)


# --- Slurm ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cluster:
    """A node as a batch script sees it, but for Slurm: what it is asked for stands in ``asked``."""

    script: Path
    asked: Path
    environment: dict[str, str]

    def start(self, *, seconds: int = 100_000, **more: str) -> "subprocess.Popen[str]":
        """The script, in an allocation that ends in so many seconds."""
        environment = {**self.environment, "SLURM_JOB_END_TIME": str(int(time.time()) + seconds), **more}
        return subprocess.Popen(
            ["/bin/bash", self.script],
            env=environment,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )

    def requeued(self) -> list[str]:
        """What `scontrol` was asked for."""
        return self.asked.read_text().splitlines() if self.asked.exists() else []


def cluster(folder: Path, example: str, more: str, **values: object) -> Cluster:
    """The example, edited, on a cluster; ``more`` options make its shards small."""
    text = edited((EXAMPLES / example).read_text(), **{k: shlex.quote(str(v)) for k, v in values.items()})
    text = text.replace(GRACE, "")
    text, found = re.subn(r"^(arguments=\(.*)\)$", rf"\1 {more})", text, flags=re.M)
    assert found == 1
    node = folder / "node"
    node.mkdir()
    (node / "job").write_text(text)
    for name in ("scontrol", "srun", "sbatch"):
        (node / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {shlex.quote(str(node / "asked"))}\n')
        (node / name).chmod(0o755)
    environment = {"PATH": f"{node}:/usr/bin:/bin", "SLURM_JOB_ID": "4711", "SLURM_CPUS_PER_TASK": "1"}
    return Cluster(node / "job", node / "asked", environment)


@dataclass(frozen=True)
class Batch:
    """A job of some seconds on a cluster: its data set, and what that is after an undisturbed one."""

    on: Cluster
    shards: Path
    right: dict[str, bytes]

    def in_the_middle(self) -> Any:
        return list(self.shards.glob(".shardwright/run/record-*.json"))


@pytest.fixture(params=["sync.sbatch", "reshard.sbatch"])
def batch(here: None, tmp_path: Path, request: pytest.FixtureRequest) -> Batch:
    if request.param == "sync.sbatch":
        shards = grown(tmp_path, {f"a/{k:03d}.jpg": jpeg(seed=k) for k in range(300)})
        values, more = {"photos": tmp_path / "my photos"}, ""
        asked = ["sync", tmp_path / "my photos", tmp_path / "right"]
    else:
        shards = build(tmp_path / "my shards", rows=4000, shard_rows=400).folder
        values, more = {}, "--shard-mib 0.002"
        asked = ["reshard", tmp_path / "right", "--seed", "0", *more.split()]
    shutil.copytree(shards, tmp_path / "right")
    subprocess.run([PROGRAM, *map(str, asked), "--quiet"], check=True)
    on = cluster(tmp_path, request.param, more, program=PROGRAM, shards=shards, **values)
    return Batch(on, shards, visible(tmp_path / "right"))


def test_slurm_takes_up_what_its_time_ended(batch: Batch) -> None:
    """A signal before the end, and what runs is asked to be queued again; the second run ends with the same bytes."""
    with batch.on.start() as job:
        wait_for(batch.in_the_middle)
        job.send_signal(signal.SIGUSR1)
        _, said = job.communicate(timeout=30)
    assert (job.returncode, batch.on.requeued()) == (143, ["scontrol requeue 4711"])
    assert "event=stopped code=143" in said
    assert read_manifest(batch.shards).version == 1
    with batch.on.start(SLURM_RESTART_COUNT="1") as job:
        _, said = job.communicate(timeout=60)
    assert (job.returncode, len(batch.on.requeued())) == (0, 1), said
    assert "event=resumed" in said
    assert visible(batch.shards) == batch.right


def test_slurm_takes_up_what_stopped_in_time(batch: Batch) -> None:
    with batch.on.start(seconds=1) as job:
        _, said = job.communicate(timeout=60)
    assert (job.returncode, batch.on.requeued()) == (5, ["scontrol requeue 4711"]), said
    assert "--max-runtime is over" in said
    with batch.on.start(seconds=1, SLURM_RESTART_COUNT="50") as job:
        _, said = job.communicate(timeout=60)
    assert (job.returncode, len(batch.on.requeued()), "give it more --time" in said) == (5, 1, True)
    with batch.on.start() as job:
        assert job.wait(60) == 0
    assert visible(batch.shards) == batch.right


def test_slurm_does_not_take_up_what_somebody_ended(batch: Batch) -> None:
    with batch.on.start() as job:
        wait_for(batch.in_the_middle)
        job.terminate()
        _, said = job.communicate(timeout=30)
    assert (job.returncode, batch.on.requeued()) == (143, [])
    assert "the same command goes on" in said


def test_slurm_takes_rejects_for_success_and_errors_for_none(shards: Path, tmp_path: Path) -> None:
    put(tmp_path / "my photos", {"a/cut.jpg": BROKEN})
    values = {"program": PROGRAM, "photos": tmp_path / "my photos", "shards": shards}
    node = cluster(tmp_path, "sync.sbatch", "--json", **values)
    with node.start() as job:
        _, said = job.communicate(timeout=60)
    assert (job.returncode, read_manifest(shards).rows, "event=rejected" in said) == (0, 13, True)
    (tmp_path / "my photos").rename(tmp_path / "unmounted")
    with node.start(SLURM_JOB_END_TIME="") as job:
        assert job.wait(60) == 2
    assert node.requeued() == []


@pytest.mark.parametrize("example", ["sync.sbatch", "reshard.sbatch"])
def test_slurm_is_told_what_the_script_relies_on(example: str) -> None:
    told = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", (EXAMPLES / example).read_text(), re.M))
    assert re.fullmatch(r"B:USR1@\d+", told["signal"])
    assert {"requeue", "time", "cpus-per-task", "mem-per-cpu"} <= told.keys()
    assert (told["open-mode"], "%j" in told["output"], told["ntasks"]) == ("append", True, "1")


# --- at the end, since up to a minute passes before it begins ----------------------------------------------------


def test_cron_does_what_the_crontab_says(night: Night | str) -> None:
    """Debian's own cron. One mail, of the picture that is rejected; what is in order is said by nobody."""
    if isinstance(night, str):
        missing(night)
    (mail,) = wait_for(lambda: list(night.sync_mails.glob("*.mail")), 90)
    head, _, body = mail.read_text().partition("\n\n")
    assert "To: you@example.org" in head
    assert re.fullmatch(r"time=\S+ level=warning event=rejected [ -~]*\n?", body)
    assert (read_manifest(night.synced).version, read_manifest(night.synced).rows) == (2, 13)
    wait_for(
        lambda: not (night.resharded / "manifest-000001.json").exists(), 90
    )  # the last thing that is done
    assert read_manifest(night.resharded).version == 2
    me = psutil.Process()
    wait_for(lambda: not [p for p in me.children(recursive=True) if "reshard" in " ".join(p.cmdline())], 30)
    assert list(night.reshard_mails.iterdir()) == []
