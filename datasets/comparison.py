"""Two data sets beside each other: whether a label means the same in both, and whether a picture is in both."""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardwright.datasets.manifest import read_manifest
from shardwright.datasets.reader import Reader

_NAMED = 5


@dataclass(frozen=True, slots=True)
class Comparison:
    """What `compare` found.

    Attributes
    ----------
    only_first, only_second
        Classes that one of them alone has.
    renumbered
        Classes of both whose number is not the same.
    shared
        (id in the first, id in the second) of pictures of the same bytes, sorted: a picture that is trained on and
        validated with.
    """

    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    renumbered: tuple[str, ...]
    shared: tuple[tuple[str, str], ...]

    @property
    def same_classes(self) -> bool:
        """Whether the two class maps are the same."""
        return not (self.only_first or self.only_second or self.renumbered)

    def in_words(self) -> list[str]:
        """What differs, and what should not be the same; empty where all is well."""
        named = [
            ("classes that only the first has", self.only_first),
            ("classes that only the second has", self.only_second),
            ("classes with another number", self.renumbered),
            ("pictures that are in both", [f"{a} = {b}" for a, b in self.shared]),
        ]
        return [
            f"{len(names)} {what}: {', '.join(map(repr, names[:_NAMED]))}{', ...' if len(names) > _NAMED else ''}"
            for what, names in named
            if names
        ]


def compare(first: str | os.PathLike[str], second: str | os.PathLike[str]) -> Comparison:
    """Compare the newest versions of two data sets: class maps, and pictures by the SHA-256 of their files.

    Reads manifests, hashes, and the ids of pictures that are in both; no pixels.

    Raises
    ------
    FormatError
        One of them is no data set.
    ShardError
        A shard cannot be read.
    """
    folders = Path(first), Path(second)
    a, b = (read_manifest(folder) for folder in folders)
    readers = Reader(folders[0], a, "off"), Reader(folders[1], b, "off")
    hashes = [
        [row.tobytes() for row in reader.column("source_sha256", np.arange(manifest.rows))]
        for reader, manifest in zip(readers, (a, b), strict=True)
    ]
    place = {digest: row for row, digest in enumerate(hashes[1])}
    pairs = [(row, place[digest]) for row, digest in enumerate(hashes[0]) if digest in place]
    ids = [
        reader.column("id", np.array(rows, np.int64)).tolist()
        for reader, rows in zip(readers, ([p[0] for p in pairs], [p[1] for p in pairs]), strict=True)
    ]
    number = {name: k for k, name in enumerate(b.classes)}
    return Comparison(
        only_first=tuple(name for name in a.classes if name not in number),
        only_second=tuple(name for name in b.classes if name not in set(a.classes)),
        renumbered=tuple(name for k, name in enumerate(a.classes) if number.get(name, k) != k),
        shared=tuple(sorted(zip(*ids, strict=True))),
    )
