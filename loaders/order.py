"""In which order samples come: pure functions of (seed, epoch)."""

import numpy as np
import numpy.typing as npt

Order = npt.NDArray[np.int64]


def sequential(rows: int) -> Order:
    """The indices 0 to rows - 1, in order."""
    return np.arange(rows, dtype=np.int64)


def exact_shuffle(rows: int, seed: int, epoch: int) -> Order:
    """A uniform permutation of the indices 0 to rows - 1; another one each epoch."""
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(rows)


def batches(order: Order, batch_size: int, drop_last: bool) -> list[Order]:
    """``order`` cut into batches of ``batch_size``; a shorter last one is kept unless ``drop_last``."""
    end = len(order) - len(order) % batch_size if drop_last else len(order)
    return [order[start : start + batch_size] for start in range(0, end, batch_size)]
