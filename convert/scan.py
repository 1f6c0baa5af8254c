"""A tree of pictures to samples, labels and a class map; and what in it is no sample, counted."""

import errno
import hashlib
import os
import time
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardwright.convert.hints import Stamp, Stamps, stamp_of
from shardwright.datasets.layout import SPLIT_NAMES, path_to_id
from shardwright.datasets.manifest import read_manifest, splits_of
from shardwright.errors import SourceError, UsageError

PICTURE_SUFFIXES = frozenset(
    [
        ".jpg",
        ".jpeg",
        ".jpe",
        ".jfif",
        ".mpo",
        ".png",
        ".apng",
        ".bmp",
        ".dib",
        ".gif",
        ".tif",
        ".tiff",
        ".webp",
        ".ppm",
        ".pgm",
        ".pbm",
        ".pnm",
        ".jp2",
        ".avif",
    ]
)
_PICTURE_STARTS = (
    b"\xff\xd8\xff",
    b"\x89PNG\r\n\x1a\n",
    b"GIF87a",
    b"GIF89a",
    b"BM",
    b"II*\0",
    b"MM\0*",
)
_SYSTEM_NAMES = frozenset({"thumbs.db", "desktop.ini", "__macosx", "lost+found", "$recycle.bin"})


@dataclass(frozen=True, slots=True)
class Scan:
    """What lies in one tree.

    Attributes
    ----------
    root
        The folder whose children are the classes.
    classes
        Class names, as ids; class number k is the k-th.
    ids, paths
        Id of each sample, sorted; and its path relative to the root, as the operating system takes it.
    labels
        int64 (samples,): class number of each sample.
    stamps
        Sizes, times and inodes of them all.
    no_class
        Ids of pictures that lie directly under the root.
    too_new
        Ids of those that were changed after the latest time that was asked for.
    skipped
        Files that are no pictures, by why: ``hidden``, ``system``, ``not-a-picture``, ``link-loop``,
        ``dangling-link``, ``too-new``.
    began_ns
        When the scan began, in ns since the epoch.
    """

    root: Path
    classes: tuple[str, ...]
    ids: tuple[str, ...]
    paths: tuple[str, ...]
    labels: npt.NDArray[np.int64]
    stamps: Stamps
    no_class: tuple[str, ...]
    too_new: tuple[str, ...]
    skipped: dict[str, int]
    began_ns: int

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """int64 (samples,): bytes of each file."""
        return self.stamps.sizes

    def fingerprint(self) -> str:
        """SHA-256 over the class map and each file's id, size and modification time."""
        digest = hashlib.sha256(repr(self.classes).encode())
        for path in (*self.paths, *self.no_class):
            digest.update(os.fsencode(path) + b"\0")
        digest.update(self.stamps.sizes.tobytes() + self.stamps.mtimes.tobytes())
        return digest.hexdigest()


def find_splits(source: Path) -> list[str]:
    """Names of the split folders of ``source``, sorted; empty where it is one tree of classes.

    It has splits when every visible folder in it is called train, val, valid, validation or test.

    Raises
    ------
    SourceError
        There are pictures beside the split folders: they would belong to none.
    """
    folders = _folders(source)
    if not folders or not set(folders) <= set(SPLIT_NAMES):
        return []
    beside = sorted(e.name for e in _entries(source) if _is_sample(e))
    if beside:
        raise SourceError(
            f"'{source}' has the splits {', '.join(folders)}, and {len(beside)} pictures beside them "
            f"(such as '{beside[0]}') that belong to none: move them into a class folder of a split, or use "
            "--no-splits to take the folders as classes"
        )
    return folders


def scan(
    root: Path,
    classes: Sequence[str] | None = None,
    found: Callable[[int], None] = lambda files: None,
    latest_ns: int | None = None,
) -> Scan:
    """Find all samples below ``root``: the class is the first folder below it.

    Links to files and folders are followed, loops are not. ``found`` is told how many more files were
    seen, now and then.

    Parameters
    ----------
    classes
        A class map to use instead of the folders'. Folders that it does not name are an error, names
        without a folder keep their number.
    latest_ns
        Files that were changed after this time are skipped as ``too-new``. None: none are.

    Raises
    ------
    SourceError
        A folder cannot be read; class folders that differ only in case or Unicode form; a class that
        ``classes`` does not name.
    """
    folders = _folders(root)
    refuse_twins(root, folders)
    names = tuple(map(path_to_id, folders)) if classes is None else tuple(classes)
    if strangers := sorted({path_to_id(f) for f in folders} - set(names)):
        raise SourceError(
            f"'{root}' has class folders that the class map does not name: {', '.join(strangers[:5])}"
            f"{' ...' if len(strangers) > 5 else ''}. Add them to it, or move them away"
        )
    number = {name: k for k, name in enumerate(names)}
    skipped: Counter[str] = Counter()
    began_ns = time.time_ns()
    rows: list[tuple[str, str, int, Stamp]] = []
    no_class, too_new = [], []
    for path, entry in _samples(root, skipped):
        stamp = _stamp(entry)
        # A copy may be given the modification time of its original; that itself is a change.
        if latest_ns is not None and max(stamp[1:3]) > latest_ns:
            skipped["too-new"] += 1
            too_new.append(path_to_id(path))
            continue
        top, slash, _ = path.partition("/")
        if not slash:
            no_class.append(path)
            continue
        rows.append((path_to_id(path), path, number[path_to_id(top)], stamp))
        if len(rows) % 1000 == 0:
            found(1000)
    found(len(rows) % 1000)
    rows.sort()
    return Scan(
        root=root,
        classes=names,
        ids=tuple(row[0] for row in rows),
        paths=tuple(row[1] for row in rows),
        labels=np.array([row[2] for row in rows], np.int64),
        stamps=Stamps.of([row[3] for row in rows]),
        no_class=tuple(sorted(map(path_to_id, no_class))),
        too_new=tuple(sorted(too_new)),
        skipped=dict(sorted(skipped.items())),
        began_ns=began_ns,
    )


def class_map_of(source: Path, splits: Sequence[str]) -> tuple[str, ...]:
    """The one class map of several splits: the union of their class folders, sorted by code point."""
    folders = sorted({folder for split in splits for folder in _folders(source / split)})
    refuse_twins(source, folders)
    return tuple(map(path_to_id, folders))


def read_class_map(path: Path) -> tuple[str, ...]:
    """Read a class map: one name a line, UTF-8, class number k is the k-th line; or that of the data set ``path``.

    Raises
    ------
    UsageError
        The file cannot be read, is empty, or names a class twice.
    FormatError
        It is a folder, and no data set.
    """
    if path.is_dir():
        splits = [] if (path / "manifest.json").exists() else splits_of(path)
        return read_manifest(path / splits[0] if splits else path).classes
    try:
        names = tuple(line for line in path.read_text("utf-8-sig").split("\n") if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the class map '{path}': {error}") from error
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice or not names:
        raise UsageError(f"class map '{path}': " + (f"{twice[0]!r} stands twice" if twice else "it is empty"))
    return names


def _samples(root: Path, skipped: Counter[str]) -> Iterator[tuple[str, "os.DirEntry[str]"]]:
    """What `_walk` finds; whatever the system says against it is an error of the source."""
    try:
        yield from _walk(root, skipped)
    except OSError as error:
        raise SourceError(
            f"cannot look at '{error.filename or root}': {error.strerror}. A picture must not go missing: mend it, or "
            "move it away"
        ) from error


def _walk(root: Path, skipped: Counter[str]) -> Iterator[tuple[str, "os.DirEntry[str]"]]:
    """Every sample below ``root`` as (path relative to it, entry), depth first, in no stated order."""
    status = os.stat(root)
    todo = [("", frozenset({(status.st_dev, status.st_ino)}))]
    while todo:
        prefix, ancestors = todo.pop()
        for entry in _entries(root / prefix):
            path = prefix + entry.name
            if why := _is_skipped(entry.name):
                skipped[why] += 1
            elif _is_folder(entry):
                status = entry.stat()
                key = (status.st_dev, status.st_ino)
                if key in ancestors:
                    skipped["link-loop"] += 1
                else:
                    todo.append((path + "/", ancestors | {key}))
            elif _is_sample(entry):
                yield path, entry
            elif entry.is_symlink() and not os.path.exists(entry.path):
                if not prefix:
                    raise SourceError(
                        f"'{entry.path}' is a link that leads nowhere: a class whose disk is not mounted? A class "
                        "must not go missing: mount it, or remove the link"
                    )
                skipped["dangling-link"] += 1
            else:
                skipped["not-a-picture"] += 1


def _entries(folder: Path) -> list["os.DirEntry[str]"]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        raise SourceError(_unreadable(folder, error)) from error


def _folders(root: Path) -> list[str]:
    """Names of the visible folders in ``root``, sorted."""
    return sorted(e.name for e in _entries(root) if _is_folder(e) and not _is_skipped(e.name))


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError as error:  # a link that leads to itself, or to where this user may not look
        if error.errno == errno.ELOOP or _is_picture_name(entry.name):
            return False
        raise SourceError(_unreadable(entry.path, error)) from error


def _unreadable(folder: Path | str, error: OSError) -> str:
    return (
        f"cannot read the folder '{folder}': {error.strerror}. A class must not go missing: give "
        "permission to read it, or move it away"
    )


def _is_skipped(name: str) -> str:
    """Why a file or folder of this name is never looked at; empty where it is."""
    if name.startswith("."):
        return "hidden"
    return "system" if name.lower() in _SYSTEM_NAMES else ""


def _is_picture_name(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in PICTURE_SUFFIXES


def _is_sample(entry: "os.DirEntry[str]") -> bool:
    """Whether what is no folder has a picture's name or a picture's first bytes."""
    if _is_skipped(entry.name):
        return False
    is_file = entry.is_file(follow_symlinks=False) or os.path.isfile(entry.path)
    if _is_picture_name(entry.name):
        # A link to nowhere with a picture's name is a sample that cannot be read, not a file to pass over.
        return is_file or not os.path.exists(entry.path)
    if not is_file:
        return False
    try:
        with open(entry.path, "rb") as file:
            start = file.read(12)
    except OSError:
        return False
    return start.startswith(_PICTURE_STARTS) or (start[:4] == b"RIFF" and start[8:] == b"WEBP")


def _stamp(entry: "os.DirEntry[str]") -> Stamp:
    try:
        return stamp_of(entry.stat())
    except OSError:  # gone meanwhile, or a link to nowhere: reading it will say so
        return 0, 0, 0, 0


def refuse_twins(root: Path, folders: Sequence[str]) -> None:
    """Class folders that differ only in case or Unicode form are one class on another file system."""
    forms: dict[str, str] = {}
    for name in folders:
        form = unicodedata.normalize("NFC", name).casefold()
        if form in forms:
            raise SourceError(
                f"class folders '{forms[form]}' and '{name}' in '{root}' differ only in case or Unicode form: "
                "rename one of them, or join them"
            )
        forms[form] = name
