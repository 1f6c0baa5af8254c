"""Make the golden data sets of format version 1, one of each storage, and what must be found in them.

    python -P tests/golden/make.py      (on Linux: other systems refuse a name that is no UTF-8)

They are what every later version must go on to read. Run this for a new format version only, into a folder of
that version's own; NEVER to make a test pass: a golden data set that cannot be read is a format that was broken.
"""

import hashlib
import json
import os
import shutil
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from shardwright.convert import ConvertOptions, PixelOptions, StoreOptions, convert
from shardwright.datasets import open_dataset

HERE = Path(__file__).parent
CLASSES = ("apple", "naïve", "zebra")
SIZE = 8
# A backslash, a byte that is no UTF-8, and what UTF-8 has: names with and without escapes.
NAMES = (b"1", b"2", "ü 3".encode(), b"back\\slash", b"caf\xe9")


def draw(root: Path) -> dict[str, dict[str, Any]]:
    """Draw 15 pictures, of noise or of one grey level, and one without a byte; id -> what a reader must find."""
    rng = np.random.default_rng(1)
    expected = {}
    for label, name in enumerate(CLASSES):
        folder = root / name
        folder.mkdir()
        for number, stem in enumerate(NAMES):
            pixels = rng.integers(0, 256, (SIZE, SIZE, 3), np.uint8)
            if (number + label) % 2:
                pixels[:] = 40 * number + label
            # The wide ones lose their margins to the centre crop; nothing is resized, so the pixels are exact.
            margin = 2 * (number == 1)
            wide = np.pad(pixels, ((0, 0), (margin, margin), (0, 0)))
            path = os.fsencode(folder) + b"/" + stem + b".png"
            Image.fromarray(wide).save(os.fsdecode(path), format="PNG")
            text = stem.replace(b"\\", b"\\\\").decode("utf-8", "surrogateescape").replace("\udce9", "\\xE9")
            with open(path, "rb") as file:
                expected[f"{name}/{text}.png"] = {
                    "label": label,
                    "crc32": zlib.crc32(pixels),
                    "source_sha256": hashlib.file_digest(file, "sha256").hexdigest(),
                    "source_shape": [SIZE, SIZE + 2 * margin],
                }
    (root / CLASSES[0] / "empty.jpg").touch()
    return expected


def main() -> None:
    """Draw, convert into either storage, and write down what was drawn in the order of the rows."""
    if (HERE / "expected.json").exists():
        sys.exit(f"{HERE} holds golden data already, and they are kept as they are")
    with tempfile.TemporaryDirectory() as work:
        source = Path(work, "source")
        source.mkdir()
        expected = draw(source)
        for storage in ("hdf5", "npy"):
            store = StoreOptions(storage, chunk_rows=4, shard_mib=8 * SIZE * SIZE * 3 / 2**20)
            (done,) = convert(source, Path(work, storage), ConvertOptions(PixelOptions(SIZE), store, seed=0))
            packed = [(shard.chunks, shard.compressed_chunks) for shard in done.manifest.shards]
            print(storage, packed, done.manifest.bytes, "bytes")
            shutil.copytree(done.folder, HERE / storage, ignore=shutil.ignore_patterns(".shardwright"))
    ids = open_dataset(HERE / "hdf5").ids()
    samples = [{"id": id, **expected[id]} for id in ids]
    text = json.dumps({"classes": CLASSES, "samples": samples}, indent=1)
    (HERE / "expected.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
