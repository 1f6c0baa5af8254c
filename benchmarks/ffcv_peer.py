"""Measure FFCV on given images, in the environment of its own that benchmarks/ffcv_environment.sh makes.

    build/ffcv/bin/python -P benchmarks/ffcv_peer.py --images IMAGES.npy --beton FILE --order random

Measured are whole epochs by the clock, from the start of the iteration to the last full batch, as FFCV's threads
hand the batches over; the consumer does nothing with them. The first epoch, which compiles, is not reported; its
first batch is compared with the images. A batch is a uint8 tensor (N, 3, H, W), channels-last in memory, and int64
labels (N, 1). FFCV copies each image once, from a memory map of its file into a ring of buffers that it allocates
each epoch, so a batch is overwritten after the next one is taken; ToTensor and ToTorchImage make views. FFCV has
no crop of its own that does not resize: `--crop` is its RandomResizedCrop, for each image, with the scale at which
the crop has its final size already, and OpenCV then copies. `--jpeg` stores JPEGs of quality 90 instead of pixels.
"""

import argparse
import json
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numba  # type: ignore[import-not-found]
import numpy as np
from ffcv.fields import IntField, RGBImageField  # type: ignore[import-not-found]
from ffcv.fields.basics import IntDecoder  # type: ignore[import-not-found]
from ffcv.fields.rgb_image import (  # type: ignore[import-not-found]
    RandomResizedCropRGBImageDecoder,
    SimpleRGBImageDecoder,
)
from ffcv.loader import Loader, OrderOption  # type: ignore[import-not-found]
from ffcv.transforms import ToTensor, ToTorchImage  # type: ignore[import-not-found]
from ffcv.writer import DatasetWriter  # type: ignore[import-not-found]
from numpy.typing import NDArray

Images = NDArray[np.uint8]  # (N, H, W, 3)

CLASSES = 1000
MODES = {"jpg": 0, "raw": 1}  # as FFCV stores them
PACKAGES = ("ffcv", "numba", "numpy", "torch")


class Samples:
    """What FFCV's writer asks for: image i, and i modulo 1000 as its label."""

    def __init__(self, images: Images) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Images, int]:
        return self.images[index], int(index) % CLASSES


def write(images: Images, beton: Path, mode: str) -> None:
    """Write ``beton`` whole or not at all, with one process: the images then lie in their order."""
    partial = beton.with_name(beton.name + ".partial")
    fields = {"image": RGBImageField(write_mode=mode, jpeg_quality=90), "label": IntField()}
    DatasetWriter(str(partial), fields, num_workers=1).from_indexed_dataset(Samples(images))
    partial.replace(beton)


def open_loader(
    beton: Path, shape: tuple[int, ...], order: str, batch_size: int, threads: int, crop: int, resized: bool
) -> Any:
    """FFCV's loader of ``beton``, whose images have ``shape`` (H, W, 3); without a crop if ``crop`` is 0."""
    decoder = SimpleRGBImageDecoder()
    if resized:
        decoder = RandomResizedCropRGBImageDecoder((crop, crop))
    elif crop:
        share = crop * crop / (shape[0] * shape[1])
        decoder = RandomResizedCropRGBImageDecoder((crop, crop), scale=(share, share), ratio=(1, 1))
    return Loader(
        str(beton),
        batch_size=batch_size,
        num_workers=threads,
        os_cache=True,
        order=OrderOption.RANDOM if order == "random" else OrderOption.SEQUENTIAL,
        drop_last=True,
        pipelines={
            "image": [decoder, ToTensor(), ToTorchImage(channels_last=True)],
            "label": [IntDecoder(), ToTensor()],
        },
    )


def is_window(window: Images, image: Images) -> bool:
    """Whether ``window`` is cut out of ``image`` somewhere, pixel for pixel."""
    height, width, _ = window.shape
    rows, columns = image.shape[0] - height + 1, image.shape[1] - width + 1
    return any(
        np.array_equal(image[y : y + height, x : x + width], window)
        for y in range(rows)
        for x in range(columns)
        if np.array_equal(image[y, x], window[0, 0])
    )


def check(
    images: Images, batch: Any, labels: Any, indices: NDArray[np.uint64], crop: int, stored: bool
) -> None:
    """Stop unless ``batch`` is of ``indices``; its pixels too where they are those ``stored``."""
    size = (crop, crop) if crop else images.shape[1:3]
    if tuple(batch.shape) != (len(indices), 3, *size) or str(batch.dtype) != "torch.uint8":
        sys.exit(f"ffcv_peer.py: FFCV gave {batch.dtype} {tuple(batch.shape)}, expected uint8 of {size}")
    if labels.flatten().tolist() != (indices % CLASSES).tolist():
        sys.exit("ffcv_peer.py: FFCV gave labels of other images: remove the .beton")
    if stored:
        for index, window in zip(indices, batch.permute(0, 2, 3, 1).numpy(), strict=True):
            if not is_window(window, images[index]):
                sys.exit(f"ffcv_peer.py: FFCV gave other pixels for image {index}: remove the .beton")


def run(images: Images, loader: Any, epochs: int, crop: int, stored: bool) -> list[float]:
    """Images a second of each epoch after the first."""
    rates = []
    for epoch in range(epochs):
        indices = loader.next_traversal_order()[: loader.batch_size]
        count = 0
        start = time.perf_counter()
        for batch, labels in loader:
            if epoch == 0 and count == 0:
                check(images, batch, labels, indices, crop, stored)
            count += len(batch)
        rates.append(count / (time.perf_counter() - start))
    return rates[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure FFCV on the images of a .npy file.")
    parser.add_argument("--images", type=Path, required=True, metavar="FILE", help="uint8 (N, H, W, 3), .npy")
    parser.add_argument(
        "--beton", type=Path, required=True, metavar="FILE", help="written if it does not exist"
    )
    parser.add_argument("--order", choices=["random", "sequential"], required=True)
    parser.add_argument("--batch-size", type=int, default=64, metavar="N")
    parser.add_argument("--threads", type=int, default=2, metavar="N")
    parser.add_argument("--epochs", type=int, default=4, metavar="N", help="the first is not reported")
    parser.add_argument("--crop", type=int, default=0, metavar="PIXELS", help="random square of each image")
    parser.add_argument("--resized", action="store_true", help="crop by scale (0.08, 1) and resize to --crop")
    parser.add_argument("--jpeg", action="store_true", help="store JPEGs of quality 90 instead of pixels")
    chosen = parser.parse_args()
    images: Images = np.load(chosen.images, mmap_mode="r")
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3:
        parser.error(f"--images: expected uint8 (N, H, W, 3), got {images.dtype} {images.shape}")
    if min(chosen.batch_size, chosen.threads, chosen.epochs - 1) < 1 or chosen.batch_size > len(images):
        parser.error("expected a batch size from 1 to the number of images, 1 thread and 2 epochs or more")
    if not 0 <= chosen.crop <= min(images.shape[1:3]):
        parser.error(f"--crop: expected at most {min(images.shape[1:3])}, got {chosen.crop}")

    mode = "jpg" if chosen.jpeg else "raw"
    if not chosen.beton.exists():
        write(images, chosen.beton, mode)
    loader = open_loader(
        chosen.beton,
        images.shape[1:],
        chosen.order,
        chosen.batch_size,
        chosen.threads,
        chosen.crop,
        chosen.resized,
    )
    stored = loader.reader.metadata["f0"]["mode"]
    if len(stored) != len(images) or (stored != MODES[mode]).any():
        sys.exit(f"ffcv_peer.py: '{chosen.beton}' was not written from these images as {mode}: remove it")
    rates = run(images, loader, chosen.epochs, chosen.crop, mode == "raw" and not chosen.resized)
    found = {name: version(name) for name in PACKAGES}
    print(json.dumps({"images_per_second": rates, **found, "threads_by": numba.threading_layer()}))


if __name__ == "__main__":
    main()
