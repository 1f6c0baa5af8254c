"""From a picture of any shape to a square of one size: crop, pad or stretch, always antialiased."""

from typing import Literal

import numpy as np

from shardwright.datasets.buffers import Pixels

Fit = Literal["crop", "pad", "stretch"]
Resample = Literal["bilinear", "bicubic", "lanczos"]


def fitted(
    pixels: Pixels, size: int, fit: Fit, resample: Resample, shape: tuple[int, int] | None = None
) -> Pixels:
    """Bring uint8 (H, W, C) pixels to (size, size, C).

    ``shape`` is that of the whole picture, where the pixels are a smaller one: its proportions count.
    """
    height, width = pixels.shape[:2]
    match fit:
        case "crop":
            side = min(height, width)
            top, left = (height - side) // 2, (width - side) // 2
            return _resize(pixels[top : top + side, left : left + side], (size, size), resample)
        case "stretch":
            return _resize(pixels, (size, size), resample)
        case "pad":
            inner = _resize(pixels, resized_shape(shape or (height, width), size, fit), resample)
            padded = np.zeros((size, size, pixels.shape[2]), np.uint8)
            top, left = (size - inner.shape[0]) // 2, (size - inner.shape[1]) // 2
            padded[top : top + inner.shape[0], left : left + inner.shape[1]] = inner
            return padded


def resized_shape(shape: tuple[int, int], size: int, fit: Fit) -> tuple[int, int]:
    """(height, width) that the whole picture would have after the fit's resize, before any crop."""
    height, width = shape
    match fit:
        case "stretch":
            return size, size
        case "crop":
            scale = size / min(height, width)
        case "pad":
            scale = size / max(height, width)
    return max(1, round(height * scale)), max(1, round(width * scale))


def least_decoded(shape: tuple[int, int], size: int, fit: Fit) -> tuple[int, int]:
    """Least (height, width) that a decoder may scale a picture of ``shape`` to; (0, 0) for no scaling.

    Only above 4 times the target, and down to no less than twice: the antialiased resize then still has
    two source pixels a target pixel to work from.
    """
    height, width = resized_shape(shape, size, fit)
    if shape[0] < 4 * height or shape[1] < 4 * width:
        return 0, 0
    return 2 * height, 2 * width


def _resize(pixels: Pixels, shape: tuple[int, int], resample: Resample) -> Pixels:
    if pixels.shape[:2] == shape:
        return np.ascontiguousarray(pixels)
    import torch  # here, so that a process that decodes nothing does not pay a second and 200 MB for it

    # Of this form torch sees that the memory is channels-last, and keeps it so: half the time.
    batch = torch.from_numpy(np.ascontiguousarray(pixels))[None].permute(0, 3, 1, 2)
    resized = torch.nn.functional.interpolate(batch, shape, mode=resample, antialias=True)
    return np.ascontiguousarray(resized[0].permute(1, 2, 0).numpy())
