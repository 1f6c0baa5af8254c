"""Of which data sets and by which options a version was made, and whether that is what is asked for now."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwright.convert.plan import MADE_OF, asked_for, differences
from shardwright.convert.rowsource import RowSource
from shardwright.convert.unfinished import Unfinished
from shardwright.datasets.layout import Manifest
from shardwright.datasets.manifest import read_manifest, why_removed
from shardwright.errors import FormatError, OutputError

#: Options of which nothing but what a manifest remembers under ``options`` decides what is made.
_COME_TO_THE_SAME = ("format", "chunk_rows", "compression", "min_saving", "size")


def made_of(command: str, manifests: Sequence[Manifest], options: Mapping[str, Any]) -> dict[str, Any]:
    """What is remembered, as JSON values."""
    return {
        "command": command,
        "data_sets": [_told(manifest) for manifest in manifests],
        "options": dict(options),
    }


def to_go_on_with(outputs: Iterable[Path], new_version: bool) -> list[Unfinished]:
    """The unfinished runs in ``outputs``, of one command; none where none has finished a shard, or ``new_version``.

    Where one part goes on, all do, those too of which no shard is finished: parts of two versions may share pictures.
    """
    runs = [Unfinished(folder) for folder in outputs]
    return runs if not new_version and any(run.shards() for run in runs) else []


def _told(manifest: Manifest) -> dict[str, Any]:
    return {"fingerprint": manifest.fingerprint(), "version": manifest.version, "rows": manifest.rows}


def versions_to_copy(
    command: str, folders: Sequence[Path], runs: Iterable[Unfinished]
) -> tuple[list[Manifest], list[str]]:
    """The version of each of ``folders`` that ``command`` is to be made of, and notes.

    An unfinished one in ``runs`` goes on with those that it was begun with, though newer ones are there by now. Else,
    or if one of those is gone, they are the newest ones.
    """
    newest = [read_manifest(folder) for folder in folders]
    for run in runs:
        request = run.request()
        if request is None or asked_for(request)[0] != command:
            continue
        begun = _still_there(folders, request["source"][MADE_OF].get("data_sets"))
        if begun is not None:
            return begun, [
                f"it goes on with version {then.version} of '{folder}', of which version {now.version} is there: the "
                "same command once more takes that"
                for folder, then, now in zip(folders, begun, newest, strict=True)
                if then.version != now.version
            ]
    return newest, []


def _still_there(folders: Sequence[Path], told: Any) -> list[Manifest] | None:
    """The versions that are ``told`` of; None where one of them is not there as it was."""
    if not isinstance(told, list) or len(told) != len(folders):
        return None
    found = []
    for folder, then in zip(folders, told, strict=True):
        version = then.get("version") if isinstance(then, dict) else None
        if type(version) is not int or version < 1:
            return None
        try:
            manifest = read_manifest(folder, version)
        except FormatError:
            return None
        if _told(manifest) != then:
            return None
        found.append(manifest)
    return found


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
