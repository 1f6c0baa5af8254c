"""Feeds training from the Datasets. Names are loaded when they are asked for (PEP 562)."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwright.loaders.loader import Loader, collate, make_loader
    from shardwright.loaders.memory import WorkerMemory
    from shardwright.loaders.micro import micro_batch
    from shardwright.loaders.options import LoaderOptions
    from shardwright.loaders.plan import suggest_workers
    from shardwright.loaders.quality import ShuffleQuality, shuffle_quality

_HOME = {
    "Loader": "shardwright.loaders.loader",
    "LoaderOptions": "shardwright.loaders.options",
    "collate": "shardwright.loaders.loader",
    "ShuffleQuality": "shardwright.loaders.quality",
    "WorkerMemory": "shardwright.loaders.memory",
    "make_loader": "shardwright.loaders.loader",
    "micro_batch": "shardwright.loaders.micro",
    "shuffle_quality": "shardwright.loaders.quality",
    "suggest_workers": "shardwright.loaders.plan",
}
__all__ = [
    "Loader",
    "LoaderOptions",
    "ShuffleQuality",
    "WorkerMemory",
    "collate",
    "make_loader",
    "micro_batch",
    "shuffle_quality",
    "suggest_workers",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
