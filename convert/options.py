"""What a conversion may be told, in small frozen dataclasses that check themselves."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args

import numpy as np

from shardwright.datasets.layout import Storage
from shardwright.datasets.pixels import PIXEL_PATH, PixelOptions
from shardwright.errors import UsageError

Compression = Literal["lzf", "gzip", "none"]
#: Bytes of pixels a shard holds by default, in MiB, where a 64th of the rows is not less.
DEFAULT_SHARD_MIB = 256
SMALLEST_SHARE = 64


#: Unit of a time -> seconds.
UNITS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}


def seconds_of(text: str, what: str) -> float:
    """Seconds of ``14d``, ``36h``, ``90m``, ``30s`` or ``0``; ``what`` it is of, for messages.

    Raises
    ------
    UsageError
        It is none of these.
    """
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([dhms])", text.strip())
    if not found and text.strip() != "0":
        raise UsageError(f"{what} is {text!r}, expected a number and its unit, such as 14d, 36h, 90m or 30s")
    return float(found[1]) * UNITS[found[2]] if found else 0.0


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """How rows are laid out on disk.

    Parameters
    ----------
    format
        ``hdf5`` or ``npy``.
    chunk_rows
        Rows of one HDF5 chunk: the batch size, or a divisor of it. In npy, the rows that block order
        reads together.
    shard_mib
        Pixels of one shard in MiB, in whole chunks. None: 256 MiB or a 64th of the rows, whichever is
        smaller, so that there are shards to share out; it depends on the data set alone.
    compression
        ``lzf`` (every h5py reads it, a stock HDF5 does not), ``gzip`` (every HDF5 reads it; slow) or
        ``none``. None: ``lzf`` for hdf5, ``none`` for npy, which knows no compression.
    min_saving
        A chunk that LZF would not make smaller by this share is stored raw: raw rows are read 7 to 10
        times faster. 0.35 leaves photographs raw and packs flat pictures. Without meaning for gzip, which
        is asked for to have small files.
    """

    format: Storage = "hdf5"
    chunk_rows: int = 32
    shard_mib: float | None = None
    compression: Compression | None = None
    min_saving: float = 0.35

    def __post_init__(self) -> None:
        if self.format not in get_args(Storage):
            raise UsageError(f"format is {self.format!r}, expected one of {', '.join(get_args(Storage))}")
        if not 1 <= self.chunk_rows <= 1 << 20:
            raise UsageError(f"chunk_rows is {self.chunk_rows}, expected 1 to {1 << 20}")
        if self.shard_mib is not None and not 0 < self.shard_mib <= 1 << 20:
            raise UsageError(f"shard_mib is {self.shard_mib}, expected more than 0 and at most {1 << 20} MiB")
        if self.compression not in (None, *get_args(Compression)):
            raise UsageError(
                f"compression is {self.compression!r}, expected one of {', '.join(get_args(Compression))}"
            )
        if self.format == "npy" and self.compression not in (None, "none"):
            raise UsageError(f"npy knows no compression, found {self.compression!r}: use none, or hdf5")
        if not 0 <= self.min_saving <= 1:
            raise UsageError(f"min_saving is {self.min_saving}, expected a share from 0 to 1")

    @property
    def codec(self) -> Compression:
        """The compression, with the default of the format put in."""
        return self.compression or ("lzf" if self.format == "hdf5" else "none")

    def rows_per_shard(self, rows: int, row_bytes: int) -> int:
        """Rows of each shard but the last of a data set of ``rows`` rows: whole chunks, at least one."""
        by_bytes = int((self.shard_mib or DEFAULT_SHARD_MIB) * 2**20) // row_bytes // self.chunk_rows
        by_share = -(-rows // SMALLEST_SHARE // self.chunk_rows) if self.shard_mib is None else by_bytes
        return max(1, min(by_bytes, by_share)) * self.chunk_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How a run goes, whatever it makes.

    Parameters
    ----------
    jobs
        Worker processes. None: as many as the CPUs and the memory allow that this process may use.
    max_runtime
        Seconds after which no further shard is begun: what was finished is kept, and the same run goes on. None: it
        runs to its end.
    """

    jobs: int | None = None
    max_runtime: float | None = None

    def __post_init__(self) -> None:
        if self.jobs is not None and not 1 <= self.jobs <= 4096:
            raise UsageError(f"jobs is {self.jobs}, expected 1 to 4096")
        if self.max_runtime is not None and not 0 < self.max_runtime < 1e9:
            raise UsageError(
                f"max_runtime is {self.max_runtime:g} seconds, expected more than 0 and less than a billion"
            )


def check_seed(seed: int) -> None:
    """Raise UsageError for a seed that is out of range."""
    if not 0 <= seed < 1 << 63:
        raise UsageError(f"seed is {seed}, expected 0 to 2**63 - 1")


@dataclass(frozen=True, slots=True)
class ConvertOptions(RunOptions):
    """All that `convert` may be told.

    Parameters
    ----------
    pixels, store
        How pictures become pixels, and pixels shards.
    seed
        Of the permutation of all rows, so that neighbours on disk are of different classes.
    classes
        The class map, if it is to be given: class number k is the k-th name. None: the class folders,
        sorted by code point as torchvision's ImageFolder does.
    splits
        Whether folders called train, val, valid, validation or test are data sets of their own.
    strict
        Whether any reject fails the run before anything is published.
    new_version
        Whether other options on an existing output make its next version rather than an error.
    allow_shrink
        Whether a source that lost more than half of its pictures is converted all the same.
    newer_than_grace
        Seconds that must have passed since a picture's file was last changed, for it to be taken: files that are still
        being copied in are left for the next run. 0: all are taken.
    jobs, max_runtime
        As in `RunOptions`.
    """

    pixels: PixelOptions = field(default_factory=PixelOptions)
    store: StoreOptions = field(default_factory=StoreOptions)
    seed: int = 0
    classes: tuple[str, ...] | None = None
    splits: bool = True
    strict: bool = False
    new_version: bool = False
    allow_shrink: bool = False
    newer_than_grace: float = 0.0

    def __post_init__(self) -> None:
        RunOptions.__post_init__(self)
        check_seed(self.seed)
        if not 0 <= self.newer_than_grace < 1e9:
            raise UsageError(
                f"newer_than_grace is {self.newer_than_grace:g} seconds, expected 0 to less than a billion"
            )
        chunk_bytes = self.store.chunk_rows * self.row_bytes
        if chunk_bytes >= 1 << 32:
            raise UsageError(
                f"a chunk of {self.store.chunk_rows} rows has {chunk_bytes} bytes, HDF5 allows less than 4 GiB: "
                "use fewer chunk_rows"
            )
        if self.classes is not None and len(set(self.classes)) != len(self.classes):
            raise UsageError("classes: a name stands twice")

    @property
    def row_bytes(self) -> int:
        """Bytes of one image."""
        return int(np.prod(self.image_shape))

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(height, width, channels) of every image."""
        return self.pixels.size, self.pixels.size, self.pixels.channels

    def recorded(self) -> dict[str, Any]:
        """What stands under ``options`` in the manifest: all that decides the bytes, and nothing else."""
        store = {k: v for k, v in asdict(self.store).items() if k != "format"}
        return {
            "pixel_path": PIXEL_PATH,
            **asdict(self.pixels),
            "format": self.store.format,
            **store,
            "compression": self.store.codec,
            "seed": self.seed,
            "class_map": "folders" if self.classes is None else "given",
        }

    @classmethod
    def from_recorded(cls, found: Mapping[str, Any]) -> "ConvertOptions":
        """The options that `recorded` wrote into a manifest, which may be of an older version, or of anybody.

        Raises
        ------
        UsageError
            Pictures were decoded in another way, an option is unknown here, or a value is none.
        """
        if (path := found.get("pixel_path")) != PIXEL_PATH:
            raise UsageError(f"its pictures were decoded by {path!r}, here they are by {PIXEL_PATH!r}")
        default = {**cls().recorded(), "bits": 0, "shard_mib": 0.0}
        if unknown := sorted(map(str, found.keys() - default.keys())):
            raise UsageError(
                f"it was made with options that are unknown here ({', '.join(unknown)}): install a newer shardwright"
            )
        for key, value in found.items():
            kinds = (int, float) if type(default[key]) is float else (type(default[key]),)
            if type(value) not in kinds and not (value is None and key in ("bits", "shard_mib")):
                raise UsageError(f"its option {key} is {value!r}")
        pixels = {f.name: found[f.name] for f in fields(PixelOptions) if f.name in found}
        store = {f.name: found[f.name] for f in fields(StoreOptions) if f.name in found}
        return cls(PixelOptions(**pixels), StoreOptions(**store), found.get("seed", 0))
