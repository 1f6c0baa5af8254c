"""What exported pictures are called: pure functions from ids, labels and class map to paths in a folder.

A picture goes to ``<class>/<rest of its id>``, its ending replaced by one that is true of the new file. Where two would
be called the same, both keep their old ending before the new one; where that does not help, their whole id; and where
that does not either, a part of its hash.
"""

import hashlib
import os
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from io import StringIO

from shardwright.convert.scan import PICTURE_SUFFIXES
from shardwright.datasets.layout import WORK_FOLDER, id_to_path, path_to_id
from shardwright.errors import FormatError, OutputError

#: The class map beside the pictures: class number k is the k-th line.
CLASSES_FILE = "classes.txt"
_WAY_OUT = "`--to webdataset` takes any id and class name"
_SHORT, _WITH_OLD_ENDING, _WHOLE_ID, _MARKED = range(4)


def class_folders(classes: Sequence[str], used: Iterable[int], longest: int) -> list[str | None]:
    """Folder name of each class; None for one without pictures whose name cannot be a folder's.

    ``used`` are the numbers of classes that have pictures, ``longest`` the bytes that a file name may have.

    Raises
    ------
    FormatError
        Such a name of a class with pictures.
    """
    folders: list[str | None] = []
    needed = set(used)
    for number, name in enumerate(classes):
        why = _why_no_folder(name, longest)
        if why and number in needed:
            raise FormatError(f"class {name!r} cannot be a folder: {why}. {_WAY_OUT}")
        folders.append(None if why else id_to_path(name))
    return folders


def _why_no_folder(name: str, longest: int) -> str:
    try:
        path = id_to_path(name)
    except ValueError as error:
        return str(error)
    if path in (CLASSES_FILE, WORK_FOLDER):
        return "the export has a file or folder of that name"
    return "it has a slash" if "/" in path else _why_no_name(path, longest)


def _why_no_name(part: str, longest: int | None = None) -> str:
    """Why ``part`` of a path is none that is written; empty where it is."""
    if part.startswith("."):  # `..` too; and whoever reads the folder would pass over the others
        return f"{part!r} begins with a dot"
    if not part or "\0" in part:
        return f"{part!r} is no name"
    too_long = longest is not None and len(os.fsencode(part)) > longest
    return f"{part[:20] + '...'!r} is longer than {longest} bytes" if too_long else ""


def numbers_shift(classes: Sequence[str], folders: Sequence[str | None]) -> bool:
    """Whether who numbers the folders by their names, as ImageFolder and `convert` do, gets other numbers."""
    return [path_to_id(folder) for folder in sorted(filter(None, folders))] != [*classes]


def class_map_text(classes: Sequence[str]) -> str | None:
    """The text of the class map file, as ``convert --classes`` reads it; None where a name cannot be a line of UTF-8.

    It must not begin as a picture does (``BM``, as in BMW): then it begins with an empty line.
    """
    text = "".join(f"{name}\n" for name in classes)
    if [line.removesuffix("\n") for line in StringIO(text, newline=None)] != [*classes]:
        return None
    if not all(name.strip() for name in classes):
        return None
    try:
        text.encode()
    except UnicodeEncodeError:
        return None
    return "\n" + text if text.startswith(("BM", "GIF8", "RIFF", "\ufeff")) else text


def picture_paths(
    ids: Sequence[str],
    labels: Sequence[int],
    folders: Sequence[str | None],
    ending: str,
    longest: int = 255,
) -> list[str]:
    """The path of each picture, as `open` takes it, below the folder of the export; all are different.

    Parameters
    ----------
    ids, labels
        Of each row.
    folders
        Of each class, see `class_folders`.
    ending
        Of the new files, such as ``.png``.
    longest
        Bytes that a file name may have. A longer one is cut, and gets eight digits of the SHA-256 of its id.

    Raises
    ------
    FormatError
        An id leads out of the folder, or stands twice; or is none.
    """

    def path(row: int, level: int) -> str:
        folder = folders[labels[row]]
        if folder is None:
            raise RuntimeError(f"class {labels[row]} has rows and no folder")
        return _path(ids[row], folder, ending, longest, level)

    paths = [path(row, _SHORT) for row in range(len(ids))]
    levels: dict[int, int] = {}
    while contested := _contested(paths):
        movable = [row for row in contested if levels.get(row, _SHORT) < _MARKED]
        if not movable:
            named = ids[contested[0]]
            raise FormatError(f"id {named!r} stands twice: the pictures would be one file. {_WAY_OUT}")
        for row in movable:
            levels[row] = levels.get(row, _SHORT) + 1
            paths[row] = path(row, levels[row])
    return paths


def _path(id: str, folder: str, ending: str, longest: int, level: int) -> str:
    try:
        parts = id_to_path(id).split("/")
    except ValueError as error:
        raise FormatError(f"{error}. {_WAY_OUT}") from error
    *above, last = parts
    if why := next(filter(None, (_why_no_name(part, longest) for part in above)), _why_no_name(last)):
        raise FormatError(f"id {id!r} cannot be a path: {why}. {_WAY_OUT}")
    if level < _WHOLE_ID and len(parts) > 1 and parts[0] == folder:
        del parts[0]
    name = parts.pop()
    stem, suffix = os.path.splitext(name)
    stem = stem if level == _SHORT and suffix.lower() in PICTURE_SUFFIXES else name
    raw = os.fsencode(stem)
    if level == _MARKED or len(raw) + len(ending) > longest:
        mark = "~" + hashlib.sha256(id.encode()).hexdigest()[:8]
        stem = os.fsdecode(_cut(raw, longest - len(mark) - len(ending))) + mark
    return "/".join([folder, *parts, stem + ending])


def _cut(raw: bytes, longest: int) -> bytes:
    """At most ``longest`` bytes of ``raw``, not cut in the middle of a character of UTF-8."""
    while longest < len(raw) and raw[longest] & 0xC0 == 0x80:
        longest -= 1
    return raw[:longest]


def _contested(paths: Sequence[str]) -> list[int]:
    """Rows whose path is that of another row, or a folder of one."""
    times = Counter(paths)
    taken = {path for path, count in times.items() if count > 1} | (folders_of(paths) & times.keys())
    return [row for row, path in enumerate(paths) if path in taken] if taken else []


def folders_of(paths: Iterable[str]) -> set[str]:
    """All folders that ``paths`` lie in, those on top too."""
    found: set[str] = set()
    for path in paths:
        while "/" in path:
            path = path.rpartition("/")[0]
            if path in found:
                break
            found.add(path)
    return found


def refuse_twins(paths: Sequence[str]) -> None:
    """Refuse paths that differ only in case or Unicode form, for a file system that holds them to be one.

    Raises
    ------
    OutputError
        Names two of them.
    """
    forms: dict[str, str] = {}
    for path in (*folders_of(paths), *paths):
        form = unicodedata.normalize("NFC", path).casefold()
        if forms.setdefault(form, path) != path:
            raise OutputError(
                f"'{forms[form]}' and '{path}' are one name on the output's file system: use another one, or "
                "`--to webdataset`"
            )
