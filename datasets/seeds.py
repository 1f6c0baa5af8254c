"""Random numbers of a sample: a function of (seed, epoch, index), whichever process draws them."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, slots=True, eq=False)
class SeededIndices(Sequence[int]):
    """Indices of a batch which, gone through, seed torch, NumPy and `random` for each of them in turn.

    So whatever loops over them to make samples, a subclass's own ``__getitems__`` too, draws the same numbers for a
    sample in any process, batch or order. As an array (``np.asarray``) they seed nothing.

    Parameters
    ----------
    indices
        int (n,).
    seed, epoch
        Of the loader.
    part
        The part of the data set that the indices count in.
    """

    indices: npt.NDArray[Any]
    seed: int
    epoch: int
    part: int = 0

    def __iter__(self) -> Iterator[int]:
        for index in self.indices.tolist():
            self._seed(index)
            yield index

    def seed_batch(self) -> None:
        """Seed for what is drawn for the batch as a whole, such as a collate function's mixing of its samples."""
        self._seed(-1 if not len(self.indices) else int(self.indices[0]), whole_batch=True)

    def _seed(self, index: int, whole_batch: bool = False) -> None:
        entropy = [self.seed, self.epoch, index & (1 << 64) - 1, self.part, whole_batch]
        words = np.random.SeedSequence(entropy).generate_state(4)
        # Not torch.manual_seed: that would touch the devices too, of which a forked worker is to know nothing.
        torch.default_generator.manual_seed(int(words[0]) << 32 | int(words[1]))
        np.random.seed(words)
        random.seed(words.tobytes())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.array(self.indices, dtype) if copy else np.asarray(self.indices, dtype)

    def __add__(self, other: Sequence[int]) -> "SeededIndices":
        # As lists: frameworks that deal out the batches of a sampler anew put parts of them together.
        indices = np.concatenate([self.indices, np.asarray(other, self.indices.dtype)])
        return SeededIndices(indices, self.seed, self.epoch, self.part)

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, i: int) -> int: ...
    @overload
    def __getitem__(self, i: slice) -> "SeededIndices": ...
    def __getitem__(self, i: int | slice) -> "int | SeededIndices":
        if isinstance(i, slice):
            return SeededIndices(self.indices[i], self.seed, self.epoch, self.part)
        return int(self.indices[i])


@contextmanager
def kept_generators() -> Iterator[None]:
    """Leave the states of torch's, NumPy's and `random`'s generators as they were: the caller's own are not to be
    seeded anew by making samples in its process."""
    states = torch.default_generator.get_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.default_generator.set_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
