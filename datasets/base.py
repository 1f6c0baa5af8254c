"""The Dataset of a converted data set: what both formats share."""

import operator
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from shardwright.datasets.buffers import RowBuffers
from shardwright.datasets.layout import Manifest
from shardwright.datasets.manifest import read_manifest
from shardwright.datasets.reader import Reader, Verify
from shardwright.datasets.seeds import SeededIndices
from shardwright.errors import FormatError, UsageError

Transform = Callable[[Any], Any]


class SampleBatch(Sequence[tuple[Any, ...]]):
    """Samples read together: a sequence of samples whose columns are whole arrays.

    A collate function may take ``columns`` as they are, or go through the samples as through a list.

    Attributes
    ----------
    columns
        One entry a column asked for, in that order: images uint8 (n, C, H, W), channels-last in memory;
        labels int64 (n,); other numbers as tensors (n, ...); ids as a list of str.
    """

    def __init__(self, columns: tuple[Any, ...]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return SampleBatch(tuple(column[i] for column in self.columns))
        return tuple(_item(column[i]) for column in self.columns)


class ShardedDataset(Dataset[Any]):
    """Samples of a data set in shards, by index; a map-style `torch.utils.data.Dataset`.

    ``dataset[i]`` is a tuple of the columns asked for: by default the image, a uint8 tensor (C, H, W),
    and the label, an int. Results are writable and share no memory with any file.

    Only the manifest is read when it is made. Shards are opened when rows of theirs are first read, by
    each process for itself: nothing is open when it is pickled, and it survives fork, spawn and
    forkserver.

    Parameters
    ----------
    path
        Folder of the data set.
    version
        A version of it; None: the newest now. That version is kept to the end, also in workers.
    columns
        Names of the columns of a sample. None: ``("image", "label")``.
    verify
        When the CRC-32 of a row's pixels is checked: ``"first"``, when this process first reads it;
        ``"read"``, whenever it is read; ``"off"``, never.
    part
        ``(node, nodes)``: every nodes-th shard from number ``node`` on, as a data set of its own; the others need not
        be there. None: all of it.
    transform, target_transform
        Called with the image tensor, and with the label, of each sample.

    Raises
    ------
    FormatError
        There is no such data set, version or column, or it is of the other format.
    """

    #: Storage that this class reads; None for either.
    storage: str | None = None

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        version: int | None = None,
        columns: Sequence[str] | None = None,
        verify: Verify = "first",
        part: tuple[int, int] | None = None,
        transform: Transform | None = None,
        target_transform: Transform | None = None,
    ) -> None:
        if verify not in ("off", "first", "read"):
            raise UsageError(f"verify is {verify!r}, expected 'off', 'first' or 'read'")
        self.path = Path(path)
        self.columns = ("image", "label") if columns is None else tuple(columns)
        self.verify: Verify = verify
        self.part = part
        self.transform = transform
        self.target_transform = target_transform
        self._whole: Manifest | None = None
        self._manifest: Manifest | None = None
        self._reader: tuple[int, Reader] | None = None  # of the process with that id
        if part is not None:
            _check_part(part)
        self.version = version
        self.version = self.manifest.version
        known = {column.name: column.kind for column in self.manifest.columns}
        unknown = [name for name in self.columns if name not in known]
        if unknown or not self.columns:
            raise FormatError(
                f"'{self.path}' has the columns {', '.join(known)}; asked for {unknown or 'none'}"
            )
        self._kinds = {name: known[name] for name in self.columns}

    @property
    def manifest(self) -> Manifest:
        """The manifest of the version that is read; of a ``part``, with its shards and rows alone."""
        if self._manifest is None:
            self._manifest = self.whole if self.part is None else self.whole.part(*self.part)
        return self._manifest

    @property
    def whole(self) -> Manifest:
        """The manifest of all parts."""
        if self._whole is None:
            manifest = read_manifest(self.path, self.version)
            if self.storage not in (None, manifest.storage):
                raise FormatError(
                    f"'{self.path}' is {manifest.storage}, {type(self).__name__} reads {self.storage}: use open_dataset"
                )
            self._whole = manifest
        return self._whole

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names; label k is the k-th."""
        return self.manifest.classes

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of every image."""
        height, width, channels = self.manifest.image_shape
        return channels, height, width

    @property
    def reader(self) -> Reader:
        """The reader of this process; made when first asked for."""
        process = os.getpid()
        if self._reader is None or self._reader[0] != process:
            # After a fork, the parent's reader is left alone: its locks may be held by threads that the
            # child does not have.
            self._reader = process, Reader(self.path, self.manifest, self.verify)
        return self._reader[1]

    def labels(self, indices: Iterable[Any] | None = None) -> npt.NDArray[np.int64]:
        """Labels of the samples at ``indices``, or of all: int64 (n,). Reads no pixels."""
        wanted = np.arange(len(self)) if indices is None else self._indices(indices)
        return self.reader.labels(wanted)

    def ids(self, indices: Iterable[Any] | None = None) -> list[str]:
        """Ids of the samples at ``indices``, or of all: each is the picture's path below the source."""
        wanted = np.arange(len(self)) if indices is None else self._indices(indices)
        return list(self.reader.column("id", wanted).tolist())

    def read_batch(self, indices: Iterable[Any]) -> SampleBatch:
        """Read the samples at ``indices`` in one call, without transforms: each chunk is read once."""
        wanted = self._indices(indices)
        images = None
        if self.has_images:
            images = torch.empty((len(wanted), *self.manifest.image_shape), dtype=torch.uint8)
            rows = images.numpy().reshape(len(wanted), self.reader.row_bytes)
            self.reader.images(wanted, RowBuffers([rows]))
        return self.assembled(wanted, images)

    def assembled(self, indices: npt.NDArray[np.int64], images: torch.Tensor | None) -> SampleBatch:
        """The samples at ``indices``, their ``images`` (n, H, W, C) read already: the other columns are added."""
        columns = []
        for name in self.columns:
            kind = self._kinds[name]
            if kind == "image":
                if images is None:
                    raise ValueError(f"column {name!r} was asked for, and no images are given")
                columns.append(images.permute(0, 3, 1, 2))
            elif kind == "label":
                columns.append(torch.from_numpy(self.reader.labels(indices)))
            else:
                columns.append(_as_torch(self.reader.column(name, indices)))
        return SampleBatch(tuple(columns))

    def samples(self, batch: SampleBatch, indices: Sequence[Any]) -> Sequence[tuple[Any, ...]]:
        """``batch``, or a list of its samples after the transforms where there are any.

        What a transform raises carries a note with the index and the id of the sample.
        """
        if self.transform is None and self.target_transform is None:
            return batch
        return [self._transformed(sample, index) for sample, index in zip(batch, indices, strict=True)]

    @property
    def has_images(self) -> bool:
        """Whether the image is among the columns asked for."""
        return "image" in self._kinds.values()

    @property
    def makes_samples(self) -> bool:
        """Whether a subclass makes its own samples, one by one or a batch."""
        kind = type(self)
        own = kind.__getitem__ is not ShardedDataset.__getitem__
        return own or kind.__getitems__ is not ShardedDataset.__getitems__

    @property
    def per_sample(self) -> bool:
        """Whether Python code runs for each sample: a transform, or a subclass's own."""
        return self.makes_samples or self.transform is not None or self.target_transform is not None

    def __len__(self) -> int:
        return self.manifest.rows

    def __getitem__(self, index: Any) -> Any:
        return self.samples(self.read_batch([index]), [index])[0]

    def __getitems__(self, indices: Sequence[Any]) -> Sequence[Any]:
        """All samples of a batch; `torch.utils.data.DataLoader` calls it where it is there.

        `SeededIndices` seed the generators of random numbers: for each sample, and at first for the batch.
        """
        if isinstance(indices, SeededIndices):
            indices.seed_batch()
        if type(self).__getitem__ is not ShardedDataset.__getitem__:
            return [self[i] for i in indices]  # a subclass that makes its own samples
        return self.samples(self.read_batch(indices), indices)

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def __getstate__(self) -> dict[str, Any]:
        # Path and version say all; a subclass's own attributes go along.
        return {**self.__dict__, "_whole": None, "_manifest": None, "_reader": None}

    def __repr__(self) -> str:
        rows, shape = len(self), self.image_shape
        part = f", part={self.part}" if self.part else ""
        return f"{type(self).__name__}('{self.path}', version={self.version}{part}): {rows} images {shape}"

    def _transformed(self, sample: tuple[Any, ...], index: Any) -> tuple[Any, ...]:
        change = {"image": self.transform, "label": self.target_transform}
        try:
            return tuple(
                f(value) if (f := change.get(self._kinds[name])) else value
                for name, value in zip(self.columns, sample, strict=True)
            )
        except Exception as error:
            error.add_note(f"while transforming sample {int(index)}, '{self.ids([index])[0]}'")
            raise

    def _indices(self, indices: Iterable[Any]) -> npt.NDArray[np.int64]:
        """Checked indices, negative ones counted from the end, as for a list."""
        if isinstance(indices, SeededIndices):
            indices = indices.indices
        if isinstance(indices, np.ndarray) and indices.dtype.kind == "i":
            wanted = indices.astype(np.int64)
        else:
            wanted = np.fromiter((operator.index(i) for i in indices), np.int64)
        rows = len(self)
        wanted = np.where(wanted < 0, wanted + rows, wanted)
        if len(wanted) and not (wanted.min() >= 0 and wanted.max() < rows):
            bad = wanted[(wanted < 0) | (wanted >= rows)][0]
            raise IndexError(f"index {bad if bad >= 0 else bad - rows} of a data set of {rows} samples")
        return wanted


def _check_part(part: object) -> None:
    match part:
        case (int(node), int(nodes)) if 0 <= node < nodes:
            return
    raise UsageError(f"part is {part!r}, expected (node, nodes) with 0 <= node < nodes")


def _as_torch(values: npt.NDArray[Any]) -> Any:
    """A column as a tensor; ids as a list of str."""
    if values.dtype == object:
        return values.tolist()
    # torch knows little of uint32
    return torch.from_numpy(values.astype(np.int64) if values.dtype == np.uint32 else values)


def _item(value: Any) -> Any:
    """A number of a column as Python's own; other values as they are."""
    return value.item() if isinstance(value, torch.Tensor) and value.ndim == 0 else value
