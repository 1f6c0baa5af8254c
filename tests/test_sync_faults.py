"""A `sync` that is killed, and what reads beside it."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from drawing import png, put
from test_one_writer import processes_naming
from test_resume import wait_for_none
from test_sync import OPTIONS, of, samples_of, without_lock

from shardwright.convert import convert
from shardwright.datasets import open_dataset
from shardwright.datasets.layout import Storage
from shardwright.datasets.manifest import read_manifest


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    pictures = {f"{c}/{k}.png": png(seed=100 * i + k) for i, c in enumerate("ab") for k in range(40)}
    return put(tmp_path / "src", pictures)


def change(tree: Path, night: int) -> None:
    """Pictures that are new, changed, moved and gone, a few of each."""
    put(tree, {f"c/{night}-{k}.png": png(seed=5000 * night + k) for k in range(24)})
    put(tree, {f"a/{night}.png": png(seed=5000 * night + 99)})
    (tree / "b" / f"{night}.png").rename(tree / "a" / f"moved-{night}.png")
    (tree / "b" / f"{night + 20}.png").unlink()


@pytest.fixture(params=["hdf5", "npy"])
def storage(request: pytest.FixtureRequest) -> Storage:
    return request.param  # type: ignore[no-any-return]


def test_killed_at_random_instants(here: None, tmp_path: Path, storage: Storage, kills: int) -> None:
    """SIGKILL, every other time to the parent alone, until the command ends by itself: the same bytes."""
    tree = put(tmp_path / "src", {f"{c}/{k}.png": png(seed=k) for c in "abc" for k in range(60)})
    convert(tree, tmp_path / "base", of(storage))
    rows = samples_of(tmp_path / "base")
    put(tree, {f"{c}/new{k}.png": png(seed=500 + k) for c in "abcd" for k in range(40)})
    (tree / "a").rename(tree / "e")
    for k in range(0, 60, 3):
        (tree / "b" / f"{k}.png").unlink()
    shutil.copytree(tmp_path / "base", tmp_path / "undisturbed")
    command = [sys.executable, "-P", "-m", "shardwright", "sync", str(tree)]
    subprocess.run([*command, str(tmp_path / "undisturbed"), "--jobs", "2"], check=True, capture_output=True)
    right = without_lock(tmp_path / "undisturbed")
    mark, chance, work = f"SHARDWRIGHT_TEST_{os.getpid()}_sync_{storage}", random.Random(0), tmp_path / "work"
    longest, killed = 4.0, 0
    shutil.copytree(tmp_path / "base", work)
    while killed < kills // 2:
        start = time.monotonic()
        process = subprocess.Popen(
            [*command, str(work), "--jobs", "2"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, mark: "1"},
            start_new_session=True,
        )
        try:
            while killed % 4 < 3 and process.poll() is None and not list(work.glob(".shardwright/run/*")):
                time.sleep(0.002)  # most of the time goes into starting
            process.wait(chance.uniform(0, longest / 2))
        except subprocess.TimeoutExpired:
            killed += 1
            os.kill(process.pid, signal.SIGKILL) if killed % 2 else os.killpg(process.pid, signal.SIGKILL)
            for pid in [] if killed % 2 else processes_naming(mark):
                os.kill(pid, signal.SIGKILL)
            process.wait()
            wait_for_none(mark)
            assert samples_of(work, version=1) == rows
            assert samples_of(work) in (rows, samples_of(tmp_path / "undisturbed"))
            continue
        assert process.returncode == 0
        longest = time.monotonic() - start
        assert without_lock(work) == right
        shutil.rmtree(work)
        shutil.copytree(tmp_path / "base", work)


_NIGHTS = """
import sys
from pathlib import Path
from test_sync_faults import change
from test_sync import SYNC
from shardwright.convert.sync import sync
tree, out = map(Path, sys.argv[1:])
for night in range(1, 7):
    change(tree, night)
    sync(tree, out, SYNC)
"""


def test_a_reader_beside_it(here: None, tree: Path, tmp_path: Path) -> None:
    """While nights go by: what is opened is one version, and stays what it was when it was opened."""
    out = tmp_path / "out"
    convert(tree, out, OPTIONS)
    found: dict[int, dict[str, tuple[str, bytes]]] = {}
    job = subprocess.Popen(
        [sys.executable, "-c", _NIGHTS, tree, out],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        cwd=tmp_path,
    )
    with job:
        while job.poll() is None or (job.returncode == 0 and max(found) < 7):
            version = read_manifest(out).version
            first = samples_of(out, version)
            time.sleep(0.05)
            assert samples_of(out, version) == first == found.setdefault(version, first)
    assert job.returncode == 0
    assert len(found) >= 2
    assert len(open_dataset(out)) == 80 + 6 * 23
    assert all(samples_of(out, version) == samples for version, samples in found.items())
