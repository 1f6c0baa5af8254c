"""Draw a tree of photograph-like JPEGs to convert and to train on, where none is at hand.

    python examples/draw_sample.py build/sample

makes `build/sample/{train,val}/<class>/<class>-0001.jpg` and so on. The class is the pattern of the thing in
the picture; its place, scale, shape and colours, the light, the ground and the size of the picture tell
nothing of it. Each picture is a pure function of (seed, split, class, number), so that neither the order of
drawing nor the number of threads changes a byte.
"""

import argparse
import io
import math
import os
import shutil
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

Plane = npt.NDArray[np.floating[Any]]  # float32 throughout, for speed

SPLITS = ("train", "val")
# (width, height) in pixels: how many pictures in a hundred have it. Mostly ImageNet's 500x375, and what else
# lies in trees of web photographs: squares, panoramas, odd sides, sides shorter than the usual crop.
SIZES = {
    (500, 375): 34, (375, 500): 18, (500, 333): 12, (333, 500): 6, (400, 400): 7, (640, 480): 7,
    (900, 300): 4, (299, 449): 4, (240, 320): 3, (213, 160): 2, (1024, 768): 2, (1600, 1200): 1,
}  # fmt: skip


def _swing(t: Plane) -> Plane:
    """A sine of period 1 from parabolas: float32 sines round otherwise on other processors, these do not."""
    s = 2 * (t - np.floor(t)) - 1
    swing: Plane = 4 * s * (1 - np.abs(s))
    return swing


# A pattern is a height over the plane (u, v), whose unit is one period: it has one colour above zero and
# another below. Sorted by name, as converters number classes.
PATTERNS: dict[str, Callable[[Plane, Plane], Plane]] = {
    "bricks": lambda u, v: np.minimum(0.9 - np.abs((u + np.floor(v)) % 2 - 1), 0.42 - np.abs(v % 1 - 0.5)),
    "checks": lambda u, v: _swing(u / 2) * _swing(v / 2),
    "discs": lambda u, v: 0.34 - np.hypot(u - np.round(u), v - np.round(v)),
    "rings": lambda u, v: _swing(np.hypot(u, v)) / 2,
    "stripes": lambda u, v: _swing(u) / 2,
    "waves": lambda u, v: _swing(u + 0.45 * _swing(v / 2)) / 2,
}
CLASSES = tuple(PATTERNS)


def _noise(rng: np.random.Generator, width: int, height: int, slope: float, step: int = 1) -> Plane:
    """Noise of unit variance and amplitude 1/f**slope; a smooth one can be drawn `step` times smaller."""
    w, h = -(-width // step), -(-height // step)
    f = np.hypot(np.fft.fftfreq(h)[:, None], np.fft.rfftfreq(w))
    f[0, 0] = np.inf  # the mean is zero
    amplitude = (f**-slope).astype(np.float32)  # a float32 power is like a float32 sine
    real, imaginary = rng.standard_normal((2, *f.shape), dtype=np.float32)
    plane = np.fft.irfft2((real + 1j * imaginary) * amplitude, s=(h, w)).astype(np.float32)
    plane /= plane.std()
    return plane if step == 1 else np.asarray(Image.fromarray(plane).resize((width, height)))


def _paint(rng: np.random.Generator, light: float) -> list[float]:
    """Red, green and blue of mean `light` and of any hue."""
    hue, saturation = rng.uniform(0, 2 * math.pi), 0.45 * rng.beta(2, 4)
    return [light * (1 + saturation * math.cos(hue - turn * 2 * math.pi / 3)) for turn in range(3)]


def _edge(height: Plane, softness: float) -> Plane:
    """0 below zero and 1 above, with a ramp `softness` wide between."""
    ramp: Plane = np.clip(height / softness + 0.5, 0, 1)
    return ramp


def draw_picture(
    split: int, label: int, number: int, *, seed: int = 0, size: tuple[int, int] | None = None
) -> bytes:
    """Draw one picture.

    Parameters
    ----------
    split, label
        Indices into `SPLITS` and `CLASSES`.
    number
        Number of the picture within its class and split, from 1.
    seed
        Another seed gives other pictures.
    size
        (width, height) in pixels, each 16 to 65500; by default one of `SIZES`, drawn by its weight.

    Returns
    -------
    bytes
        The JPEG file: the same for the same arguments, NumPy and Pillow.

    Raises
    ------
    ValueError
        A side of `size` is out of range.
    """
    rng = np.random.default_rng([seed, split, label, number])
    weights = np.array(list(SIZES.values()))
    drawn = list(SIZES)[rng.choice(len(SIZES), p=weights / weights.sum())]
    width, height = size or drawn
    if not 16 <= min(width, height) <= max(width, height) <= 65500:
        raise ValueError(f"cannot draw {width}x{height} pixels: expected sides of 16 to 65500")

    # Lengths are in shorter sides, from the middle of the picture: a centre crop keeps what is within 0.5.
    short = min(width, height)
    x = (np.arange(width, dtype=np.float32) - width / 2) / short
    y = (np.arange(height, dtype=np.float32)[:, None] - height / 2) / short
    cloud, haze = (_noise(rng, width, height, 2.0, step=8) for _ in range(2))
    grain = _noise(rng, width, height, rng.uniform(0.6, 1.0))

    # The thing: a round body, its surface slightly uneven.
    dx = x - rng.uniform(-0.12, 0.12) + 0.01 * cloud
    dy = y - rng.uniform(-0.12, 0.12) + 0.01 * haze
    radius, squash, turn = rng.uniform(0.4, 0.62), rng.uniform(0.8, 1.25), rng.uniform(-0.35, 0.35)
    depth = radius - np.hypot(dx * squash, dy / squash)
    thing = _edge(depth, rng.uniform(0.01, 0.05))
    shadow = _edge(radius - np.hypot((dx - 0.04) * squash, (dy - 0.06) / squash), 0.15)
    period = rng.uniform(0.11, 0.2)
    u = (dx * math.cos(turn) + dy * math.sin(turn)) / period
    v = (dy * math.cos(turn) - dx * math.sin(turn)) / period
    pattern = _edge(PATTERNS[CLASSES[label]](u, v), rng.uniform(0.05, 0.25))

    # The two paints of the pattern differ in lightness, enough to be seen in grey; their hues are any.
    dark = rng.uniform(0.1, 0.3)
    paints = [_paint(rng, dark), _paint(rng, dark + rng.uniform(0.3, 0.5))]
    if rng.random() < 0.5:
        paints.reverse()
    paints += [_paint(rng, rng.uniform(0.1, 0.7)) for _ in ("wall", "floor")]

    # Behind it a smooth wall, out of focus, meets a rough floor: JPEG and LZF find both kinds in photographs.
    floor = _edge(y - rng.uniform(-0.2, 0.4) + rng.uniform(-0.2, 0.2) * x, rng.uniform(0.02, 0.2))
    behind = (1 + 0.15 * cloud + (0.02 + rng.uniform(0.1, 0.35) * floor) * grain) * (1 - 0.5 * shadow)
    surface = (1 + rng.uniform(0.12, 0.34) * grain) * (1 + 0.6 * np.minimum(depth, 0.2))
    angle, exposure = rng.uniform(0, 2 * math.pi), rng.uniform(0.8, 1.5)
    lamp = exposure * (1 + rng.uniform(0.1, 0.4) * (x * math.cos(angle) + y * math.sin(angle)) + 0.06 * haze)
    shot = rng.uniform(0.008, 0.024) * rng.standard_normal((height, width), dtype=np.float32)

    pixels = np.empty((height, width, 3), np.uint8)
    for channel, (one, other, wall, ground) in enumerate(zip(*paints, strict=True)):
        body = (one + (other - one) * pattern) * surface
        rest = (wall + (ground - wall) * floor) * behind
        pixels[..., channel] = 255 * np.clip(lamp * (rest + (body - rest) * thing) + shot, 0, 1)
    image = Image.fromarray(pixels).convert("L" if rng.random() < 0.04 else "RGB")
    file = io.BytesIO()
    image.save(
        file,
        "JPEG",
        quality=int(rng.triangular(80, 95, 96)),
        progressive=bool(rng.random() < 0.2),
        subsampling="4:4:4" if rng.random() < 0.25 else "4:2:0",
    )
    return file.getvalue()


def _name(split: int, label: int, number: int) -> str:
    return f"{SPLITS[split]}/{CLASSES[label]}/{CLASSES[label]}-{number:04d}.jpg"


def _difference(dest: Path, names: list[str], first: bytes) -> str:
    """Say what makes `dest` another tree than the one of these names, whose first picture is `first`."""
    for folder in (dest, *(dest / split for split in SPLITS)):
        if not folder.is_dir():
            return f"'{folder}' is not a folder"
    found = {path.relative_to(dest).as_posix() for path in dest.rglob("*.jpg")}
    if odd := found ^ set(names):
        what = "has" if min(odd) in found else "lacks"
        return f"it {what} '{min(odd)}' ({len(found)} pictures found, {len(names)} expected)"
    # Pixels and not bytes are compared, as another version of Pillow may encode them otherwise.
    files = (dest / names[0], io.BytesIO(first))
    old, new = (np.asarray(Image.open(file).convert("RGB"), np.float32) for file in files)
    if old.shape != new.shape or np.abs(old - new).mean() > 4:
        return f"'{names[0]}' is of another seed or size"
    return ""


def draw_tree(dest: Path, *, pictures: int = 600, seed: int = 0, size: tuple[int, int] | None = None) -> int:
    """Draw the tree `dest`, or find that it is drawn. It appears whole or not at all.

    Parameters
    ----------
    dest
        Folder to make. Until the last picture is drawn it is called `<dest>.partial-<process id>`.
    pictures
        Number of pictures, at least 30. One in five is for `val`; the classes share them evenly.
    seed, size
        As for `draw_picture`.

    Returns
    -------
    int
        Number of pictures drawn: 0 if `dest` was complete.

    Raises
    ------
    FileExistsError
        `dest` exists and is not this tree. It is left as it is.
    ValueError
        `pictures`, `seed` or `size` is out of range.
    """
    fewest = 5 * len(CLASSES)  # one of each class in val
    if pictures < fewest or seed < 0:
        raise ValueError(f"cannot draw {pictures} pictures of seed {seed}: expected >= {fewest} of seed >= 0")
    counts = (pictures - pictures // 5, pictures // 5)
    plan = [
        (split, k % len(CLASSES), k // len(CLASSES) + 1) for split in range(2) for k in range(counts[split])
    ]
    first = draw_picture(*plan[0], seed=seed, size=size)

    if os.path.lexists(dest):
        if difference := _difference(dest, [_name(*item) for item in plan], first):
            raise FileExistsError(
                f"{dest} is not this sample: {difference}. Remove it, or name another folder."
            )
        return 0

    partial = dest.with_name(f"{dest.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)

    def draw(item: tuple[int, int, int]) -> None:
        path = partial / _name(*item)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(draw_picture(*item, seed=seed, size=size))

    try:
        # Threads suffice, as NumPy and Pillow let go of the interpreter lock; above 8 they only cost memory.
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            for _ in pool.map(draw, plan):
                pass
        os.rename(partial, dest)
    except BaseException:
        shutil.rmtree(partial)
        raise
    return pictures


def _size(text: str) -> tuple[int, int]:
    width, height = text.split("x")
    return int(width), int(height)


def main() -> int:
    """Parse the command line, draw, and say what was done."""
    parser = argparse.ArgumentParser(description="Draw a tree of JPEGs, DEST/{train,val}/CLASS/*.jpg.")
    parser.add_argument("dest", metavar="DEST", type=Path, help="folder to make")
    parser.add_argument("--pictures", type=int, default=600, metavar="N", help="how many (default: 600)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="other pictures (default: 0)")
    parser.add_argument("--size", type=_size, metavar="WxH", help="of every picture (default: a mix)")
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # as an exception, so that the partial folder goes
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        drawn = draw_tree(options.dest, pictures=options.pictures, seed=options.seed, size=options.size)
    except (OSError, ValueError) as error:
        print(f"draw_sample.py: {error}", file=sys.stderr)
        return 1
    print(f"{options.dest}: drew {drawn} pictures" if drawn else f"{options.dest}: complete, nothing to do")
    return 0


if __name__ == "__main__":
    sys.exit(main())
