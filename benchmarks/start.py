"""Measure the start of a large data set: the first batch of 1.28 million rows in 1,000 shards (`make bench-start`).

The images are 4x4 pixels, since what is measured is opening: manifest, chunk indices, labels, the order. Each
figure comes from a process of its own. Memory is that beside the imports.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from shardwright.convert.options import StoreOptions
from shardwright.convert.output import Output
from shardwright.convert.store import shard_file, shard_writer
from shardwright.datasets import open_dataset
from shardwright.datasets.layout import Manifest, Shard, Stats, columns_of
from shardwright.loaders import LoaderOptions, make_loader

REPOSITORY = Path(__file__).resolve().parent.parent
HOW = ("from the beginning", "resumed", "rank 3 of 8")
SHARDS, ROWS, SHAPE, CLASSES = 1000, 1280, (4, 4, 3), 1000


def write(folder: Path) -> None:
    """Write the data set: every shard has the same images, its own ids and labels."""
    options = StoreOptions(chunk_rows=32)
    output = Output(folder)
    output.begin()
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (ROWS, *SHAPE), np.uint8)
    shards: list[Shard] = []
    for number in range(SHARDS):
        writer = shard_writer(output.work / str(number), ROWS, SHAPE, options)
        for start in range(0, ROWS, 32):
            writer.write(images[start : start + 32], 32)
        labels = rng.integers(0, CLASSES, ROWS)
        columns = {
            "label": labels,
            "id": np.array(
                [f"n{label:08d}/{number:04d}_{row:05d}.JPEG" for row, label in enumerate(labels)], object
            ),
            "crc32": np.zeros(ROWS, np.uint32),
            "source_sha256": np.zeros((ROWS, 32), np.uint8),
            "source_shape": np.full((ROWS, 2), 375, np.int32),
        }
        files = writer.finish(columns)
        names = tuple(shard_file(path, f"shards/000001-{number:05d}{end}") for end, path in files.items())
        shards.append(Shard(ROWS, names, (), writer.chunks, writer.compressed_chunks))
        for path, file in zip(files.values(), names, strict=True):
            path.rename(folder / file.name)
    manifest = Manifest(
        version=1,
        storage="hdf5",
        rows=SHARDS * ROWS,
        classes=tuple(f"n{k:08d}" for k in range(CLASSES)),
        columns=columns_of(*SHAPE),
        shards=tuple(shards),
        seed=0,
        stats=Stats((0.0,) * 3, (1.0,) * 3),
        options={"chunk_rows": 32},
    )
    output.accompany(manifest, [], None)
    output.publish(manifest)
    output.abandon()


def first_batch(folder: Path, order: str, how: str) -> dict[str, float]:
    """Seconds from nothing to the first batch of 64, and MB taken meanwhile; and of a state its bytes and seconds."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    options = LoaderOptions(shuffle_by=order, workers=2, quiet=True)  # type: ignore[arg-type]
    ranks = (3, 8) if how == "rank 3 of 8" else (0, 1)
    dataset = open_dataset(folder, verify="off")
    loader = make_loader(dataset, 64, shuffle=True, ranks=ranks, options=options)
    state = {**loader.state_dict(), "epoch": 3, "batch": len(loader) // 2}
    seconds = time.perf_counter() - start
    restoring = time.perf_counter()
    if how == "resumed":
        loader.load_state_dict(state)
    restored = time.perf_counter() - restoring
    iterator = iter(loader)
    next(iterator)
    seconds += time.perf_counter() - restoring
    return {
        "seconds": seconds,
        "mb": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024,
        "state_bytes": len(json.dumps(state)),
        "restored_seconds": restored,
    }


def main() -> None:
    """Measure each order in processes of their own, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--order", choices=["exact", "block"], help=argparse.SUPPRESS)
    parser.add_argument("--how", choices=HOW, default=HOW[0], help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    folder = REPOSITORY / "build" / "bench" / "start"
    if arguments.order:
        print(json.dumps(first_batch(folder, arguments.order, arguments.how)))
        return
    if not (folder / "manifest.json").exists():
        write(folder)
    print(
        "| first batch of 1.28 million rows in 1,000 shards | s, median | MB beside imports "
        "| bytes of the state | s to restore it |\n|---|---|---|---|---|"
    )
    cases = [(order, how) for order in ("exact", "block") for how in HOW]
    command = [sys.executable, "-P", os.path.abspath(__file__)]
    found: dict[tuple[str, str], list[dict[str, float]]] = {case: [] for case in cases}
    for _ in range(arguments.rounds):  # interleaved: a machine that slows down favours none
        for order, how in cases:
            ran = subprocess.run(
                [*command, "--order", order, "--how", how], check=True, capture_output=True, text=True
            )
            found[order, how].append(json.loads(ran.stdout))
    for (order, how), rounds in found.items():
        median = {key: statistics.median(f[key] for f in rounds) for key in rounds[0]}
        restored = f"{median['restored_seconds']:.4f}" if how == "resumed" else ""
        print(
            f"| {order}, {how} | {median['seconds']:.2f} | {median['mb']:.0f} "
            f"| {median['state_bytes']:.0f} | {restored} |"
        )


if __name__ == "__main__":
    main()
