"""Measure `sync` by how much of a tree has changed, and reading with dead rows, in one run (`make bench-sync`).

A tree of small pictures, in which nothing, 0.1, 1 and 10 % change: half of those replaced, a quarter added, a quarter
removed. Each sync is a process of its own, from its start to its end. Then whole epochs of a data set of which 5 % of
the rows are dead, beside the same without; rounds are interleaved, and every other one runs backwards. All is in the
page cache.
"""

import argparse
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import simplejpeg
from reshard import build

from shardwright.convert.options import ConvertOptions, StoreOptions
from shardwright.convert.run import convert
from shardwright.convert.scan import scan
from shardwright.datasets import open_dataset
from shardwright.datasets.layout import Manifest, Stats
from shardwright.datasets.manifest import read_manifest, write_manifest
from shardwright.datasets.pixels import PixelOptions
from shardwright.loaders import LoaderOptions, make_loader

BENCH = Path(__file__).resolve().parent.parent / "build" / "bench-sync"
SIZE, CLASSES = 32, 100
SHARES = (0.0, 0.001, 0.01, 0.1)
DEAD = 0.05
BATCH = 64
EPOCHS = 4
#: Times of files tick in up to two seconds; what is younger than that is read again.
REST_SECONDS = 2.5


def picture(rng: np.random.Generator) -> bytes:
    """A small picture of soft blocks, as the bytes of a JPEG."""
    pixels = np.kron(rng.integers(0, 256, (4, 4, 3), np.uint8), np.ones((SIZE // 4, SIZE // 4, 1), np.uint8))
    return bytes(simplejpeg.encode_jpeg(pixels, 90))


def draw(tree: Path, pictures: int) -> None:
    """Draw the tree."""
    rng = np.random.default_rng(0)
    for k in range(CLASSES):
        (tree / f"class{k:03d}").mkdir(parents=True)
    for k in range(pictures):
        (tree / f"class{k % CLASSES:03d}" / f"{k:07d}.jpg").write_bytes(picture(rng))


def change(tree: Path, number: int, seed: int) -> None:
    """Replace, add and remove pictures, ``number`` in all."""
    rng, draws = random.Random(seed), np.random.default_rng(seed)
    there = sorted(tree.rglob("*.jpg"))
    chosen = rng.sample(there, number * 3 // 4)
    for path in chosen[: number // 2]:
        path.write_bytes(picture(draws))
    for path in chosen[number // 2 :]:
        path.unlink()
    for k in range(number - len(chosen)):
        (tree / f"class{k % CLASSES:03d}" / f"new-{seed}-{k}.jpg").write_bytes(picture(draws))


def synced(tree: Path, out: Path) -> float:
    """Seconds of a sync in a process of its own."""
    command = [sys.executable, "-P", "-m", "shardwright", "sync", str(tree), str(out), "--quiet"]
    start = time.perf_counter()
    subprocess.run(command, check=True)
    return time.perf_counter() - start


def scanned(tree: Path) -> float:
    """Seconds of a scan."""
    start = time.perf_counter()
    scan(tree)
    return time.perf_counter() - start


def with_dead_rows(source: Path, folder: Path) -> None:
    """The data set ``source`` with some rows marked dead, at random, its shards by hard links."""
    rng, manifest = np.random.default_rng(0), read_manifest(source)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source / "shards", folder / "shards", copy_function=os.link)
    (folder / ".shardwright").mkdir()
    shards = tuple(
        replace(
            shard,
            dead_rows=tuple(sorted(rng.choice(shard.rows, round(shard.rows * DEAD), replace=False).tolist())),
        )
        for shard in manifest.shards
    )
    rows = sum(shard.living_rows for shard in shards)
    stats = Stats(manifest.stats.mean, manifest.stats.std)  # the sums are those of all rows
    write_manifest(folder, replace(manifest, shards=shards, rows=rows, stats=stats))


def read(folder: Path, order: Literal["exact", "block"]) -> tuple[float, float]:
    """(images a second, seconds from opening to the first batch) by threads: of some epochs, after a first one."""
    start = time.perf_counter()
    dataset = open_dataset(folder, verify="off")
    options = LoaderOptions(engine="threads", shuffle_by=order, quiet=True)
    loader = make_loader(dataset, BATCH, shuffle=True, options=options)
    batches = iter(loader)
    next(batches)
    first = time.perf_counter()
    for _ in batches:  # memory is new to the process, and then taken again
        pass
    begun, images = time.perf_counter(), 0
    for _ in range(EPOCHS):
        images += sum(len(labels) for _, labels in loader)
    return images / (time.perf_counter() - begun), first - start


def measure_sync(pictures: int, rounds: int) -> None:
    """Print the table of syncs."""
    tree, out = BENCH / f"tree-{pictures}", BENCH / f"out-{pictures}"
    if not (out / "manifest.json").exists():
        shutil.rmtree(tree, ignore_errors=True)
        shutil.rmtree(out, ignore_errors=True)
        draw(tree, pictures)
        convert(tree, out, ConvertOptions(PixelOptions(size=SIZE), StoreOptions()))
    time.sleep(REST_SECONDS)
    synced(tree, out)  # so that it is up to date, whatever an earlier run left
    scans = [scanned(tree) for _ in range(rounds)]
    files = sum(1 for _ in tree.rglob("*.jpg"))
    print(f"{files} pictures, {rounds} rounds; scan: {files / statistics.median(scans):,.0f} files/s\n")
    print(
        "| changed | pictures | s, median | min - max | beyond nothing, ms a picture |\n|---|---|---|---|---|"
    )
    seconds: dict[float, list[float]] = {share: [] for share in SHARES}
    for number in range(rounds):
        for share in SHARES:
            change(tree, round(pictures * share), seed=time.time_ns() % 2**32 + number)
            time.sleep(REST_SECONDS)
            seconds[share].append(synced(tree, out))
            if share:  # files that were just written are read once more, which is not to be measured here
                synced(tree, out)
    nothing = statistics.median(seconds[0.0])
    for share, took in seconds.items():
        each = 1000 * (statistics.median(took) - nothing) / (pictures * share) if share else 0
        print(
            f"| {share:.1%} | {round(pictures * share)} | {statistics.median(took):.2f} | {min(took):.2f} - "
            f"{max(took):.2f} | {each:.2f} |"
        )


def measure_reading(images: int, rounds: int) -> None:
    """Print the table of reading with dead rows."""
    whole, dead = BENCH / f"whole-{images}", BENCH / f"dead-{images}"
    if not (whole / "manifest.json").exists():
        shutil.rmtree(whole, ignore_errors=True)
        build(whole, images)
    with_dead_rows(whole, dead)
    found: Manifest = read_manifest(dead)
    print(f"\n{images} rows of 256x256x3, {1 - found.rows / images:.1%} of them dead, {rounds} rounds\n")
    print("| order | images/s, none dead | some dead / none dead, median | min - max | first batch, s |")
    print("|---|---|---|---|---|")
    orders: tuple[Literal["exact", "block"], ...] = ("exact", "block")
    for order in orders:
        for folder in (whole, dead):
            read(folder, order)
        rates: dict[Path, list[float]] = {whole: [], dead: []}
        firsts: dict[Path, list[float]] = {whole: [], dead: []}
        for number in range(rounds):
            for folder in (whole, dead) if number % 2 == 0 else (dead, whole):
                rate, first = read(folder, order)
                rates[folder].append(rate)
                firsts[folder].append(first)
        ratios = [a / b for a, b in zip(rates[dead], rates[whole], strict=True)]
        print(
            f"| {order} | {statistics.median(rates[whole]):,.0f} | {statistics.median(ratios):.3f} | "
            f"{min(ratios):.3f} - {max(ratios):.3f} | {statistics.median(firsts[dead]):.3f} / "
            f"{statistics.median(firsts[whole]):.3f} |"
        )


def main() -> None:
    """Measure both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=int, default=50_000)
    parser.add_argument("--images", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--reading-rounds", type=int, default=11)
    chosen = parser.parse_args()
    measure_sync(chosen.pictures, chosen.rounds)
    measure_reading(chosen.images, chosen.reading_rounds)


if __name__ == "__main__":
    main()
