"""Measure re-sharding against copying and hashing the same bytes, in one run (`make bench-reshard`).

`cp`, `sync` and one SHA-256 are what any copy takes that is durable and has a manifest. Rounds are interleaved, and
every other one runs backwards. Each re-shard is a process of its own, from its start to its end, so that its memory is
its own. The page cache is warm.
"""

import argparse
import hashlib
import json
import resource
import shutil
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import joblib
import numpy as np

from shardwright.convert.copy_plan import ReshardOptions
from shardwright.convert.hints import Hints, Stamps
from shardwright.convert.layouts import LayoutOptions
from shardwright.convert.options import StoreOptions
from shardwright.convert.output import Output
from shardwright.convert.reshard import reshard
from shardwright.convert.store import shard_file, shard_writer
from shardwright.convert.verify import verify
from shardwright.datasets.layout import Manifest, Shard, Stats, columns_of
from shardwright.datasets.manifest import read_manifest

BENCH = Path(__file__).resolve().parent.parent / "build" / "bench-reshard"
SHAPE = (256, 256, 3)
CHUNK_ROWS, SHARD_CHUNKS = 32, 10
#: What is compared: a re-shard, the options for it, what it is compared with, and the ratio that is aimed at.
LAYOUTS = {
    "chunks as they are": LayoutOptions(shard_mib=120),
    "raw, chunks of 64": LayoutOptions(chunk_rows=64, shard_mib=120),
    "raw HDF5 to npy": LayoutOptions(format="npy", shard_mib=120),
}
AIMS = {"chunks as they are": 0.8, "raw, chunks of 64": 0.5, "raw HDF5 to npy": None}


def build(folder: Path, images: int) -> None:
    """Write a data set of noise, which LZF does not make smaller: all chunks are raw."""
    rng = np.random.default_rng(0)
    output = Output(folder)
    output.begin()
    options = StoreOptions(chunk_rows=CHUNK_ROWS)
    shards = []
    digests = rng.integers(0, 256, (images, 32), np.uint8)
    ids = [f"a/{row:08d}.jpg" for row in range(images)]
    for number, first in enumerate(range(0, images, CHUNK_ROWS * SHARD_CHUNKS)):
        rows = min(CHUNK_ROWS * SHARD_CHUNKS, images - first)
        writer = shard_writer(output.work / str(number), rows, SHAPE, options)
        crcs: list[int] = []
        for start in range(0, rows, CHUNK_ROWS):
            count = min(CHUNK_ROWS, rows - start)
            chunk = np.zeros((min(CHUNK_ROWS, rows), *SHAPE), np.uint8)
            chunk[:count] = rng.integers(0, 256, (count, *SHAPE), np.uint8)
            writer.write(chunk, count)
            crcs += [zlib.crc32(image) for image in chunk[:count]]
        columns = {
            "label": np.zeros(rows, np.int64),
            "id": np.array(ids[first : first + rows], object),
            "crc32": np.array(crcs, np.uint32),
            "source_sha256": digests[first : first + rows],
            "source_shape": np.full((rows, 2), 256, np.int32),
        }
        paths = writer.finish(columns)
        files = tuple(shard_file(path, f"shards/000001-{number:05d}{end}") for end, path in paths.items())
        for path, file in zip(paths.values(), files, strict=True):
            path.rename(folder / file.name)
        shards.append(Shard(rows, files, (), writer.chunks, writer.compressed_chunks))
    manifest = Manifest(
        version=1,
        storage="hdf5",
        rows=images,
        classes=("a",),
        columns=columns_of(*SHAPE),
        shards=tuple(shards),
        seed=0,
        stats=Stats((127.5,) * 3, (73.9,) * 3),
        options={"chunk_rows": CHUNK_ROWS, "compression": "lzf", "min_saving": 0.35},
    )
    labels = np.zeros(images, np.int64)
    output.accompany(manifest, [], Hints("", 0, images, ids, Stamps.unknown(images), labels, digests))
    output.publish(manifest)
    output.abandon()


def copied(source: Path, out: Path) -> float:
    """Seconds of `cp`, `sync` and one SHA-256 of the shards."""
    start = time.perf_counter()
    subprocess.run(["cp", "-r", source / "shards", out], check=True)
    subprocess.run(["sync", *sorted(out.iterdir())], check=True)
    for path in sorted(out.iterdir()):
        with open(path, "rb") as file:
            hashlib.file_digest(file, "sha256")
    return time.perf_counter() - start


def hashed(source: Path) -> float:
    """Seconds of the SHA-256 of all shards, on all cores."""
    start = time.perf_counter()
    with ThreadPoolExecutor(joblib.cpu_count()) as pool:
        list(pool.map(lambda path: shard_file(path, path.name), sorted((source / "shards").iterdir())))
    return time.perf_counter() - start


def verified(source: Path) -> float:
    """Seconds of `verify`."""
    start = time.perf_counter()
    if verify(source).damage:
        raise SystemExit(f"'{source}' is damaged")
    return time.perf_counter() - start


def resharded(source: Path, out: Path, layout: str) -> tuple[float, float]:
    """(seconds, MB of the largest process) of a re-shard in a process of its own."""
    command = [sys.executable, "-P", __file__, "--one", layout, str(source), str(out)]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found["seconds"], found["mb"]


def one(layout: str, source: Path, out: Path) -> None:
    """Re-shard, and print what it took."""
    start = time.perf_counter()
    reshard(source, out, ReshardOptions(LAYOUTS[layout]))
    seconds = time.perf_counter() - start
    usage = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print(json.dumps({"seconds": seconds, "mb": max(usage) * (1024 if sys.platform == "linux" else 1) / 1e6}))


def main() -> None:
    """Build the data set, measure in rounds, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--one", nargs=3, metavar=("LAYOUT", "SRC", "OUT"), help="for the processes it starts"
    )
    chosen = parser.parse_args()
    if chosen.one:
        one(chosen.one[0], Path(chosen.one[1]), Path(chosen.one[2]))
        return
    source, out = BENCH / f"src-{chosen.images}", BENCH / "out"
    if not (source / "manifest.json").exists():
        shutil.rmtree(source, ignore_errors=True)
        build(source, chosen.images)
    size = read_manifest(source).bytes
    hashed(source)
    memory: dict[str, list[float]] = {name: [] for name in LAYOUTS}
    seconds: dict[str, list[float]] = {}

    def of_layout(name: str) -> float:
        took, mb = resharded(source, out, name)
        memory[name].append(mb)
        return took

    tasks: dict[str, Callable[[], float]] = {
        "cp, sync, one SHA-256": lambda: copied(source, out),
        **{name: partial(of_layout, name) for name in LAYOUTS},
        "SHA-256 on all cores": lambda: hashed(source),
        "verify": lambda: verified(source),
    }
    for number in range(chosen.rounds):
        for name in list(tasks) if number % 2 == 0 else reversed(tasks):
            shutil.rmtree(out, ignore_errors=True)
            seconds.setdefault(name, []).append(tasks[name]())
    shutil.rmtree(out, ignore_errors=True)
    print(
        f"{chosen.images} images, {size / 1e9:.2f} GB, {joblib.cpu_count()} cores, {chosen.rounds} rounds\n"
    )
    print("| what | MB/s, median | largest process, MB |\n|---|---|---|")
    for name, took in seconds.items():
        mb = f"{max(memory[name]):.0f}" if name in memory else ""
        print(f"| {name} | {size / 1e6 / statistics.median(took):.0f} | {mb} |")
    print("\n| ratio, round by round | aim | median | min - max |\n|---|---|---|---|")
    pairs = [(name, "cp, sync, one SHA-256", AIMS[name]) for name in LAYOUTS]
    for name, beside, aim in [*pairs, ("verify", "SHA-256 on all cores", 0.9)]:
        ratios = [b / a for a, b in zip(seconds[name], seconds[beside], strict=True)]
        print(
            f"| {name} / {beside} | {aim or ''} | {statistics.median(ratios):.2f} | "
            f"{min(ratios):.2f} - {max(ratios):.2f} |"
        )


if __name__ == "__main__":
    main()
