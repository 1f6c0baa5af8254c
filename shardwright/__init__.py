"""shardwright: trees of JPEGs to plain HDF5 or .npy shards, once; and training from them at memory speed."""

__version__ = "0.1.0"
