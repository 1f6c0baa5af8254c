"""One writer an output, by a lock that a dead process cannot hold."""

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from shardwright.convert.job import read_job, told_in
from shardwright.convert.output import refuse_links
from shardwright.convert.space import unwritable
from shardwright.datasets.layout import SHARDS_FOLDER, SPLIT_NAMES, WORK_FOLDER
from shardwright.datasets.manifest import data_sets_in, sync_folder
from shardwright.errors import LockedError

# Who only looks whether somebody holds an output does so for an instant: one more try tells it from a writer.
_TRIES = 4
_PAUSE_SECONDS = 0.05


@contextmanager
def one_writer(out: Path) -> Iterator[None]:
    """Hold the output ``out``, made if it is missing, as its only writer.

    Folders that this made go again with the context if they are empty then, or hold nothing but the lock.

    Raises
    ------
    LockedError
        Another process holds it. Names host, process and since when.
    OutputError
        The folder cannot be made or written.
    """
    state = out / WORK_FOLDER
    missing = [folder for folder in (state, out, *out.parents) if not folder.exists()]
    try:
        state.mkdir(parents=True, exist_ok=True)
        _sync_parents(missing)
        fd = _locked(state / "lock")
    except OSError as error:
        if isinstance(error, LockedError):
            raise
        _remove_empty(missing)
        raise unwritable(error, out) from error
    try:
        _say_who(fd)
        with told_in(state):
            yield
    finally:
        try:
            with suppress(OSError):  # of a process that is gone it would hold nobody either
                os.ftruncate(fd, 0)
            held = any((out / name).exists() for name in ("manifest.json", SHARDS_FOLDER))
            lock_alone = [path.name for path in state.glob("*")] == ["lock"]
            if (missing and (lock_alone or not held)) or (lock_alone and not held):
                (state / "lock").unlink()
                with suppress(OSError):  # what a killed run left may be in it
                    state.rmdir()
                _remove_empty(missing)
        finally:
            os.close(fd)


def _say_who(fd: int) -> None:
    holder = {"host": socket.gethostname(), "process": os.getpid(), "since": time.strftime("%F %T %z")}
    # On a full disk `gc` must go on: who holds it is for others to read, and for nothing else.
    with suppress(OSError):
        os.pwrite(fd, json.dumps(holder).encode(), 0)


def _remove_empty(folders: Sequence[Path]) -> None:
    for folder in folders:
        with suppress(OSError):  # not empty, or not there
            folder.rmdir()


@contextmanager
def split_writer(out: Path, splits: Sequence[str]) -> Iterator[None]:
    """Hold ``out`` and its ``splits``, also against a writer of a split alone. Splits beside ``out`` may be written.

    Raises as `one_writer` does, and OutputError for a split that is a link: what is written there would be another's.
    """
    refuse_links(out, [WORK_FOLDER, *splits])
    with ExitStack() as held:
        for folder in (out, *(out / split for split in splits)):
            held.enter_context(one_writer(folder))
        yield


@contextmanager
def sole_writer(out: Path, splits: Sequence[str]) -> Iterator[None]:
    """Hold ``out`` and its ``splits`` against every writer: also one of a split alone, or of all splits beside ``out``.

    Raises as `split_writer` does.
    """
    with ExitStack() as held:
        for folder in _folder_of_splits(out):
            held.enter_context(one_writer(folder))
        held.enter_context(split_writer(out, splits))
        yield


def _folder_of_splits(out: Path) -> list[Path]:
    """The folder that a conversion would write to, of which ``out`` is a split; none where there is no such."""
    path = Path(os.path.realpath(out))
    if path.name not in SPLIT_NAMES or not os.access(path.parent, os.R_OK | os.W_OK | os.X_OK):
        return []
    return [path.parent] if set(os.listdir(path.parent)) <= {*SPLIT_NAMES, WORK_FOLDER} else []


def running_job(out: Path) -> dict[str, Any] | None:
    """What runs on the output ``out``, as its ``job.json`` tells it; None where nobody holds it, or does not tell."""
    state = out / WORK_FOLDER
    job = read_job(state)
    return job if job is not None and _is_held(state / "lock") else None


def data_sets_of(out: Path) -> dict[str, Path]:
    """As `data_sets_in`: split -> folder of its data set.

    Raises
    ------
    LockedError
        There is none yet, and another process is making one.
    """
    found = data_sets_in(out)
    lock = out / WORK_FOLDER / "lock"
    if found == {"": out} and not (out / "manifest.json").exists() and _is_held(lock):
        with suppress(FileNotFoundError):  # it came to its end meanwhile
            raise LockedError(_who(out, lock.read_bytes()))
        return data_sets_in(out)
    return found


def _is_held(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system that knows no locks
        return False
    finally:
        os.close(fd)
    return False


def _sync_parents(folders: Sequence[Path]) -> None:
    """Make the names of ``folders`` durable: what is synced inside is lost with the name of a folder around it."""
    for parent in dict.fromkeys(Path(os.path.realpath(folder)).parent for folder in folders):
        with suppress(PermissionError):  # a folder that may be written to, and not be read, cannot be opened
            sync_folder(parent)


def _locked(path: Path) -> int:
    tries = 0
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            tries += 1
            if tries < _TRIES:
                os.close(fd)
                time.sleep(_PAUSE_SECONDS)
                continue
            holder = os.pread(fd, 4096, 0)
            os.close(fd)
            raise LockedError(_who(path.parent.parent, holder)) from error
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd
        os.close(fd)  # its last holder removed it between our two calls


def _who(out: Path, holder: bytes) -> str:
    try:
        known = json.loads(holder)
        who = f"process {known['process']} on {known['host']}, since {known['since']}"
    except (ValueError, TypeError, KeyError):
        who = "another process"
    return f"the output '{out}' is held by {who}. Wait for it, or use another output"
