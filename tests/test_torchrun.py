"""Three processes of torchrun, stopped in the middle of an epoch, and two that go on."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from building import Built, build

SCRIPT = Path(__file__).parent / "frameworks" / "under_torchrun.py"
ORDERS = ("exact", "block", "sequential")
STOP = 4  # batches before the job stops


def torchrun(ranks: int, out: Path, *arguments: object) -> list[dict[str, Any]]:
    """What each rank left behind."""
    out.mkdir()
    command = [
        sys.executable,
        "-P",
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
    ]
    done = subprocess.run(
        [*command, SCRIPT, *map(str, arguments)], capture_output=True, text=True, cwd=out, timeout=110
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.mktemp("torchrun") / "set", rows=203, shard_rows=50)


@pytest.fixture(scope="module")
def three(built: Built, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("torchrun") / "three"
    return torchrun(3, out, built.folder, out, 8, STOP)


def counted(ranks: list[dict[str, Any]], order: str, what: str) -> Counter[str]:
    return Counter(id for rank in ranks for ids in rank[order][what] for id in ids)


@pytest.mark.parametrize("order", ORDERS)
def test_evaluation_is_disjoint_and_complete(built: Built, three: list[dict[str, Any]], order: str) -> None:
    assert counted(three, order, "evaluated") == Counter(built.ids)
    assert len({len(rank[order]["evaluated"]) for rank in three}) == 1


@pytest.mark.parametrize("order", ORDERS)
def test_training_keeps_step(built: Built, three: list[dict[str, Any]], order: str) -> None:
    assert {len(rank[order]["trained"]) for rank in three} == {9}
    assert {len(ids) for rank in three for ids in rank[order]["trained"]} == {8}
    times = counted(three, order, "trained")
    assert set(times) == set(built.ids)
    assert sum(n - 1 for n in times.values()) == 9 * 24 - 203 < 24
    assert {len(rank[order]["dropped"]) for rank in three} == {8}
    dropped = counted(three, order, "dropped")
    assert set(dropped.values()) == {1}
    assert len(dropped) == 203 - 11


def test_stopped_in_the_middle_and_resumed_on_two_ranks(
    built: Built, three: list[dict[str, Any]], tmp_path: Path
) -> None:
    states = tmp_path / "states.json"
    states.write_text(json.dumps({order: three[0][order]["state"] for order in ORDERS}))
    two = torchrun(2, tmp_path / "two", built.folder, tmp_path / "two", 12, STOP, states)
    for order in ORDERS:
        assert all(rank[order]["state"] == three[0][order]["state"] for rank in three)
        assert {len(rank[order]["begun"]) for rank in three} == {STOP}
        assert {len(rank[order]["rest"]) for rank in two} == {9 - STOP}
        together = counted(three, order, "begun") + counted(two, order, "rest")
        assert together == counted(three, order, "trained")
