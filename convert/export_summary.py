"""What became of a data set that was exported: as JSON values, and in words."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.convert.export_options import ExportOptions
from shardwright.convert.summary import counted_words
from shardwright.datasets.layout import Manifest


@dataclass(frozen=True, slots=True)
class Exported:
    """What became of one data set.

    Attributes
    ----------
    split, folder
        Its split, empty where the source has none; and where it lies now.
    source, manifest, options
        Of what it was made, and how.
    made
        Whether it was made by this run, or was there already. In a dry run: whether it would be made.
    files, bytes
        Pictures or tars, and the bytes of all of them. In a dry run: about.
    seconds, written
        What this run took to write, and the rows that it wrote. In a dry run: about.
    resumed
        Rows that an earlier run, which did not come to its end, had written.
    notes, warnings
        What else a person should know, in words; and what may go wrong with what was made, if nobody heeds it.
    dry_run
        Whether nothing was made.
    """

    split: str
    folder: Path
    source: Path
    manifest: Manifest
    options: ExportOptions
    made: bool
    files: int
    bytes: int
    seconds: float = 0.0
    written: int = 0
    resumed: int = 0
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    dry_run: bool = False

    def as_json(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "out": str(self.folder),
            "to": self.options.to,
            "encoding": self.options.file.encoding,
            "version": self.manifest.version,
            "made": self.made and not self.dry_run,
            "dry_run": self.dry_run,
            "rows": self.manifest.rows,
            "classes": len(self.manifest.classes),
            "files": self.files,
            "bytes": self.bytes,
            "seconds": round(self.seconds, 3),
            "images_per_second": round(self.written / self.seconds, 1) if self.seconds else None,
            "resumed_rows": self.resumed,
            "notes": [*self.warnings, *self.notes],
        }

    def in_words(self) -> list[str]:
        """Lines for a person."""
        rows, files, kind = self.manifest.rows, self.files, self.options.file.encoding.upper()
        of = f"version {self.manifest.version} of '{self.source}'"
        what = counted_words(rows, f"{kind} file")
        if self.options.to == "webdataset":
            what = f"{counted_words(rows, 'sample')} with {kind} in {counted_words(files, 'tar shard')}"
        if not self.made:
            return [f"'{self.folder}' is up to date: {what} from {of}. Nothing to do."]
        size = f"{self.bytes / 1e6:.1f} MB"
        if self.dry_run:
            return [f"'{self.folder}': {what} from {of}, about {size}, in about {self.seconds:.0f} s"]
        lines = [
            f"'{self.folder}': {what}, {counted_words(len(self.manifest.classes), 'class')}, from {of}",
            f"  {self.seconds:.1f} s, {self.written / max(self.seconds, 1e-9):.0f} images/s; {size}",
        ]
        if self.options.to == "webdataset":
            numbers = f"{{000000..{files - 1:06d}}}"
            lines.append(f'  webdataset.WebDataset("{self.folder}/{self.split or "data"}-{numbers}.tar")')
        if self.resumed:
            lines.append(f"  {self.resumed} rows had been written by a run that did not come to its end")
        return lines + [f"  {note}" for note in (*self.warnings, *self.notes)]
