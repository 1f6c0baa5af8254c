"""From any mode of Pillow to the channels of a data set: the policy of docs/pixels.md, in code.

No value is ever clipped, and nothing that hides under transparency shows.
"""

from functools import cache
from typing import Any

import numpy as np
from PIL import Image, ImageCms

from shardwright.datasets.buffers import Pixels
from shardwright.errors import PictureError

_WITH_ALPHA = frozenset({"LA", "La", "PA", "RGBA", "RGBa"})
#: Below this, the largest value of a 16-bit picture says that it has fewer bits.
LOW_RANGE = 1 << 12


def is_wide_colour(image: Image.Image) -> bool:
    """Whether the file has 16 bits a colour, of which Pillow reads 8; to be asked before it is loaded."""
    return any(";16" in str(tile.args) for tile in getattr(image, "tile", ())) and not _is_wide_grey(image)


def _is_wide_grey(image: Image.Image) -> bool:
    return image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM")


def to_channels(
    image: Image.Image, channels: int, bits: int | None, wide_colour: bool = False
) -> tuple[Pixels, str]:
    """uint8 (H, W, channels) of the picture, and what makes it suspect, empty where nothing does.

    Parameters
    ----------
    bits
        Bits that the values of 16-bit pictures have; None: all 16.
    wide_colour
        Whether the file `is_wide_colour`.

    Raises
    ------
    PictureError
        ``unsupported``: its values have no stated range; ``out-of-range``: they have more than ``bits``.
    """
    if _is_wide_grey(image):
        return _from_16_bits(image, channels, bits)
    if image.mode in ("I", "F"):
        kind = "whole numbers" if image.mode == "I" else "floating point"
        raise PictureError(
            f"unsupported: its values are 32-bit {kind}, which say nothing of what is black and white: "
            "save it with 8 or 16 bits"
        )
    if wide_colour and bits is not None:
        raise PictureError(
            f"unsupported: 16-bit colour, of which Pillow reads the upper 8 bits: {bits} bits (--bits) can be taken of "
            "grey pictures alone; save it with 8 bits"
        )
    pixels = _from_8_bits(image, channels)
    if wide_colour and int(pixels.max()) < LOW_RANGE >> 8:
        return pixels, (
            f"low-range: 16-bit colour whose largest value is below {LOW_RANGE} of 65535, so that it is almost black: "
            "if it has fewer bits, save it with 8"
        )
    return pixels, ""


def _from_16_bits(image: Image.Image, channels: int, bits: int | None) -> tuple[Pixels, str]:
    # Pillow's own conversion to 8 bits makes everything above 255 white.
    wide = np.asarray(image).astype(np.uint32)
    largest, full = int(wide.max()), (1 << (bits or 16)) - 1
    transparent = image.info.get("transparency")
    clear = wide == transparent if isinstance(transparent, int) else None
    if largest > full:
        raise PictureError(
            f"out-of-range: its largest value is {largest}, {bits} bits (--bits) end at {full}"
        )
    grey = ((wide * 255 + full // 2) // full).astype(np.uint8)
    if clear is not None:
        grey[clear] = 0
    doubt = ""
    if bits is None and largest < LOW_RANGE:
        doubt = (
            f"low-range: its 16-bit values end at {largest} of 65535, so that it is almost black: if they have "
            f"{max(8, largest.bit_length())} or 12 bits, say so (--bits)"
        )
    return np.repeat(grey[..., None], channels, axis=2), doubt


def _from_8_bits(image: Image.Image, channels: int) -> Pixels:
    if image.mode in _WITH_ALPHA or "transparency" in image.info:
        # Composed on black, never dropped: what lies under it is arbitrary.
        image = image.convert("LA") if image.mode == "La" else image
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (0, 0, 0, 255)), image)
    elif image.mode == "LAB":
        image = ImageCms.applyTransform(image, _lab_to_srgb()) or image
    pixels = np.array(image.convert("L" if channels == 1 else "RGB"))
    return pixels if pixels.ndim == 3 else pixels[..., None]


@cache
def _lab_to_srgb() -> Any:
    return ImageCms.buildTransform(
        ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB"), "LAB", "RGB"
    )
