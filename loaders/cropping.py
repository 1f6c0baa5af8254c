"""Images cropped, flipped and normalised on their way into a batch, a row at a time, by the reading threads."""

import math
import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from shardwright.datasets.buffers import Pixels, RowBuffers, aligned
from shardwright.datasets.reader import Reader
from shardwright.datasets.rows import Index
from shardwright.errors import UsageError
from shardwright.loaders.draws import Drawing
from shardwright.loaders.transform import Crop, ImageShape, Normalize, RandomResizedCrop

#: Rows that are read at a time: few enough that they are still in the processor's cache when they are copied.
_GROUP_ROWS = 16


class CroppingReader:
    """Reads images as a `Reader` does, and puts what a transform makes of them into the caller's buffers.

    May be used by many threads at once.

    Parameters
    ----------
    reader
        Reads the whole rows, and checks them.
    drawing
        The transform, and what is drawn for each index.
    packed
        Whether there are compressed chunks: then rows that are asked for together are read together, so that a chunk
        is decoded once.
    """

    def __init__(self, reader: Reader, drawing: Drawing, *, packed: bool) -> None:
        self._reader, self._drawing, self._packed = reader, drawing, packed
        transform = drawing.transform
        self.image_shape = transform.shape(drawing.image_shape)
        self.row_bytes = math.prod(self.image_shape) * transform.dtype.itemsize
        self._resize = resizer_of(transform.crop)
        width = self.image_shape[1]
        self._normalizer = _Normalizer(transform.normalize, width) if transform.normalize else None
        self._of_thread = threading.local()
        self.will_need = reader.will_need

    def images(self, index: Index, out: RowBuffers, *, keep: bool = True) -> None:
        """Read the images at ``index`` (n,), and put what becomes of each to its place in ``out``.

        Raises as `Reader.images` does.
        """
        draws = self._drawing.draws(index)
        boxes, flips = draws.boxes.tolist(), draws.flips.tolist()
        step = len(index) if self._packed else min(len(index), _GROUP_ROWS)
        desk = self._desk(step)
        for start in range(0, len(index), max(1, step)):
            end = min(start + step, len(index))
            self._reader.images(index[start:end], desk.buffers(end - start), keep=keep)
            for i in range(start, end):
                self._put(desk, desk.images[i - start], boxes[i], flips[i], out[i])

    def _put(self, desk: "_Desk", image: Pixels, box: list[int], flip: bool, out: Pixels) -> None:
        top, left, height, width = box
        part = image[top : top + height, left : left + width]
        place = out.reshape(self.image_shape) if self._normalizer is None else desk.place
        if self._resize is not None:
            resized = desk.resized if flip else place
            self._resize(part, resized)
            part = resized
        if flip:
            place[...] = torch.from_numpy(part).flip(1).numpy()  # NumPy takes seven times as long to flip
        elif self._resize is None:
            place[...] = part
        if self._normalizer is not None:
            self._normalizer(place.reshape(len(place), -1), out, desk.floats)

    def _desk(self, rows: int) -> "_Desk":
        """What the calling thread works on, with room for ``rows`` images."""
        desk: _Desk | None = getattr(self._of_thread, "desk", None)
        if desk is None or len(desk.images) < rows:
            desk = self._of_thread.desk = _Desk(rows, self._drawing.image_shape, self.image_shape)
        return desk


class _Desk:
    """Memory of one thread that is taken again and again: new pages cost as much as what is done to them.

    ``images`` as they are stored; one of them resized, and in its ``place`` before it is normalised; ``floats`` for one
    that is not of float32 then.
    """

    def __init__(self, rows: int, image_shape: ImageShape, shape: ImageShape) -> None:
        memory = aligned(rows * math.prod(image_shape)).reshape(rows, -1)
        self.images = memory.reshape(rows, *image_shape)
        self.resized, self.place = np.empty(shape, np.uint8), np.empty(shape, np.uint8)
        self.floats = np.empty((shape[0], shape[1] * shape[2]), np.float32)
        self._rows, self._all = memory, RowBuffers([memory])

    def buffers(self, rows: int) -> RowBuffers:
        """Places for so many images."""
        return self._all if rows == len(self._rows) else RowBuffers([self._rows[:rows]])


def resizer_of(crop: Crop | None) -> Callable[[Pixels, Pixels], None] | None:
    """What resizes the first to the size of the second, both uint8 (h, w, C); None for a crop that does not resize.

    Raises
    ------
    UsageError
        It is to be OpenCV, and that is not there.
    """
    if not isinstance(crop, RandomResizedCrop):
        return None
    if crop.resize == "torch":
        return _resize_by_torch
    try:
        import cv2
    except ImportError as error:
        raise UsageError(
            "resize='opencv' needs OpenCV, which is not there: pip install opencv-python-headless"
        ) from error

    def resize(image: Pixels, out: Pixels) -> None:
        cv2.resize(image, (out.shape[1], out.shape[0]), dst=out, interpolation=cv2.INTER_AREA)

    return resize


def _resize_by_torch(image: Pixels, out: Pixels) -> None:
    # With the output given it writes there in our order of memory; interpolate() returns another, and takes three
    # times as long.
    source, target = (torch.from_numpy(a).permute(2, 0, 1)[None] for a in (image, out))
    size = list(out.shape[:2])
    torch.ops.aten._upsample_bilinear2d_aa.out(source, size, False, None, None, out=target)


class _Normalizer:
    """Lines of uint8 pixels to floating point, normalised."""

    def __init__(self, normalize: Normalize, width: int) -> None:
        std = np.array(normalize.std)
        self._factor = np.tile((1 / (255 * std)).astype(np.float32), width)
        self._summand = np.tile((-np.array(normalize.mean) / std).astype(np.float32), width)
        self._dtype = normalize.dtype

    def __call__(self, lines: Pixels, out: Pixels, floats: npt.NDArray[np.float32]) -> None:
        """Put what becomes of ``lines`` (h, w C) into the bytes ``out``."""
        if self._dtype == torch.float32:
            floats = out.view(np.float32).reshape(lines.shape)
        np.multiply(lines, self._factor, out=floats)
        np.add(floats, self._summand, out=floats)
        if self._dtype != torch.float32:
            torch.from_numpy(out).view(self._dtype)[:] = torch.from_numpy(floats).view(-1)
