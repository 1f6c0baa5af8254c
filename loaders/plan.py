"""The choices that a loader makes, as data: what is read how, and why."""

import math
from dataclasses import dataclass
from typing import Literal

import joblib
import torch

from shardwright.datasets.base import ShardedDataset
from shardwright.datasets.layout import Manifest
from shardwright.errors import UsageError
from shardwright.loaders.memory import memory_bytes
from shardwright.loaders.options import LoaderOptions
from shardwright.loaders.order import Order

MOST_WORKERS = 8
MIXED_BYTES = 64 << 20
LEAST_MIXED_CHUNKS, MOST_MIXED_CHUNKS = 4, 64


@dataclass(frozen=True, slots=True)
class LoaderPlan:
    """How a loader reads.

    ``why_order`` and ``why_engine`` give the reason of a choice in words. ``mixed_chunks`` are the chunks
    read together in block order.
    """

    order: Order
    why_order: str
    engine: Literal["threads", "processes"]
    why_engine: str
    workers: int
    mixed_chunks: int
    pin_memory: bool

    def __str__(self) -> str:
        return (
            f"order: {self.order} ({self.why_order}); "
            f"engine: {self.workers} {self.engine} ({self.why_engine})"
        )


def plan(dataset: ShardedDataset, batch_size: int, shuffle: bool, options: LoaderOptions) -> LoaderPlan:
    """Choose order and engine for ``dataset``."""
    order, why_order = _order(dataset.manifest, shuffle, options)
    if options.engine != "auto":
        engine, why_engine = options.engine, "as asked for"
    elif dataset.per_sample:
        engine, why_engine = "processes", "the data set has a transform or its own __getitem__"
    else:
        engine, why_engine = "threads", "no Python code a sample"
    if options.pin_memory and not torch.cuda.is_available():
        raise UsageError(
            "pin_memory is True, and there is no CUDA here: expected None, which pins where there is"
        )
    height, width, channels = dataset.manifest.image_shape
    mixed = MIXED_BYTES // (dataset.manifest.chunk_rows * height * width * channels)
    return LoaderPlan(
        order=order,
        why_order=why_order,
        engine=engine,
        why_engine=why_engine,
        workers=suggest_workers(batch_size, engine) if options.workers is None else options.workers,
        mixed_chunks=options.mixed_chunks or min(max(LEAST_MIXED_CHUNKS, mixed), MOST_MIXED_CHUNKS),
        pin_memory=torch.cuda.is_available() if options.pin_memory is None else options.pin_memory,
    )


def suggest_workers(batch_size: int, engine: Literal["threads", "processes"] = "processes") -> int:
    """Workers to begin with: min(cpus - 2, ceil(batch_size / 4), 8), at least 1; threads: min(cpus, 8)."""
    cpus = int(joblib.cpu_count())  # affinity and cgroup counted in
    if engine == "threads":
        return min(cpus, MOST_WORKERS)
    return max(1, min(cpus - 2, math.ceil(batch_size / 4), MOST_WORKERS))


def _order(manifest: Manifest, shuffle: bool, options: LoaderOptions) -> tuple[Order, str]:
    if not shuffle:
        return "sequential", "shuffle=False"
    if options.shuffle_by != "auto":
        return options.shuffle_by, "as asked for"
    packed = sum(shard.compressed_chunks for shard in manifest.shards)
    if packed:
        return "block", f"{packed} of {sum(shard.chunks for shard in manifest.shards)} chunks are compressed"
    if options.fast_random_storage:
        return "exact", "rows are raw, and storage is fast at random"
    pixels, memory = manifest.bytes, memory_bytes()
    if 2 * pixels <= memory:
        return "exact", f"rows are raw, and {_gb(pixels)} fit half of {_gb(memory)} of memory"
    return "block", f"{_gb(pixels)} do not fit half of {_gb(memory)} of memory"


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
