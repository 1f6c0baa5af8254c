"""What a conversion is worth knowing by: as JSON values, and what compression costs and saves on its pixels."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.convert.run import Conversion
from shardwright.datasets import codecs
from shardwright.datasets.buffers import RowBuffers
from shardwright.datasets.layout import Manifest, report_name
from shardwright.datasets.reader import Reader


@dataclass(frozen=True, slots=True)
class LzfTrial:
    """LZF tried on one chunk of a data set.

    ``saving`` is a share of its bytes, ``decode_ms`` and ``copy_ms`` are milliseconds an image: to decode
    it, and to copy it as a raw one is.
    """

    saving: float
    decode_ms: float
    copy_ms: float


def try_lzf(folder: Path, manifest: Manifest) -> LzfTrial:
    """Measure what LZF saves on the first rows of a data set, and what it costs to read them so."""
    rows = min(32, manifest.rows)
    pixels = np.empty((rows, *manifest.image_shape), np.uint8)
    Reader(folder, manifest).images(np.arange(rows), RowBuffers([pixels.reshape(rows, -1)]))
    packed = np.frombuffer(codecs.encode("lzf", pixels), np.uint8)
    out = np.empty(pixels.nbytes, np.uint8)
    decode, copy = [], []
    for _ in range(3):
        start = time.perf_counter()
        codecs.decode("lzf", packed, out)
        middle = time.perf_counter()
        out[...] = pixels.reshape(-1)
        copy.append(time.perf_counter() - middle)
        decode.append(middle - start)
    return LzfTrial(1 - len(packed) / pixels.nbytes, min(decode) / rows * 1e3, min(copy) / rows * 1e3)


def as_json(done: Conversion) -> dict[str, Any]:
    """One conversion as JSON values."""
    manifest = done.manifest
    return {
        "out": str(done.folder),
        "version": manifest.version,
        "made": done.made,
        "storage": manifest.storage,
        "rows": manifest.rows,
        "classes": len(manifest.classes),
        "shards": len(manifest.shards),
        "chunks": sum(shard.chunks for shard in manifest.shards),
        "compressed_chunks": sum(shard.compressed_chunks for shard in manifest.shards),
        "source_bytes": done.source_bytes,
        "bytes": manifest.bytes,
        "seconds": round(done.seconds, 3),
        "images_per_second": round(done.read / done.seconds, 1) if done.seconds else None,
        "rejected": dict(manifest.rejected),
        "suspect": dict(manifest.suspect),
        "duplicates": dict(manifest.duplicates),
        "skipped": dict(manifest.skipped),
        "resumed_shards": done.resumed,
        "changes": done.changes.counts() if done.changes else None,
        "notes": list(done.notes),
        "report": str(done.folder / report_name(manifest.version)),
    }


def in_words(done: Conversion) -> list[str]:
    """One conversion as lines for a person."""
    manifest = done.manifest
    if not done.made:
        there = f"version {manifest.version}, {counted_words(manifest.rows, 'image')}"
        return [
            f"'{done.folder}' is up to date: {there}. Nothing to do.",
            *(f"  {note}" for note in done.notes),
        ]
    chunks = sum(shard.chunks for shard in manifest.shards)
    packed = sum(shard.compressed_chunks for shard in manifest.shards)
    height, width, channels = manifest.image_shape
    lines = [
        f"'{done.folder}': version {manifest.version}, {counted_words(manifest.rows, 'image')} of "
        f"{height}x{width}x{channels}, "
        f"{counted_words(len(manifest.classes), 'class')}, "
        f"{counted_words(len(manifest.shards), manifest.storage + ' shard')}",
        f"  {done.seconds:.1f} s, {done.read / max(done.seconds, 1e-9):.0f} images/s; "
        f"{_mb(done.source_bytes)} of pictures, {_mb(manifest.bytes)} of shards",
    ]
    trial = try_lzf(done.folder, manifest)
    saving = max(0.0, trial.saving if done.lzf_saving is None else done.lzf_saving)
    lines.append(
        f"  LZF {'saves' if packed else 'would save'} about {saving:.0%} of the pixels' bytes "
        f"({packed} of {chunks} chunks are compressed); reading an image so takes {trial.decode_ms:.2f} ms, "
        f"a raw one {trial.copy_ms:.2f} ms"
    )
    kinds = {"rejected": manifest.rejected, "suspect": manifest.suspect, "duplicate": manifest.duplicates}
    if any(kinds.values()):
        lines.append(
            f"  {'verdict':<10} {'reason':<16} pictures, named in '{done.folder / report_name(manifest.version)}'"
        )
    lines += [
        f"  {verdict:<10} {reason:<16} {count}"
        for verdict, counts in kinds.items()
        for reason, count in counts.items()
    ]
    if animated := manifest.source.get("animated"):
        lines.append(f"  {counted_words(animated, 'picture')} of several frames: the first was taken")
    if done.resumed:
        lines.append(
            f"  {done.resumed} of {len(manifest.shards)} shards had been finished by a run that did not come to its end"
        )
    if done.changes:
        lines.append(f"  since version {manifest.version - 1}: {done.changes.in_words()}")
    lines += [f"  {note}" for note in done.notes]
    if manifest.skipped:
        lines.append(f"  skipped, not pictures: {_counts(manifest.skipped)}")
    return lines


def foreseen_in_words(found: dict[str, Any]) -> list[str]:
    """What a dry run says, as lines for a person."""
    if found["version"] is None:
        return [f"up to date: {found['files']} pictures. Nothing to do."]
    lines = [
        f"version {found['version']} from {found['files']} pictures ({_mb(found['source_bytes'])}) in "
        f"{found['classes']} classes",
        f"  {found['shards']} shards, at most {_mb(found['bytes_at_most'])}, in about {found['seconds_about']:.0f} s",
    ]
    if found["no_class"]:
        lines.append(f"  {found['no_class']} pictures lie in no class folder and would be rejected")
    if found["skipped"]:
        lines.append(f"  skipped, not pictures: {_counts(found['skipped'])}")
    return lines


def counted_words(count: int, what: str) -> str:
    """Such as ``1 class``, ``2 classes``."""
    return f"{count} {what}" if count == 1 else f"{count} {what}{'es' if what.endswith('s') else 's'}"


def _counts(counts: Any) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in counts.items())


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
