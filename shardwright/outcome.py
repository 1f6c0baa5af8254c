"""What became of data sets, as events for the log: from what the library's calls return."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shardwright.log import Level

if TYPE_CHECKING:
    from shardwright.convert.copy_summary import Copied
    from shardwright.convert.export_summary import Exported
    from shardwright.convert.gc import Garbage
    from shardwright.convert.repair import Repair
    from shardwright.convert.run import Conversion
    from shardwright.convert.sync_summary import Synced
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
    for one in done:
        if not one.made:
            yield _nothing(one.split, one.folder, one.manifest)
            continue
        yield from _made(one.split, one.folder, one.manifest, one.seconds, one.read, one.resumed, one.notes)
        yield from _findings(one.split, one.folder, one.manifest)


def of_rewrites(done: Iterable["Copied"]) -> Iterator[Event]:
    """What `reshard`, `merge` or `split` made."""
    for one in done:
        if one.made and one.manifest is not None:
            yield from _made(
                one.split, one.folder, one.manifest, one.seconds, one.written, one.resumed, one.notes
            )
        elif one.version is None and one.manifest is not None:
            yield _nothing(one.split, one.folder, one.manifest)


def of_syncs(done: Iterable["Synced"]) -> Iterator[Event]:
    """What `sync` found and made."""
    for one in done:
        if one.version is None:
            yield _nothing(one.split, one.folder, one.manifest)
            yield from _notes(one.split, one.folder, one.notes)
        elif one.made:
            where = _where(one.split, one.folder)
            changes = {kind: len(ids) for kind, ids in one.changes.items()}
            shares = {"dead_share": round(one.dead, 4), "mixing": round(one.mixed, 3)}
            yield Event(
                "changes", values={**where, **changes, "new_classes": list(one.new_classes), **shares}
            )
            yield from _made(
                one.split, one.folder, one.manifest, one.seconds, one.read, one.resumed, one.notes
            )
            yield from _findings(one.split, one.folder, one.manifest)


def of_exports(done: Iterable["Exported"]) -> Iterator[Event]:
    """What `export` wrote."""
    for one in done:
        if not one.dry_run:
            name = "exported" if one.made else "nothing-to-do"
            values = {"version": one.manifest.version, "rows": one.manifest.rows, "files": one.files}
            yield Event(name, values={**_where(one.split, one.folder), **values, "bytes": one.bytes})
            yield from _notes(one.split, one.folder, one.warnings, Level.WARNING)
            yield from _notes(one.split, one.folder, one.notes)


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
    yield from _notes(split, folder, notes)


def _notes(split: str, folder: Any, notes: Iterable[str], level: Level = Level.INFO) -> Iterator[Event]:
    for note in notes:
        yield Event("note", level, {**_where(split, folder), "note": note})


def _findings(split: str, folder: Any, manifest: "Manifest") -> Iterator[Event]:
    from shardwright.datasets.layout import report_name

    for name, counts, level in (
        ("rejected", manifest.rejected, Level.WARNING),
        ("suspect", manifest.suspect, Level.INFO),
        ("duplicates", manifest.duplicates, Level.INFO),
    ):
        if counts:
            report = folder / report_name(manifest.version)
            values = {"count": sum(counts.values()), "reasons": dict(counts), "report": report}
            yield Event(name, level, {**_where(split, folder), **values})


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
