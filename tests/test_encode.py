"""Chunks as they are stored: h5py itself reads them back, and LZF is used where it pays."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from drawing import Pixels, noise, photograph

from shardwright.convert.encode import encode_chunk, probe
from shardwright.convert.options import Compression
from shardwright.datasets import codecs

LEFT_OUT = 1  # the bit of the first filter


def chunk_of(kind: str, rows: int = 8, size: int = 64) -> Pixels:
    match kind:
        case "noise":
            return np.stack([noise(size, size, k) for k in range(rows)])
        case "photographs":
            return np.stack([photograph(size, size, k) for k in range(rows)])
        case "letterboxed":
            return np.concatenate(
                [np.zeros((rows, size // 4, size, 3), np.uint8), chunk_of("noise", rows, size)], axis=1
            )
        case "flat":
            return np.repeat(np.arange(rows, dtype=np.uint8), size * size * 3).reshape(rows, size, size, 3)
    raise ValueError(kind)


def read_by_h5py(folder: Path, chunk: Pixels, payload: bytes, mask: int, compression: Compression) -> Any:
    """Store one chunk as it is, and read it through h5py's own filters."""
    with h5py.File(folder / "x.h5", "w") as file:
        image = file.create_dataset(
            "image",
            chunk.shape,
            np.uint8,
            chunks=chunk.shape,
            compression=None if compression == "none" else compression,
            fletcher32=True,
        )
        image.id.write_direct_chunk((0, 0, 0, 0), payload, mask)
    with h5py.File(folder / "x.h5") as file:
        return file["image"][...]


@pytest.mark.parametrize("kind", ["noise", "photographs", "flat"])
@pytest.mark.parametrize("compression", ["lzf", "gzip", "none"])
@pytest.mark.parametrize("min_saving", [0, 0.35, 1])
def test_h5py_reads_what_is_encoded(
    tmp_path: Path, kind: str, compression: Compression, min_saving: float
) -> None:
    chunk = chunk_of(kind)
    payload, mask, _ = encode_chunk(chunk, len(chunk), compression, min_saving)
    assert np.array_equal(read_by_h5py(tmp_path, chunk, payload, mask, compression), chunk)


@pytest.mark.parametrize("mask", [0, LEFT_OUT])
def test_h5py_sees_a_flipped_byte(tmp_path: Path, mask: int) -> None:
    chunk = chunk_of("flat" if mask == 0 else "noise")
    payload, found, _ = encode_chunk(chunk, len(chunk), "lzf", 0.35)
    assert found == mask
    damaged = bytearray(payload)
    damaged[len(payload) // 2] ^= 1
    with pytest.raises(OSError, match="filter returned failure"):
        read_by_h5py(tmp_path, chunk, bytes(damaged), mask, "lzf")


@pytest.mark.parametrize(
    ("kind", "min_saving", "packed"),
    [
        ("flat", 0.35, True),
        ("flat", 0, True),
        ("flat", 1, False),
        ("noise", 0.35, False),
        ("noise", 0, False),  # it would grow
        ("photographs", 0.35, False),
        ("photographs", 1, False),
    ],
)
def test_lzf_where_it_pays(kind: str, min_saving: float, packed: bool) -> None:
    chunk = chunk_of(kind)
    payload, mask, saving = encode_chunk(chunk, len(chunk), "lzf", min_saving)
    assert mask == (0 if packed else LEFT_OUT)
    assert (len(payload) < chunk.nbytes) == packed
    if packed:
        assert saving == pytest.approx(1 - (len(payload) - codecs.CHECKSUM_BYTES) / chunk.nbytes)
        assert saving >= min_saving
    else:
        assert payload[: -codecs.CHECKSUM_BYTES] == chunk.tobytes()


@pytest.mark.parametrize("kind", ["noise", "flat"])
def test_gzip_and_none_leave_no_filter_out(kind: str) -> None:
    chunk = chunk_of(kind)
    for compression in ("gzip", "none"):
        assert encode_chunk(chunk, len(chunk), compression, 0.35)[1:] == (0, 0.0)
    assert len(encode_chunk(chunk, len(chunk), "none", 0)[0]) == chunk.nbytes + codecs.CHECKSUM_BYTES


@pytest.mark.parametrize("kind", ["noise", "photographs", "flat"])
@pytest.mark.parametrize("rows", [1, 5])
def test_padding_does_not_decide(kind: str, rows: int) -> None:
    whole = chunk_of(kind, rows)
    padded = np.concatenate([whole, np.zeros((32 - rows, *whole.shape[1:]), np.uint8)])
    payload, mask, saving = encode_chunk(padded, rows, "lzf", 0.35)
    _, expected_mask, expected_saving = encode_chunk(whole, rows, "lzf", 0.35)
    assert (mask, saving) == (expected_mask, expected_saving)
    if mask:
        assert len(payload) == padded.nbytes + codecs.CHECKSUM_BYTES


@pytest.mark.parametrize("kind", ["noise", "photographs", "letterboxed", "flat"])
@pytest.mark.parametrize("size", [64, 224])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_probe_is_near_the_truth(kind: str, size: int, channels: int) -> None:
    chunk = np.ascontiguousarray(chunk_of(kind, 32, size)[..., :channels])
    truth = 1 - len(codecs.encode("lzf", chunk)) / chunk.nbytes
    assert probe(chunk) == pytest.approx(truth, abs=0.05)


@pytest.mark.parametrize("size", [1, 2, 15, 16, 17])
def test_small_pictures_are_probed_too(size: int) -> None:
    assert -1 < probe(chunk_of("noise", 32, size)) < 0.1
