"""The Dataset of .npy shards."""

from shardwright.datasets.base import ShardedDataset


class NpyDataset(ShardedDataset):
    __doc__ = ShardedDataset.__doc__
    storage = "npy"
