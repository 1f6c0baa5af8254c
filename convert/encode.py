"""Chunks of pixels to the bytes that HDF5 stores: compressed where that pays, with a checksum."""

import numpy as np

from shardwright.convert.options import Compression
from shardwright.datasets import codecs
from shardwright.datasets.buffers import Pixels

#: A probe that promises this much less than is asked for does not rule the chunk out: over 22 chunks of
#: photographs it lay 0.016 above the chunk's own ratio, at most 0.044.
_PROBE_ERROR = 0.05


def encode_chunk(
    pixels: Pixels, rows: int, compression: Compression, min_saving: float
) -> tuple[bytes, int, float]:
    """Encode one whole chunk.

    Parameters
    ----------
    pixels
        uint8 (chunk_rows, H, W, C), C-contiguous; rows behind ``rows`` are padding.
    compression, min_saving
        As in `StoreOptions`.

    Returns
    -------
    payload : bytes
        What `h5py.h5d.DatasetID.write_direct_chunk` takes: the chunk with its fletcher32 behind it.
    filter_mask : int
        1 where the compression, the first filter, was left out for this chunk.
    saving : float
        The share that LZF saves, or would save by a probe; 0 without LZF.
    """
    if compression == "none":
        return checksummed(pixels), 0, 0.0
    if compression == "gzip":
        return checksummed(codecs.encode("gzip", pixels)), 0, 0.0
    saving = probe(pixels[:rows]) if min_saving > 0 else 1.0
    if saving + _PROBE_ERROR >= min_saving:
        packed = codecs.encode("lzf", pixels)
        # What padding saves is no reason: it is decided on the rows that are there.
        real = packed if rows == len(pixels) else codecs.encode("lzf", pixels[:rows])
        saving = 1 - len(real) / pixels[:rows].nbytes
        if saving >= min_saving:
            return checksummed(packed), 0, saving
    return checksummed(pixels), 1, saving


def probe(pixels: Pixels) -> float:
    """Predict the share that LZF saves on a chunk from a strip of a 16th of each image.

    The strips are taken at positions that walk down from image to image. Strips, since single rows lose
    the codec's history: those predict the whole chunk to 0.014 at 7 % of its cost.
    """
    height = pixels.shape[1]
    strip = max(1, height // 16)
    starts = (np.arange(len(pixels)) * strip) % (height - strip + 1)
    strips = np.stack([image[start : start + strip] for image, start in zip(pixels, starts, strict=True)])
    return 1 - len(codecs.encode("lzf", strips)) / strips.nbytes


def checksummed(data: Pixels | bytes) -> bytes:
    """``data`` with HDF5's fletcher32 behind it, as the filter stores it."""
    return b"".join((memoryview(data), codecs.fletcher32(data)))
