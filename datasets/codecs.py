"""The codecs of HDF5 chunks and of PNG, outside h5py and outside the GIL; the only place that knows imagecodecs.

Its stubs know bytes where it takes any buffer, so it is typed here.
"""

from typing import Any

import imagecodecs
import numpy as np
import numpy.typing as npt

from shardwright.errors import ShardError

_codecs: Any = imagecodecs
Bytes = npt.NDArray[np.uint8]

#: HDF5's level for gzip, also h5py's default.
GZIP_LEVEL = 4
CHECKSUM_BYTES = 4


def encode(codec: str, data: Bytes) -> bytes:
    """Encode C-contiguous ``data`` with ``"lzf"`` or ``"gzip"``, as HDF5's filter of that name does."""
    if codec == "lzf":
        return bytes(_codecs.lzf_encode(data))
    return bytes(_codecs.zlib_encode(data, GZIP_LEVEL))


def decode(codec: str, data: Bytes, out: Bytes) -> None:
    """Decode ``data`` into all of ``out``, flat uint8.

    Raises
    ------
    ShardError
        ``data`` is damaged, or does not fill ``out``.
    """
    try:
        decoded = (_codecs.lzf_decode if codec == "lzf" else _codecs.zlib_decode)(data, out=out)
    except (_codecs.LzfError, _codecs.ZlibError, RuntimeError, ValueError) as error:
        raise ShardError(f"{codec} data cannot be decoded: {error}") from error
    if len(decoded) != len(out):
        raise ShardError(f"{codec} data gives {len(decoded)} bytes, expected {len(out)}")


def fletcher32(data: Bytes | bytes) -> bytes:
    """HDF5's fletcher32 of ``data``, in the four bytes that stand behind a chunk."""
    checksum: int = _codecs.h5checksum_fletcher32(data)
    return checksum.to_bytes(CHECKSUM_BYTES, "little")


def deflated(data: Bytes, level: int) -> bytes:
    """C-contiguous ``data`` as a zlib stream, by libdeflate, whose level 1 packs better than zlib's in less time."""
    return bytes(_codecs.deflate_encode(data, level, raw=False))
