"""Training frameworks over our loader, in an environment of their own: see docs/frameworks.md."""

import json
import subprocess
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


def run(python: Path, script: str, *arguments: object) -> Any:
    """What a script prints, as JSON, in its last line."""
    command = [python, "-P", SCRIPTS / script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT / "build")
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("workers", [0, 2])
def test_stateful_dataloader(python: Path, built: Built, workers: int) -> None:
    found = run(python, "stateful.py", built.folder, workers)
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
