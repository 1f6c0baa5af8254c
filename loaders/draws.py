"""Where each image is cropped and whether it is flipped: pure functions of (seed, epoch, index)."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwright.datasets.rows import Index
from shardwright.loaders.transform import (
    BatchTransform,
    CenterCrop,
    Crop,
    ImageShape,
    RandomCrop,
    RandomResizedCrop,
    size_of,
)

Floats = npt.NDArray[np.float64]
_ATTEMPTS = 10
# Of splitmix64: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014.
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


@dataclass(frozen=True, slots=True, eq=False)
class Draws:
    """What was drawn for n images.

    Attributes
    ----------
    boxes
        int64 (n, 4): top, left, height and width in pixels of what is kept.
    flips
        bool (n,).
    """

    boxes: Index
    flips: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Drawing:
    """Draws for the images of one epoch.

    Parameters
    ----------
    transform
        What is drawn for.
    image_shape
        (height, width, channels) of the images.
    seed, epoch, part
        Of the loader; the part of the data set that indices count in.
    """

    transform: BatchTransform
    image_shape: ImageShape
    seed: int
    epoch: int
    part: int = 0

    def draws(self, index: Index) -> Draws:
        """What is drawn for the samples at ``index`` (n,)."""
        crop, shape = self.transform.crop, self.image_shape[:2]
        if not self.transform.random:
            return Draws(_middle(crop, shape, len(index)), np.zeros(len(index), np.bool_))
        numbers = self._uniform(index, 3 + 2 * _ATTEMPTS * isinstance(crop, RandomResizedCrop))
        match crop:
            case RandomResizedCrop():
                boxes = _resized(crop, shape, numbers[:, 1:])
            case RandomCrop():
                boxes = _placed(np.tile(np.array(size_of(crop)), (len(index), 1)), shape, numbers[:, 1:])
            case _:
                boxes = _middle(crop, shape, len(index))
        return Draws(boxes, numbers[:, 0] < self.transform.flip)

    def _uniform(self, index: Index, count: int) -> Floats:
        """(n, count) numbers in [0, 1), of each index its own."""
        key = np.random.SeedSequence([self.seed, self.epoch, self.part]).generate_state(1, np.uint64)
        of_index = _mixed(_mixed(index.astype(np.uint64) + key))
        numbers = _mixed(of_index[:, None] + np.arange(1, count + 1, dtype=np.uint64) * _STEP)
        return (numbers >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * _MIX[0]
    z = (z ^ (z >> np.uint64(27))) * _MIX[1]
    return z ^ (z >> np.uint64(31))


def _middle(crop: Crop | None, shape: tuple[int, int], n: int) -> Index:
    """The same box ``n`` times: in the middle, or all."""
    size = np.array(size_of(crop) if isinstance(crop, CenterCrop) else shape)
    return np.tile(np.concatenate([(np.array(shape) - size) // 2, size]), (n, 1))


def _placed(sizes: Index, shape: tuple[int, int], numbers: Floats) -> Index:
    """Boxes of ``sizes`` (n, 2), anywhere in the image."""
    corners = (numbers[:, :2] * (np.array(shape) - sizes + 1)).astype(np.int64)
    return np.concatenate([corners, sizes], axis=1)


def _resized(crop: RandomResizedCrop, shape: tuple[int, int], numbers: Floats) -> Index:
    """Boxes of random area and shape: the first attempt that fits, else the largest box of an allowed shape.

    As torchvision.transforms.RandomResizedCrop.get_params draws them.
    """
    height, width = shape
    by_area, by_ratio = numbers[:, 2 : 2 + _ATTEMPTS], numbers[:, 2 + _ATTEMPTS :]
    area = height * width * (crop.scale[0] + by_area * (crop.scale[1] - crop.scale[0]))
    least, largest = np.log(crop.ratio)
    ratio = np.exp(least + by_ratio * (largest - least))
    sizes = np.rint(np.sqrt(np.stack([area / ratio, area * ratio], axis=2))).astype(np.int64)
    fits = ((sizes > 0) & (sizes <= np.array(shape))).all(axis=2)
    first = fits.argmax(axis=1)
    boxes = _placed(np.minimum(sizes[np.arange(len(first)), first], shape), shape, numbers)
    last = (height, min(width, round(height * crop.ratio[1])))
    if width / height < crop.ratio[0]:
        last = (min(height, round(width / crop.ratio[0])), width)
    boxes[~fits.any(axis=1)] = [(height - last[0]) // 2, (width - last[1]) // 2, *last]
    return boxes
