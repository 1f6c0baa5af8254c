"""The output folder: what in it is ours, and how finished shards become a version that readers see."""

import json
import os
import secrets
import shutil
import stat
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from shardwright.convert.hints import Hints
from shardwright.convert.records import Finding
from shardwright.convert.unfinished import Unfinished
from shardwright.datasets.layout import SHARDS_FOLDER, SPLIT_NAMES, WORK_FOLDER, Manifest, report_name
from shardwright.datasets.manifest import (
    newest_version,
    read_manifest,
    replace_file,
    sync_folder,
    versions_of,
    write_manifest,
)
from shardwright.errors import OutputError, UsageError

_MOST_HINTS_BYTES = 1 << 34
#: A time that was given to a file lies at least so long before that was done.
_PUT_BACK_NS = 50_000_000
_OURS = ("manifest-", "report-")


def check_paths(source: Path, out: Path) -> None:
    """Refuse a source that is no folder, and paths of which one lies in the other.

    Raises
    ------
    UsageError
        One of these.
    """
    check_source(source)
    inner, outer = os.path.realpath(source), os.path.realpath(out)
    if os.path.commonpath([inner, outer]) in (inner, outer):
        raise UsageError(
            f"the source '{source}' and the output '{out}' lie in one another: use another output"
        )


def check_source(source: Path) -> None:
    """Refuse a source that is no folder.

    Raises
    ------
    UsageError
        It is none.
    """
    if not source.is_dir():
        raise UsageError(f"the source '{source}' is {'not a folder' if source.exists() else 'missing'}")


def check_output(out: Path, splits: Sequence[str]) -> None:
    """Refuse an output that holds anything that this project did not make.

    Raises
    ------
    OutputError
        ``out`` is a file, or holds something foreign, or a data set where splits are to go (or the other
        way round).
    """
    if not os.path.lexists(out):
        return
    if not out.is_dir():
        raise OutputError(f"the output '{out}' is not a folder")
    names = set(os.listdir(out))
    if not splits:
        if held := sorted(names & set(SPLIT_NAMES)):
            raise OutputError(
                f"the output '{out}' holds the splits {', '.join(held)}, the source has none: use another output"
            )
        _check_data_set(out, names)
        return
    if "manifest.json" in names:
        raise OutputError(f"the output '{out}' holds one data set, the source has splits: use another output")
    if foreign := sorted(names - {*SPLIT_NAMES, WORK_FOLDER}):
        raise OutputError(_foreign(out, foreign))
    refuse_links(out, [WORK_FOLDER, *splits])
    for split in sorted(names - {WORK_FOLDER}):
        if not (out / split).is_dir():
            raise OutputError(_foreign(out, [split]))
        _check_data_set(out / split, set(os.listdir(out / split)))


def refuse_links(folder: Path, names: Iterable[str] = (SHARDS_FOLDER, WORK_FOLDER)) -> None:
    """Refuse a data set, or a folder of splits, whose own folders ``names`` are links.

    Raises
    ------
    OutputError
        One of them is.
    """
    for name in names:
        if (folder / name).is_symlink():
            raise OutputError(
                f"'{folder / name}' is a link: what is written there would be another's. Nothing was changed"
            )


def _check_data_set(folder: Path, names: set[str]) -> None:
    refuse_links(folder)
    ours = {"manifest.json", SHARDS_FOLDER, WORK_FOLDER}
    foreign = sorted(name for name in names - ours if not name.startswith(_OURS))
    if names and WORK_FOLDER not in names and "manifest.json" not in names:
        foreign = sorted(names)  # a folder called shards alone is somebody else's, unless it is empty
        if foreign == [SHARDS_FOLDER] and not any((folder / SHARDS_FOLDER).iterdir()):
            foreign = []
    if foreign:
        raise OutputError(_foreign(folder, foreign))


def _foreign(folder: Path, names: Sequence[str]) -> str:
    return (
        f"the output '{folder}' holds what is not ours: {', '.join(map(repr, names[:5]))}"
        f"{' ...' if len(names) > 5 else ''}. Nothing was changed: use an empty folder"
    )


class Output:
    """The folder of one data set while it is being written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = folder / WORK_FOLDER
        # Of this run alone: what a worker of a killed run may still do in its own harms nobody.
        self.work = self.state / f"work-{os.getpid()}-{secrets.token_hex(4)}"
        #: Finished shards that are not published yet.
        self.unfinished = Unfinished(folder)

    def begin(self) -> None:
        """Make the folders, and empty the work folder of what a killed run left."""
        self.forget_work()
        self.work.mkdir(parents=True)
        (self.folder / SHARDS_FOLDER).mkdir(exist_ok=True)

    def forget_work(self) -> None:
        """Remove work in progress, also that of killed runs."""
        for folder in self.state.glob("work*"):
            shutil.rmtree(folder, ignore_errors=True)

    def bytes_under_way(self) -> int:
        """Bytes written so far, by finished workers and others: how far they are, without asking them."""
        total = 0
        for entry in os.scandir(self.work):
            with suppress(FileNotFoundError):  # a worker discards a shard of which nothing could be taken
                total += entry.stat().st_size
        return total

    def abandon(self, begun: bool = False) -> None:
        """Remove work in progress, but no finished shards; and the folders for it if they are empty.

        What it was asked for is kept too where it has ``begun``: of a split, where shards of another one are finished.
        """
        self.forget_work()
        if not begun and not self.unfinished.shards():
            self.unfinished.forget()
        if not (self.folder / "manifest.json").exists():
            for folder in (self.folder / SHARDS_FOLDER, self.state, self.folder):
                with suppress(OSError):  # missing, not empty, or locked
                    folder.rmdir()

    def settle(self) -> None:
        """Finish publishing a version whose own manifest was written, and forget how it was made."""
        if not self.folder.is_dir():
            return
        versions, newest = versions_of(self.folder), newest_version(self.folder) or 0
        if versions and versions[-1] > newest:
            self.state.mkdir(exist_ok=True)
            write_manifest(self.folder, read_manifest(self.folder, versions[-1]))
        request = self.unfinished.request()
        if request is not None and request.get("version", 0) <= (newest_version(self.folder) or 0):
            self.unfinished.forget()

    def place(self, manifest: Manifest) -> None:
        """Give the finished shards of ``manifest`` their names. Readers do not see them yet."""
        for file in (file for shard in manifest.shards for file in shard.files):
            self.unfinished.place(file)
        sync_folder(self.folder / SHARDS_FOLDER)

    def accompany(self, manifest: Manifest, findings: Sequence[Finding], hints: Hints | None) -> None:
        """Write what goes with a version whose shards are placed: its report, and what is known of its source."""
        lines = "".join(json.dumps(asdict(f)) + "\n" for f in sorted(findings, key=lambda f: f.id))
        replace_file(self.folder / report_name(manifest.version), lines.encode(), self.state)
        self.remember(manifest, hints or Hints.nothing())

    def publish(self, manifest: Manifest) -> None:
        """Write the manifest of a version that has all else: from then on readers see it."""
        write_manifest(self.folder, manifest)
        self.unfinished.forget()

    def holds(self, manifest: Manifest) -> bool:
        """Whether every file of ``manifest`` is there, in its size: one that lost a shard is not up to date."""
        for file in (file for shard in manifest.shards for file in shard.files):
            try:
                if (self.folder / file.name).stat().st_size != file.bytes:
                    return False
            except OSError:
                return False
        return True

    def remember(self, manifest: Manifest, hints: Hints) -> None:
        """Keep what is known of the source of ``manifest``."""
        path = self._hints(manifest.version)
        replace_file(path, hints.to_bytes(manifest), self.state)
        os.utime(path, ns=(hints.began_ns, hints.began_ns))

    def hints(self, manifest: Manifest) -> Hints | None:
        """What is known of the source of ``manifest``; None where nothing is."""
        try:
            # A pipe in its place would wait for a writer.
            fd = os.open(
                self._hints(manifest.version), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            )
        except OSError:
            return None
        with os.fdopen(fd, "rb") as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_HINTS_BYTES:
                return None
            # Of a plain copy of the data set it is the time of the copy, which says nothing.
            put_back = status.st_ctime_ns - status.st_mtime_ns >= _PUT_BACK_NS
            return Hints.from_bytes(file.read(), status.st_mtime_ns if put_back else 0, manifest)

    def _hints(self, version: int) -> Path:
        return self.state / f"source-{version:06d}.npz"


def counted(findings: Sequence[Finding], verdict: str) -> dict[str, int]:
    """Reason code -> how many, sorted."""
    return dict(sorted(Counter(f.reason for f in findings if f.verdict == verdict).items()))


def other_splits(out: Path, splits: Sequence[str]) -> list[str]:
    """Names of the splits that ``out`` holds beside ``splits``, sorted."""
    if not splits or not out.is_dir():
        return []
    return sorted(name for name in set(SPLIT_NAMES) - {*splits} if (out / name / "manifest.json").exists())
