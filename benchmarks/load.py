"""Measure the loader against bare reads, FFCV and what users have, in one run (`make bench-load`).

8,000 images of 256x256x3, batches of 64, page cache warm. The rounds are interleaved, every other one runs
backwards; the first is not counted (it fills caches, checks each row's CRC-32, starts workers). A ratio is the
median of the ratios round by round, so that a machine that slows down does not favour one side.
"""

import argparse
import gc
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import baselines
import numpy as np
import torch
from baselines import BATCH, Places

from shardwright.datasets import open_dataset
from shardwright.loaders import (
    BatchTransform,
    LoaderOptions,
    Normalize,
    RandomCrop,
    RandomResizedCrop,
    collate,
    make_loader,
)

REPOSITORY = Path(__file__).resolve().parent.parent
BENCH = REPOSITORY / "build" / "bench"
PICTURES, COPIES = 2000, 4
STORES = {"raw": ["--min-saving", "1"], "npy": ["--format", "npy"], "lzf": ["--min-saving", "0"]}


@dataclass(frozen=True)
class Row:
    """One thing that is measured: its name, and how; ``slow`` rows run in every other round."""

    name: str
    run: Callable[[int], float]


@dataclass(frozen=True)
class Claim:
    """A ratio of two rows, and what it should be."""

    row: str
    to: str
    aim: float


CLAIMS = [
    Claim("raw HDF5, exact", "FFCV raw RANDOM", 1.2),
    Claim("npy, exact", "FFCV raw RANDOM", 1.2),
    Claim("raw HDF5, exact", "bare row gather, HDF5", 0.9),
    Claim("npy, exact", "bare row gather, npy", 0.9),
    Claim("raw HDF5, block", "FFCV raw SEQUENTIAL", 1.1),
    Claim("raw HDF5, block", "bare chunk read", 0.9),
    Claim("raw HDF5, block", "bare chunk read, to as much memory", 0.9),
    Claim("LZF, block", "bare lzf_decode", 0.9),
    Claim("LZF, block", "h5py, 2 processes, LZF chunks", 2.5),
    Claim("LZF, block", "obvious h5py recipe, 2 workers", 100),
    Claim("stock DataLoader, default collate, 2 workers", "per-sample memmap, 2 workers", 0.8),
    Claim("stock DataLoader, our collate, 2 workers", "hand-over limit, 2 workers", 0.9),
    Claim("raw HDF5, exact, random crop 224 + flip", "raw HDF5, exact", 0.6),
    Claim("raw HDF5, block, random crop 224 + flip", "raw HDF5, block", 0.6),
    Claim("raw HDF5, exact, RandomResizedCrop by OpenCV", "FFCV raw RANDOM, RandomResizedCrop", 1),
    Claim("raw HDF5, exact, RandomResizedCrop by torch", "FFCV raw RANDOM, RandomResizedCrop", 1),
    Claim("cold, raw HDF5, block", "cold, large sequential reads", 0.9),
    Claim("cold, raw HDF5, exact", "cold, large sequential reads", 0.9),
]


def prepare() -> tuple[dict[str, Path], Path]:
    """Draw pictures once, convert them in three ways; also all images in one .npy."""
    source, linked = BENCH / "source", BENCH / "linked"
    draw = [sys.executable, "-P", str(REPOSITORY / "examples" / "draw_sample.py"), str(source)]
    subprocess.run([*draw, "--pictures", str(PICTURES), "--size", "500x375"], check=True)
    pictures = sorted(source.glob("*/*/*.jpg"))
    for picture in pictures:
        for copy in range(COPIES):
            link = linked / picture.parent.name / f"{picture.parent.parent.name}-{copy}-{picture.name}"
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.exists():
                os.link(picture, link)
    folders = {}
    for name, options in STORES.items():
        folders[name] = BENCH / f"load-{name}"
        command = [sys.executable, "-m", "shardwright", "convert", str(linked), str(folders[name]), *options]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    images = BENCH / "images.npy"
    dataset = open_dataset(folders["npy"], verify="off")
    if not images.exists():
        array = np.lib.format.open_memmap(
            images, "w+", np.uint8, (len(dataset), *dataset.manifest.image_shape)
        )
        for start in range(0, len(dataset), 500):
            stop = min(start + 500, len(dataset))
            array[start:stop] = dataset.read_batch(range(start, stop)).columns[0].permute(0, 2, 3, 1).numpy()
        array.flush()
    return folders, images


def rows_of(folders: dict[str, Path], images: Path, threads: int, cold: bool) -> list[Row]:
    """All rows, in the order in which a round runs them."""

    def ours(
        name: str, order: Any, verify: Any = "first", transform: BatchTransform | None = None
    ) -> Callable[[int], float]:
        options = LoaderOptions(
            engine="threads", workers=threads, shuffle_by=order, transform=transform, quiet=True
        )
        dataset = open_dataset(folders[name], verify=verify)
        loader = make_loader(dataset, BATCH, shuffle=True, drop_last=True, options=options)
        return lambda _: baselines.over(loader)

    def every_row_of(dataset: Any, rows: int, collate_fn: Any = None) -> Callable[[int], float]:
        epoch = baselines.stock(dataset, rows, collate_fn)
        return lambda _: epoch()

    raw, npy, lzf = (Places(folders[name]) for name in ("raw", "npy", "lzf"))
    datasets = {name: open_dataset(folder) for name, folder in folders.items()}
    lzf_files = baselines.files_of(datasets["lzf"])
    raw_files = baselines.files_of(datasets["raw"])
    row_bytes = raw.row_bytes
    obvious = baselines.ObviousDataset(lzf_files[0], datasets["lzf"].manifest.shards[0].rows)
    memmap = baselines.MemmapDataset(images, datasets["npy"].labels())
    ready = baselines.ReadyDataset(len(memmap), datasets["npy"].image_shape)
    rows = [
        Row("raw HDF5, exact", ours("raw", "exact")),
        Row("bare row gather, HDF5", lambda epoch: baselines.bare_rows(raw, threads, epoch)),
        Row("npy, exact", ours("npy", "exact")),
        Row("bare row gather, npy", lambda epoch: baselines.bare_rows(npy, threads, epoch)),
        Row("bare row copies from a map", lambda epoch: baselines.bare_mapped_rows(raw, threads, epoch)),
        Row("raw HDF5, block", ours("raw", "block")),
        Row("bare chunk read", lambda epoch: baselines.bare_chunks(raw, threads, epoch)),
        Row(
            "bare chunk read, to as much memory", lambda epoch: baselines.bare_chunks(raw, threads, epoch, 10)
        ),
        Row("npy, block", ours("npy", "block")),
        Row("LZF, block", ours("lzf", "block")),
        Row("bare lzf_decode", lambda epoch: baselines.bare_decoding(lzf, threads, epoch)),
        Row("h5py, 2 processes, LZF chunks", lambda _: baselines.h5py_processes(lzf_files, 2)),
        Row("obvious h5py recipe, 2 workers", every_row_of(obvious, 128)),
        Row("stock DataLoader, default collate, 2 workers", every_row_of(datasets["raw"], 3200)),
        Row("per-sample memmap, 2 workers", every_row_of(memmap, 3200)),
        Row("stock DataLoader, our collate, 2 workers", every_row_of(datasets["raw"], 6400, collate)),
        Row("hand-over limit, 2 workers", every_row_of(ready, 6400, baselines.taken_as_it_is)),
        Row("raw HDF5, exact, verify='off'", ours("raw", "exact", "off")),
        Row("raw HDF5, exact, verify='read'", ours("raw", "exact", "read")),
        Row("LZF, block, verify='off'", ours("lzf", "block", "off")),
        Row("LZF, block, verify='read'", ours("lzf", "block", "read")),
    ]
    crop = BatchTransform(RandomCrop(224), flip=0.5)
    resized = {
        "torch": BatchTransform(RandomResizedCrop(224), flip=0.5),
        "OpenCV": BatchTransform(RandomResizedCrop(224, resize="opencv"), flip=0.5),
    }
    normalize = Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    rows += [
        Row("raw HDF5, exact, random crop 224 + flip", ours("raw", "exact", transform=crop)),
        Row("raw HDF5, block, random crop 224 + flip", ours("raw", "block", transform=crop)),
        *(
            Row(f"raw HDF5, exact, RandomResizedCrop by {name}", ours("raw", "exact", transform=transform))
            for name, transform in resized.items()
        ),
        Row(
            "raw HDF5, exact, random crop 224 + flip, float32",
            ours("raw", "exact", transform=replace(crop, normalize=normalize)),
        ),
    ]
    if cold:

        def cold_epoch(order: Any) -> Callable[[int], float]:
            epoch = ours("raw", order, "off")

            def cold(number: int) -> float:
                baselines.drop_from_cache(raw_files)
                return epoch(number)

            return cold

        def cold_sequential(_: int) -> float:
            baselines.drop_from_cache(raw_files)
            return baselines.sequential_bytes(raw_files) / row_bytes

        rows += [
            Row("cold, raw HDF5, block", cold_epoch("block")),
            Row("cold, raw HDF5, exact", cold_epoch("exact")),
            Row("cold, large sequential reads", cold_sequential),
        ]
    return rows


def ffcv_rows(images: Path, threads: int) -> list[Row]:
    """FFCV in its own environment, one epoch a round; empty where `make ffcv` was not run."""
    python = REPOSITORY / "build" / "ffcv" / "bin" / "python"
    if not python.exists():
        print("no build/ffcv: run `make ffcv` for FFCV's rows", file=sys.stderr)
        return []

    def run(order: str, *others: str) -> Callable[[int], float]:
        command = [
            str(python),
            "-P",
            str(REPOSITORY / "benchmarks" / "ffcv_peer.py"),
            "--images",
            str(images),
        ]
        command += ["--beton", str(BENCH / "images.beton"), "--order", order, "--batch-size", str(BATCH)]
        command += ["--threads", str(threads), "--epochs", "4", *others]

        def epoch(_: int) -> float:
            said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
            return float(statistics.median(json.loads(said.splitlines()[-1])["images_per_second"]))

        return epoch

    return [
        Row("FFCV raw RANDOM", run("random")),
        Row("FFCV raw SEQUENTIAL", run("sequential")),
        Row("FFCV raw RANDOM, RandomResizedCrop", run("random", "--crop", "224", "--resized")),
    ]


def memory_over_epochs(folder: Path, threads: int, epochs: int = 20) -> list[float]:
    """Resident MB after each epoch of block order over compressed chunks."""
    options = LoaderOptions(engine="threads", workers=threads, shuffle_by="block", quiet=True)
    loader = make_loader(open_dataset(folder), BATCH, shuffle=True, options=options)
    found = []
    for _ in range(epochs):
        baselines.over(loader)
        gc.collect()
        found.append(_resident_mb())
    return found


def _resident_mb() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1e6


def machine() -> str:
    """The machine and the versions, in one line."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "?")
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return (
        f"{cpu}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}"
    )


def main() -> None:
    """Measure, and print a table of rows and one of ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", help="measure rows whose names hold this text")
    parser.add_argument(
        "--no-cold", action="store_true", help="leave out what empties the page cache of our files"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folders, images = prepare()
    rows = rows_of(folders, images, arguments.threads, not arguments.no_cold) + ffcv_rows(
        images, arguments.threads
    )
    rows = [
        row for row in rows if not arguments.only or any(t in row.name for t in arguments.only.split(","))
    ]
    found: dict[str, list[float]] = {row.name: [] for row in rows}
    for number in range(arguments.rounds + 1):
        for row in rows if number % 2 else rows[::-1]:
            rate = row.run(number)
            if number:
                found[row.name].append(rate)
    print(f"{machine()}\n{arguments.rounds} rounds, {arguments.threads} threads\n")
    print("| what | img/s, median | min - max |\n|---|---|---|")
    for name, rates in found.items():
        print(f"| {name} | {statistics.median(rates):,.0f} | {min(rates):,.0f} - {max(rates):,.0f} |")
    print("\n| ratio | aim | median | min - max |\n|---|---|---|---|")
    for claim in CLAIMS:
        if found.get(claim.row) and found.get(claim.to):
            ratios = [a / b for a, b in zip(found[claim.row], found[claim.to], strict=True)]
            print(
                f"| {claim.row} / {claim.to} | {claim.aim} | {statistics.median(ratios):.2f} | "
                f"{min(ratios):.2f} - {max(ratios):.2f} |"
            )
    if not arguments.only:
        memory = memory_over_epochs(folders["lzf"], arguments.threads)
        print(f"\nresident MB after each of 20 epochs, LZF, block: {' '.join(f'{mb:.0f}' for mb in memory)}")


if __name__ == "__main__":
    main()
