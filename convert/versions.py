"""The versions of a data set: what each is, whether it is whole, and what it alone keeps on the disk."""

import os
import stat
from collections import Counter
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shardwright.datasets.layout import Manifest, manifest_name
from shardwright.datasets.manifest import read_manifest, versions_of
from shardwright.errors import FormatError


@dataclass(frozen=True, slots=True)
class Version:
    """One version.

    Attributes
    ----------
    version
        Its number.
    newest
        Whether ``manifest.json`` is it.
    made
        When its manifest was written (UTC, ISO 8601); None where its own manifest is gone.
    rows, storage, shards
        As in its manifest; None where that cannot be read.
    bytes, own_bytes
        Of all its shard files, by its manifest; and of those that no other version names, None where another
        version cannot be read.
    missing
        Files that are not there in their size: with none it is whole, byte for byte if `verify` says so.
    error
        Why its own manifest cannot be read; empty where it can. Of the newest the rest is then from ``manifest.json``.
    """

    version: int
    newest: bool
    made: str | None
    rows: int | None = None
    storage: str | None = None
    shards: int | None = None
    bytes: int | None = None
    own_bytes: int | None = None
    missing: tuple[str, ...] = ()
    error: str = ""

    @property
    def whole(self) -> bool:
        """Whether all its files are there, in their sizes."""
        return not self.missing and not self.error


def versions(folder: Path) -> list[Version]:
    """All versions of the data set in ``folder``, oldest first.

    Raises
    ------
    FormatError
        There is no data set, or its newest manifest cannot be read.
    """
    newest = read_manifest(folder)
    read: dict[int, Manifest | None] = {}
    errors: dict[int, str] = {}
    for version in sorted({*versions_of(folder), newest.version}):
        try:
            read[version] = read_manifest(folder, version)
        except FormatError as error:
            read[version], errors[version] = None, str(error)
    read[newest.version] = newest
    own = folder / manifest_name(newest.version)
    if not os.path.lexists(own):
        errors[newest.version] = f"'{own}' is gone: copy manifest.json to it, before another version comes"
    manifests = [manifest for manifest in read.values() if manifest is not None]
    needed = Counter(file.name for m in manifests for shard in m.shards for file in shard.files)
    all_known = len(manifests) == len(read)
    sizes: dict[str, int | None] = {}
    found = []
    for version, manifest in sorted(read.items()):
        made = _made(folder / manifest_name(version))
        if manifest is None:
            found.append(Version(version, False, made, error=errors[version]))
            continue
        files = [file for shard in manifest.shards for file in shard.files]
        for file in files:
            if file.name not in sizes:
                sizes[file.name] = _size(folder / file.name)
        found.append(
            Version(
                version=version,
                newest=version == newest.version,
                made=made,
                rows=manifest.rows,
                storage=manifest.storage,
                shards=len(manifest.shards),
                bytes=manifest.bytes,
                own_bytes=sum(f.bytes for f in files if needed[f.name] == 1) if all_known else None,
                missing=tuple(f.name for f in files if sizes[f.name] != f.bytes),
                error=errors.get(version, ""),
            )
        )
    return found


def as_json(found: list[Version]) -> dict[str, Any]:
    """All versions as JSON values."""
    return {
        "newest": next(v.version for v in found if v.newest),
        "versions": [{**asdict(v), "missing": list(v.missing), "whole": v.whole} for v in found],
    }


def in_words(folder: Path, found: list[Version]) -> list[str]:
    """A table for a person: the bytes of each version, and those that are free again without it."""
    lines = [f"'{folder}': {len(found)} version{'s' * (len(found) > 1)}"]
    lines.append(
        f"  {'version':>7}  {'made':<20} {'images':>9}  storage {'shards':>7} {'MB':>10} {'its own':>10}"
    )
    for v in found:
        made = v.made.replace("+00:00", "Z") if v.made else "unknown"
        start = f"  {v.version:7d}  {made:<20} "
        if v.rows is None:
            lines.append(f"{start}{v.error}")
            continue
        own = "unknown" if v.own_bytes is None else f"{v.own_bytes / 1e6:.1f}"
        state = ["newest"] * v.newest
        if v.missing:
            state.append(f"{len(v.missing)} files missing or of another size, such as '{v.missing[0]}'")
        if v.error:
            state.append(v.error)
        lines.append(
            f"{start}{v.rows:9d}  {v.storage:<7} {v.shards:7d} {(v.bytes or 0) / 1e6:10.1f} {own:>10}"
            f"  {', '.join(state)}".rstrip()
        )
    return lines


def _made(path: Path) -> str | None:
    try:
        return datetime.fromtimestamp(int(path.stat().st_mtime), UTC).isoformat()
    except (OSError, ValueError, OverflowError):
        return None


def _size(path: Path) -> int | None:
    """Bytes of the plain file ``path``; None where there is none: a link is no shard."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None
