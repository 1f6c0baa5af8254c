"""The README is true: its commands and its code run, in its order, and print what it says that they print."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

from shardwright.cli import convert

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(console|python)\n(.*?)^```$", README, re.M | re.S)
PYTHON = [code for language, code in BLOCKS if language == "python"]


@dataclass(frozen=True)
class Shown:
    """A command of the README, and the lines that it is said to print; ``...`` stands for lines left out."""

    command: str
    lines: tuple[str, ...]


def shown() -> list[Shown]:
    """All commands of the README, in its order."""
    found = []
    for language, text in BLOCKS:
        if language == "console":
            for part in re.split(r"^\$ ", text, flags=re.M)[1:]:
                command, *lines = part.splitlines()
                found.append(Shown(command, tuple(line for line in lines if line.strip(". "))))
    return found


SHOWN = shown()
#: What is done to `photos`.
CHANGES = ("cp", "mv", "rm")
MAKE = sorted(
    {s.command for s in SHOWN if s.command.startswith("make ")} | set(re.findall(r"`(make [a-z-]+)`", README))
)


def masked(text: str) -> list[str]:
    """Lines whose numbers, which change from run to run, are all the same; also what is one and what is several."""
    numbers = (re.sub(r"\d[\d.,]*", "#", " ".join(line.split())) for line in text.splitlines())
    return [re.sub(r"\b(shard|class|image|picture)(es|s)?\b", r"\1", line) for line in numbers]


def run(*command: str | Path, cwd: Path) -> str:
    """What the command prints on stdout; it must end with 0."""
    ran = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"{command} ended with {ran.returncode}:\n{ran.stdout}{ran.stderr}"
    return ran.stdout


def shardwright(arguments: str, cwd: Path) -> str:
    """What the installed command prints."""
    return run(Path(sys.executable).with_name("shardwright"), *shlex.split(arguments), cwd=cwd)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as `make convert` leaves it, its pictures fewer and smaller, and `photos` of one's own."""
    folder = tmp_path_factory.mktemp("readme")
    drawing = [sys.executable, "-P", ROOT / "examples" / "draw_sample.py", "build/sample"]
    said = run(*drawing, "--pictures", "60", "--size", "64x48", cwd=folder)
    said += shardwright("convert build/sample build/shards", folder)
    (folder / "said").write_text(said)
    shutil.copytree(folder / "build/sample/train", folder / "photos")
    return folder


@pytest.fixture(scope="module")
def printed(folder: Path) -> dict[str, list[list[str]]]:
    """Command -> what each of its runs printed, after all `shardwright` commands ran in order."""
    found: dict[str, list[list[str]]] = {}
    for entry in SHOWN:
        program, _, arguments = entry.command.partition(" ")
        if program == ".venv/bin/shardwright":
            found.setdefault(entry.command, []).append(masked(shardwright(arguments, folder)))
        elif program in CHANGES:
            run(*shlex.split(entry.command), cwd=folder)
    return found


def test_every_command_is_one_that_is_checked_here() -> None:
    assert len(SHOWN) >= 6
    for entry in SHOWN:
        assert entry.command.split()[0] in ("make", ".venv/bin/shardwright", *CHANGES)


@pytest.mark.parametrize("command", MAKE)
def test_make_target_is_there(command: str) -> None:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))
    }
    told = [command.split()[0], "-n", *shlex.split(command)[1:]]
    assert subprocess.run(told, cwd=ROOT, env=environment, capture_output=True, check=False).returncode == 0


def test_commands_print_what_is_shown(printed: dict[str, list[list[str]]]) -> None:
    runs = {command: iter(texts) for command, texts in printed.items()}
    for entry in SHOWN:
        if entry.command in runs:
            lines = next(runs[entry.command])
            assert [line for line in masked("\n".join(entry.lines)) if line not in lines] == [], entry.command


def test_make_convert_prints_what_is_shown(folder: Path) -> None:
    (entry,) = (s for s in SHOWN if s.command == "make convert")
    lines = masked((folder / "said").read_text())
    makefile = (
        (ROOT / "Makefile").read_text("utf-8").replace("$(BIN)", ".venv/bin").replace("$$out", "build/shards")
    )
    missing = [s for s in entry.lines if masked(s)[0] not in lines and s.strip() not in makefile]
    assert missing == []


@pytest.mark.parametrize("number", range(len(PYTHON)))
def test_python_runs(number: int, folder: Path, printed: dict[str, list[list[str]]]) -> None:
    run(sys.executable, "-P", "-W", "error", "-c", PYTHON[number], cwd=folder)


def test_options_of_convert_are_those_of_its_help() -> None:
    table = dict(re.findall(r"^\| `(--[a-z-]+)[^`]*` \| (?:`(.*?)`)? ?\|", README, re.M))
    there = {}
    for param in convert.params:
        if isinstance(
            param, click.Option
        ):  # whose default is False for a flag, and no number or text for none
            told = isinstance(param.default, str | int | float) and not param.is_flag
            there[param.opts[0]] = str(param.default) if told else ""
    assert table == there


def test_choices_of_convert_are_those_of_its_help() -> None:
    choices = {
        param.opts[0]: "|".join(param.type.choices)
        for param in convert.params
        if isinstance(param.type, click.Choice)
    }
    shown_choices = re.findall(r"^\| `(--[a-z-]+) ([^`]*\|[^`]*)`", README, re.M)
    assert {option: text.replace("\\|", "|") for option, text in shown_choices} == choices


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_somewhere(name: str) -> None:
    for link in re.findall(r"\]\(([^)#:]+)[^):]*\)", (ROOT / name).read_text("utf-8")):
        assert (ROOT / link).exists(), f"{name} links to {link}"
