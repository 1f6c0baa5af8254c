"""Other readers read our shards: an old h5py, h5dump, and Hugging Face; each in an environment of its own."""

import hashlib
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from environments import ROOT, environment
from trees import SIZE, STORE, Pictures, draw_tree

from shardwright.convert import ConvertOptions, PixelOptions, StoreOptions, convert

pytestmark = [pytest.mark.interop, pytest.mark.timeout(900)]

OLD_H5PY = ("h5py==3.8.0", "numpy<2")
HUGGING_FACE = ("datasets==5.2.0", "h5py")

#: The reader of the documentation: `samples(folder)` yields (image, label, id).
DOCUMENTED = next(
    code
    for code in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "format.md").read_text("utf-8"), re.S)
    if "def samples" in code
)
BY_HUGGING_FACE = """
import importlib.util, json
from datasets import load_dataset

assert not importlib.util.find_spec("torch"), "this is to be shown without torch"

def samples(folder):
    with open(f"{folder}/manifest.json", encoding="utf-8") as file:
        manifest = json.load(file)
    files = [f"{folder}/{shard['files'][0]['name']}" for shard in manifest["shards"]]
    rows = load_dataset("hdf5", data_files=files, split="train")
    assert (rows.features["image"].dtype, rows.features["label"].dtype) == ("uint8", "int64")
    for row in rows.with_format("numpy"):
        yield row["image"].astype("uint8"), row["label"], row["id"]
"""
#: What any of them found, as [id, label, SHA-256 of the pixels] of each sample, sorted.
REPORT = """
import hashlib, sys
found = samples(sys.argv[1])
print(json.dumps(sorted([id, int(label), hashlib.sha256(image.tobytes()).hexdigest()] for image, label, id in found)))
"""


def read_with(python: Path, reader: str, folder: Path, **variables: str) -> list[Any]:
    # -I: no folder of ours on the path, where `datasets` would be the wrong one.
    done = subprocess.run(
        [python, "-I", "-c", reader + REPORT, folder],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("interop")


@pytest.fixture(scope="module")
def pictures(folder: Path) -> Pictures:
    return draw_tree(folder / "source")


@pytest.fixture(scope="module")
def expected(pictures: Pictures) -> list[Any]:
    return sorted([id, label, hashlib.sha256(pixels).hexdigest()] for id, (label, pixels) in pictures.items())


@pytest.fixture(scope="module", params=["lzf", "gzip", "none"])
def made(request: pytest.FixtureRequest, folder: Path, pictures: Pictures) -> Path:
    store = StoreOptions(compression=request.param, **STORE)
    convert(folder / "source", folder / request.param, ConvertOptions(PixelOptions(SIZE), store, jobs=1))
    return folder / request.param


def shards_of(folder: Path) -> list[Path]:
    manifest = json.loads((folder / "manifest.json").read_bytes())
    return [folder / shard["files"][0]["name"] for shard in manifest["shards"]]


def masks_of(shard: Path) -> list[int]:
    """The filter mask of each chunk of images, in order."""
    with h5py.File(shard) as h5:
        images = h5["image"]
        return [
            images.id.read_direct_chunk((first, 0, 0, 0))[0]
            for first in range(0, len(images), images.chunks[0])
        ]


def test_the_shards_are_those_that_are_hard_to_read(made: Path) -> None:
    masks = [masks_of(shard) for shard in shards_of(made)]
    assert masks == ([[0, 1], [1, 0]] if made.name == "lzf" else [[0, 0], [0, 0]])
    with h5py.File(shards_of(made)[0]) as h5:
        assert (len(h5["image"]), h5["image"].maxshape[0]) == (15, 16)


def test_h5py_3_8(made: Path, expected: list[Any]) -> None:
    python = environment("h5py38", OLD_H5PY)
    version = subprocess.run(
        [python, "-I", "-c", "import h5py; print(h5py.__version__)"], capture_output=True, text=True
    )
    assert version.stdout.strip() == "3.8.0"
    assert read_with(python, DOCUMENTED, made) == expected


def test_hugging_face(made: Path, expected: list[Any], tmp_path: Path) -> None:
    python = environment("huggingface", HUGGING_FACE)
    found = read_with(
        python, BY_HUGGING_FACE, made, HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1", HOME=str(tmp_path)
    )
    assert found == expected


@pytest.fixture(scope="module")
def h5dump() -> str:
    if not shutil.which("h5dump") and os.geteuid() == 0 and shutil.which("apt-get"):
        subprocess.run("apt-get update && apt-get install -y hdf5-tools", shell=True, check=True)
    found = shutil.which("h5dump")
    if not found:
        pytest.fail("h5dump is missing: `apt-get install hdf5-tools` (macOS: `brew install hdf5`) brings it")
    return found


def dump(h5dump: str, shard: Path, column: str, *part: str) -> str:
    """What h5dump prints between the braces of a column's DATA."""
    done = subprocess.run(
        [h5dump, "-y", "-w", "65535", "-d", f"/{column}", *part, shard], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    return re.search(r"\n *DATA \{(.*?)\n *\}", done.stdout, re.S)[1]


def test_h5dump_reads_labels_and_ids(made: Path, h5dump: str) -> None:
    for shard in shards_of(made):
        with h5py.File(shard) as h5:
            labels, ids = h5["label"][:].tolist(), h5["id"][:].tolist()
        assert list(map(int, dump(h5dump, shard, "label").split(","))) == labels
        # It prints a byte above 127 in octal, as a negative 32-bit integer.
        printed = re.findall(r'"(.*?)"', dump(h5dump, shard, "id"))
        plain = [re.sub(r"\\(37777777\d{3})", lambda m: chr(int(m[1], 8) & 255), text) for text in printed]
        assert [text.encode("latin-1") for text in plain] == ids


def test_h5dump_reads_every_chunk_but_those_of_lzf(made: Path, pictures: Pictures, h5dump: str) -> None:
    chunk_rows = STORE["chunk_rows"]
    for shard in shards_of(made):
        with h5py.File(shard) as h5:
            expected = np.stack([pictures[id][1] for id in h5["id"].asstr()[:]])
        for chunk, mask in enumerate(masks_of(shard)):
            rows = expected[chunk * chunk_rows :][:chunk_rows]
            start, count = f"{chunk * chunk_rows},0,0,0", ",".join(map(str, rows.shape))
            printed = dump(h5dump, shard, "image", "-s", start, "-c", count)
            if made.name == "lzf" and mask == 0:
                assert printed.strip() == ""  # with exit code 0, as docs/format.md warns
            else:
                numbers = np.array(re.findall(r"\d+", printed), np.uint8)
                np.testing.assert_array_equal(numbers.reshape(rows.shape), rows)
