"""Training frameworks over our loader, in an environment of their own: see docs/frameworks.md."""

import json
import subprocess
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from building import Built, build
from environments import ROOT, environment

pytestmark = [pytest.mark.interop, pytest.mark.timeout(900)]

SCRIPTS = ROOT / "tests" / "frameworks"
FRAMEWORKS = (
    "accelerate==1.15.0",
    "lightning==2.6.6",
    "timm==1.0.31",
    "torchdata==0.11.0",
    "torchvision==0.28.0",
)


@pytest.fixture(scope="module")
def python() -> Path:
    return environment("frameworks", FRAMEWORKS, with_ours=True)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.mktemp("frameworks") / "set", rows=203, shard_rows=50)


@pytest.fixture(scope="module")
def even(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Whole global batches of 16."""
    return build(tmp_path_factory.mktemp("frameworks") / "even", rows=96, shard_rows=50)


def run(python: Path, *command: object) -> Any:
    """What a script prints, as JSON, in its last line; None if it prints something else."""
    # In a folder that is no home of a `datasets` of ours.
    done = subprocess.run(
        [python, *map(str, command)], capture_output=True, text=True, cwd=ROOT / "build", check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    last = (done.stdout.splitlines() or [""])[-1]
    return json.loads(last) if last.startswith("{") else None


def ranks_of(out: Path) -> Any:
    """What two ranks left in ``out``: case -> [what rank 0 saw, what rank 1 saw]."""
    zero, one = (json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2))
    return {case: [zero[case], one[case]] for case in zero}


@pytest.mark.parametrize("workers", [0, 2])
def test_stateful_dataloader(python: Path, built: Built, workers: int) -> None:
    found = run(python, SCRIPTS / "stateful.py", built.folder, workers)
    expected = found["expected"]
    for epoch in expected:
        assert sorted(id for ids in epoch for id in ids) == sorted(built.ids)
    assert found["twice"] == expected
    assert found["at the end"] == expected
    assert found["after an epoch that was left"] == expected[1:]
    assert found["every third"] == expected[0]
    assert found["by ours"] == expected[0][4:]
    kind, text = found["other batch size"]
    assert kind == "UsageError"
    assert "global_batch is 8 there, 4 here" in text
    assert found["other workers"][0] in ("AssertionError", "KeyError")  # torchdata's own


Batches = list[list[str]]


def times(ranks: Iterable[Batches]) -> Counter[str]:
    """How often each id came, on all ranks together."""
    return Counter(id for batches in ranks for ids in batches for id in ids)


@pytest.fixture(scope="module")
def lightning(python: Path, built: Built, even: Built, tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("lightning")
    run(python, SCRIPTS / "under_lightning.py", built.folder, even.folder, out)
    return ranks_of(out)


@pytest.mark.parametrize("case", ["early", "hooks", "even"])
def test_lightning_trains_on_every_sample(lightning: Any, built: Built, even: Built, case: str) -> None:
    ids = set((even if case == "even" else built).ids)
    assert [rank["error"] for rank in lightning[case]] == [None, None]
    epochs = list(zip(*(rank["train"].values() for rank in lightning[case]), strict=True))
    assert len(epochs) == (2 if case == "even" else 3)
    for epoch in epochs:
        assert len(epoch[0]) == len(epoch[1])
        came = times(epoch)
        assert set(came) == ids
        # Loaders of the hooks know the ranks when they are made, and fill up what does not fill a global batch.
        assert came.total() - len(ids) == (5 if case == "hooks" else 0)
    assert len({json.dumps(epoch) for epoch in epochs}) == len(epochs)


@pytest.mark.parametrize("case", ["early", "hooks", "even"])
def test_lightning_validates_each_sample_once(lightning: Any, built: Built, even: Built, case: str) -> None:
    for epoch in zip(*(rank["val"].values() for rank in lightning[case]), strict=True):
        assert times(epoch) == Counter((even if case == "even" else built).ids)


@pytest.mark.parametrize("step", [5, 13, 20, 25])  # an epoch has 13: one is at its end
def test_lightning_goes_on_from_a_checkpoint(lightning: Any, step: int) -> None:
    for whole, rest in zip(lightning["hooks"], lightning[f"from {step}"], strict=True):
        assert rest["error"] is None
        batches = [ids for epoch in whole["train"].values() for ids in epoch]
        assert [ids for epoch in rest["train"].values() for ids in epoch] == batches[step:]
        assert set(rest["train"]) == {str(epoch) for epoch in range(step // 13, 3)}


def test_lightning_without_our_ranks(lightning: Any, built: Built) -> None:
    for rank in lightning["unsharded"]:
        assert "Lightning can't inject a (distributed) sampler into your batch sampler" in rank["error"]
        assert "set `Trainer(use_distributed_sampler=False)`" in rank["error"]
    for rank in lightning["all on each"]:
        assert times(rank["train"].values()) == times(rank["val"].values()) == Counter(built.ids)


def test_lightning_predicts_with_a_loader_of_torch(lightning: Any, built: Built) -> None:
    for rank in lightning["predict"]:
        assert rank["error"].startswith("MisconfigurationException: Trying to inject custom `Sampler`")
    stock = lightning["predict by torch's"]
    assert times(batches for rank in stock for batches in rank["predict"].values()) == Counter(built.ids)


@pytest.fixture(scope="module")
def accelerate(python: Path, built: Built, tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("accelerate")
    # Not `accelerate launch`, which imports what else is in the environment.
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    run(python, *torchrun, SCRIPTS / "under_accelerate.py", built.folder, out)
    return ranks_of(out)


def test_accelerate_trains_on_every_sample(accelerate: Any, built: Built) -> None:
    assert accelerate["prepared is ours"] == [True, True]
    epochs = list(zip(*accelerate["train"], strict=True))
    for epoch in epochs:
        assert {len(ids) for batches in epoch for ids in batches} == {8}
        assert len(epoch[0]) == len(epoch[1])
        came = times(epoch)
        assert set(came) == set(built.ids)
        assert came.total() - len(built.ids) == 5  # they fill up the last global batch
    assert epochs[0] != epochs[1]
    # What Accelerate does at the last batch, such as ending an accumulation of gradients, it does not here.
    assert not any(any(rank) for rank in accelerate["ends seen"])


def test_accelerate_goes_on_from_its_checkpoint(accelerate: Any) -> None:
    assert accelerate["resumed"] == accelerate["undisturbed"]
    assert {len(batches) for batches in accelerate["resumed"]} == {13}


def test_accelerate_gathers_each_sample_once(accelerate: Any, built: Built) -> None:
    for ids, labels in accelerate["gathered"]:
        assert Counter(ids) == Counter(built.ids)
        assert Counter(labels) == Counter(built.labels.tolist())


def test_accelerate_deals_out_what_has_no_ranks(accelerate: Any, built: Built) -> None:
    """even_batches: True, its default, repeats samples; False leaves a rank with less."""
    kinds, *epochs = zip(*accelerate["theirs"], strict=True)
    assert set(kinds) == {"DataLoaderShard"}
    for epoch in epochs:
        assert {len(ids) for batches in epoch for ids in batches} == {8}
        assert set(times(epoch)) == set(built.ids)
        assert times(epoch).total() - len(built.ids) == 5
    assert epochs[0] != epochs[1]
    assert times(accelerate["uneven"]) == Counter(built.ids)
    assert [len(batches[-1]) for batches in accelerate["uneven"]] == [8, 3]
    # 25 whole batches are left of 26. It does not see that the last one was dropped, and repeats the first instead.
    dropped = accelerate["theirs, drop_last"]
    assert [len(batches) for batches in dropped] == [13, 13]
    assert dropped[1][-1] == dropped[0][0]
    assert times(dropped).total() - len(times(dropped)) == 8


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """What to train on, and what to validate on."""
    folder = tmp_path_factory.mktemp("toys")
    options: Any = {"shard_rows": 50, "shape": (32, 32, 3), "classes": 4, "telling": True}
    return [build(folder / name, rows=n, **options).folder for name, n in (("train", 240), ("val", 90))]


def test_a_loop_like_timms(python: Path, toys: list[Path]) -> None:
    found = run(python, SCRIPTS / "like_timm.py", *toys)
    (before, _), (after, seen), (ema, _) = found["before"], found["after"], found["ema"]
    assert before < 50
    assert min(after, ema) > 90
    assert (seen, found["epoch"]) == (90, len(found["losses"]))


def test_a_loop_like_torchvisions(python: Path, toys: list[Path]) -> None:
    found = run(python, SCRIPTS / "like_torchvision.py", *toys)
    (before, _), (after, seen) = found["before"], found["after"]
    assert before < 0.5
    assert after > 0.9
    assert seen == 90
    assert found["processes"] == [2, False]  # two of them, none of which is the loop's
