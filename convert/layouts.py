"""Pure, but for a look at one shard: how rows lie on disk now, and how they are to lie."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np

from shardwright.convert.options import Compression, StoreOptions
from shardwright.datasets.layout import Column, Manifest, Storage
from shardwright.datasets.shards import finished_shard
from shardwright.errors import FormatError, UsageError


@dataclass(frozen=True, slots=True)
class LayoutOptions:
    """How rows are to lie on disk, as in `StoreOptions`; None: as they do now."""

    format: Storage | None = None
    chunk_rows: int | None = None
    shard_mib: float | None = None
    compression: Compression | None = None
    min_saving: float | None = None

    def __post_init__(self) -> None:
        self.target(StoreOptions("hdf5"))  # what is wrong whatever there is

    def target(self, now: StoreOptions) -> StoreOptions:
        """The options of what is to be made of rows that lie as ``now`` says, the compression put in.

        Raises
        ------
        UsageError
            They contradict one another.
        """
        format = self.format or now.format
        wanted = StoreOptions(
            format=format,
            chunk_rows=now.chunk_rows if self.chunk_rows is None else self.chunk_rows,
            shard_mib=now.shard_mib if self.shard_mib is None else self.shard_mib,
            compression=self.compression or (now.compression if format == now.format else None),
            min_saving=now.min_saving if self.min_saving is None else self.min_saving,
        )
        if self.min_saving is not None and wanted.codec != "lzf":
            what = wanted.codec if wanted.format == "hdf5" else "npy"
            raise UsageError(f"min_saving is of chunks under lzf, not of {what}: leave it out")
        return replace(wanted, compression=wanted.codec)


def store_of(folder: Path, manifest: Manifest) -> StoreOptions:
    """How the rows of a data set lie on disk: as its manifest remembers, or, of the compression, as its shards say.

    Raises
    ------
    ShardError
        The first shard cannot be opened, where the manifest does not say.
    """
    options = manifest.options
    codec = options.get("compression")
    if manifest.storage == "npy":
        codec = "none"
    elif codec not in get_args(Compression):
        codec = (
            finished_shard(folder, manifest, 0).opened().index.codec or "none" if manifest.shards else "lzf"
        )
    store = StoreOptions(manifest.storage, manifest.chunk_rows, compression=codec)
    with suppress(UsageError):  # what a manifest says may be anything
        if (value := _number(options.get("shard_mib"))) is not None:
            store = replace(store, shard_mib=value)
    with suppress(UsageError):
        if (value := _number(options.get("min_saving"))) is not None:
            store = replace(store, min_saving=value)
    return store


def _number(value: object) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def same_store(now: StoreOptions, wanted: StoreOptions) -> bool:
    """Whether chunks are laid out alike; how many rows a shard has is not asked."""
    return (now.format, now.chunk_rows, now.codec) == (
        wanted.format,
        wanted.chunk_rows,
        wanted.codec,
    ) and same_saving(now, wanted)


def same_saving(now: StoreOptions, wanted: StoreOptions) -> bool:
    """Whether LZF leaves out the same chunks."""
    return wanted.codec != "lzf" or now.min_saving == wanted.min_saving


def even_shards(rows: int, row_bytes: int, store: StoreOptions) -> list[int]:
    """Rows of each shard of ``rows`` rows, all alike but the last.

    Raises
    ------
    UsageError
        A chunk would be larger than HDF5 allows.
    """
    if store.chunk_rows * row_bytes >= 1 << 32:
        raise UsageError(
            f"a chunk of {store.chunk_rows} rows has {store.chunk_rows * row_bytes} bytes, HDF5 allows less than 4 "
            "GiB: use fewer chunk_rows"
        )
    each = store.rows_per_shard(rows, row_bytes)
    return [min(each, rows - start) for start in range(0, rows, each)]


def carried_columns(manifests: Sequence[Manifest], folders: Sequence[Path]) -> tuple[Column, ...]:
    """The columns beside the image, which all of ``manifests`` have, and which both formats can hold.

    Raises
    ------
    FormatError
        One cannot be carried over. Names it.
    """
    first = [column for column in manifests[0].columns if column.kind != "image"]
    for manifest, folder in zip(manifests, folders, strict=True):
        other = {column.name: column for column in manifest.columns if column.kind != "image"}
        for column in (*first, *other.values()):
            if other.get(column.name) != column or column not in first:
                raise FormatError(
                    f"'{folders[0]}' and '{folder}' have not the same column '{column.name}': data sets of "
                    "other columns cannot be put together"
                )
    for column in first:
        if column.dtype != "utf8" and not _is_plain(column.dtype):
            raise FormatError(
                f"'{folders[0]}' has the column '{column.name}' of {column.dtype}, which cannot be carried over: "
                "expected numbers, or utf8"
            )
        if column.dtype == "utf8" and column.shape:
            raise FormatError(
                f"'{folders[0]}' has the column '{column.name}', text of shape {list(column.shape)}, which cannot be "
                "carried over: expected one text a row"
            )
    return tuple(first)


def _is_plain(dtype: str) -> bool:
    try:
        found = np.dtype(dtype)
    except TypeError:
        return False
    return found.kind in "biuf" and found.name == dtype


def recorded(manifest: Manifest, store: StoreOptions, seed: int, size: int | None) -> dict[str, Any]:
    """What stands under ``options`` of the new manifest: how the pixels were made, and how they are stored now."""
    options = dict(manifest.options)
    if size is not None:
        before = options.get("resized_from")
        options["resized_from"] = [*(before if isinstance(before, list) else []), manifest.image_shape[0]]
        options["size"] = size
    return {
        **options,
        "format": store.format,
        "chunk_rows": store.chunk_rows,
        "shard_mib": store.shard_mib,
        "compression": store.codec,
        "min_saving": store.min_saving,
        "seed": seed,
    }
