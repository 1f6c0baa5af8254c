"""What became of data sets, as events for the log: from what the library's calls return."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shardwright.log import Level

if TYPE_CHECKING:
    from shardwright.convert.gc import Garbage
    from shardwright.convert.repair import Repair
    from shardwright.convert.rewritten import Rewritten
    from shardwright.convert.run import Conversion
    from shardwright.convert.verify import Verification
    from shardwright.datasets.layout import Manifest


@dataclass(frozen=True, slots=True)
class Event:
    """One event: its name, its level, and what it says."""

    name: str
    level: Level = Level.INFO
    values: Mapping[str, Any] = field(default_factory=dict)


def of_conversions(done: Iterable["Conversion"]) -> Iterator[Event]:
    """What `convert` made."""
    from shardwright.datasets.layout import report_name

    for one in done:
        if not one.made:
            yield _nothing(one.split, one.folder, one.manifest)
            continue
        yield from _made(one.split, one.folder, one.manifest, one.seconds, one.read, one.resumed, one.notes)
        report = one.folder / report_name(one.manifest.version)
        for name, counts, level in (
            ("rejected", one.manifest.rejected, Level.WARNING),
            ("suspect", one.manifest.suspect, Level.INFO),
            ("duplicates", one.manifest.duplicates, Level.INFO),
        ):
            if counts:
                values = {**_where(one.split, one.folder), "count": sum(counts.values())}
                yield Event(name, level, {**values, "reasons": dict(counts), "report": report})


def of_rewrites(done: Iterable["Rewritten"]) -> Iterator[Event]:
    """What `reshard`, `merge` or `split` made."""
    for one in done:
        if one.made and one.manifest is not None:
            yield from _made(
                one.split, one.folder, one.manifest, one.seconds, one.copied, one.resumed, one.notes
            )
        elif one.version is None and one.manifest is not None:
            yield _nothing(one.split, one.folder, one.manifest)


def of_verifications(found: Mapping[str, "Verification"]) -> Iterator[Event]:
    """What `verify` found."""
    for split, one in found.items():
        values = {**_where(split, one.folder), **_size(one.manifest)}
        if one.damage:
            values |= {"places": len(one.damage), "first": one.damage[0]}
            yield Event("damaged", Level.ERROR, values)
        else:
            yield Event("verified", values={**values, "full": one.full})


def of_repairs(done: Mapping[str, "Repair"]) -> Iterator[Event]:
    """What `repair` mended."""
    for split, one in done.items():
        where = _where(split, one.folder)
        if one.repaired:
            yield Event("repaired", values={**where, "files": len(one.repaired), "checked": one.checked})
        for failure in one.failures:
            yield Event(
                "still-damaged", Level.ERROR, {**where, "files": list(failure.files), "why": failure.why}
            )
        if not one.repaired and not one.failures:
            yield _nothing(split, one.folder, one.manifest)


def of_garbage(found: Mapping[str, "Garbage"]) -> Iterator[Event]:
    """What `gc` removed."""
    for split, one in found.items():
        where = _where(split, one.folder)
        if one.files:
            values = {"versions": list(one.versions), "files": len(one.files), "bytes": one.bytes}
            yield Event("removed", values={**where, **values})
        else:
            yield Event("nothing-to-do", values={**where, "version": one.newest})


def _made(
    split: str,
    folder: Any,
    manifest: "Manifest",
    seconds: float,
    images: int,
    resumed: int,
    notes: Iterable[str],
) -> Iterator[Event]:
    where = _where(split, folder)
    if resumed:
        yield Event("resumed", values={**where, "shards": resumed, "of_shards": len(manifest.shards)})
    yield Event(
        "published",
        values={**where, **_size(manifest), "images": images, "seconds": round(seconds, 1)},
    )
    for note in notes:
        yield Event("note", values={**where, "note": note})


def _nothing(split: str, folder: Any, manifest: "Manifest") -> Event:
    return Event("nothing-to-do", values={**_where(split, folder), **_size(manifest)})


def _where(split: str, folder: Any) -> dict[str, Any]:
    return {"split": split or None, "out": folder}


def _size(manifest: "Manifest") -> dict[str, Any]:
    return {
        "version": manifest.version,
        "rows": manifest.rows,
        "shards": len(manifest.shards),
        "bytes": manifest.bytes,
    }
