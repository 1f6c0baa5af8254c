"""What lies on disk, and the Datasets that read it. Names are loaded when they are asked for (PEP 562)."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwright.datasets.base import SampleBatch, ShardedDataset
    from shardwright.datasets.comparison import Comparison, compare
    from shardwright.datasets.hdf5 import H5Dataset
    from shardwright.datasets.npy import NpyDataset
    from shardwright.datasets.open import open_dataset

_HOME = {
    "Comparison": "shardwright.datasets.comparison",
    "H5Dataset": "shardwright.datasets.hdf5",
    "NpyDataset": "shardwright.datasets.npy",
    "SampleBatch": "shardwright.datasets.base",
    "ShardedDataset": "shardwright.datasets.base",
    "compare": "shardwright.datasets.comparison",
    "open_dataset": "shardwright.datasets.open",
}
__all__ = [
    "Comparison",
    "H5Dataset",
    "NpyDataset",
    "SampleBatch",
    "ShardedDataset",
    "compare",
    "open_dataset",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
