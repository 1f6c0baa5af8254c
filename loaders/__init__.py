"""Feeds training from the Datasets. Names are loaded when they are asked for (PEP 562)."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwright.loaders.device import to_device
    from shardwright.loaders.loader import Loader, collate, make_loader
    from shardwright.loaders.options import LoaderOptions
    from shardwright.loaders.plan import suggest_workers
    from shardwright.loaders.quality import ShuffleQuality, shuffle_quality
    from shardwright.loaders.transform import (
        BatchTransform,
        CenterCrop,
        Normalize,
        RandomCrop,
        RandomResizedCrop,
    )

_HOME = {
    "BatchTransform": "shardwright.loaders.transform",
    "CenterCrop": "shardwright.loaders.transform",
    "Loader": "shardwright.loaders.loader",
    "LoaderOptions": "shardwright.loaders.options",
    "collate": "shardwright.loaders.loader",
    "Normalize": "shardwright.loaders.transform",
    "RandomCrop": "shardwright.loaders.transform",
    "RandomResizedCrop": "shardwright.loaders.transform",
    "ShuffleQuality": "shardwright.loaders.quality",
    "make_loader": "shardwright.loaders.loader",
    "shuffle_quality": "shardwright.loaders.quality",
    "suggest_workers": "shardwright.loaders.plan",
    "to_device": "shardwright.loaders.device",
}
__all__ = [
    "BatchTransform",
    "CenterCrop",
    "Loader",
    "LoaderOptions",
    "Normalize",
    "RandomCrop",
    "RandomResizedCrop",
    "ShuffleQuality",
    "collate",
    "make_loader",
    "shuffle_quality",
    "suggest_workers",
    "to_device",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
