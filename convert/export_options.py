"""What `export` may be told, in a frozen dataclass that checks itself."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from shardwright.convert.picturefile import PictureFile
from shardwright.errors import UsageError, whole_number

Target = Literal["folder", "webdataset"]
_LEAST_SHARD_MIB = 1 / 1024


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """All that `export` may be told.

    Parameters
    ----------
    to
        ``folder``: a picture file each, in a folder a class. ``webdataset``: tars of samples, in the order of the rows.
    file
        How pictures are encoded.
    shard_mib
        About so many MiB a tar. None: 256, or a 64th of the rows if that is less, of at least 32 rows.
    version
        Of the source. None: the newest.
    jobs
        Worker processes. None: as many as the CPUs and the memory allow that this process may use.
    """

    to: Target
    file: PictureFile = field(default_factory=PictureFile)
    shard_mib: float | None = None
    version: int | None = None
    jobs: int | None = None

    def __post_init__(self) -> None:
        if self.to not in get_args(Target):
            raise UsageError(f"to is {self.to!r}, expected one of {', '.join(get_args(Target))}")
        if self.shard_mib is not None:
            if self.to == "folder":
                raise UsageError(f"shard_mib is {self.shard_mib}, and a folder has no shards: leave it out")
            if not _LEAST_SHARD_MIB <= self.shard_mib <= 1 << 20:
                raise UsageError(
                    f"shard_mib is {self.shard_mib}, expected {_LEAST_SHARD_MIB:.3f} to {1 << 20} MiB"
                )
        if self.version is not None:
            whole_number("version", self.version, 1)
        if self.jobs is not None:
            whole_number("jobs", self.jobs, 1, 4096)

    @property
    def ending(self) -> str:
        """What names of the files that it makes end in."""
        return self.file.ending if self.to == "folder" else ".tar"
