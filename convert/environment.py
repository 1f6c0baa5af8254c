"""The versions that decide the bytes of a shard: same input, options and environment give the same bytes."""

from collections.abc import Sequence
from functools import cache
from importlib.metadata import version

import h5py

from shardwright import __version__


@cache  # 6 ms, and the same for every shard of a process
def environment() -> dict[str, str]:
    """Name -> version of all that touches pixels or file bytes, and torch's CPU capability.

    Loads torch, so it is called where pictures are decoded.
    """
    import torch

    packages = ("h5py", "imagecodecs", "numpy", "pillow", "simplejpeg", "torch")
    return {**_of(packages), "cpu_capability": torch.backends.cpu.get_cpu_capability()}


@cache
def storing_environment() -> dict[str, str]:
    """The same of all that touches file bytes alone, where no pixel is made: without torch."""
    return _of(("h5py", "imagecodecs", "numpy"))


def environment_of(decodes: bool) -> dict[str, str]:
    """`environment` where pixels are made, else `storing_environment`."""
    return environment() if decodes else storing_environment()


def _of(packages: Sequence[str]) -> dict[str, str]:
    return {
        "shardwright": __version__,
        "hdf5": h5py.version.hdf5_version,
        **{name: version(name) for name in packages},
    }
