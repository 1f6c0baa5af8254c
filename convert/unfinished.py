"""What a conversion has done so far: its finished shards and the record of each, kept until it is published.

A shard is finished when its record is there, which is written last: that a file exists says nothing. All of it
belongs to one *request*, which says from what and how; another request does not go on with it.
"""

import json
import os
import re
import shutil
import zlib
from collections.abc import Collection, Container, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import joblib

from shardwright.convert.hints import Stamp
from shardwright.convert.plan import ShardPlan, shard_stem
from shardwright.convert.records import Finding, ShardRecord
from shardwright.convert.stats import Sums
from shardwright.convert.store import shard_file
from shardwright.datasets.layout import SHARD_NAME, SHARDS_FOLDER, WORK_FOLDER, Shard, ShardFile
from shardwright.datasets.manifest import newest_version, read_manifest, versions_of
from shardwright.errors import OutputError

Request = Mapping[str, Any]
_REQUEST = "request.json"


class Unfinished:
    """The unfinished conversion in the data set at ``folder``, if there is one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._run = folder / WORK_FOLDER / "run"

    def is_there(self) -> bool:
        """Whether there is anything of an unfinished conversion, readable or not."""
        return os.path.lexists(self._run)

    def request(self) -> Request | None:
        """What it was asked for; None where there is no unfinished conversion."""
        found: Request = _read(self._run / _REQUEST)
        return found if _is_request(found) else None

    def begun_ns(self) -> int | None:
        """When it was begun, in ns since the epoch; None where there is none."""
        try:
            return (self._run / _REQUEST).stat().st_mtime_ns
        except OSError:
            return None

    def give_up(self) -> None:
        """Remove it all, with shards that it has placed already, of a version that was never published."""
        request = self.request()
        if request is not None:
            self._remove_unpublished(request["version"])
        self.forget()

    def shards(self) -> int:
        """How many shards it has finished, for all that their records say."""
        return sum(1 for _ in self._run.glob("record-*.json"))

    def begin(self, request: Request, plans: Sequence[ShardPlan]) -> list[ShardRecord]:
        """Begin the conversion that ``request`` asks for, or go on with it: the records of its finished shards.

        What another one left is removed. A record is believed if it is of one of ``plans``, as one is written here.
        """
        if self.request() != request:
            self._remove_unpublished(request["version"])
            self.forget()
            self._run.mkdir(parents=True)
            _write(self._run / _REQUEST, request)
        records = ((plan, _record_at(self._record(plan.number))) for plan in plans)
        known = [record for plan, record in records if record is not None and _fits(record, plan)]
        # Hashing lets go of the interpreter's lock, and costs a hundredth of making the shards again.
        with ThreadPoolExecutor(joblib.cpu_count()) as pool:
            return [record for record, held in zip(known, pool.map(self._holds, known), strict=True) if held]

    def records(self) -> list[ShardRecord]:
        """Of its finished shards, as far as they are written as here. Whether their files are there is not asked."""
        found = {path: _record_at(path) for path in self._run.glob("record-*.json")}
        return [
            record
            for path, record in found.items()
            if record is not None and record.number >= 0 and path == self._record(record.number)
        ]

    def go_on(self, request: Request, numbers: Collection[int]) -> None:
        """Go on with those of its finished shards that have these ``numbers``, as the conversion of ``request``."""
        shards = {Path(shard_stem(request["version"], number)).name for number in numbers}
        stays = {*shards, Path(_REQUEST).stem, *(self._record(number).stem for number in numbers)}
        # Records go before their files, and all before others may be written under the same numbers.
        for path in sorted(self._run.iterdir(), key=lambda path: not path.name.startswith("record-")):
            if _stem(path) in stays:
                continue
            if (
                path.is_dir() and not path.is_symlink()
            ):  # the folder is ours as a whole, as where it is forgotten
                shutil.rmtree(path)
            else:
                path.unlink()
        self._remove_unpublished(request["version"], shards)
        _write(self._run / _REQUEST, request, self.begun_ns())

    def _remove_unpublished(self, version: int, kept: Container[str] = ()) -> None:
        """Remove shards of a version that was being published and never was, but those ``kept``, names without endings.

        Its number is given again.
        """
        named = {
            file.name.casefold()
            for known in {*versions_of(self.folder), newest_version(self.folder)} - {None}
            for shard in read_manifest(self.folder, known).shards
            for file in shard.files
        }
        for path in (self.folder / SHARDS_FOLDER).glob(f"{version:06d}-*"):
            name = f"{SHARDS_FOLDER}/{path.name}"
            if name.casefold() in named:
                raise OutputError(
                    f"'{path}' would be a shard of version {version}, and an earlier version names it: another program "
                    "made that one. Nothing was changed: use another output"
                )
            if SHARD_NAME.fullmatch(name) and _stem(path) not in kept:
                path.unlink()

    def keep(self, record: ShardRecord) -> None:
        """Take the files of a shard that a worker finished, then write its record."""
        self._record(record.number).unlink(missing_ok=True)  # of files that were lost: these may be others
        if record.shard is not None:
            for path, file in zip(record.temporary, record.shard.files, strict=True):
                os.rename(path, self._kept(file))
        _write(self._record(record.number), {**asdict(record), "temporary": ()})

    def drop(self, record: ShardRecord) -> None:
        """Forget one finished shard."""
        self._record(record.number).unlink()

    def place(self, file: ShardFile) -> None:
        """Give a finished file its name, unless a run that was killed just then has done so.

        Raises
        ------
        OutputError
            It is gone.
        """
        path = self.folder / file.name
        if self._kept(file).exists():
            os.rename(self._kept(file), path)
        if not path.exists() or path.stat().st_size != file.bytes:
            raise OutputError(f"a finished file is gone: '{self._kept(file)}'. Run the same command again")

    def forget(self) -> None:
        """Remove it all."""
        shutil.rmtree(self._run, ignore_errors=True)

    def _record(self, number: int) -> Path:
        return self._run / f"record-{number:05d}.json"

    def _holds(self, record: ShardRecord) -> bool:
        return record.shard is None or all(map(self._has, record.shard.files))

    def _has(self, file: ShardFile) -> bool:
        """Whether the file is there, byte for byte: under the name that it will have, or not yet."""
        path = self._kept(file)
        path = path if path.exists() else self.folder / file.name
        return path.is_file() and shard_file(path, file.name) == file

    def _kept(self, file: ShardFile) -> Path:
        return self._run / Path(file.name).name


def _stem(path: Path) -> str:
    return path.name.partition(".")[0]


def _write(path: Path, values: Request, time_ns: int | None = None) -> None:
    # Not synced: what the machine's end leaves of it has not its checksum, and its shard is made again.
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"check": _check(values), "values": values}))
    if time_ns is not None:
        os.utime(partial, ns=(time_ns, time_ns))
    os.replace(partial, path)


def _read(path: Path) -> Any:
    """The values that `_write` wrote; None where there are none, or others.

    Raises
    ------
    OSError
        The file is there, and cannot be read.
    """
    try:
        found = json.loads(path.read_bytes())
        return found["values"] if found["check"] == _check(found["values"]) else None
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _check(values: Any) -> int:
    return zlib.crc32(json.dumps(values).encode())


def _is_request(found: object) -> bool:
    return (
        isinstance(found, dict)
        and type(found.get("version")) is int
        and isinstance(found.get("options"), dict)
    )


def _fits(record: ShardRecord, plan: ShardPlan) -> bool:
    """Whether ``record`` can be of ``plan``: what a file in a user's folder says may be anything."""
    sums = (record.sums.pixels, *record.sums.total, *record.sums.squares, record.animated)
    if record.number != plan.number or any(type(value) is not int for value in sums):
        return False
    if record.shard is None:
        return True
    names = [file.name for file in record.shard.files]
    endings = [name.removeprefix(plan.stem) for name in names]
    return (
        type(record.shard.rows) is int
        and 0 < record.shard.rows <= len(plan.samples)
        and not record.shard.dead_rows
        and len(set(names)) == len(names) > 0
        and all(re.fullmatch(r"\.h5|\.\w+\.npy", ending) for ending in endings)
        and all(type(file.bytes) is int for file in record.shard.files)
    )


def _stamp(found: Any) -> Stamp:
    size, mtime, ctime, inode = found
    if not all(type(value) is int and abs(value) < 1 << 63 for value in found):
        raise ValueError("no stamp of a file")
    return size, mtime, ctime, inode


def _record_at(path: Path) -> ShardRecord | None:
    try:
        found = _read(path)
        shard = found["shard"]
        if shard is not None:
            files = tuple(ShardFile(**file) for file in shard["files"])
            shard = Shard(**{**shard, "files": files, "dead_rows": tuple(shard["dead_rows"])})
        if type(found["number"]) is not int or not all(isinstance(f["id"], str) for f in found["findings"]):
            return None
        return ShardRecord(
            number=found["number"],
            shard=shard,
            findings=tuple(
                Finding(**{**f, "size": None if f["size"] is None else tuple(f["size"])})
                for f in found["findings"]
            ),
            animated=found["animated"],
            sums=Sums(**found["sums"]),
            saved_bytes=float(found["saved_bytes"]),
            environment=dict(found["environment"]),
            stamps={id: _stamp(stamp) for id, stamp in found["stamps"].items()},
            unread={id: _stamp(stamp) for id, stamp in found["unread"].items()},
            copied=dict(found["copied"]),
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
