"""Pure: how well classes are mixed within the chunks of a data set."""

import numpy as np
import numpy.typing as npt

from shardwright.datasets.rows import Index


def mixing(labels: npt.NDArray[np.int64], blocks: Index) -> float:
    """How often two rows of one chunk are of different classes, as a share of how often two rows of all are.

    About 1 where rows lie in a random order, 0 where each chunk is of one class; 1 where there is but one class. The
    first is one less Simpson's index of the pairs within chunks, the second one less that of all pairs (E. H. Simpson,
    Measurement of Diversity, Nature 163, 1949).

    Parameters
    ----------
    labels
        int64 (rows,), by index.
    blocks
        Where chunks begin, in indices, and the number of rows; see `RowMap.blocks`.
    """
    chunk = np.repeat(np.arange(len(blocks) - 1), np.diff(blocks))
    _, of_class_in_chunk = np.unique(np.stack([chunk, labels]), axis=1, return_counts=True)
    different_in_chunks = 1 - _same(of_class_in_chunk, np.diff(blocks))
    different = 1 - _same(np.unique(labels, return_counts=True)[1], np.array([len(labels)]))
    return float(different_in_chunks / different) if different > 0 else 1.0


def _same(of_class: npt.NDArray[np.int64], of_all: npt.NDArray[np.int64]) -> float:
    """Share of the pairs that are of one class."""
    pairs = int((of_all * (of_all - 1)).sum())
    return int((of_class * (of_class - 1)).sum()) / pairs if pairs else 0.0
