"""The one way from the bytes of a picture to uint8 pixels of a fixed size.

JPEG is decoded by libjpeg-turbo through ``simplejpeg``, whose strict mode reports what libjpeg warns of
(Pillow loads many damaged files without a word); everything else by Pillow. Resizing is
``torch.nn.functional.interpolate(antialias=True)`` on uint8: it equals Pillow's resize to a mean of 0.04
grey levels at a third of its time.
"""

import io
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import Image, UnidentifiedImageError

from shardwright.errors import PictureError, UsageError

#: Name of this decode and resize path in the manifest. Another path that gives other pixels gets another.
PIXEL_PATH = "simplejpeg|pillow -> torch interpolate, antialiased /1"

Fit = Literal["crop", "pad", "stretch"]
Resample = Literal["bilinear", "bicubic", "lanczos"]
Pixels = npt.NDArray[np.uint8]

_PILLOW_LIMIT = 178_956_970
_ORIENTATION_TAG = 0x0112
#: EXIF orientation -> (transpose first, flip rows, flip columns)
_ORIENTATIONS = {
    2: (False, False, True),
    3: (False, True, True),
    4: (False, True, False),
    5: (True, False, False),
    6: (True, False, True),
    7: (True, True, True),
    8: (True, True, False),
}


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
    """

    size: int = 256
    fit: Fit = "crop"
    resample: Resample = "bilinear"
    channels: int = 3
    max_pixels: int = 64_000_000

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


@dataclass(frozen=True, slots=True)
class Picture:
    """A decoded picture: ``pixels`` uint8 (size, size, channels), and what its file was like.

    ``source_shape`` is (height, width) as displayed, before the fit. ``warning`` is what libjpeg said of a
    file whose picture is still whole, empty where it said nothing.
    """

    pixels: Pixels
    source_shape: tuple[int, int]
    warning: str = ""


def decode(data: bytes, options: PixelOptions) -> Picture:
    """Decode one picture and bring it to the size, channels and fit of ``options``.

    Raises
    ------
    PictureError
        The bytes hold no picture, a damaged one, or one that is larger than ``max_pixels``. Its
        ``reason`` is one of ``empty``, ``not-a-picture``, ``too-large``, ``truncated``, ``damaged``.
    """
    if not data:
        raise PictureError("empty: the file has no bytes")
    if (picture := _decode_plain_jpeg(data, options)) is not None:
        return picture
    try:
        with Image.open(io.BytesIO(data)) as image:
            return _decode(data, image, options)
    except PictureError:
        raise
    except Image.DecompressionBombError as error:
        raise PictureError(f"too-large: {error}") from error
    except UnidentifiedImageError as error:
        raise PictureError(
            f"not-a-picture: no decoder knows these {len(data)} bytes ({_start(data)})"
        ) from error
    except Exception as error:  # one bad file never ends a run, whatever its decoder raises
        raise PictureError(f"{_reason(error)}: {error or type(error).__name__}") from error


def _decode_plain_jpeg(data: bytes, options: PixelOptions) -> Picture | None:
    """The picture of a sound grey or colour JPEG that says nothing of its orientation; None for all others.

    Most pictures are such ones, and need nothing of Pillow, whose look at a header takes a tenth of decoding.
    """
    if not data.startswith(b"\xff\xd8\xff") or b"Exif\0" in data or b"http://ns.adobe.com/xap/" in data:
        return None
    try:
        height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data)
        if colorspace not in ("YCbCr", "RGB", "Gray") or height * width > options.max_pixels:
            return None
        pixels = _simplejpeg(data, "GRAY" if options.channels == 1 else "RGB", (height, width), options)
    except ValueError:
        return None
    return Picture(fit(pixels, options, (height, width)), (height, width))


def _simplejpeg(data: bytes, colorspace: str, shape: tuple[int, int], options: PixelOptions) -> Pixels:
    """Decode, strictly: ValueError for all that libjpeg warns of."""
    least_height, least_width = _scaled_decoding(shape, options)
    pixels: Pixels = simplejpeg.decode_jpeg(data, colorspace, min_height=least_height, min_width=least_width)
    return pixels


def _decode(data: bytes, image: Image.Image, options: PixelOptions) -> Picture:
    width, height = image.size
    if width * height > options.max_pixels:
        raise PictureError(
            f"too-large: {width}x{height} pixels, the limit is {options.max_pixels} (--max-pixels)"
        )
    warning = ""
    if image.format in ("JPEG", "MPO"):
        pixels, warning = _decode_jpeg(data, image, options)
    else:
        pixels = _decode_other(image, options.channels)
    turn = _ORIENTATIONS.get(_orientation(image))
    pixels = fit(pixels, options, (height, width))
    if turn is None:
        return Picture(pixels, (height, width), warning)
    transpose, flip_rows, flip_columns = turn
    if transpose:
        pixels, height, width = pixels.transpose(1, 0, 2), width, height
    pixels = pixels[:: -1 if flip_rows else 1, :: -1 if flip_columns else 1]
    return Picture(np.ascontiguousarray(pixels), (height, width), warning)


def _decode_jpeg(data: bytes, image: Image.Image, options: PixelOptions) -> tuple[Pixels, str]:
    colorspace = "CMYK" if image.mode == "CMYK" else "GRAY" if options.channels == 1 else "RGB"
    try:
        pixels = _simplejpeg(data, colorspace, (image.height, image.width), options)
    except ValueError as error:
        if _reason(error) == "truncated":
            raise
        # libjpeg may live with what it warned of, such as extraneous bytes: Pillow then decodes without
        # minding, or says why it cannot. Not `strict=False`, which after an error returns unwritten memory.
        return _decode_other(image, options.channels), str(error)
    if colorspace == "CMYK":  # inverted, as all JPEGs of it are
        inks = Image.frombytes("CMYK", (pixels.shape[1], pixels.shape[0]), pixels.tobytes(), "raw", "CMYK;I")
        pixels = _decode_other(inks, options.channels)
    return pixels, ""


def _scaled_decoding(shape: tuple[int, int], options: PixelOptions) -> tuple[int, int]:
    """Least (height, width) that libjpeg may scale to while decoding; (0, 0) for no scaling.

    Only above 4 times the target, and down to no less than twice: the antialiased resize then still has
    two source pixels a target pixel to work from.
    """
    height, width = _resized(shape, options)
    if shape[0] < 4 * height or shape[1] < 4 * width:
        return 0, 0
    return 2 * height, 2 * width


def _resized(shape: tuple[int, int], options: PixelOptions) -> tuple[int, int]:
    """(height, width) that the whole picture would have after the fit's resize, before any crop."""
    height, width = shape
    match options.fit:
        case "stretch":
            return options.size, options.size
        case "crop":
            scale = options.size / min(height, width)
        case "pad":
            scale = options.size / max(height, width)
    return max(1, round(height * scale)), max(1, round(width * scale))


def _decode_other(image: Image.Image, channels: int) -> Pixels:
    mode = "L" if channels == 1 else "RGB"
    if image.mode.startswith("I;16"):
        # 16 bits to 8: value / 257, rounded. Pillow's own conversion clips everything to white.
        wide = np.asarray(image).astype(np.uint32)
        grey = ((wide + 128) // 257).astype(np.uint8)
        grey[wide == image.info.get("transparency", -1)] = 0
        return np.repeat(grey[..., None], channels, axis=2)
    if image.mode in ("LA", "PA", "RGBA", "La", "RGBa") or "transparency" in image.info:
        # Transparency is composed on black, never dropped: what lies under it is arbitrary.
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (0, 0, 0, 255)), image)
    elif image.mode in ("I", "F"):
        raise PictureError(f"damaged: pixels of mode {image.mode} (32 bit) have no stated range")
    pixels = np.array(image.convert(mode))
    return pixels if pixels.ndim == 3 else pixels[..., None]


def fit(pixels: Pixels, options: PixelOptions, shape: tuple[int, int] | None = None) -> Pixels:
    """Bring uint8 (H, W, C) pixels to (size, size, C) as ``options.fit`` says.

    ``shape`` is that of the whole picture, where the pixels are a smaller one: its proportions count.
    """
    height, width = pixels.shape[:2]
    size = options.size
    match options.fit:
        case "crop":
            side = min(height, width)
            top, left = (height - side) // 2, (width - side) // 2
            return _resize(pixels[top : top + side, left : left + side], (size, size), options.resample)
        case "stretch":
            return _resize(pixels, (size, size), options.resample)
        case "pad":
            inner = _resize(pixels, _resized(shape or (height, width), options), options.resample)
            padded = np.zeros((size, size, pixels.shape[2]), np.uint8)
            top, left = (size - inner.shape[0]) // 2, (size - inner.shape[1]) // 2
            padded[top : top + inner.shape[0], left : left + inner.shape[1]] = inner
            return padded


def _resize(pixels: Pixels, shape: tuple[int, int], resample: Resample) -> Pixels:
    if pixels.shape[:2] == shape:
        return np.ascontiguousarray(pixels)
    import torch  # here, so that a process that decodes nothing does not pay a second and 200 MB for it

    # Of this form torch sees that the memory is channels-last, and keeps it so: half the time.
    batch = torch.from_numpy(np.ascontiguousarray(pixels))[None].permute(0, 3, 1, 2)
    resized = torch.nn.functional.interpolate(batch, shape, mode=resample, antialias=True)
    return np.ascontiguousarray(resized[0].permute(1, 2, 0).numpy())


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(_ORIENTATION_TAG, 1))
    except Exception:  # broken EXIF never loses a good picture
        return 1


def _reason(error: Exception) -> str:
    text = str(error).lower()
    return "truncated" if "premature" in text or "truncated" in text else "damaged"


def _start(data: bytes) -> str:
    return f"they start with {data[:12]!r}"
