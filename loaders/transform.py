"""What is done to whole batches of images, as data: cropped, flipped, normalised."""

from dataclasses import dataclass, field
from typing import Literal, get_args

import torch

from shardwright.datasets.base import ShardedDataset
from shardwright.errors import UsageError

Resize = Literal["torch", "opencv"]
ImageShape = tuple[int, int, int]
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class CenterCrop:
    """The ``size`` pixels in the middle: one number for a square, or (height, width)."""

    size: int | tuple[int, int]

    def __post_init__(self) -> None:
        _check_size(self.size)


@dataclass(frozen=True, slots=True)
class RandomCrop:
    """``size`` pixels, one number for a square or (height, width), from anywhere in the image."""

    size: int | tuple[int, int]

    def __post_init__(self) -> None:
        _check_size(self.size)


@dataclass(frozen=True, slots=True)
class RandomResizedCrop:
    """A part of the image of random area and shape, resized: as torchvision's of that name draws it.

    Parameters
    ----------
    size
        Pixels of the result: one number for a square, or (height, width).
    scale
        Least and largest share of the image's area.
    ratio
        Least and largest width / height; their logarithm is drawn.
    resize
        Who resizes in the reading threads. ``torch``: bilinear and antialiased, as torchvision does with
        ``antialias=True``. ``opencv``: INTER_AREA, as FFCV does; two to three times as fast, and needs the package
        opencv-python-headless, or another that brings ``cv2``. On a device it is always the first.
    """

    size: int | tuple[int, int]
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    resize: Resize = "torch"

    def __post_init__(self) -> None:
        _check_size(self.size)
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise UsageError(f"scale is {self.scale}, expected 0 < least <= largest <= 1")
        if not 0 < self.ratio[0] <= self.ratio[1]:
            raise UsageError(f"ratio is {self.ratio}, expected 0 < least <= largest")
        if self.resize not in get_args(Resize):
            raise UsageError(f"resize is {self.resize!r}, expected one of {', '.join(get_args(Resize))}")


Crop = CenterCrop | RandomCrop | RandomResizedCrop


@dataclass(frozen=True, slots=True)
class Normalize:
    """(image / 255 - mean) / std, a channel: as torchvision's Normalize does to an image scaled to [0, 1].

    Parameters
    ----------
    mean, std
        One number a channel, of images scaled to [0, 1], as those of ImageNet are given: (0.485, 0.456, 0.406) and
        (0.229, 0.224, 0.225).
    dtype
        Of the result: torch.float32, bfloat16 or float16.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std):
            raise UsageError(f"mean has {len(self.mean)} channels, std {len(self.std)}: expected as many")
        if not all(0 <= value <= 1 for value in self.mean) or not all(0 < value <= 1 for value in self.std):
            raise UsageError(
                f"mean is {self.mean}, std {self.std}, expected those of images scaled to [0, 1]: divide by 255"
            )
        if self.dtype not in _FLOATS:
            raise UsageError(f"dtype is {self.dtype}, expected {', '.join(map(str, _FLOATS))}")

    @classmethod
    def of(cls, dataset: ShardedDataset, dtype: torch.dtype = torch.float32) -> "Normalize":
        """By the mean and standard deviation of ``dataset``'s own pixels, from its manifest."""
        stats = dataset.manifest.stats
        # The least that is told from none: all pixels alike would be divided by 0.
        std = tuple(max(value, 1e-3) / 255 for value in stats.std)
        return cls(tuple(value / 255 for value in stats.mean), std, dtype)


@dataclass(frozen=True, slots=True)
class BatchTransform:
    """What is done to each image of a batch: cropped, then flipped, then normalised.

    What is random about it is a function of the loader's seed, the epoch and the sample's index, so that it is the same
    with any number of workers and ranks, resumed or not, on the CPU or on a device.

    Parameters
    ----------
    crop
        None: the whole image.
    flip
        Probability of a horizontal flip.
    normalize
        None: images stay uint8, a quarter of float32 to copy to a device.
    """

    crop: Crop | None = None
    flip: float = 0.0
    normalize: Normalize | None = None
    #: What the images are then.
    dtype: torch.dtype = field(init=False)

    def __post_init__(self) -> None:
        if not 0 <= self.flip <= 1:
            raise UsageError(f"flip is {self.flip}, expected a probability, 0 to 1")
        object.__setattr__(self, "dtype", self.normalize.dtype if self.normalize else torch.uint8)

    @property
    def random(self) -> bool:
        """Whether it differs from sample to sample."""
        return self.flip > 0 or isinstance(self.crop, RandomCrop | RandomResizedCrop)

    def shape(self, image_shape: ImageShape) -> ImageShape:
        """(height, width, channels) of what becomes of images of ``image_shape``.

        Raises
        ------
        UsageError
            A crop is larger than the image, or ``normalize`` is of another number of channels.
        """
        height, width, channels = image_shape
        if self.normalize and len(self.normalize.mean) != channels:
            raise UsageError(f"mean has {len(self.normalize.mean)} channels, the images have {channels}")
        if self.crop is None:
            return image_shape
        crop_height, crop_width = size_of(self.crop)
        enlarges = isinstance(self.crop, RandomResizedCrop)
        if not enlarges and (crop_height > height or crop_width > width):
            raise UsageError(
                f"a crop of {crop_height}x{crop_width} from images of {height}x{width}: convert with a larger --size, "
                "or crop less"
            )
        return crop_height, crop_width, channels


def size_of(crop: Crop) -> tuple[int, int]:
    """(height, width) of what ``crop`` gives."""
    return (crop.size, crop.size) if isinstance(crop.size, int) else crop.size


def _check_size(size: object) -> None:
    match size:
        case int(side) if side >= 1:
            return
        case (int(height), int(width)) if height >= 1 and width >= 1:
            return
    raise UsageError(f"size is {size!r}, expected pixels, or (height, width) in pixels")
