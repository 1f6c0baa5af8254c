"""The Dataset of HDF5 shards."""

from shardwright.datasets.base import ShardedDataset


class H5Dataset(ShardedDataset):
    __doc__ = ShardedDataset.__doc__
    storage = "hdf5"
