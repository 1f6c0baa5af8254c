"""From the bytes of a picture to pixels: geometry, colours, and what no picture may get away with."""

import io
import struct
import zlib
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from drawing import Pixels, encoded, jpeg, noise, photograph
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageCms, ImageOps

from shardwright.datasets.fit import fitted
from shardwright.datasets.header import look
from shardwright.datasets.modes import to_channels
from shardwright.datasets.pixels import Picture, PixelOptions, decode
from shardwright.errors import PictureError, UsageError

RED, GREEN, BLUE, BLACK = (255, 0, 0), (0, 255, 0), (0, 0, 255), (0, 0, 0)
RESAMPLE = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}


def decoded(data: bytes, **options: Any) -> Pixels:
    return decode(data, PixelOptions(**options)).pixels


def fit(pixels: Pixels, options: PixelOptions) -> Pixels:
    return fitted(pixels, options.size, options.fit, options.resample)


def unfitted(image: Image.Image, format: str = "PNG", channels: int = 3, **save: Any) -> Pixels:
    """Pixels of a square picture that needs no resizing."""
    assert image.width == image.height
    return decoded(encoded(image, format, **save), size=image.width, channels=channels)


def apart(one: Pixels, other: Pixels) -> float:
    """Mean difference in grey levels."""
    assert one.shape == other.shape
    return float(np.abs(one.astype(int) - other).mean())


# --- geometry ----------------------------------------------------------------------------------------


def flag(tall: bool) -> bytes:
    """100x60: a fifth red, three fifths green, a fifth blue, from left to right, or from top to bottom."""
    stripes = np.repeat(np.array([RED, GREEN, BLUE], np.uint8), [20, 60, 20], axis=0)
    pixels = np.repeat(stripes[:, None], 60, axis=1)
    return encoded(pixels if tall else pixels.transpose(1, 0, 2), "PNG")


@pytest.mark.parametrize("tall", [False, True])
@pytest.mark.parametrize(
    ("fit", "along"),  # colours along the longer side, in the middle of the other; 50 pixels
    [
        ("crop", {0: GREEN, 25: GREEN, 49: GREEN}),
        ("pad", {0: RED, 7: RED, 12: GREEN, 37: GREEN, 42: BLUE, 49: BLUE}),
        ("stretch", {0: RED, 7: RED, 12: GREEN, 37: GREEN, 42: BLUE, 49: BLUE}),
    ],
)
@pytest.mark.parametrize("resample", RESAMPLE)
def test_a_fit_keeps_what_it_says(tall: bool, fit: str, along: dict[int, Any], resample: str) -> None:
    picture = decode(flag(tall), PixelOptions(size=50, fit=fit, resample=resample))
    assert picture.source_shape == ((100, 60) if tall else (60, 100))
    assert picture.pixels.shape == (50, 50, 3)
    pixels = picture.pixels.transpose(1, 0, 2) if tall else picture.pixels
    for at, colour in along.items():
        assert np.abs(pixels[25, at].astype(int) - colour).max() <= 2, at
    filled = [row for row in range(50) if pixels[row].any()]
    assert filled == list(range(10, 40) if fit == "pad" else range(50))


@pytest.mark.parametrize("resample", RESAMPLE)
@pytest.mark.parametrize("shape", [(300, 400), (401, 300), (1000, 700), (97, 64), (40, 57)])
def test_resizing_agrees_with_pillow(shape: tuple[int, int], resample: str) -> None:
    pixels, (height, width) = photograph(*shape), shape
    side = min(shape)
    left, top = (width - side) // 2, (height - side) // 2
    boxes = {"crop": (left, top, left + side, top + side), "stretch": (0, 0, width, height)}
    for fitting, box in boxes.items():
        theirs = np.asarray(Image.fromarray(pixels).resize((96, 96), RESAMPLE[resample], box=box))
        ours = fit(pixels, PixelOptions(size=96, fit=fitting, resample=resample))
        # 0.01 to 0.02 grey levels where pictures shrink, at most 0.32 where they grow.
        assert apart(ours, theirs) < (0.05 if side > 96 else 0.4)


@pytest.mark.parametrize("resample", RESAMPLE)
@pytest.mark.parametrize("fitting", ["crop", "pad", "stretch"])
@pytest.mark.parametrize("shape", [(1200, 1600), (600, 1111), (1111, 333)])
def test_decoding_at_a_smaller_scale_agrees(shape: tuple[int, int], fitting: str, resample: str) -> None:
    data = jpeg(*shape)
    options = PixelOptions(size=48, fit=fitting, resample=resample)
    whole = fit(np.array(Image.open(io.BytesIO(data))), options)
    # 0.1 to 0.3 grey levels; 1.0 where a side is no multiple of the scale, so that the picture moves a little.
    assert apart(decoded(data, size=48, fit=fitting, resample=resample), whole) < 1.2


def test_scaling_begins_above_four_times_the_size() -> None:
    """Below it, pixels are exactly those of the unscaled picture."""
    data = jpeg(399, 399)
    whole = np.array(Image.open(io.BytesIO(data)))
    assert np.array_equal(decoded(data, size=100), fit(whole, PixelOptions(size=100)))
    assert not np.array_equal(decoded(data, size=99), fit(whole, PixelOptions(size=99)))


@pytest.mark.parametrize("format", ["PNG", "JPEG"])
@pytest.mark.parametrize("orientation", range(10))
def test_orientation_is_applied(orientation: int, format: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.fromarray(photograph(60, 100))
    data = encoded(image, format, exif=exif)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    for fitting in ("crop", "pad", "stretch"):
        options = PixelOptions(size=50, fit=fitting)
        picture, expected = decode(data, options), decode(encoded(upright, "PNG"), options)
        assert picture.source_shape == (upright.height, upright.width) == expected.source_shape
        assert np.abs(picture.pixels.astype(int) - expected.pixels).max() <= 1
    assert (picture.source_shape == (100, 60)) == (orientation in (5, 6, 7, 8))


@pytest.mark.parametrize("format", ["PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("shape", [(61, 100), (60, 101), (61, 102)])
def test_orientation_is_exact_and_may_be_left(orientation: int, format: str, shape: tuple[int, int]) -> None:
    """Cropped where it is displayed: of odd sides the middle is not that of the stored picture."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    pixels = noise(*shape)
    data = encoded(pixels, format, exif=exif, **({"lossless": True} if format == "WEBP" else {}))
    options = PixelOptions(size=min(shape))
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(encoded(pixels, "PNG", exif=exif))))
    picture = decode(data, options)
    assert picture.source_shape == (upright.height, upright.width)
    assert np.array_equal(picture.pixels, fit(np.asarray(upright), options))
    stored = decode(data, PixelOptions(size=min(shape), orient=False))
    assert stored.source_shape == shape
    assert np.array_equal(stored.pixels, fit(pixels, options))


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")  # as a conversion does
@pytest.mark.parametrize("exif", [b"Exif\0\0MM\0*\0\0\0\x08\xff\xff", b"Exif\0\0junk", b"\xff" * 40])
def test_broken_exif_loses_no_picture(exif: bytes) -> None:
    assert np.array_equal(decoded(jpeg(exif=exif), size=16), decoded(jpeg(), size=16))


@pytest.mark.parametrize("shape", [(1, 4000), (4000, 1), (1, 1), (2, 3)])
@pytest.mark.parametrize("fitting", ["crop", "pad", "stretch"])
@pytest.mark.parametrize("channels", [1, 3])
def test_odd_shapes(shape: tuple[int, int], fitting: str, channels: int) -> None:
    for format in ("PNG", "JPEG"):
        data = encoded(Image.new("RGB", shape[::-1], (200, 200, 200)), format)
        pixels = decoded(data, size=32, fit=fitting, channels=channels)
        assert pixels.shape == (32, 32, channels)
        assert set(np.unique(pixels)) <= {0, 199, 200, 201}
        assert pixels[16 if shape[0] == 1 else 15].any() or fitting == "pad"


# --- colours -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format", "save"),
    [
        ("PNG", {}),
        ("JPEG", {}),
        ("JPEG", {"keep_rgb": True}),
        ("JPEG", {"progressive": True}),
        ("WEBP", {}),
        ("MPO", {}),
    ],
)
def test_channels_1_is_luma(format: str, save: dict[str, Any]) -> None:
    data = encoded(Image.fromarray(photograph(64, 64)), format, **save)
    luma = np.asarray(Image.open(io.BytesIO(data)).convert("L"))[..., None]
    found = decoded(data, size=64, channels=1)
    assert found.shape == (64, 64, 1)
    assert apart(found, luma) < 0.5


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "CMYK"])
@pytest.mark.parametrize("channels", [1, 3])
def test_colours_are_pillows(mode: str, channels: int) -> None:
    image = Image.fromarray(photograph(64, 64)).convert(mode)
    format = "TIFF" if mode == "CMYK" else "PNG"
    expected = np.asarray(image.convert("L" if channels == 1 else "RGB")).reshape(64, 64, channels)
    assert np.array_equal(unfitted(image, format, channels), expected)


@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
def test_jpegs_are_pillows(mode: str) -> None:
    data = encoded(Image.fromarray(photograph(64, 64)).convert(mode))
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    assert np.array_equal(decoded(data, size=64), expected)


def test_the_first_picture_of_several_is_taken() -> None:
    frames = [Image.new("RGB", (16, 16), colour) for colour in (RED, GREEN, BLUE)]
    for format in ("GIF", "MPO", "WEBP"):
        pixels = unfitted(frames[0], format, save_all=True, append_images=frames[1:])
        assert np.abs(pixels.astype(int) - RED).max() <= 2


def shown_on_black(mode: str) -> tuple[Image.Image, dict[str, Any]]:
    """A 2x2 picture, transparent in the upper left, else (200, 200, 200), and how to save it."""
    alpha = np.array([[0, 255], [255, 255]], np.uint8)
    if mode in ("LA", "RGBA"):
        image = Image.new(mode[:-1], (2, 2), 200 if mode == "LA" else (200, 200, 200))
        image.putalpha(Image.fromarray(alpha))
        return image, {}
    if mode == "P":
        image = Image.fromarray((alpha == 0).astype(np.uint8), "P")
        image.putpalette([200, 200, 200, 250, 10, 10])
        return image, {"transparency": 1}
    if mode == "I;16":
        return Image.fromarray(np.where(alpha == 0, 60_000, 200 * 257).astype(np.uint16)), {
            "transparency": 60_000
        }
    image = Image.fromarray(np.where(alpha == 0, 250, 200).astype(np.uint8)).convert(mode)
    return image, {"transparency": 250 if mode == "L" else (250, 250, 250)}


@pytest.mark.parametrize("mode", ["P", "LA", "RGBA", "L", "RGB", "I;16"])
@pytest.mark.parametrize("channels", [1, 3])
def test_transparency_is_composed_on_black(mode: str, channels: int) -> None:
    image, save = shown_on_black(mode)
    assert image.mode == mode
    assert unfitted(image, channels=channels, **save).max(axis=2).tolist() == [[0, 200], [200, 200]]


def test_half_transparent_is_half_as_bright() -> None:
    pixels = unfitted(Image.new("RGBA", (2, 2), (200, 100, 50, 128)))
    assert np.abs(pixels - np.array([200, 100, 50]) * 128 / 255).max() < 1


@pytest.mark.parametrize(("format", "dtype"), [("PNG", "<u2"), ("TIFF", "<u2"), ("TIFF", ">u2")])
@pytest.mark.parametrize("channels", [1, 3])
def test_16_bits_are_divided_by_257(format: str, dtype: str, channels: int) -> None:
    wide = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    pixels = unfitted(Image.fromarray(wide.astype(dtype)), format, channels)
    assert pixels.shape == (256, 256, channels)
    assert np.array_equal(pixels[..., 0], np.round(wide / 257))
    assert (pixels == pixels[..., :1]).all()


def test_32_bits_have_no_stated_range() -> None:
    for dtype in (np.int32, np.float32):
        with pytest.raises(PictureError, match="unsupported: its values are 32-bit") as error:
            unfitted(Image.fromarray(np.ones((2, 2), dtype)), "TIFF")
        assert error.value.reason == "unsupported"


@pytest.mark.parametrize(("bits", "full"), [(8, 255), (10, 1023), (12, 4095), (16, 65535)])
def test_bits_say_what_is_white(bits: int, full: int) -> None:
    wide = np.linspace(0, full, 64 * 64).astype(np.uint16).reshape(64, 64)
    data = encoded(Image.fromarray(wide), "PNG")
    pixels = decoded(data, size=64, bits=bits)
    assert np.abs(pixels[..., 0] - wide * (255 / full)).max() <= 0.5
    assert decode(data, PixelOptions(size=64, bits=bits)).doubt == ""
    wide[0, 0] = min(full + 1, 65535)
    if bits < 16:
        error = refused(encoded(Image.fromarray(wide), "PNG"), bits=bits)
        assert str(error) == (
            f"out-of-range: its largest value is {full + 1}, {bits} bits (--bits) end at {full}"
        )


@pytest.mark.parametrize(("largest", "doubtful"), [(255, True), (4095, True), (4096, False), (65535, False)])
def test_a_low_range_is_suspect(largest: int, doubtful: bool) -> None:
    wide = np.full((16, 16), largest, np.uint16)
    data = encoded(Image.fromarray(wide), "PNG")
    picture = decode(data, PixelOptions(size=16))
    assert picture.doubt.startswith("low-range: ") == doubtful
    assert (f"end at {largest} of 65535" in picture.doubt) == doubtful
    if doubtful:
        assert refused(data, suspect="reject").reason == "low-range"
    else:
        assert decoded(data, size=16, suspect="reject").max() == round(largest / 257)


def wide_png(values: Any) -> bytes:
    """A PNG of 16 bits a colour, which Pillow reads and does not write."""
    rows = np.asarray(values, ">u2")
    header = b"IHDR" + struct.pack(">IIBBBBB", rows.shape[1], rows.shape[0], 16, 2, 0, 0, 0)
    data = zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
        for chunk in (header, b"IDAT" + data, b"IEND")
    )


def test_16_bit_colour() -> None:
    values = np.random.default_rng(0).integers(0, 65536, (16, 16, 3))
    picture = decode(wide_png(values), PixelOptions(size=16))
    assert np.abs(picture.pixels - values / 257).max() <= 1
    assert picture.doubt == ""
    assert decode(wide_png(values // 16), PixelOptions(size=16)).doubt.startswith("low-range: 16-bit colour")
    assert refused(wide_png(values // 16), bits=12).reason == "unsupported"


def test_16_bits_in_a_pgm() -> None:
    wide = np.arange(0, 65536, 256, np.uint16).reshape(16, 16)
    data = b"P5 16 16 65535\n" + wide.astype(">u2").tobytes()
    assert np.array_equal(decoded(data, size=16)[..., 0], np.round(wide / 257))


@pytest.mark.parametrize("mode", ["LAB", "HSV", "YCbCr", "CMYK"])
def test_other_colours_become_rgb(mode: str) -> None:
    colours = np.array([[(200, 30, 40), (30, 180, 60)], [(40, 60, 200), (128, 128, 128)]], np.uint8)
    image = Image.fromarray(np.repeat(np.repeat(colours, 8, axis=0), 8, axis=1))
    if mode == "LAB":
        profiles = (ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB"))
        other = ImageCms.applyTransform(image, ImageCms.buildTransform(*profiles, "RGB", "LAB"))
    else:
        other = image.convert(mode)
    if mode == "HSV":  # no format stores it
        pixels, doubt = to_channels(other, 3, None)
        assert doubt == ""
    else:
        pixels = unfitted(other, "TIFF")
    assert np.abs(pixels.astype(int) - np.asarray(image)).max() <= (
        8 if mode == "LAB" else 3
    )  # LAB has 8 bits too


def test_one_bit_is_black_and_white() -> None:
    bits = np.random.default_rng(0).random((16, 16)) < 0.5
    for format in ("PNG", "TIFF", "BMP"):
        assert np.array_equal(unfitted(Image.fromarray(bits), format)[..., 0], bits * 255)


def test_more_frames_than_one_are_told() -> None:
    frames = [Image.new("RGB", (16, 16), colour) for colour in (RED, GREEN)]
    assert decode(encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]), PixelOptions()).animated
    assert not decode(encoded(frames[0], "GIF"), PixelOptions()).animated


# --- what is no picture ------------------------------------------------------------------------------


def refused(data: bytes, **options: Any) -> PictureError:
    with pytest.raises(PictureError) as error:
        decode(data, PixelOptions(size=16, **options))
    assert error.value.message
    return error.value


def png_of(width: int, height: int) -> bytes:
    """A PNG that claims to be that large, and holds nothing."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [header, b"IDAT" + zlib.compress(b""), b"IEND"]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk)) for chunk in chunks
    )


def jpeg_of(width: int, height: int) -> bytes:
    """A JPEG whose header claims to be that large."""
    data = bytearray(jpeg())
    frame = data.index(b"\xff\xc0") + 5
    data[frame : frame + 4] = struct.pack(">HH", height, width)
    return bytes(data)


HEADER = jpeg()[: jpeg().index(b"\xff\xda")]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"<!DOCTYPE html><title>404</title>", "not-a-picture"),
        (b"\0" * 1000, "not-a-picture"),
        (b"\xff\xd8\xff\xe0", "not-a-picture"),
        (HEADER, "damaged"),
        (HEADER + b"\xff\xd9", "damaged"),
        (encoded(noise(40, 40), "PNG")[:-100], "truncated"),
        (encoded(noise(40, 40), "PNG")[:60], "truncated"),
        (encoded(photograph(40, 40, channels=1), "GIF")[:-100], "truncated"),
        (encoded(noise(40, 40), "BMP")[:-100], "truncated"),
        (encoded(noise(40, 40), "TIFF")[:-100], "truncated"),
        (encoded(noise(40, 40), "WEBP")[:-100], "damaged"),
        (jpeg_of(0, 40), "damaged"),
        (jpeg().replace(b"\xff\xc0\x00\x11\x08", b"\xff\xc0\x00\x11\x0c"), "unsupported"),
        (jpeg_of(65535, 65535), "too-large"),
        (jpeg_of(8001, 8000), "too-large"),
        (png_of(65535, 65535), "too-large"),
        (png_of(8001, 8000), "too-large"),
        (png_of(2**31 - 1, 2**31 - 1), "too-large"),
    ],
)
def test_this_is_refused(data: bytes, reason: str) -> None:
    assert refused(data).reason == reason


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (jpeg_of(65535, 65535), ("JPEG", (65535, 65535))),
        (jpeg(24, 32)[:-100], ("JPEG", (32, 24))),
        (b"\xff\xd8\xff\xe0", ("JPEG", None)),
        (png_of(2**31 - 1, 7), ("PNG", (2**31 - 1, 7))),
        (png_of(9, 7)[:18], ("PNG", None)),
        (encoded(noise(7, 9), "BMP")[:-20], ("BMP", (9, 7))),
        (b"<!DOCTYPE html>", ("", None)),
        (b"", ("", None)),
    ],
)
def test_what_a_header_claims(data: bytes, says: Any) -> None:
    assert look(data) == says


def test_the_limit_of_pixels_is_named() -> None:
    assert "32x24 pixels, the limit is 767" in refused(jpeg(24, 32), max_pixels=767).message
    assert decoded(jpeg(24, 32), size=16, max_pixels=768).any()


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
def test_a_jpeg_without_its_end_is_truncated(mode: str, progressive: bool, share: float) -> None:
    data = encoded(Image.fromarray(photograph(200, 300)).convert(mode), progressive=progressive)
    cut, lost = data[: int(len(data) * share)], len(data) - int(len(data) * share)
    for damaged in (cut, cut + b"\xff\xd9", cut + bytes(lost)):
        assert refused(damaged).reason == "truncated"
    ended = cut + bytes(lost - 2) + b"\xff\xd9"
    if progressive:  # it has lost only the finest details, for all that libjpeg knows
        with suppress(PictureError):
            assert decode(ended, PixelOptions(size=16)).doubt
    else:
        assert refused(ended).reason == "truncated"


def test_unwritten_memory_is_no_picture() -> None:
    """After an error between two scans, libjpeg has written no pixel; not each of its decoders says so."""
    data = jpeg(200, 300, progressive=True)
    table = data.index(b"\xff\xc4", len(data) // 2)  # of the Huffman codes of a later scan
    assert refused(data[: table + 8]).reason in ("truncated", "damaged")
    assert refused(data[: table + 5] + b"\xff" * 20 + data[table + 25 :]).reason == "damaged"


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_extraneous_bytes_make_a_suspect(mode: str) -> None:
    data = encoded(Image.fromarray(photograph(64, 64)).convert(mode))
    picture = decode(data[:-2] + b"junk" * 10 + data[-2:], PixelOptions(size=64))
    assert picture.doubt.startswith("decoder-warning: ")
    assert "extraneous bytes" in picture.doubt
    assert np.array_equal(picture.pixels, decoded(data, size=64))
    assert decode(data + b"junk behind the end", PixelOptions(size=64)).doubt == ""


def test_extraneous_bytes_between_the_headers_make_a_suspect() -> None:
    data = jpeg(64, 64)
    picture = decode(data.replace(b"\xff\xda", b"\0\0\xff\xda", 1), PixelOptions(size=64))
    assert "2 extraneous bytes" in picture.doubt
    assert np.array_equal(picture.pixels, decoded(data, size=64))


PICTURES = [
    *(encoded(photograph(20, 30), format) for format in ("JPEG", "PNG", "WEBP", "TIFF", "BMP", "PPM")),
    *(encoded(Image.fromarray(photograph(20, 30)).convert(mode)) for mode in ("L", "CMYK")),
    encoded(photograph(20, 30, channels=1), "GIF"),
    encoded(Image.fromarray(photograph(20, 30)).convert("P"), "PNG", transparency=1),
    jpeg(20, 30, progressive=True),
]


@given(
    st.sampled_from(PICTURES),
    st.lists(st.tuples(st.floats(0, 0.999), st.integers(0, 255)), max_size=3),
    st.floats(0.1, 1),
)
def test_no_damage_ends_a_run(picture: bytes, flips: list[tuple[float, int]], share: float) -> None:
    """Whatever a decoder makes of it: a picture, or a `PictureError`."""
    data = bytearray(picture[: int(len(picture) * share)])
    for place, value in flips:
        data[int(place * len(data))] = value
    try:
        found = decode(bytes(data), PixelOptions(size=8, max_pixels=10**6))
    except PictureError as error:
        reason = error.reason
    else:
        reason = ""
        assert isinstance(found, Picture)
        assert (found.pixels.shape, found.pixels.dtype) == ((8, 8, 3), np.uint8)
        assert found.pixels.flags.c_contiguous
    assert reason in ("", "not-a-picture", "too-large", "truncated", "damaged")


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_is_no_damage(interrupt: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise interrupt

    monkeypatch.setattr(Image, "open", interrupted)
    with pytest.raises(interrupt):
        decode(b"GIF89a", PixelOptions())


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"size": 0}, "size is 0, expected 1 to 8192"),
        ({"size": 8193}, "size is 8193, expected 1 to 8192"),
        ({"fit": "zoom"}, "fit is 'zoom', expected one of crop, pad, stretch"),
        ({"resample": "nearest"}, "resample is 'nearest', expected one of bilinear, bicubic, lanczos"),
        ({"channels": 4}, "channels is 4, expected 1 .* or 3"),
        ({"max_pixels": 0}, "max_pixels is 0, expected 1 to 178956970"),
        ({"max_pixels": 10**9}, "max_pixels is 1000000000, expected 1 to 178956970"),
    ],
)
def test_an_option_out_of_range_names_the_range(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        PixelOptions(**wrong)


def test_the_largest_limit_is_where_pillow_stops() -> None:
    limit = PixelOptions(max_pixels=178_956_970).max_pixels
    assert limit == 2 * Image.MAX_IMAGE_PIXELS
