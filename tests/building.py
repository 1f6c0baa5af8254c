"""Data sets for tests, written by the shard writers themselves, without pictures and worker processes."""

import multiprocessing
import os
import pickle
import random
import shutil
import signal
import time
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from shardwright.convert.options import StoreOptions
from shardwright.convert.output import Output
from shardwright.convert.store import shard_file, shard_writer
from shardwright.datasets import ShardedDataset, open_dataset
from shardwright.datasets.aio import ReadList
from shardwright.datasets.layout import Manifest, Shard, Stats, Storage, columns_of
from shardwright.loaders import LoaderOptions, make_loader


@dataclass(frozen=True)
class Built:
    """A data set and what a reader must find in it, by index."""

    folder: Path
    images: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.int64]
    ids: list[str]
    manifest: Manifest


def build(
    folder: Path,
    storage: Storage = "hdf5",
    *,
    rows: int = 50,
    shard_rows: int = 20,
    chunk_rows: int = 8,
    shape: tuple[int, int, int] = (8, 8, 3),
    classes: int = 5,
    flat: float = 0.5,
    compression: str | None = None,
    min_saving: float = 0.35,
    dead: dict[int, tuple[int, ...]] | None = None,
    telling: bool = False,
    ids: list[str] | None = None,
) -> Built:
    """Write a data set of noise, in which a share ``flat`` of the chunks is of one grey level and packs well.

    ``telling``: the higher the class, the brighter the noise, so that there is something to learn.
    """
    rng = np.random.default_rng(rows)
    images = rng.integers(0, 256, (rows, *shape), np.uint8)
    for first in range(0, rows, shard_rows):
        for start in range(first, min(first + shard_rows, rows), chunk_rows):
            if rng.random() < flat:
                packs = images[start : min(start + chunk_rows, first + shard_rows)]
                packs[:, 1:] = 7  # the first line of pixels stays noise, so that no two images are alike
    labels = rng.integers(0, classes, rows)
    if telling:
        images = images // classes + (labels * (255 // classes)).astype(np.uint8)[:, None, None, None]
    ids = ids or [f"c{label}/ü {i:05d}.jpg" for i, label in enumerate(labels)]
    options = StoreOptions(storage, chunk_rows, compression=compression, min_saving=min_saving)  # type: ignore[arg-type]
    output = Output(folder)
    output.begin()
    shards = []
    for number, first in enumerate(range(0, rows, shard_rows)):
        here = slice(first, min(first + shard_rows, rows))
        count = here.stop - here.start
        writer = shard_writer(output.work / f"{number}", count, shape, options)
        width = min(chunk_rows, count)
        for start in range(here.start, here.stop, width):
            part = images[start : min(start + width, here.stop)]
            writer.write(np.concatenate([part, np.zeros((width - len(part), *shape), np.uint8)]), len(part))
        files = writer.finish(
            {
                "label": labels[here].astype(np.int64),
                "id": np.array(ids[here], object),
                "crc32": np.array([zlib.crc32(image) for image in images[here]], np.uint32),
                "source_sha256": np.zeros((count, 32), np.uint8),
                "source_shape": np.full((count, 2), 9, np.int32),
            }
        )
        named = tuple(shard_file(path, f"shards/000001-{number:05d}{end}") for end, path in files.items())
        shards.append(
            Shard(count, named, (dead or {}).get(number, ()), writer.chunks, writer.compressed_chunks)
        )
        for path, file in zip(files.values(), named, strict=True):
            path.rename(folder / file.name)
    living = np.ones(rows, bool)
    for number, gone in (dead or {}).items():
        living[number * shard_rows + np.array(gone, int)] = False
    manifest = Manifest(
        version=1,
        storage=storage,
        rows=int(living.sum()),
        classes=tuple(f"c{k}" for k in range(classes)),
        columns=columns_of(*shape),
        shards=tuple(shards),
        seed=0,
        stats=Stats(*(tuple(f(images[living], axis=(0, 1, 2)).tolist()) for f in (np.mean, np.std))),
        options={"chunk_rows": chunk_rows},
    )
    output.accompany(manifest, [], None)
    output.publish(manifest)
    output.abandon()
    return Built(
        folder,
        images[living],
        labels[living],
        [id for id, lives in zip(ids, living, strict=True) if lives],
        manifest,
    )


def publish_next(built: Built, keep: int) -> Manifest:
    """Publish the next version of ``built``: its first ``keep`` shards, and a copy of its last one as its own."""
    before, folder = open_dataset(built.folder).manifest, built.folder
    last, version = built.manifest.shards[-1], before.version + 1
    files = []
    for file in last.files:
        name = file.name.replace("/000001-", f"/{version:06d}-")
        shutil.copy(folder / file.name, folder / name)
        files.append(replace(file, name=name))
    shards = (*built.manifest.shards[:keep], replace(last, files=tuple(files)))
    rows = sum(shard.living_rows for shard in shards)
    manifest = replace(built.manifest, version=version, shards=shards, rows=rows)
    output = Output(folder)
    output.accompany(manifest, [], None)
    output.publish(manifest)
    return manifest


def send_labels(dataset: ShardedDataset, queue: "multiprocessing.Queue[list[int]]") -> None:
    """For a process of its own: read every sample there, and send the labels."""
    queue.put([dataset[i][1] for i in range(len(dataset))])


def drawn(image: Any = None) -> torch.Tensor:
    """A transform: random numbers of torch, NumPy and `random`, in place of an image."""
    return torch.tensor([torch.rand(()).item(), np.random.rand(), random.random()], dtype=torch.float64)


class OwnItem(ShardedDataset):
    """Makes its own samples, one by one."""

    def __getitem__(self, index: Any) -> Any:
        return drawn(), self.ids([index])[0]


class OwnItems(ShardedDataset):
    """Makes its own samples, a batch at a time, in a loop."""

    def __getitems__(self, indices: Any) -> Any:
        return [(drawn(), self.ids([index])[0]) for index in indices]


class OwnBatch(ShardedDataset):
    """Makes its own samples, a batch at a time, at once."""

    def __getitems__(self, indices: Any) -> Any:
        batch = self.read_batch(indices)
        numbers = torch.stack([drawn() for _ in range(len(batch))])
        return list(zip(numbers, self.ids(indices), strict=True))


def mixed(samples: Any) -> Any:
    """A collate function that draws once for each batch, as MixUp does."""
    numbers, ids = zip(*samples, strict=True)
    return torch.stack(numbers), list(ids), drawn()


def threads_here(image: Any) -> torch.Tensor:
    """A transform: torch's threads in this process."""
    return torch.tensor(torch.get_num_threads())


class Deed:
    """A transform that does something to its process when it comes to the samples at ``when``, counted in it."""

    def __init__(self, deed: str, when: int = 0) -> None:
        self.deed, self.left = deed, when

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left >= 0:
            return image
        match self.deed.split():
            case ["signal", name]:
                os.kill(os.getpid(), getattr(signal, name))
            case ["exit", code]:
                os._exit(int(code))
            case ["sleep"]:
                sleep_for_long()
            case ["cuda"]:
                raise RuntimeError("Cannot re-initialize CUDA in forked subprocess. To use CUDA ...")
            case ["device"]:
                return image.to("meta")
        return image


def sleep_for_long() -> None:
    """As a read from a file system that is gone."""
    time.sleep(600)


def as_floats(image: torch.Tensor) -> torch.Tensor:
    """A transform that makes samples four times as large."""
    return image.float()


def unpicklable(samples: Any) -> Any:
    """A collate function whose batches cannot be sent."""
    return lambda: samples


def send_first_or_error(pickled: bytes, queue: "multiprocessing.Queue[Any]") -> None:
    """For a process of its own: read the first sample, and send its label, or what was raised."""
    try:
        queue.put(pickle.loads(pickled)[0][1])
    except Exception as error:
        queue.put((type(error).__name__, str(error)))


def train_on_rank(rank: int, world: int, folder: Path, meeting: str, queue: Any) -> None:
    """For a process of its own: one epoch as a rank of torch.distributed; sends (rank, ids of each batch)."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    try:
        dataset = open_dataset(folder, columns=("image", "label", "id"))
        loader = make_loader(dataset, 8, shuffle=True, options=LoaderOptions(quiet=True))
        queue.put((rank, [list(ids) for _, _, ids in loader]))
        torch.distributed.barrier()
    finally:
        torch.distributed.destroy_process_group()


def republish(built: Built, **changes: object) -> None:
    """Write the manifest of ``built`` again with other values: what a hostile or damaged one would say."""
    text = replace(built.manifest, **changes).to_json()  # type: ignore[arg-type]
    for name in ("manifest.json", "manifest-000001.json"):
        (built.folder / name).write_text(text)


def recorded_reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """A list that grows by (inode, offset, bytes) with every read of pixels, by whichever call."""
    found: list[tuple[int, int, int]] = []
    preadv, read = os.preadv, ReadList.read

    def recording_preadv(fd: int, buffers: Any, offset: int, *flags: int) -> int:
        if not flags:  # else it asks whether the page is in memory
            found.append((os.fstat(fd).st_ino, offset, sum(map(len, buffers))))
        return preadv(fd, buffers, offset, *flags)

    def recording_read(self: ReadList, fds: Any, offsets: Any, addresses: Any, size: int) -> Any:
        inodes = [os.fstat(fd).st_ino for fd in fds.tolist()]
        found.extend(zip(inodes, offsets.tolist(), [size] * len(fds), strict=True))
        return read(self, fds, offsets, addresses, size)

    monkeypatch.setattr(os, "preadv", recording_preadv)
    monkeypatch.setattr(ReadList, "read", recording_read)
    return found
