"""What a file says that it is, without decoding it: for reports on pictures that were not taken."""

import io

from PIL import Image

from shardwright.datasets.jpeg import frame_of, is_jpeg

_PNG = b"\x89PNG\r\n\x1a\n"


def look(data: bytes) -> tuple[str, tuple[int, int] | None]:
    """(format, (width, height)) that the header claims; empty and None for what cannot be told."""
    if is_jpeg(data):  # Pillow does not open all that has a header
        frame = frame_of(data)
        return "JPEG", None if frame is None else (frame.width, frame.height)
    if data.startswith(_PNG):
        size = data[16:24]
        return "PNG", (int.from_bytes(size[:4], "big"), int.from_bytes(size[4:], "big")) if len(
            size
        ) == 8 else None
    try:
        with Image.open(io.BytesIO(data)) as image:
            return image.format or "", image.size
    except Exception:  # that it cannot be opened is what the report says anyway
        return "", None
