"""Pictures that tests draw: every one is a pure function of its arguments."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

Pixels = npt.NDArray[np.uint8]


def noise(height: int, width: int, seed: int = 0, channels: int = 3) -> Pixels:
    """Independent grey levels: nothing compresses them."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), np.uint8)


def photograph(height: int, width: int, seed: int = 0, channels: int = 3) -> Pixels:
    """Soft shapes under fine grain, as photographs have them."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(20, 236, (12, 12, channels), np.uint8)
    soft = [
        Image.fromarray(plane).resize((width, height), Image.Resampling.BICUBIC)
        for plane in coarse.transpose(2, 0, 1)
    ]
    grain = rng.normal(0, 3, (height, width, channels))
    return np.clip(np.stack(soft, axis=2) + grain, 0, 255).astype(np.uint8)


def encoded(pixels: Pixels | Image.Image, format: str = "JPEG", **options: Any) -> bytes:
    """The picture as the bytes of a file; JPEG at quality 90."""
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels.squeeze())
    if format == "JPEG":
        options = {"quality": 90, **options}
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def jpeg(height: int = 24, width: int = 32, seed: int = 0, **options: Any) -> bytes:
    """A drawn photograph as the bytes of a JPEG."""
    return encoded(photograph(height, width, seed), **options)


def png(seed: int = 0, size: int = 16) -> bytes:
    """Noise as the bytes of a PNG: a conversion to ``size`` keeps every pixel as it is."""
    return encoded(noise(size, size, seed), "PNG")


def put(root: Path, files: Mapping[str, bytes]) -> Path:
    """Write ``files``, path below ``root`` -> content; a path that ends with a slash is an empty folder."""
    for name, data in files.items():
        path = root / name
        if name.endswith("/"):
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    return root
