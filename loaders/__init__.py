"""Feeds training from the Datasets. Names are loaded when they are asked for (PEP 562)."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwright.loaders.loader import Loader, collate, make_loader
    from shardwright.loaders.options import LoaderOptions

_HOME = {
    "Loader": "shardwright.loaders.loader",
    "LoaderOptions": "shardwright.loaders.options",
    "collate": "shardwright.loaders.loader",
    "make_loader": "shardwright.loaders.loader",
}
__all__ = ["Loader", "LoaderOptions", "collate", "make_loader"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
