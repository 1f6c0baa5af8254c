"""Converts trees of pictures into data sets. Names are loaded when they are asked for (PEP 562)."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwright.convert.options import ConvertOptions, StoreOptions
    from shardwright.convert.run import Conversion, convert
    from shardwright.datasets.pixels import PixelOptions

_HOME = {
    "Conversion": "shardwright.convert.run",
    "ConvertOptions": "shardwright.convert.options",
    "PixelOptions": "shardwright.datasets.pixels",
    "StoreOptions": "shardwright.convert.options",
    "convert": "shardwright.convert.run",
}
__all__ = ["Conversion", "ConvertOptions", "PixelOptions", "StoreOptions", "convert"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
