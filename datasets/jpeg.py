"""JPEG: decoded strictly by libjpeg-turbo, and its header read without a decoder."""

import struct
from dataclasses import dataclass

import simplejpeg

from shardwright.datasets.buffers import Pixels

_START = b"\xff\xd8\xff"
# Frame headers are the markers SOF0 to SOF15 without those that mean something else: DHT, JPG, DAC.
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_WITHOUT_LENGTH = frozenset({0x01, *range(0xD0, 0xDA)})


@dataclass(frozen=True, slots=True)
class Frame:
    """What a frame header says: ``bits`` a sample, height and width in pixels, and the number of components."""

    bits: int
    height: int
    width: int
    components: int


def is_jpeg(data: bytes) -> bool:
    """Whether ``data`` starts as a JPEG does."""
    return data.startswith(_START)


def frame_of(data: bytes) -> Frame | None:
    """The frame header (ITU-T T.81, B.2.2), read from the markers alone; None where there is none."""
    at = 2
    while at + 4 <= len(data):
        if data[at] != 0xFF:
            return None
        marker = data[at + 1]
        if marker == 0xFF:  # fill
            at += 1
        elif marker in _WITHOUT_LENGTH:
            at += 2
        elif marker in _FRAMES:
            header = data[at + 4 : at + 10]
            return Frame(*struct.unpack(">BHHB", header)) if len(header) == 6 else None
        else:
            at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return None


def plain_shape(data: bytes) -> tuple[int, int] | None:
    """(height, width) of a grey or colour JPEG; None where it is of other colours.

    Raises
    ------
    ValueError
        libjpeg cannot read the header.
    """
    height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data)
    return (height, width) if colorspace in ("YCbCr", "RGB", "Gray") else None


def decode_strictly(data: bytes, colorspace: str, least: tuple[int, int]) -> Pixels:
    """Decode to uint8 (H, W, C); by (height, width) ``least`` libjpeg may scale it down to no less than that.

    Raises
    ------
    ValueError
        Whatever libjpeg warns of, though the picture may be whole.
    """
    pixels: Pixels = simplejpeg.decode_jpeg(data, colorspace, min_height=least[0], min_width=least[1])
    return pixels
