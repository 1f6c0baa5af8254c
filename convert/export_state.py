"""What an export has done so far: finished units out of sight, each with a record, and how they get their names.

All lies in ``OUT/.shardwright``: ``export.json`` says what was asked for and how far it is, ``export/tree`` is what
will be in OUT. A folder of pictures of which a part is missing looks like one that is whole: so none is seen before all
is there.
"""

import json
import os
import secrets
import shutil
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from shardwright.convert.job import JOB_FILES
from shardwright.convert.plan import differences
from shardwright.datasets.layout import WORK_FOLDER
from shardwright.datasets.manifest import replace_file, sync_folder
from shardwright.errors import OutputError, named

Stage = Literal["making", "placing", "finished"]
_STATUS = "export.json"
_TAR = ".tar"


@dataclass(frozen=True, slots=True)
class Status:
    """How far an export is.

    Attributes
    ----------
    request
        From what and how: another one does not go on with it.
    stage
        ``making``: nothing is to be seen yet. ``placing``: all was made, and gets its names. ``finished``.
    unit_rows
        Rows of each unit of work but the last: of a tar, or of pictures that are made together.
    library
        The version of the library that encodes the pictures.
    entries
        What lies in OUT when it is finished. Empty while it is made.
    files, bytes
        Pictures or tars, and the bytes of all of them, when all were made.
    """

    request: Mapping[str, Any]
    stage: Stage
    unit_rows: int
    library: Mapping[str, str]
    entries: tuple[str, ...] = ()
    files: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Unit:
    """The record of a finished unit: its rows, and the bytes and the SHA-256 of its files one after the other."""

    number: int
    rows: int
    bytes: int
    sha256: str


class ExportState:
    """The export in ``folder``, finished or not, if there is one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._state = folder / WORK_FOLDER
        self._run = self._state / "export"
        #: What will be in ``folder``.
        self.tree = self._run / "tree"
        # Of this run alone: what a worker of a killed run may still do in its own harms nobody.
        self.work = self._run / f"work-{os.getpid()}-{secrets.token_hex(4)}"

    def status(self) -> Status | None:
        """How far it is; None where there is no export."""
        found = _read(self._state / _STATUS)
        try:
            status = Status(**{**found, "entries": tuple(found["entries"])})
        except (TypeError, KeyError):
            return None
        return status if _is_status(status) else None

    def check(self, request: Mapping[str, Any] | None) -> Status | None:
        """How far the export is that ``request`` asks for; None where ``folder`` is free for it.

        ``request`` None: whatever is asked for. What is there is not changed.

        Raises
        ------
        OutputError
            The folder holds something else, or the export of something else.
        """
        if not os.path.lexists(self.folder):
            return None
        if not self.folder.is_dir():
            raise OutputError(f"the output '{self.folder}' is not a folder")
        for path in (self._state, self._run):
            if path.is_symlink():
                raise OutputError(
                    f"'{path}' is a link: what is written there would be another's. Nothing was changed"
                )
        names = set(os.listdir(self.folder)) - {WORK_FOLDER}
        status = self.status()
        if status is None:
            hidden = set(os.listdir(self._state)) if self._state.is_dir() else set()
            ours = {"lock", f"{_STATUS}.partial", *JOB_FILES}
            names |= {f"{WORK_FOLDER}/{name}" for name in hidden - ours}
            self._refuse(names)
            return None
        if status.stage != "finished":
            self._refuse(names - {*status.entries})
        if request is None or status.request == request:
            return status
        if status.stage == "making" and not self._records():
            return None  # nothing of it is finished
        what = "the export" if status.stage == "finished" else "an unfinished export"
        raise OutputError(
            f"the output '{self.folder}' holds {what} of something else: "
            f"{'; '.join(differences(status.request, request))}. Nothing was changed: use an empty folder, or ask for "
            "the same (--version takes an older version of the source)"
        )

    def _refuse(self, names: set[str]) -> None:
        if names:
            raise OutputError(
                f"the output '{self.folder}' holds what is not of this export: {named(sorted(names))}. Nothing was "
                "changed: use an empty folder"
            )

    def begin(self, status: Status) -> list[Unit]:
        """Begin an export, or go on with it: the records of units that an earlier run finished."""
        if self.status() != status:
            shutil.rmtree(self._run, ignore_errors=True)
            self._write(status)
        self._forget_work()
        self.work.mkdir(parents=True)
        self.tree.mkdir(exist_ok=True)
        found = [(path, _unit_at(path)) for path in self._records()]
        return [unit for path, unit in found if unit is not None and path == self._record(unit.number)]

    def keep(self, unit: Unit) -> None:
        """Note that a unit is finished: its files lie in the tree."""
        # Not synced: what the machine's end leaves of it has not its checksum, and its unit is made again.
        path = self._record(unit.number)
        partial = path.with_suffix(".partial")
        partial.write_text(_checked(asdict(unit)))
        os.replace(partial, path)

    def drop(self, unit: Unit) -> None:
        """Forget a finished unit."""
        self._record(unit.number).unlink()

    def all_made(self, status: Status, files: int) -> Status:
        """Note, for good, that all is in the tree, which must hold ``files`` files; the status that it has then.

        Raises
        ------
        OutputError
            Some are not there.
        """
        self._forget_work()
        found = sum(len(names) for _, _, names in os.walk(self.tree))
        if found != files:
            raise OutputError(
                f"'{self.tree}' holds {found} files, {files} were written: others removed some, or some names are the "
                "same on this file system. Nothing was published: use another one, or `--to webdataset`"
            )
        os.sync()  # a million files one by one would take an hour
        status = replace(status, stage="placing", entries=tuple(sorted(os.listdir(self.tree))))
        self._write(status)
        return status

    def place(self, status: Status) -> Status:
        """Give everything its name in ``folder``: that of a class or a tar in one step each.

        Raises
        ------
        OutputError
            Something of that name is there, or something is gone.
        """
        for entry in status.entries:
            source, target = self.tree / entry, self.folder / entry
            if not os.path.lexists(source):
                if not os.path.lexists(target):
                    raise OutputError(
                        f"'{source}' is gone: remove '{self._state}', and run the same command again"
                    )
                continue  # a run that was killed just then placed it
            if os.path.lexists(target):
                raise OutputError(
                    f"'{target}' is in the way: it is not of this export. Move it, and the same command goes on"
                )
            os.rename(source, target)
        sync_folder(self.folder)
        status = replace(status, stage="finished")
        self._write(status)
        shutil.rmtree(self._run, ignore_errors=True)
        return status

    def lost(self, status: Status, ending: str) -> str:
        """What of a finished export is not there any more, in words; empty where all is.

        Names of its files end in ``ending``. Pictures are counted, of tars the sizes are looked at too: there may be a
        million of the former, on a disk where a look at each takes long.
        """
        if gone := [entry for entry in status.entries if not os.path.lexists(self.folder / entry)]:
            return f"{named(gone)} {'is' if len(gone) == 1 else 'are'} gone"
        if ending == _TAR:
            tars = [self.folder / entry for entry in status.entries if entry.endswith(ending)]
            size = sum(tar.stat().st_size for tar in tars if tar.is_file())
            return "" if size == status.bytes else f"its tars have {size} bytes, not {status.bytes} as then,"
        found = sum(self._count(entry, ending) for entry in status.entries)
        return (
            f"{status.files - found} of its {status.files} pictures are gone" if found < status.files else ""
        )

    def _count(self, entry: str, ending: str) -> int:
        if entry.endswith(ending) and (self.folder / entry).is_file():
            return 1
        walked = os.walk(self.folder / entry)  # nothing where it is a file
        return sum(name.endswith(ending) for _, _, names in walked for name in names)

    def abandon(self) -> None:
        """Remove work in progress, but nothing that is finished; and all where nothing is."""
        if not self._run.is_dir():
            return
        self._forget_work()
        status = self.status()
        if status is None or status.stage == "finished":
            shutil.rmtree(self._run, ignore_errors=True)
        elif status.stage == "making" and not self._records():
            shutil.rmtree(self._run, ignore_errors=True)
            (self._state / _STATUS).unlink()
            with suppress(OSError):  # the lock is in it
                self._state.rmdir()

    def _forget_work(self) -> None:
        for folder in self._run.glob("work-*"):
            shutil.rmtree(folder, ignore_errors=True)

    def _records(self) -> Sequence[Path]:
        return sorted(self._run.glob("unit-*.json"))

    def _record(self, number: int) -> Path:
        return self._run / f"unit-{number:06d}.json"

    def _write(self, status: Status) -> None:
        self._state.mkdir(parents=True, exist_ok=True)
        replace_file(self._state / _STATUS, _checked(asdict(status)).encode(), self._state)


def _checked(values: Mapping[str, Any]) -> str:
    return json.dumps({"check": zlib.crc32(json.dumps(values).encode()), "values": values})


def _read(path: Path) -> Any:
    """The values that `_checked` made a text of; None where there are none, or others."""
    try:
        found = json.loads(path.read_bytes())
        return found["values"] if found["check"] == zlib.crc32(json.dumps(found["values"]).encode()) else None
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _unit_at(path: Path) -> Unit | None:
    try:
        unit = Unit(**_read(path))
    except (OSError, TypeError):
        return None
    numbers = (unit.number, unit.rows, unit.bytes)
    return unit if all(type(number) is int and number >= 0 for number in numbers) else None


def _is_status(found: Status) -> bool:
    """Whether it can be ours: what a file in a user's folder says may be anything."""
    numbers = (found.unit_rows, found.files, found.bytes)
    return (
        isinstance(found.request, dict)
        and isinstance(found.library, dict)
        and found.stage in get_args(Stage)
        and all(type(number) is int for number in numbers)
        and found.unit_rows > 0
        and all(isinstance(entry, str) and _is_entry(entry) for entry in found.entries)
    )


def _is_entry(name: str) -> bool:
    return bool(name) and "/" not in name and "\0" not in name and not name.startswith(".")
