"""Images cropped, flipped and normalised on their way into a batch, a row at a time, by the reading threads."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from shardwright.datasets.buffers import Pixels, RowBuffers, Scratch
from shardwright.datasets.reader import Reader
from shardwright.datasets.rows import Index
from shardwright.errors import UsageError
from shardwright.loaders.draws import Drawing
from shardwright.loaders.transform import Crop, Normalize, RandomResizedCrop

#: Rows that are read at a time: few enough that they are still in the processor's cache when they are copied.
_GROUP_ROWS = 8
#: Elements up to which torch stays in the calling thread; beyond, OpenMP's threads would fight with ours for the cores.
_SERIAL = 32768


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
        self._height, self._width, self._channels = self.image_shape
        self.row_bytes = self._height * self._width * self._channels * transform.dtype.itemsize
        self._resize = resizer_of(transform.crop)
        self._normalizer = _Normalizer(transform.normalize, self._width) if transform.normalize else None
        self._scratch = Scratch()
        self.will_need = reader.will_need

    def images(self, index: Index, out: RowBuffers, *, keep: bool = True) -> None:
        """Read the images at ``index`` (n,), and put what becomes of each to its place in ``out``.

        Raises as `Reader.images` does.
        """
        step = len(index) if self._packed else _GROUP_ROWS
        for start in range(0, len(index), max(1, step)):
            some = index[start : start + step]
            rows = self._take("rows", len(some), self._reader.row_bytes)
            self._reader.images(some, RowBuffers([rows]), keep=keep)
            draws = self._drawing.draws(some)
            images = rows.reshape(len(some), *self._drawing.image_shape)
            for i, (image, box, flip) in enumerate(
                zip(images, draws.boxes.tolist(), draws.flips.tolist(), strict=True), start
            ):
                self._put(image, box, flip, out[i])

    def _put(self, image: Pixels, box: list[int], flip: bool, out: Pixels) -> None:
        top, left, height, width = box
        part = image[top : top + height, left : left + width]
        place = (
            out
            if self._normalizer is None
            else self._take("place", self._height, self._width * self._channels)
        )
        place = place.reshape(self._height, self._width, self._channels)
        if self._resize is not None:
            resized = self._take("resized", *place.shape) if flip else place
            self._resize(part, resized)
            part = resized
        if flip:
            _flip(part, place)
        elif self._resize is None:
            place[...] = part
        if self._normalizer is not None:
            self._normalizer(place.reshape(self._height, -1), out, self._take)

    def _take(self, name: str, *shape: int) -> Pixels:
        return self._scratch.take(name, int(np.prod(shape))).reshape(shape)


def _flip(image: Pixels, out: Pixels) -> None:
    """``image`` (h, w, C) mirrored left to right, to ``out``."""
    lines = max(1, _SERIAL // (out.shape[1] * out.shape[2]))
    source, target = torch.from_numpy(image), torch.from_numpy(out)
    for start in range(0, len(out), lines):
        target[start : start + lines] = source[start : start + lines].flip(1)


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

    def __call__(self, lines: Pixels, out: Pixels, take: Callable[..., Pixels]) -> None:
        """Put what becomes of ``lines`` (h, w C) into the bytes ``out``."""
        whole = self._dtype == torch.float32
        floats: npt.NDArray[np.float32]
        floats = (out if whole else take("floats", lines.size * 4)).view(np.float32).reshape(lines.shape)
        np.multiply(lines, self._factor, out=floats)
        np.add(floats, self._summand, out=floats)
        if not whole:
            target = torch.from_numpy(out.view(np.int16)).view(self._dtype).view(lines.shape)
            source = torch.from_numpy(floats)
            step = max(1, _SERIAL // lines.shape[1])
            for start in range(0, len(lines), step):
                target[start : start + step] = source[start : start + step]
