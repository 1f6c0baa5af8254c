"""The architecture, read from the imports: which room may know which."""

import ast
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("convert", "datasets", "loaders", "shardwright")
MODULES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
#: Room -> rooms that it may import. `shardwright` stands for the errors and the version, which all may know.
MAY_KNOW = {
    "convert": {"convert", "datasets", "shardwright"},
    "datasets": {"datasets", "shardwright"},
    "loaders": {"loaders", "datasets", "shardwright"},
    "shardwright": {"shardwright"},
}
#: Modules of the front door that are above all rooms, and what of it the rooms may know.
ABOVE = {"cli", "__main__", "exporting", "operation", "outcome", "resharding"}
KNOWN_TO_ALL = {"shardwright", "shardwright.errors"}

name_of = "{0.parent.name}/{0.name}".format


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Each module that ``path`` imports, and whether at its top level, where importing it does so."""
    tree = ast.parse(path.read_text("utf-8"))
    late = {id(node) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for node in ast.walk(f)}
    for guard in ast.walk(tree):  # what only type checkers see
        if isinstance(guard, ast.If) and ast.unparse(guard.test) == "TYPE_CHECKING":
            late |= {id(node) for node in ast.walk(guard)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) not in late) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield from ((f"{node.module}", id(node) not in late) for _ in node.names[:1])
            if node.module in ("shardwright", *(f"shardwright.{room}" for room in ROOMS)):
                yield from ((f"{node.module}.{alias.name}", id(node) not in late) for alias in node.names)
    for text in re.findall(r'"(shardwright(?:\.\w+)+)"', path.read_text("utf-8")):  # names handed on lazily
        yield text, False


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in ROOMS else parts[0]


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_no_arrow_points_the_wrong_way(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    if room == "shardwright" and path.stem in ABOVE:
        return
    known = {module for module, _ in imports(path) if module.split(".")[0] == "shardwright"}
    assert {room_of(module) for module in known} <= MAY_KNOW[room]
    of_the_door = {module for module in known if room_of(module) == "shardwright"}
    assert of_the_door <= KNOWN_TO_ALL | {"shardwright.__version__"}


def test_the_arrows_are_seen() -> None:
    """The test above reads something at all."""
    found = dict(imports(ROOT / "convert" / "picture_build.py"))
    assert found["shardwright.datasets.layout"] is True
    assert dict(imports(ROOT / "convert" / "jobs.py"))["joblib"] is True
    assert dict(imports(ROOT / "convert" / "environment.py"))["torch"] is False
    assert "shardwright.convert.run" in dict(imports(ROOT / "shardwright" / "cli.py"))


@pytest.mark.parametrize("path", [p for p in MODULES if p.parent.name == "convert"], ids=name_of)
def test_converting_imports_torch_only_where_it_decodes(path: Path) -> None:
    assert "torch" not in {module for module, at_top in imports(path) if at_top}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_nobody_imports_our_folders_by_their_own_names(path: Path) -> None:
    assert not {
        module for module, _ in imports(path) if module.split(".")[0] in ("convert", "datasets", "loaders")
    }


def test_modules_are_called_after_what_they_hold() -> None:
    assert MODULES
    vague = {"utils", "util", "common", "helpers", "helper", "config", "misc", "core"}
    assert not vague & {path.stem for path in MODULES}


Python = Callable[..., Any]


@pytest.mark.parametrize(
    "module",
    [
        "shardwright",
        "shardwright.convert",
        "shardwright.convert.run",
        "shardwright.convert.export",
        "shardwright.convert.gc",
        "shardwright.convert.repair",
        "shardwright.convert.merge",
        "shardwright.convert.reshard",
        "shardwright.convert.split",
        "shardwright.convert.verify",
        "shardwright.convert.versions",
        "shardwright.datasets",
        "shardwright.datasets.pixels",
        "shardwright.datasets.reader",
        "shardwright.loaders",
    ],
)
def test_importing_it_leaves_torch_unloaded(python: Python, module: str) -> None:
    ran = python(f"import sys, {module}; sys.exit('torch' in sys.modules)")
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize("room", ["convert", "datasets", "loaders"])
def test_rooms_hand_on_what_they_promise(python: Python, room: str) -> None:
    code = f"""
import shardwright.{room} as room
assert all(getattr(room, name).__name__ == name for name in room.__all__)
assert dir(room) == room.__all__
try:
    room.nothing
except AttributeError as error:
    assert "nothing" in str(error)
"""
    ran = python(code)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_a_package_called_datasets_is_not_hidden(python: Python, tmp_path: Path) -> None:
    """Hugging Face's, in its place a stub: also where Python starts in our folder."""
    for name in ("convert", "datasets", "loaders"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("stub = True\n")
    code = """
import convert, datasets, loaders
import shardwright.convert, shardwright.datasets, shardwright.loaders
assert datasets.stub and convert.stub and loaders.stub
assert shardwright.datasets.__all__ and not hasattr(shardwright.datasets, "stub")
"""
    ran = python(code, PYTHONPATH=str(tmp_path))
    assert (ran.returncode, ran.stderr) == (0, "")


def test_pytest_does_not_hide_it_either() -> None:
    """These tests run in the root folder, whose name must not be among those searched."""
    assert not {"", ".", str(ROOT)} & set(sys.path)
    assert "datasets" not in sys.modules or str(ROOT) not in str(sys.modules["datasets"].__file__)


def named_tests(text: str) -> list[tuple[str, list[str]]]:
    """(file, tests) of each "`test_file.py`: `one`, `other`"."""
    named = re.findall(r"`(test_\w+\.py)`(?::\s+((?:`\w+`(?:,\s+)?)+))?", text)
    return [(file, re.findall(r"\w+", tests)) for file, tests in named]


def assert_they_are_there(named: list[tuple[str, list[str]]]) -> None:
    for file, tests in named:
        text = (ROOT / "tests" / file).read_text("utf-8")
        assert all(f"def test_{test}(" in text for test in tests), (file, tests)


def test_every_promise_names_tests_that_are_there() -> None:
    rows = re.findall(r"^\|.*\|(.*)\|$", (ROOT / "docs" / "guarantees.md").read_text("utf-8"), re.M)[2:]
    assert len(rows) > 10
    for shown in rows:
        named = named_tests(shown)
        assert named or "`output.py`" in shown, shown
        assert_they_are_there(named)


def test_what_is_said_of_training_names_tests_that_are_there() -> None:
    for section in (ROOT / "docs" / "training.md").read_text("utf-8").split("\n## ")[1:]:
        named = named_tests(section)
        assert named, section
        assert_they_are_there(named)


def test_what_is_said_of_frameworks_names_tests_that_are_there() -> None:
    said = (ROOT / "docs" / "frameworks.md").read_text("utf-8")
    named = named_tests(said)
    assert_they_are_there(named)
    shown = {test for file, tests in named if file == "test_frameworks.py" for test in tests}
    written = (ROOT / "tests" / "test_frameworks.py").read_text("utf-8")
    assert shown == set(re.findall(r"^def test_(\w+)\(", written, re.M))
    for name, version in re.findall(r'^    "(\w+)==([\d.]+)",$', written, re.M):
        assert re.search(rf"^## {name} \({re.escape(version)}\)$", said, re.M | re.I), name


def test_what_is_said_of_export_names_tests_that_are_there() -> None:
    named = named_tests((ROOT / "docs" / "export.md").read_text("utf-8"))
    assert {file for file, _ in named} == {"test_export.py", "test_webdataset.py"}
    assert_they_are_there(named)
