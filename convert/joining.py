"""Pure: what the manifests of several data sets come to as one."""

import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwright.datasets.layout import Manifest
from shardwright.errors import SourceError

_OF_STORE = frozenset(("format", "chunk_rows", "shard_mib", "compression", "min_saving", "seed"))


def join_classes(folders: Sequence[Path], maps: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """The classes of the first, with their numbers, then those that the others have beside.

    Raises
    ------
    SourceError
        Two names differ only in case or Unicode form: on another file system they are one.
    """
    found: dict[str, tuple[str, Path]] = {}
    classes: dict[str, None] = {}
    for folder, names in zip(folders, maps, strict=True):
        for name in names:
            form = unicodedata.normalize("NFC", name).casefold()
            other, where = found.setdefault(form, (name, folder))
            if name in classes:  # letter for letter
                continue
            if other != name and where != folder:
                raise SourceError(
                    f"class '{other}' of '{where}' and class '{name}' of '{folder}' differ only in case or "
                    "Unicode form: are they one class? Convert one of them again with the other's name"
                )
            classes[name] = None
    return tuple(classes)


def added(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The sum of counts of the same name, sorted."""
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return dict(sorted(total.items()))


def common_options(manifests: Sequence[Manifest], options: dict[str, Any]) -> dict[str, Any]:
    """``options`` without those in which the pixels of the data sets differ."""
    return {
        key: value
        for key, value in options.items()
        if key in _OF_STORE or all(m.options.get(key) == value for m in manifests)
    }


def different_pixels(folders: Sequence[Path], manifests: Sequence[Manifest]) -> list[str]:
    """In which options that made the pixels the others differ from the first, in words."""
    first = manifests[0]
    notes = []
    for folder, manifest in zip(folders[1:], manifests[1:], strict=True):
        keys = sorted(({*first.options} | {*manifest.options}) - _OF_STORE - {"class_map"})
        different = [
            f"{key} is {first.options.get(key)!r} there, {manifest.options.get(key)!r} here"
            for key in keys
            if first.options.get(key) != manifest.options.get(key)
        ]
        if different:
            notes.append(
                f"the pixels of '{folders[0]}' and '{folder}' were made by other options: {'; '.join(different)}"
            )
    return notes
