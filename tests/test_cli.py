"""The command line: exit codes, what stands on stdout and on stderr, and what it leaves behind."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import pytest
from building import build
from drawing import jpeg, png, put

import shardwright
from shardwright.convert import write

Command = Callable[..., Any]
FAST = ("--size", 16, "--chunk-rows", 16)
BROKEN = jpeg(40, 40)[:-30]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return put(tmp_path / "src", {f"{'ab'[k % 2]}/{k}.png": png(k) for k in range(10)})


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def made(command: Command, source: Path, out: Path) -> Path:
    """A data set of ten pictures."""
    assert command("convert", source, out, *FAST).code == 0
    return out


@pytest.fixture
def splits(command: Command, tmp_path: Path, out: Path) -> Path:
    """Data sets of two splits; one picture was rejected."""
    files = {"train/a/0.png": png(0), "train/b/1.png": png(1), "val/a/2.png": png(2), "val/a/cut.jpg": BROKEN}
    assert command("convert", put(tmp_path / "split", files), out, *FAST).code == 3
    return out


def listing(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def test_version_and_help(command: Command) -> None:
    assert shardwright.__version__ in command("--version").out
    text = command("--help").out
    assert text == command("-h").out
    for name in ("convert", "info", "verify"):
        assert name in text
        assert command(name, "--help").out.startswith(f"Usage: shardwright {name}")


def test_convert_says_what_it_made(command: Command, source: Path, out: Path) -> None:
    ran = command("convert", source, out, *FAST)
    assert ran.code == 0
    assert ran.out.startswith(f"'{out}': version 1, 10 images of 16x16x3, 2 classes, 1 hdf5 shard\n")
    assert "LZF would save about" in ran.out
    assert "event=stage state=end stage=scan unit=files done=10 " in ran.err
    assert "event=stage state=end stage=convert unit=images total=10 done=10 " in ran.err
    assert not set(ran.out + ran.err) & set("\r\x1b")  # logs take no control characters
    again = command("convert", source, out, *FAST)
    assert (again.code, again.out) == (0, f"'{out}' is up to date: version 1, 10 images. Nothing to do.\n")


def test_rejects_are_said_and_exit_with_3(command: Command, source: Path, out: Path) -> None:
    put(source, {"a/cut.jpg": BROKEN, "a/404.jpg": b"<html>", "notes.txt": b""})
    ran = command("convert", source, out, *FAST)
    assert ran.code == 3
    table = ran.out[ran.out.index("  verdict") :].splitlines()
    assert table[0].split() == [
        "verdict",
        "reason",
        "pictures,",
        "named",
        "in",
        f"'{out / 'report-000001.jsonl'}'",
    ]
    assert [line.split() for line in table[1:3]] == [
        ["rejected", "not-a-picture", "1"],
        ["rejected", "truncated", "1"],
    ]
    assert "skipped, not pictures: 1 not-a-picture" in ran.out
    assert command("convert", source, out, *FAST).code == 0  # nothing to do


def test_every_option_arrives(command: Command, source: Path, out: Path, tmp_path: Path) -> None:
    (tmp_path / "map").write_text("b\nnone\na\n")
    options = {
        "format": "hdf5",
        "size": 24,
        "fit": "pad",
        "resample": "lanczos",
        "channels": 1,
        "max-pixels": 1000,
        "chunk-rows": 4,
        "shard-mib": 0.01,
        "compression": "gzip",
        "min-saving": 0.5,
        "seed": 3,
    }
    arguments = [str(word) for key, value in options.items() for word in (f"--{key}", value)]
    assert command("convert", source, out, *arguments, "--classes", tmp_path / "map", "--jobs", 2).code == 0
    found = json.loads((out / "manifest.json").read_bytes())
    assert {key: found["options"][key.replace("-", "_")] for key in options} == options
    assert found["classes"] == ["b", "none", "a"]
    assert found["columns"][0]["shape"] == [24, 24, 1]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["src"], 2, "Missing argument 'OUT'"),
        (["src", "out", "--formt", "npy"], 2, "No such option"),
        (["src", "out", "--format", "zip"], 2, "'zip' is not one of 'hdf5', 'npy'"),
        (["src", "out", "--size", "0"], 2, "shardwright: size is 0, expected 1 to 8192 pixels"),
        (["src", "out", "--jobs", "0"], 2, "shardwright: jobs is 0, expected 1 to 4096"),
        (
            ["src", "out", "--min-saving", "2"],
            2,
            "shardwright: min_saving is 2.0, expected a share from 0 to 1",
        ),
        (
            ["src", "out", "--format", "npy", "--compression", "lzf"],
            2,
            "shardwright: npy knows no compression",
        ),
        (["src", "out", "--classes", "missing"], 2, "shardwright: cannot read the class map 'missing'"),
        (["missing", "out"], 2, "shardwright: the source 'missing' is missing"),
        (["missing", "out", "--dry-run"], 2, "shardwright: the source 'missing' is missing"),
        (["src", "src/out"], 2, "lie in one another"),
        (["src", "src/out", "--dry-run"], 2, "lie in one another"),
        (["empty", "out"], 1, "shardwright: 'empty' has no pictures"),
        (["empty", "out", "--dry-run"], 1, "shardwright: 'empty' has no pictures"),
        (["broken", "out"], 1, "shardwright: not one of the 1 pictures in 'broken' could be taken"),
        (["src", "foreign"], 1, "shardwright: the output 'foreign' holds what is not ours: 'notes.txt'"),
        (["some", "out", "--strict"], 1, "shardwright: 1 pictures were rejected"),
        (["new\nline", "out"], 2, "shardwright: the source 'new\\nline' is missing"),
    ],
)
def test_an_error_is_one_line_and_changes_nothing(
    command: Command,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: int,
    says: str,
) -> None:
    put(tmp_path, {"empty/a/": b"", "broken/a/x.jpg": BROKEN, "foreign/notes.txt": b"mine"})
    put(tmp_path, {"some/a/x.jpg": BROKEN, "some/a/y.png": png()})
    monkeypatch.chdir(tmp_path)
    before = listing(tmp_path)
    for extra in ([], ["--json"]):
        ran = command("convert", *arguments, *extra)
        assert (ran.code, ran.out) == (code, "")
        assert says in ran.err.splitlines()[-1]
        assert "Traceback" not in ran.err
        assert listing(tmp_path) == before


@pytest.mark.parametrize("name", ["info", "verify"])
def test_no_data_set_is_an_error(command: Command, tmp_path: Path, name: str) -> None:
    for folder, says in [(tmp_path, "holds no manifest.json"), (tmp_path / "missing", "no such folder")]:
        ran = command(name, folder)
        assert (ran.code, ran.out) == (1, "")
        assert ran.err.startswith("shardwright: no data set at")
        assert says in ran.err
        assert ran.err.count("\n") == 1


def test_debug_shows_a_traceback(command: Command, tmp_path: Path) -> None:
    for arguments in (["convert", "missing", tmp_path], ["info", "missing"], ["verify", "missing"]):
        ran = command(*arguments, "--debug")
        assert "Traceback" in ran.err
        assert ran.err.splitlines()[-1].startswith("shardwright: ")
        assert ran.code == (2 if arguments[0] == "convert" else 1)


def test_an_interrupt_exits_with_130(
    command: Command, source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(write, "write_shard", interrupted)
    ran = command("convert", source, out, *FAST)
    assert (ran.code, ran.out) == (130, "")
    assert "interrupted" in ran.err
    assert "Traceback" not in ran.err
    assert not out.exists()


def test_other_options_are_named(command: Command, source: Path, made: Path) -> None:
    before = listing(made)
    ran = command("convert", source, made, *FAST, "--seed", 1)
    assert ran.code == 1
    assert "seed is 0 there, 1 here" in ran.err
    assert listing(made) == before
    assert command("convert", source, made, *FAST, "--seed", 1, "--new-version").code == 0
    assert json.loads(command("info", made, "--json").out)["version"] == 2


def test_a_shrunken_source_needs_a_word(command: Command, source: Path, made: Path) -> None:
    for path in sorted(source.rglob("*.png"))[:6]:
        path.unlink()
    assert command("convert", source, made, *FAST).code == 1
    assert command("convert", source, made, *FAST, "--allow-shrink").code == 0


# --- JSON ------------------------------------------------------------------------------------------------


def test_json_is_all_that_stands_on_stdout(command: Command, source: Path, out: Path) -> None:
    for made in (True, False):
        ran = command("convert", source, out, *FAST, "--json")
        found = json.loads(ran.out)
        assert ran.out.count("\n") == 1
        assert (found["made"], found["version"], found["rows"], found["classes"]) == (made, 1, 10, 2)
        assert found["out"] == str(out)
        assert found["report"] == str(out / "report-000001.jsonl")
    for name in ("info", "verify"):
        ran = command(name, out, "--json")
        assert (ran.code, json.loads(ran.out)["version"]) == (0, 1)
    assert json.loads(command("verify", out, "--json").out) == {"version": 1, "shards": 1, "damage": []}


def test_json_is_keyed_by_split(command: Command, splits: Path, tmp_path: Path) -> None:
    ran = command("convert", tmp_path / "split", splits, *FAST, "--json")
    found = json.loads(ran.out)
    assert (ran.code, {split: entry["rows"] for split, entry in found.items()}) == (0, {"train": 2, "val": 1})
    assert found["val"]["rejected"] == {"truncated": 1}
    found = json.loads(command("info", splits, "--json", "--stats").out)
    assert {split: entry["images_per_class"] for split, entry in found.items()} == {
        "train": {"a": 1, "b": 1},
        "val": {"a": 1, "b": 0},
    }
    assert json.loads(command("verify", splits, "--json").out).keys() == {"train", "val"}
    dry = json.loads(command("convert", tmp_path / "split", tmp_path / "new", "--dry-run", "--json").out)
    assert {split: entry["files"] for split, entry in dry.items()} == {"train": 2, "val": 2}


def test_one_split_is_keyed_too(command: Command, tmp_path: Path, out: Path) -> None:
    put(tmp_path / "split", {"train/a/0.png": png(0)})
    assert json.loads(command("convert", tmp_path / "split", out, *FAST, "--json").out).keys() == {"train"}
    assert json.loads(command("info", out, "--json").out).keys() == {"train"}


@pytest.mark.parametrize("as_json", [False, True])
def test_a_dry_run_writes_nothing(command: Command, source: Path, tmp_path: Path, as_json: bool) -> None:
    put(source, {"a/cut.jpg": BROKEN, "top.png": png(), "a/notes.txt": b""})
    before = listing(tmp_path)
    ran = command("convert", source, tmp_path / "out", *FAST, "--dry-run", *["--json"] * as_json)
    assert ran.code == 0
    assert listing(tmp_path) == before
    if as_json:
        found = json.loads(ran.out)
        assert found.pop("seconds_about") >= 0
        assert found == {
            "version": 1,
            "files": 11,
            "classes": 2,
            "no_class": 1,
            "skipped": {"not-a-picture": 1},
            "source_bytes": sum(path.stat().st_size for path in source.glob("[ab]/*[!t]")),
            "shards": 1,
            "bytes_at_most": 11 * 16 * 16 * 3,
        }
    else:
        assert "version 1 from 11 pictures" in ran.out


# --- info and verify --------------------------------------------------------------------------------------


def test_info(command: Command, made: Path) -> None:
    assert command("info", made).out.startswith(f"'{made}': version 1, 10 images of 16x16x3, 2 classes\n")
    found = json.loads(command("info", made, "--files", "--stats", "--json").out)
    (file,) = found["files"]
    data = (made / file["name"]).read_bytes()
    assert file == {
        "name": "shards/000001-00000.h5",
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    assert found["images_per_class"] == {"a": 5, "b": 5}
    assert found["mean"] == pytest.approx([127.5] * 3, abs=5)
    words = command("info", made, "--files", "--stats").out
    assert file["sha256"] in words
    assert "       5 a\n" in words
    assert "  mean: " in words


def test_stats_are_those_of_all_shards(command: Command, source: Path, out: Path) -> None:
    command("convert", source, out, "--size", 16, "--chunk-rows", 2)
    found = json.loads(command("info", out, "--stats", "--json").out)
    assert (found["shards"], found["images_per_class"]) == (5, {"a": 5, "b": 5})


def test_info_of_splits(command: Command, splits: Path) -> None:
    words = command("info", splits).out
    assert words.index("[train]") < words.index("2 images") < words.index("[val]") < words.index("1 images")
    assert command("info", splits / "val").out.startswith(f"'{splits / 'val'}': version 1, 1 images")


@pytest.mark.parametrize("full", [False, True])
def test_verify(command: Command, made: Path, full: bool) -> None:
    arguments = ["verify", made, *["--full"] * full]
    ran = command(*arguments)
    assert (ran.code, ran.out.count("\n")) == (0, 1)
    assert "are right" in ran.out
    path = made / "shards/000001-00000.h5"
    with h5py.File(path) as file:
        first_pixels = file["image"][0].tobytes()
    data = path.read_bytes()
    path.write_bytes(data.replace(first_pixels, b"\0" + first_pixels[1:]))
    assert path.read_bytes() != data
    ran = command(*arguments)
    assert ran.code == 1
    assert f"'{path}': wrong SHA-256" in ran.out
    assert f"'{path}': rows 0: wrong CRC-32" in ran.out
    ran = command(*arguments, "--json")
    assert (ran.code, len(json.loads(ran.out)["damage"])) == (1, 3)
    path.unlink()
    ran = command(*arguments)
    assert (ran.code, f"'{path}': No such file" in ran.out) == (1, True)


def test_verify_of_splits_finds_the_damaged_one(command: Command, splits: Path) -> None:
    os.truncate(splits / "val/shards/000001-00000.h5", 100)
    ran = command("verify", splits, "--json")
    found = json.loads(ran.out)
    assert (ran.code, found["train"]["damage"], len(found["val"]["damage"])) == (1, [], 1)


# --- in processes of their own ------------------------------------------------------------------------------


def test_help_is_quick(python: Command) -> None:
    """It loads nothing that takes long, and that may be missing where only the help is asked for."""
    code = """
import sys
from shardwright.cli import main
try:
    main(["convert", "--help"], prog_name="shardwright")
finally:
    heavy = {"torch", "h5py", "joblib", "numpy", "PIL", "tqdm", "imagecodecs"} & set(sys.modules)
    assert not heavy, heavy
"""
    ran = python(code)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith("Usage: shardwright convert")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shell_completion(python: Command, shell: str) -> None:
    code = "from shardwright.cli import main; main(prog_name='shardwright')"
    ran = python(code, _SHARDWRIGHT_COMPLETE=f"{shell}_source")
    assert ran.returncode == 0, ran.stderr
    assert "_SHARDWRIGHT_COMPLETE" in ran.stdout


def test_a_bare_environment(tmp_path: Path, out: Path) -> None:
    """As cron runs it: no terminal, the C locale, a bare PATH, and names that are not UTF-8; with workers."""
    odd = "é" if sys.platform == "darwin" else os.fsdecode(b"caf\xe9")
    source = put(tmp_path / "src", {f"{odd}/ü {k}.png": png(k) for k in range(9)} | {"b\n/cut.jpg": BROKEN})
    ran = subprocess.run(
        [sys.executable, "-P", "-m", "shardwright", "convert", source, out, "--size", "16", "--jobs", "2"],
        env={"PATH": "/usr/bin:/bin", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        cwd=tmp_path,
        check=False,
    )
    assert ran.returncode == 3, ran.stderr
    assert b"version 1, 9 images" in ran.stdout
    assert not set(ran.stdout + ran.stderr) & set(b"\r\x1b")
    classes = json.loads((out / "manifest.json").read_bytes())["classes"]
    assert classes == ["b\n", "é" if sys.platform == "darwin" else r"caf\xE9"]
    (line,) = (out / "report-000001.jsonl").read_text().splitlines()
    assert json.loads(line)["id"] == "b\n/cut.jpg"


def test_the_command_may_open_as_many_files_as_the_system_lets_it(python: Any) -> None:
    code = """
import resource
from shardwright.cli import main
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
try:
    main(["info", "/nowhere"])
except SystemExit:
    pass
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(hard, 65536), hard)
"""
    ran = python(code)
    assert ran.returncode == 0, ran.stderr


def test_a_limit_that_cannot_be_raised_is_no_error(monkeypatch: pytest.MonkeyPatch, command: Any) -> None:
    import resource

    def refuse(*_: Any) -> None:
        raise ValueError("not allowed")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 1000))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert command("info", "--help").code == 0
    assert command("info", "/nowhere").err.startswith("shardwright: ")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
@pytest.mark.parametrize("asked", ["info", "info --json", "verify", "--help", "--version"])
def test_output_that_cannot_be_written(tmp_path: Path, asked: str) -> None:
    name, *options = asked.split()
    folder = [] if name.startswith("-") else [str(build(tmp_path / "set").folder)]
    with open("/dev/full", "w") as full:
        ran = subprocess.run(
            [sys.executable, "-P", "-m", "shardwright", name, *folder, *options],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    *progress, said = ran.stderr.splitlines()
    assert (ran.returncode, said) == (1, "shardwright: cannot write the output: No space left on device")
    assert all(line.startswith("time=") for line in progress)


def test_a_reader_that_had_enough_is_no_error_to_speak_of(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    ran = subprocess.run(
        [sys.executable, "-P", "-m", "shardwright", "info", str(build(tmp_path / "set").folder)],
        stdout=writing,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writing)
    assert (ran.returncode, ran.stderr) == (1, b"")


def test_a_current_folder_that_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Any
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here").rmdir()
    for arguments in (["info", "out"], ["convert", "src", "out"], ["verify", "out"]):
        ran = command(*arguments)
        assert ran.code in (1, 2)
        assert ran.err.endswith(
            "The current folder was removed, so relative paths lead nowhere: change into another\n"
        )
    monkeypatch.chdir(tmp_path)
    assert "current folder" not in command("info", "out").err
