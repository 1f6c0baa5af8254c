"""Of which data sets and by which options a version was made, and whether that is what is asked for now."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwright.convert.plan import MADE_OF, differences
from shardwright.convert.rowsource import RowSource
from shardwright.datasets.layout import Manifest
from shardwright.datasets.manifest import read_manifest, why_removed
from shardwright.errors import FormatError, OutputError

#: Options of which nothing but what a manifest remembers under ``options`` decides what is made.
_COME_TO_THE_SAME = ("format", "chunk_rows", "compression", "min_saving", "size")


def made_of(command: str, manifests: Sequence[Manifest], options: Mapping[str, Any]) -> dict[str, Any]:
    """What is remembered, as JSON values."""
    return {
        "command": command,
        "data_sets": [
            {"fingerprint": m.fingerprint(), "version": m.version, "rows": m.rows} for m in manifests
        ],
        "options": dict(options),
    }


def same_made(newest: Manifest, draft: Manifest) -> bool:
    """Whether ``newest`` was made of the same data sets by options that come to the same as those of ``draft``."""
    found, wanted = newest.source.get(MADE_OF), draft.source[MADE_OF]
    if found == wanted or not isinstance(found, dict) or not isinstance(found.get("options"), dict):
        return bool(found == wanted)
    rest = {**found, "options": wanted["options"]}
    return rest == wanted and not _different(newest, draft)


def _different(newest: Manifest, draft: Manifest) -> list[str]:
    """In which options the two differ: what was left as it was then may be given now, if it comes to the same."""
    found, wanted = newest.source[MADE_OF]["options"], draft.source[MADE_OF]["options"]
    same = {
        key
        for key in _COME_TO_THE_SAME
        if key in newest.options and newest.options[key] == draft.options.get(key)
    }
    return differences(*({k: v for k, v in each.items() if k not in same} for each in (found, wanted)))


def refuse_others(
    newest: Manifest,
    draft: Manifest,
    sources: Sequence[RowSource],
    out: Path,
) -> None:
    """Refuse to follow ``newest`` by ``draft``, made otherwise. A later version of the same data sets is no other.

    Raises
    ------
    OutputError
        Names the differences.
    """
    found, wanted = newest.source.get(MADE_OF), draft.source[MADE_OF]
    what = f"'{out}' holds version {newest.version}, "
    cure = "Use another output, or --new-version if it is to follow all the same"
    if not isinstance(found, dict) or not isinstance(found.get("options"), dict):
        raise OutputError(f"{what}which `{wanted['command']}` did not make. {cure}")
    if found.get("command") != wanted["command"]:
        raise OutputError(f"{what}made by `{found.get('command')}`, not `{wanted['command']}`. {cure}")
    if different := _different(newest, draft):
        raise OutputError(f"{what}made with other options: {'; '.join(different)}. {cure}")
    before = found.get("data_sets")
    if not isinstance(before, list) or len(before) != len(sources):
        number = len(before) if isinstance(before, list) else 0
        raise OutputError(f"{what}made of {number} data sets, here are {len(sources)}. {cure}")
    for found_then, now, source in zip(before, wanted["data_sets"], sources, strict=True):
        then = found_then if isinstance(found_then, dict) else {}
        if then != now and not _is_earlier(then, source, newest.classes == draft.classes):
            raise OutputError(
                f"{what}made of another data set than '{source.folder}': {'; '.join(differences(then, now))}. {cure}"
            )


def _is_earlier(then: Any, source: RowSource, same_classes: bool) -> bool:
    """Whether what is remembered is an earlier version of ``source``; one that was removed is taken for one."""
    if not isinstance(then, dict) or type(version := then.get("version")) is not int:
        return False
    if not 1 <= version < source.version:
        return False
    try:
        return read_manifest(source.folder, version).fingerprint() == then.get("fingerprint")
    except FormatError:
        return same_classes and why_removed(source.folder, version) is not None
