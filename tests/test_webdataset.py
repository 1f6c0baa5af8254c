"""The WebDataset library reads what `export` writes for it; in an environment of its own."""

import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawing import encoded, photograph, put
from environments import environment

from shardwright.convert import ConvertOptions, PixelOptions, StoreOptions, convert
from shardwright.convert.export import ExportOptions, export
from shardwright.convert.picturefile import PictureFile
from shardwright.datasets import open_dataset
from shardwright.datasets.layout import Storage

pytestmark = [pytest.mark.interop, pytest.mark.timeout(900)]

PINS = ("webdataset==1.0.2", "pillow", "numpy")
SIZE = 32
#: What the library makes of the tars: [key, id, label, class, CRC-32, pixels in hex, shape] of each sample, in order.
READ = """
import json, sys
import numpy, webdataset

pattern, decoder, ending = sys.argv[1:]
found = []
for sample in webdataset.WebDataset(pattern, shardshuffle=False).decode(decoder):
    assert set(sample) - {"__key__", "__url__", "__local_path__"} == {ending, "cls", "json"}, sample.keys()
    pixels, about = numpy.asarray(sample[ending]), sample["json"]
    key = [sample["__key__"], about["id"], sample["cls"], about["class"], about["crc32"]]
    found.append([*key, pixels.tobytes().hex(), list(pixels.shape)])
    assert sample["cls"] == about["label"]
pairs = webdataset.WebDataset(pattern, shardshuffle=True).shuffle(50).decode("pil").to_tuple(ending, "cls")
assert sorted(label for _, label in pairs) == sorted(row[2] for row in found)
print(json.dumps(found))
"""


@pytest.mark.parametrize("storage", ["hdf5", "npy"])
@pytest.mark.parametrize("encoding", ["png", "jpeg"])
@pytest.mark.parametrize(("channels", "decoder"), [(3, "pil"), (3, "rgb8"), (1, "l8")])
def test_the_library_reads_every_sample_once(
    tmp_path: Path, storage: Storage, encoding: Any, channels: int, decoder: str
) -> None:
    """Pixels, labels and ids, in the order of the rows; names with dots in them are no trouble."""
    put(
        tmp_path / "tree",
        {
            f"{('a.b', 'ü', 'owl')[k % 3]}/x.{k}.tar.png": encoded(photograph(SIZE, SIZE, k, channels), "PNG")
            for k in range(50)
        },
    )
    store = StoreOptions(storage, chunk_rows=8, shard_mib=0.05)
    convert(tmp_path / "tree", tmp_path / "src", ConvertOptions(PixelOptions(SIZE, channels=channels), store))
    wanted = ExportOptions("webdataset", PictureFile(encoding), shard_mib=0.04)
    done = export(tmp_path / "src", tmp_path / "out", wanted)[""]
    assert done.files > 1
    pattern = done.in_words()[2].split('"')[1]  # what it says that WebDataset takes
    python = environment("webdataset", PINS)
    ending = PictureFile(encoding).ending.removeprefix(".")
    ran = subprocess.run(
        [python, "-I", "-c", READ, pattern, decoder, ending], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    rows = open_dataset(tmp_path / "src", columns=("image", "label", "id", "crc32"))
    assert len({row[0] for row in found}) == len(found) == len(rows) == 50
    for (_, id, label, name, crc32, pixels, shape), row in zip(found, rows, strict=True):
        image = row[0].numpy().transpose(1, 2, 0)
        assert (id, label, name, crc32) == (row[2], row[1], rows.classes[row[1]], int(row[3]))
        assert shape == [SIZE, SIZE, 3] if channels == 3 else [SIZE, SIZE]
        if encoding == "png":
            assert hashlib.sha256(bytes.fromhex(pixels)).digest() == hashlib.sha256(image.tobytes()).digest()
        else:
            there = np.frombuffer(bytes.fromhex(pixels), np.uint8).astype(int)
            assert np.abs(there - image.reshape(-1)).mean() < 4
