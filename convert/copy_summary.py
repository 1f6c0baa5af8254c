"""What became of a data set made of rows of others: as JSON values and in words."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.convert.copy_build import CopyBuild
from shardwright.convert.plan import MADE_OF
from shardwright.convert.summary import counted_words
from shardwright.datasets.layout import Manifest


@dataclass(frozen=True, slots=True)
class Copied:
    """One data set.

    Attributes
    ----------
    split, folder
        Its split, empty where there is none; where it lies.
    manifest
        Its newest version now; None where there is none yet, after a dry run.
    version
        The version that was made, or would be; None where the newest was what was asked for.
    made
        Whether that was done.
    rows, shards, of_rows, bytes_at_most
        Of the one that was asked for; the rows that there were to take from; bytes of its pixels.
    seconds, written, resumed, notes
        As in `CopyBuild`; ``written`` rows were copied by this run.
    """

    split: str
    folder: Path
    manifest: Manifest | None
    version: int | None
    made: bool
    rows: int
    shards: int
    of_rows: int
    bytes_at_most: int
    seconds: float = 0.0
    written: int = 0
    resumed: int = 0
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """It as JSON values."""
        found: dict[str, Any] = {
            "out": str(self.folder),
            "version": self.version,
            "made": self.made,
            "rows": self.rows,
            "of_rows": self.of_rows,
            "shards": self.shards,
            "bytes_at_most": self.bytes_at_most,
            "notes": list(self.notes),
        }
        if self.manifest is None or (self.version is not None and not self.made):
            return found
        m = self.manifest
        return {
            **found,
            "version": m.version,
            "storage": m.storage,
            "image_shape": list(m.image_shape),
            "classes": len(m.classes),
            "chunks": sum(shard.chunks for shard in m.shards),
            "compressed_chunks": sum(shard.compressed_chunks for shard in m.shards),
            "bytes": m.bytes,
            "duplicates": dict(m.duplicates),
            "seconds": round(self.seconds, 3),
            "images_per_second": round(self.written / self.seconds, 1) if self.seconds else None,
            "resumed_shards": self.resumed,
            "made_of": m.source.get(MADE_OF),
        }

    def in_words(self) -> list[str]:
        """Lines for a person."""
        images = counted_words(self.rows, "image")
        if self.rows != self.of_rows:
            images = f"{self.rows} of {self.of_rows} ({self.rows / self.of_rows:.1%}) images"
        if self.version is None and self.manifest is not None:
            there = f"version {self.manifest.version}, {images}"
            return [
                f"'{self.folder}' is up to date: {there}. Nothing to do.",
                *(f"  {note}" for note in self.notes),
            ]
        if not self.made or self.manifest is None:
            return [
                f"'{self.folder}': version {self.version} would be {images} in "
                f"{counted_words(self.shards, 'shard')}, at most {self.bytes_at_most / 1e6:.1f} MB",
                *(f"  {note}" for note in self.notes),
            ]
        m = self.manifest
        height, width, channels = m.image_shape
        chunks, packed = (sum(getattr(s, name) for s in m.shards) for name in ("chunks", "compressed_chunks"))
        lines = [
            f"'{self.folder}': version {m.version}, {images} of {height}x{width}x{channels}, "
            f"{counted_words(len(m.classes), 'class')}, {counted_words(len(m.shards), m.storage + ' shard')}",
            f"  {self.seconds:.1f} s, {self.written / max(self.seconds, 1e-9):.0f} images/s; {m.bytes / 1e6:.1f} MB, "
            f"{packed} of {chunks} chunks are compressed",
        ]
        if self.resumed:
            lines.append(
                f"  {self.resumed} of {len(m.shards)} shards had been finished by a run that did not come to its end"
            )
        if m.duplicates:
            lines.append(
                "  pictures of the same bytes: "
                + ", ".join(f"{n} {reason}" for reason, n in m.duplicates.items())
            )
        return lines + [f"  {note}" for note in self.notes]


def copied(build: CopyBuild, manifest: Manifest | None, *, dry_run: bool = False) -> Copied:
    """What became of ``build``, of which ``manifest`` was made, if anything."""
    return Copied(
        split=build.split,
        folder=build.output.folder,
        manifest=manifest or build.newest,
        version=build.version,
        made=manifest is not None and not dry_run,
        rows=len(build.index),
        shards=len(build.shard_rows),
        of_rows=len(build.source),
        bytes_at_most=len(build.index) * int(np.prod(build.draft.image_shape)),
        seconds=build.seconds,
        written=build.written,
        resumed=build.resumed,
        notes=tuple(build.notes),
    )
