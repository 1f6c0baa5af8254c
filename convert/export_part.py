"""One data set to export: from what is asked for to the units that are missing, and their making."""

import hashlib
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import joblib
import numpy as np

from shardwright.convert.export_names import (
    CLASSES_FILE,
    class_folders,
    class_map_text,
    folders_of,
    numbers_shift,
    picture_paths,
    refuse_twins,
)
from shardwright.convert.export_options import ExportOptions
from shardwright.convert.export_state import ExportState, Status, Unit
from shardwright.convert.export_summary import Exported
from shardwright.convert.export_task import PicturesTask, Rows, TarTask, describe, sample, tar_bytes
from shardwright.convert.options import DEFAULT_SHARD_MIB, SMALLEST_SHARE
from shardwright.convert.progress import ProgressMaker
from shardwright.convert.records import ShardRecord
from shardwright.convert.rowsource import RowSource, SourceRows
from shardwright.convert.workers import Workers
from shardwright.datasets.layout import Manifest
from shardwright.errors import OutputError

#: Bytes of pixels of the pictures that one worker makes before they count as finished.
_UNIT_BYTES = 32 << 20
#: A small data set is not cut into more tars than that.
_LEAST_TAR_ROWS = 32
#: Rows that are encoded to know how many go into a tar, and whether there is room.
_TRIED = 64
_DISK_BLOCK = 4096


class Part:
    """One data set that is exported."""

    def __init__(
        self, split: str, folder: Path, manifest: Manifest, state: ExportState, options: ExportOptions
    ) -> None:
        self.split, self.folder, self.manifest, self.state = split, folder, manifest, state
        self.rows_total = manifest.rows
        self.status: Status | None = None
        self.notes: list[str] = []
        self.warnings: list[str] = []
        self.request = _request(manifest, options)
        #: Bytes on the disk of a row, and seconds to encode it, about.
        self.row_bytes, self.row_seconds = 0.0, 0.0
        self._options = options
        self._source = RowSource(folder, manifest.version)
        self._rows: SourceRows | None = None
        self._unit_rows = 1
        self._paths: list[str] = []
        self._finished: list[Unit] = []
        self._seconds, self._resumed, self._made = 0.0, 0, False

    # --- before -------------------------------------------------------------------------------------------

    def look(self) -> None:
        """See how far the export is.

        Raises
        ------
        OutputError
            The folder holds something else, or a finished export of which some is gone.
        """
        self.status = self.state.check(self.request)
        finished = self.status if self.status is not None and self.status.stage == "finished" else None
        if finished and (lost := self.state.lost(finished, self._options.ending)):
            raise OutputError(
                f"the export in '{self.state.folder}' was finished, and {lost} since. Nothing was changed: use an "
                "empty folder, or remove what is left of it"
            )

    def plan(self) -> None:
        """Encode a few rows, to know how many go into a unit, and how many bytes they take."""
        rows = self._rows = SourceRows([self._source], [self.manifest])
        index = np.unique(np.linspace(0, self.rows_total - 1, _TRIED).astype(np.int64))
        pixels = np.empty((1, int(np.prod(self.manifest.image_shape))), np.uint8)
        tar = self._options.to == "webdataset"
        sizes = []
        start = time.perf_counter()
        for at in index:
            rows.images(np.array([at]), pixels)
            data = self._options.file.encode(pixels[0].reshape(self.manifest.image_shape))
            if tar:
                members = sample(int(at), self._options.file.ending, data, describe(rows, np.array([at]))[0])
                sizes.append(tar_bytes(members))
            else:
                sizes.append(-(-len(data) // _DISK_BLOCK) * _DISK_BLOCK)
        self.row_seconds = (time.perf_counter() - start) / len(index)
        self.row_bytes = float(np.mean(sizes))
        if self.status is not None:  # as it was begun
            self._unit_rows = self.status.unit_rows
        elif tar:
            self._unit_rows = self._tar_rows()
        else:
            chunk_bytes = self.manifest.chunk_rows * pixels.nbytes
            self._unit_rows = max(1, _UNIT_BYTES // chunk_bytes) * self.manifest.chunk_rows

    def _tar_rows(self) -> int:
        by_bytes = max(1, int((self._options.shard_mib or DEFAULT_SHARD_MIB) * 2**20 / self.row_bytes))
        if self._options.shard_mib is not None:
            return by_bytes
        return min(by_bytes, max(_LEAST_TAR_ROWS, self.rows_total // SMALLEST_SHARE))

    def units(self) -> list[tuple[int, int]]:
        """Half-open ranges of rows: the units of work, in order."""
        starts = range(0, self.rows_total, self._unit_rows)
        return [(start, min(start + self._unit_rows, self.rows_total)) for start in starts]

    # --- making -------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Make the folders, write the class map, and see what an earlier run finished."""
        library = dict(self._options.file.library)
        if self.status is None:
            self.status = Status(self.request, "making", self._unit_rows, library)
        elif self.status.library != library:
            self.notes.append(
                f"begun with {self.status.library}, gone on with {library}: the bytes of files may differ from those "
                "of one run"
            )
        units = self.units()
        names = self._named() if self._options.to == "folder" else []
        found = self.state.begin(self.status)
        for folder in names:
            (self.state.tree / folder).mkdir(parents=True, exist_ok=True)
        if self._paths and not _tells_apart(self.state.work):
            refuse_twins(self._paths)
        text = class_map_text(self.manifest.classes)
        if text is None:
            self.notes.append(
                f"a class name has a line break, is blank or no UTF-8: there is no {CLASSES_FILE}"
            )
        else:
            (self.state.tree / CLASSES_FILE).write_bytes(text.encode())
        known = [unit for unit in found if unit.number < len(units)]
        with ThreadPoolExecutor(joblib.cpu_count()) as pool:  # hashing lets go of the interpreter's lock
            for unit, holds in zip(known, pool.map(self._holds, known), strict=True):
                if holds:
                    self._finished.append(unit)
                else:
                    self.state.drop(unit)
        self._resumed = sum(unit.rows for unit in self._finished)

    def _named(self) -> list[str]:
        """Find the path of every picture; the folders that they lie in, and those of classes without pictures."""
        rows = self._rows or SourceRows([self._source], [self.manifest])
        index = np.arange(self.rows_total)
        labels = rows.column("label", index).tolist()
        longest = os.pathconf(self.state.folder, "PC_NAME_MAX")
        folders = class_folders(self.manifest.classes, set(labels), longest)
        if numbers_shift(self.manifest.classes, folders):
            where = "no file can say which they are, `--to webdataset` keeps them"
            if class_map_text(self.manifest.classes) is not None:
                file = self.state.folder / CLASSES_FILE
                where = f"they stand in {CLASSES_FILE}, `convert --classes '{file}'` takes them"
            self.warnings.append(f"class numbers are not those that the folders' names give: {where}")
        ids = rows.column("id", index).tolist()
        self._paths = picture_paths(ids, labels, folders, self._options.file.ending, longest)
        return sorted({*folders_of(self._paths), *filter(None, folders)})

    def _holds(self, unit: Unit) -> bool:
        """Whether a unit's files are there, byte for byte."""
        start, stop = self.units()[unit.number]
        digest, size = hashlib.sha256(), 0
        try:
            for path in self._paths_of(unit.number, start, stop):
                with open(path, "rb") as file:
                    while data := file.read(1 << 20):
                        digest.update(data)
                        size += len(data)
        except OSError:
            return False
        return (unit.rows, unit.bytes, unit.sha256) == (stop - start, size, digest.hexdigest())

    def _paths_of(self, number: int, start: int, stop: int) -> list[str]:
        names = self._paths[start:stop] or [_tar_name(self.split, number)]
        return [os.path.join(self.state.tree, name) for name in names]

    def missing(self) -> int:
        """Rows that are still to be written."""
        return self.rows_total - sum(unit.rows for unit in self._finished)

    def bytes_missing(self) -> int:
        """Bytes that they take, about."""
        return int(self.missing() * self.row_bytes)

    def bytes_at_most(self) -> int:
        """Bytes that they take, where nothing compresses them."""
        if self.status is None or self.status.stage != "making":
            return 0
        pixels = int(np.prod(self.manifest.image_shape))
        return self.missing() * (pixels + pixels // 1000 + 2 * _DISK_BLOCK)

    def make(self, workers: Workers, progress: ProgressMaker) -> None:
        """Write the units that are missing."""
        start = time.monotonic()
        done = self.rows_total - self.missing()
        with progress(self.split or "export", self.rows_total, "images", done) as bar:
            for record in workers.write(self._tasks()):
                if record is not None:
                    self._keep(record)
                    bar.update(self._finished[-1].rows)
        self._seconds = time.monotonic() - start

    def _keep(self, record: ShardRecord) -> None:
        if record.shard is None:
            raise RuntimeError(f"unit {record.number}: neither made nor failed")
        (file,) = record.shard.files
        unit = Unit(record.number, record.shard.rows, file.bytes, file.sha256)
        self.state.keep(unit)
        self._finished.append(unit)

    def _tasks(self) -> Iterator[PicturesTask | TarTask]:
        done = {unit.number for unit in self._finished}
        for number, (start, stop) in enumerate(self.units()):
            if number in done:
                continue
            rows = Rows(self._source, start, stop, self._options.file)
            partial, tree = self.state.work / f"{number:06d}", self.state.tree
            if self._options.to == "webdataset":
                yield TarTask(number, _tar_name(self.split, number), partial, rows, tree)
            else:
                paths = tuple(self._paths[start:stop])
                yield PicturesTask(number, f"{number:06d}", partial, rows, tree, paths)

    def all_made(self) -> None:
        """Note that all is there."""
        if self.status is None:
            raise RuntimeError("not begun")
        files = self.rows_total if self._options.to == "folder" else len(self.units())
        written = sum(unit.bytes for unit in self._finished)
        beside = (self.state.tree / CLASSES_FILE).is_file()
        self.status = self.state.all_made(replace(self.status, files=files, bytes=written), files + beside)

    # --- after --------------------------------------------------------------------------------------------

    def finish(self) -> list[str]:
        """Give what was made its names; the folder, if this did so."""
        if self.status is None:
            raise RuntimeError("not begun")
        if self.status.stage == "finished":
            return []
        self.status = self.state.place(self.status)
        self._made = True
        return [str(self.state.folder)]

    def exported(self) -> Exported:
        """What became of it."""
        return Exported(
            split=self.split,
            folder=self.state.folder,
            source=self.folder,
            manifest=self.manifest,
            options=self._options,
            made=self._made,
            files=self.status.files if self.status else 0,
            bytes=self.status.bytes if self.status else 0,
            seconds=self._seconds,
            written=self.rows_total - self._resumed if self._seconds else 0,
            resumed=self._resumed,
            notes=tuple(self.notes),
            warnings=tuple(self.warnings),
        )


def _tar_name(split: str, number: int) -> str:
    return f"{split or 'data'}-{number:06d}.tar"


def _request(manifest: Manifest, options: ExportOptions) -> dict[str, Any]:
    """From what and how: all that decides what is made."""
    shards = [[[file.sha256 for file in shard.files], shard.dead_rows] for shard in manifest.shards]
    held = json.dumps([manifest.classes, shards]).encode()
    return {
        "version": manifest.version,
        "source": hashlib.sha256(held).hexdigest()[:16],
        "rows": manifest.rows,
        "to": options.to,
        "encoding": options.file.encoding,
        "quality": options.file.quality,
        "shard_mib": options.shard_mib,
    }


def _tells_apart(folder: Path) -> bool:
    """Whether the file system of ``folder`` tells names apart that differ in case or Unicode form alone."""
    (folder / "é").touch()
    apart = not any((folder / name).exists() for name in ("É", "e\u0301"))
    (folder / "é").unlink()
    return apart
