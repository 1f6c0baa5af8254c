"""The one way from the bytes of a picture to uint8 pixels of a fixed size.

JPEG is decoded by libjpeg-turbo through ``simplejpeg``, whose strict mode reports what libjpeg warns of
(Pillow loads many damaged files without a word); everything else by Pillow. Resizing is
``torch.nn.functional.interpolate(antialias=True)`` on uint8: it equals Pillow's resize to a mean of 0.04
grey levels at a third of its time.
"""

import io
from dataclasses import dataclass
from typing import Literal, get_args

from PIL import Image, UnidentifiedImageError

from shardwright.datasets.buffers import Pixels
from shardwright.datasets.fit import Fit, Resample, fitted, least_decoded
from shardwright.datasets.jpeg import decode_strictly, frame_of, is_jpeg, plain_shape
from shardwright.datasets.modes import is_wide_colour, to_channels
from shardwright.errors import PictureError, UsageError

#: Name of this decode and resize path in the manifest. Another path that gives other pixels gets another.
PIXEL_PATH = "simplejpeg|pillow -> torch interpolate, antialiased /2"

Suspect = Literal["keep", "reject"]

_PILLOW_LIMIT = 178_956_970
_ORIENTATION_TAG = 0x0112
#: EXIF orientation -> (transpose first, flip rows, flip columns) that bring stored pixels to displayed ones
_ORIENTATIONS = {
    2: (False, False, True),
    3: (False, True, True),
    4: (False, True, False),
    5: (True, False, False),
    6: (True, False, True),
    7: (True, True, True),
    8: (True, True, False),
}
#: The orientation that undoes each: a quarter turn is undone by the other one.
_UNDONE_BY = {**{k: k for k in _ORIENTATIONS}, 6: 8, 8: 6}


@dataclass(frozen=True, slots=True)
class PixelOptions:
    """How a picture becomes a square of uint8.

    Parameters
    ----------
    size
        Height and width of the result in pixels, 1 to 8192.
    fit
        ``crop``: the centre square of the picture, resized (as torchvision's ``Resize`` and
        ``CenterCrop``, to half a source pixel). ``pad``: the whole picture, centred on black.
        ``stretch``: the whole picture, its shape not kept.
    resample
        Interpolation; always antialiased.
    channels
        3 for RGB, 1 for grey (ITU-R 601 luma).
    max_pixels
        A picture that claims more is rejected by its header, before memory is taken. At most 178,956,970,
        which is where Pillow stops.
    bits
        Bits that the values of 16-bit grey pictures have, 8 to 16; 10 or 12 for those of many cameras and
        detectors. None: 16, and those whose values end below 4096 are suspect.
    orient
        Whether EXIF's orientation is applied; without it pixels stay as they are stored.
    suspect
        What becomes of a picture that its decoder has doubts about: ``keep`` or ``reject`` it. Either way it stands
        in the report.
    """

    size: int = 256
    fit: Fit = "crop"
    resample: Resample = "bilinear"
    channels: int = 3
    max_pixels: int = 64_000_000
    bits: int | None = None
    orient: bool = True
    suspect: Suspect = "keep"

    def __post_init__(self) -> None:
        if not 1 <= self.size <= 8192:
            raise UsageError(f"size is {self.size}, expected 1 to 8192 pixels")
        if self.fit not in get_args(Fit):
            raise UsageError(f"fit is {self.fit!r}, expected one of {', '.join(get_args(Fit))}")
        if self.resample not in get_args(Resample):
            raise UsageError(
                f"resample is {self.resample!r}, expected one of {', '.join(get_args(Resample))}"
            )
        if self.channels not in (1, 3):
            raise UsageError(f"channels is {self.channels}, expected 1 (grey) or 3 (RGB)")
        if not 1 <= self.max_pixels <= _PILLOW_LIMIT:
            raise UsageError(f"max_pixels is {self.max_pixels}, expected 1 to {_PILLOW_LIMIT}")
        if self.bits is not None and not 8 <= self.bits <= 16:
            raise UsageError(f"bits is {self.bits}, expected 8 to 16")
        if self.suspect not in get_args(Suspect):
            raise UsageError(f"suspect is {self.suspect!r}, expected one of {', '.join(get_args(Suspect))}")


@dataclass(frozen=True, slots=True)
class Picture:
    """A decoded picture: ``pixels`` uint8 (size, size, channels), and what its file was like.

    ``source_shape`` is (height, width) before the fit, as displayed where the orientation is applied. ``doubt`` is
    why it is suspect, ``<reason code>: <message>``, empty where it is not. ``animated``: it has more frames than
    the first, which was taken.
    """

    pixels: Pixels
    source_shape: tuple[int, int]
    doubt: str = ""
    animated: bool = False


def decode(data: bytes, options: PixelOptions) -> Picture:
    """Decode one picture and bring it to the size, channels and fit of ``options``.

    Raises
    ------
    PictureError
        The bytes hold no picture, a damaged one, or one that is not to be taken. Its ``reason`` is one of
        ``empty``, ``not-a-picture``, ``unsupported``, ``too-large``, ``truncated``, ``damaged``, ``out-of-range``,
        and, with ``suspect="reject"``, ``decoder-warning``, ``not-checked`` and ``low-range``.
    """
    if not data:
        raise PictureError("empty: the file has no bytes")
    if (picture := _decode_plain_jpeg(data, options)) is not None:
        return picture
    try:
        with Image.open(io.BytesIO(data)) as image:
            picture = _decode(data, image, options)
    except PictureError:
        raise
    except Image.DecompressionBombError as error:
        raise PictureError(f"too-large: {error}") from error
    except UnidentifiedImageError as error:
        raise PictureError(_why_unknown(data)) from error
    except Exception as error:  # one bad file never ends a run, whatever its decoder raises
        raise PictureError(f"{_reason(error)}: {error or type(error).__name__}") from error
    if picture.doubt and options.suspect == "reject":
        raise PictureError(picture.doubt)
    return picture


def _decode_plain_jpeg(data: bytes, options: PixelOptions) -> Picture | None:
    """The picture of a sound grey or colour JPEG that says nothing of its orientation; None for all others.

    Most pictures are such ones, and need nothing of Pillow, whose look at a header takes a tenth of decoding.
    """
    if not is_jpeg(data) or b"Exif\0" in data or b"http://ns.adobe.com/xap/" in data:
        return None
    try:
        shape = plain_shape(data)
        if shape is None or shape[0] * shape[1] > options.max_pixels:
            return None
        pixels = decode_strictly(data, _colorspace(options), least_decoded(shape, options.size, options.fit))
    except ValueError:
        return None
    return Picture(fitted(pixels, options.size, options.fit, options.resample, shape), shape)


def _decode(data: bytes, image: Image.Image, options: PixelOptions) -> Picture:
    width, height = image.size
    if width * height > options.max_pixels:
        raise PictureError(
            f"too-large: {width}x{height} pixels, the limit is {options.max_pixels} (--max-pixels)"
        )
    wide_colour = is_wide_colour(image)
    orientation = _orientation(image)
    if image.format in ("JPEG", "MPO"):
        pixels, doubt = _decode_jpeg(data, image, options)
    else:
        pixels, doubt = to_channels(image, options.channels, options.bits, wide_colour)
    # Pillow turns some formats by itself while it loads them.
    turned = orientation if _orientation(image) != orientation else 1
    if options.orient and turned == 1:
        pixels = _turned(pixels, orientation)
        height, width = (width, height) if orientation >= 5 else (height, width)
    elif turned != 1:
        height, width = image.height, image.width
        if not options.orient:
            pixels = _turned(pixels, _UNDONE_BY[turned])
            height, width = (width, height) if turned >= 5 else (height, width)
    pixels = fitted(pixels, options.size, options.fit, options.resample, (height, width))
    return Picture(pixels, (height, width), doubt, _is_animated(image))


def _decode_jpeg(data: bytes, image: Image.Image, options: PixelOptions) -> tuple[Pixels, str]:
    colorspace = "CMYK" if image.mode == "CMYK" else _colorspace(options)
    try:
        least = least_decoded((image.height, image.width), options.size, options.fit)
        pixels = decode_strictly(data, colorspace, least)
    except ValueError as error:
        if _reason(error) == "truncated":
            raise
        # libjpeg may live with what it warned of, such as extraneous bytes: Pillow then decodes without
        # minding, or says why it cannot. Not `strict=False`, which after an error returns unwritten memory.
        pixels, _ = to_channels(image, options.channels, options.bits)
        if "subsampling" in str(error):
            return pixels, f"not-checked: of this JPEG's kind damage may go unseen: {error}"
        return pixels, f"decoder-warning: {error}"
    if colorspace == "CMYK":  # inverted, as all JPEGs of it are
        inks = Image.frombytes("CMYK", (pixels.shape[1], pixels.shape[0]), pixels.tobytes(), "raw", "CMYK;I")
        pixels, _ = to_channels(inks, options.channels, options.bits)
    return pixels, ""


def _colorspace(options: PixelOptions) -> str:
    return "GRAY" if options.channels == 1 else "RGB"


def _turned(pixels: Pixels, orientation: int) -> Pixels:
    """Stored pixels as EXIF's ``orientation`` displays them: a view."""
    if orientation not in _ORIENTATIONS:
        return pixels
    transpose, flip_rows, flip_columns = _ORIENTATIONS[orientation]
    if transpose:
        pixels = pixels.transpose(1, 0, 2)
    return pixels[:: -1 if flip_rows else 1, :: -1 if flip_columns else 1]


def _orientation(image: Image.Image) -> int:
    """EXIF's orientation, 1 where there is none that it knows."""
    try:
        found = int(image.getexif().get(_ORIENTATION_TAG, 1))
    except Exception:  # broken EXIF never loses a good picture
        return 1
    return found if found in _ORIENTATIONS else 1


def _is_animated(image: Image.Image) -> bool:
    try:
        return bool(getattr(image, "is_animated", False))
    except Exception:  # the first frame is what counts
        return False


def _why_unknown(data: bytes) -> str:
    """Why no decoder takes these bytes, as far as they say."""
    frame = frame_of(data) if is_jpeg(data) else None
    if frame is None:
        what = "a JPEG without a picture" if is_jpeg(data) else "no picture"
        return (
            f"not-a-picture: {what}: no decoder knows these {len(data)} bytes, which start with {data[:12]!r}"
        )
    if frame.bits != 8:
        return f"unsupported: a JPEG of {frame.bits} bits a sample, decoders take 8: save it with 8 bits, or as PNG"
    return (
        f"damaged: a JPEG whose header says {frame.width}x{frame.height} pixels, {frame.components} components: no "
        "decoder takes that"
    )


def _reason(error: Exception) -> str:
    text = str(error).lower()
    return "truncated" if "premature" in text or "truncated" in text else "damaged"
