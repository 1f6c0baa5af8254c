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
from test_one_writer import everything, processes_naming
from test_resume import wait_for_none
from test_sync import OPTIONS, SYNC, samples_of

from shardwright.convert import convert
from shardwright.convert.sync import sync
from shardwright.datasets import open_dataset
from shardwright.datasets.manifest import read_manifest

SYNCING = [sys.executable, "-m", "shardwright", "sync", "--jobs", "2"]


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


def test_killed_at_random_instants(here: None, tree: Path, tmp_path: Path, kills: int) -> None:
    """A reader sees the version before or the next one, whole; the same command ends with the bytes of one run."""
    first, once, out = tmp_path / "first", tmp_path / "once", tmp_path / "out"
    convert(tree, first, OPTIONS)
    change(tree, 1)
    time.sleep(2.1)  # what was changed a moment ago is read again the next time, and would be known as such
    shutil.copytree(first, once)
    start = time.monotonic()
    subprocess.run([*SYNCING, tree, once], check=True, capture_output=True)
    seconds, undisturbed = time.monotonic() - start, everything(once)
    right = {1: samples_of(first), 2: samples_of(once)}
    rng, seen = random.Random(7), []
    mark = f"SHARDWRIGHT_TEST_{os.getpid()}_sync"
    for kill in range(max(1, kills // 2)):
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(first, out)
        with subprocess.Popen(
            [*SYNCING, tree, out],
            env={**os.environ, mark: "1"},
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        ) as process:
            time.sleep(rng.uniform(0.4, 1.1) * seconds)
            process.kill()
            for pid in processes_naming(mark) if kill % 2 else ():
                os.kill(pid, signal.SIGKILL)
        wait_for_none(mark)
        version = read_manifest(out).version
        assert samples_of(out) == right[version]
        seen.append((version, (out / ".shardwright" / "run").exists()))
        sync(tree, out, SYNC)
        assert {k: v for k, v in everything(out).items() if not k.endswith("lock")} == {
            k: v for k, v in undisturbed.items() if not k.endswith("lock")
        }
    assert {version for version, _ in seen} <= {1, 2}
    assert (1, True) in seen, f"no kill met the middle of a run: {seen}"


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
        while job.poll() is None or max(found) < 7:
            version = read_manifest(out).version
            first = samples_of(out, version)
            time.sleep(0.05)
            assert samples_of(out, version) == first == found.setdefault(version, first)
    assert job.returncode == 0
    assert len(found) > 2
    assert len(open_dataset(out)) == 80 + 6 * 23
    assert all(samples_of(out, version) == samples for version, samples in found.items())
