"""How well an order mixes: labels and neighbours of its batches, beside those of an exact shuffle."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwright.datasets.base import ShardedDataset
from shardwright.loaders.loader import make_loader
from shardwright.loaders.options import LoaderOptions
from shardwright.loaders.order import Indices, exact_shuffle


@dataclass(frozen=True, slots=True)
class Mix:
    """What the batches of some epochs are like.

    Attributes
    ----------
    label_distance
        Total variation distance between the labels of a batch and those of the data set, mean over
        batches: 0 for the same shares, towards 1 for batches of one class. Never 0 for small batches.
    chunk_mates
        Share of the pairs of samples of a batch that lie in one chunk on disk, mean over batches.
    met_again
        Share of the pairs of samples of a batch that are in one batch in the next epoch too, mean over
        batches.
    """

    label_distance: float
    chunk_mates: float
    met_again: float


@dataclass(frozen=True, slots=True)
class ShuffleQuality:
    """The order of a loader, and an exact shuffle of the same data set in the same batches."""

    order: str
    measured: Mix
    exact: Mix

    def __str__(self) -> str:
        names = ("label_distance", "chunk_mates", "met_again")
        pairs = (f"{n} {getattr(self.measured, n):.4f} (exact: {getattr(self.exact, n):.4f})" for n in names)
        return f"{self.order} order: " + ", ".join(pairs)


def shuffle_quality(
    dataset: ShardedDataset,
    batch_size: int,
    *,
    seed: int = 0,
    epochs: int = 3,
    options: LoaderOptions | None = None,
) -> ShuffleQuality:
    """Measure the order that ``make_loader(dataset, batch_size, shuffle=True, seed=seed)`` gives.

    Reads labels and no pixels.

    Parameters
    ----------
    epochs
        Epochs that are looked at, at least 2.
    options
        As for `make_loader`; ``shuffle_by`` and ``mixed_chunks`` matter.
    """
    batches = make_loader(dataset, batch_size, shuffle=True, seed=seed, options=options).batches
    labels, blocks = dataset.labels(), batches.blocks
    orders = [batches.take_share().indices for _ in range(max(2, epochs))]
    exact = [exact_shuffle(blocks, seed, epoch).indices for epoch in range(len(orders))]
    return ShuffleQuality(
        batches.plan.order, _mix(orders, labels, blocks, batch_size), _mix(exact, labels, blocks, batch_size)
    )


def _mix(
    orders: Sequence[Indices],
    labels: npt.NDArray[np.int64],
    blocks: npt.NDArray[np.int64],
    batch_size: int,
) -> Mix:
    rows = len(labels)
    whole = rows - rows % batch_size or rows
    shares = np.bincount(labels) / rows
    chunk = np.searchsorted(blocks, np.arange(rows), side="right")
    starts = range(0, whole, batch_size)
    distances, mates, again = [], [], []
    for epoch, order in enumerate(orders):
        following = np.empty(rows, np.int64)
        following[orders[(epoch + 1) % len(orders)]] = np.arange(rows) // batch_size
        for batch in (order[start : start + batch_size] for start in starts):
            here = np.bincount(labels[batch], minlength=len(shares)) / len(batch)
            distances.append(np.abs(here - shares).sum() / 2)
            mates.append(_pairs_alike(chunk[batch]))
            again.append(_pairs_alike(following[batch]))
    return Mix(float(np.mean(distances)), float(np.mean(mates)), float(np.mean(again)))


def _pairs_alike(values: npt.NDArray[np.int64]) -> float:
    """Share of the pairs of ``values`` that are equal."""
    counts = np.unique(values, return_counts=True)[1]
    pairs = len(values) * (len(values) - 1)
    return float((counts * (counts - 1)).sum() / pairs) if pairs else 0.0
