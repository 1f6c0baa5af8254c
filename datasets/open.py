"""Open a data set of either format."""

import os
from collections.abc import Sequence
from pathlib import Path

from shardwright.datasets.base import ShardedDataset, Transform
from shardwright.datasets.hdf5 import H5Dataset
from shardwright.datasets.manifest import read_manifest
from shardwright.datasets.npy import NpyDataset
from shardwright.datasets.reader import Verify


def open_dataset(
    path: str | os.PathLike[str],
    version: int | None = None,
    columns: Sequence[str] | None = None,
    verify: Verify = "first",
    part: tuple[int, int] | None = None,
    transform: Transform | None = None,
    target_transform: Transform | None = None,
) -> ShardedDataset:
    """Open the data set in the folder ``path``: an `H5Dataset` or an `NpyDataset`, whichever it is.

    Parameters are those of `ShardedDataset`.

    Raises
    ------
    FormatError
        There is no such data set, version or column; for a folder of splits, it names them.
    """
    manifest = read_manifest(Path(path), version)
    kind = H5Dataset if manifest.storage == "hdf5" else NpyDataset
    return kind(
        path,
        version=manifest.version,
        columns=columns,
        verify=verify,
        part=part,
        transform=transform,
        target_transform=target_transform,
    )
