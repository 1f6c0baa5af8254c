"""Rows that are taken from data sets that are there: of one, or of several one after the other, by one index.

The index counts the living rows of the first data set, then those of the second, and so on.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import numpy.typing as npt

from shardwright.convert.hints import Hints
from shardwright.convert.output import Output
from shardwright.convert.verify import damage_of
from shardwright.datasets.buffers import Pixels, RowBuffers
from shardwright.datasets.layout import COLUMN_KINDS, Manifest
from shardwright.datasets.manifest import read_manifest, why_removed
from shardwright.datasets.reader import Reader, StoredChunk
from shardwright.datasets.rows import Index
from shardwright.datasets.shards import finished_shard
from shardwright.errors import NAMED, ShardError

Array = npt.NDArray[Any]
#: Bytes of small columns that are kept: rows in another order want those of every shard again and again.
_KEPT_BYTES = 64 << 20
_STR_BYTES = 64


@dataclass(frozen=True, slots=True)
class RowSource:
    """One version of a data set.

    ``labels`` are the new numbers of its classes, None where they stay; ``prefix`` is put before its ids.
    """

    folder: Path
    version: int
    labels: tuple[int, ...] | None = None
    prefix: str = ""


@dataclass(frozen=True, slots=True)
class Known:
    """Of n rows: ids as objects of str, uint8 (n, 32) SHA-256 of their pictures, and int64 (n,) labels."""

    ids: Array
    digests: Array
    labels: Array

    def taking(self, index: Index) -> "Known":
        """Those at ``index``."""
        return Known(self.ids[index], self.digests[index], self.labels[index])


def damaged_source(folder: Path, damage: Sequence[str]) -> ShardError:
    """The error of a source that is not what it was, with the places of ``damage``."""
    more = f"; and {len(damage) - NAMED} places more" if len(damage) > NAMED else ""
    return ShardError(
        f"the source is damaged, so nothing was published: {'; '.join(damage[:NAMED])}{more}. "
        f"`shardwright repair '{folder}' --source SRC` makes damaged files again from the pictures"
    )


class SourceRows:
    """Reads rows of ``sources``. Every row's pixels are checked by their CRC-32 whenever they are read."""

    def __init__(self, sources: Sequence[RowSource], manifests: Sequence[Manifest] | None = None) -> None:
        self.sources = sources
        self.manifests = manifests or [read_manifest(s.folder, s.version) for s in sources]
        self._readers = [Reader(s.folder, m, "read") for s, m in zip(sources, self.manifests, strict=True)]
        #: (sources + 1,) index of the first row of each; the last is the number of rows.
        self.first: Index = np.cumsum([0, *(manifest.rows for manifest in self.manifests)])
        self._columns: dict[tuple[int, int, str], Array] = {}
        self._sound: set[tuple[int, int]] = set()
        self._room = _KEPT_BYTES

    def __len__(self) -> int:
        return int(self.first[-1])

    @cached_property
    def hints(self) -> list[Hints | None]:
        """What is known of the pictures of each source."""
        return [
            Output(source.folder).hints(manifest)
            for source, manifest in zip(self.sources, self.manifests, strict=True)
        ]

    @cached_property
    def known(self) -> Known | None:
        """Ids of all rows as they are known beside the shards; None where they are not, or nothing can confirm them."""
        ids, digests, labels = [], [], []
        for k, hints in enumerate(self.hints):
            kinds = {column.name: column.kind for column in self.manifests[k].columns}
            if hints is None or kinds.get("source_sha256") != "sha256":
                return None
            ids.append(self._translated(k, "id", np.array(hints.ids[: hints.rows], object)))
            digests.append(hints.hashes)
            labels.append(self._translated(k, "label", hints.labels))
        return Known(np.concatenate(ids), np.concatenate(digests), np.concatenate(labels))

    def ids(self, index: Index) -> list[str]:
        """The ids at ``index``, as `ids_like` has them of what is known beside the shards."""
        known = None if self.known is None else self.known.taking(index)
        return list(self.ids_like(known, index).tolist())

    def ids_like(self, known: Known | None, index: Index) -> Array:
        """The ids at ``index`` (n,), as objects of str: those ``known``, if of the rows that the shards name.

        Nothing but its SHA-256 guards the ids in an HDF5 shard, and to hash it costs as much as to copy it.
        """
        if known is not None and self._confirm(known, index):
            return known.ids
        return self.column("id", index)

    def _confirm(self, known: Known, index: Index) -> bool:
        """Whether the shards say the same of the rows at ``index``, and lost nothing of the columns beside.

        The fletcher32 of zeros is zero: of what a disk lost in a small column, nothing but zeros in it tells.
        """
        own = [{column.name for column in manifest.columns} for manifest in self.manifests]
        beside = {"crc32", "source_shape"}.intersection(*own)
        return (
            np.array_equal(self.column("source_sha256", index), known.digests)
            and np.array_equal(self.column("label", index), known.labels)
            and all(bool(self.column(name, index).all()) for name in beside)
        )

    def images(self, index: Index, out: Pixels) -> None:
        """Read the images at ``index`` (n,) into uint8 ``out`` (n, row_bytes)."""
        for k, at, own in self._by_source(index):
            places = RowBuffers([out], np.zeros(len(at), np.int64), at)
            self._readers[k].images(own, places)

    def stored_chunk(self, index: Index) -> tuple[int, StoredChunk] | None:
        """(source, chunk) that holds the rows at ``index`` and no others, in order; None where there is no such one."""
        k = int(np.searchsorted(self.first, index[0], side="right")) - 1
        if index.max() >= self.first[k + 1] or index.min() < self.first[k]:
            return None
        stored = self._readers[k].stored_chunk(index - self.first[k])
        return None if stored is None else (k, stored)

    def read_stored(self, source: int, stored: StoredChunk) -> Pixels:
        """Its bytes with their fletcher32, checked by it."""
        return self._readers[source].read_stored(stored)

    def raw_under(self, codec: str, index: Index) -> bool:
        """Whether all rows at ``index`` lie in raw chunks of shards that declare ``codec``."""
        return all(self._readers[k].raw_under(codec, own) for k, _, own in self._by_source(index))

    def column(self, name: str, index: Index) -> Array:
        """A small column at ``index`` (n,): labels by new numbers, text as objects of str, ids with their prefix."""
        found: Array | None = None
        for k, at, own in self._by_source(index):
            rows = self._readers[k].rows
            slot = rows.slot_of(own)
            shard = rows.shard_of(slot)
            numbers = np.unique(shard).tolist()
            if self._is_text(k, name):
                self._refuse_damage(k, numbers)
            for number in numbers:
                here = np.flatnonzero(shard == number)
                values = self._of_shard(k, number, name)[slot[here] - rows.first_slot[number]]
                if found is None:
                    found = np.empty((len(index), *values.shape[1:]), values.dtype)
                found[at[here]] = values
        return np.empty(0, object) if found is None else found

    def is_removed(self) -> bool:
        """Whether a version that rows are taken from was removed meanwhile."""
        return any(why_removed(source.folder, source.version) for source in self.sources)

    def refuse_damage(self, index: Index) -> None:
        """Look at all HDF5 shards that have rows at ``index``; in npy, who stumbles over one has named file and rows.

        Raises
        ------
        ShardError
            Names files and rows.
        """
        for k, _, own in self._by_source(index):
            rows = self._readers[k].rows
            self._refuse_damage(k, np.unique(rows.shard_of(rows.slot_of(own))).tolist())

    def _is_text(self, k: int, name: str) -> bool:
        kind = next(column.kind for column in self.manifests[k].columns if column.name == name)
        return kind == "id" or kind not in COLUMN_KINDS

    def _refuse_damage(self, k: int, numbers: Sequence[int]) -> None:
        """Compare HDF5 shards with their SHA-256, once each: nothing else guards their text.

        Over damaged text HDF5 may go round in circles for ever, or give another one. In npy each column is a file that
        is checked when it is read.
        """
        folder, manifest = self.sources[k].folder, self.manifests[k]
        new = [number for number in numbers if (k, number) not in self._sound]
        if manifest.storage != "hdf5" or not new:
            return
        with ThreadPoolExecutor(joblib.cpu_count()) as pool:  # hashing lets go of the interpreter's lock
            looks = pool.map(lambda number: list(damage_of(finished_shard(folder, manifest, number))), new)
            damage = [where for places in looks for where in places]
        if damage:
            raise damaged_source(folder, damage)
        self._sound.update((k, number) for number in new)

    def _of_shard(self, k: int, number: int, name: str) -> Array:
        values = self._columns.get((k, number, name))
        if values is None:
            values = self._translated(k, name, self._read(k, number, name))
            size = values.nbytes + (len(values) * _STR_BYTES if values.dtype == object else 0)
            if (
                size <= self._room
            ):  # what came first stays: all are wanted in turn, and the last used as soon as any
                self._room -= size
                self._columns[k, number, name] = values
        return values

    def _read(self, k: int, number: int, name: str) -> Array:
        shard = self._readers[k].shard(number)
        if name == "label":
            return shard.labels()
        values = shard.column(name)
        if values.dtype.kind == "S" or (values.dtype == object and shard.columns[name].kind != "id"):
            try:
                texts = [v.decode("utf-8") if isinstance(v, bytes) else str(v) for v in values.tolist()]
            except UnicodeDecodeError as error:
                raise ShardError(
                    f"'{shard.path(0)}': column {name!r} is no UTF-8, and cannot be carried over: {error}"
                ) from error
            return np.array(texts, object)
        return values

    def _translated(self, k: int, name: str, values: Array) -> Array:
        source = self.sources[k]
        if name == "label" and source.labels is not None:
            return np.array(source.labels, np.int64)[values]
        if name == "id" and source.prefix:
            return np.array([source.prefix + id for id in values.tolist()], object)
        return values

    def _by_source(self, index: Index) -> Iterator[tuple[int, Index, Index]]:
        """(source, places in ``index``, the source's own indices) of each source that has rows in it."""
        which = np.searchsorted(self.first, index, side="right") - 1
        for k in np.unique(which).tolist():
            at = np.flatnonzero(which == k)
            yield k, at, index[at] - self.first[k]
