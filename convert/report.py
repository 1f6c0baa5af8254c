"""The report of a version, read back: for versions that are made of it."""

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from shardwright.convert.records import Finding
from shardwright.datasets.layout import report_name


def read_report(folder: Path, version: int) -> list[Finding]:
    """What was rejected, suspect or a duplicate in a version.

    Raises
    ------
    ValueError
        There is no report, or it is none. Says which.
    """
    path = folder / report_name(version)
    try:
        return [_finding(json.loads(line)) for line in path.read_text("utf-8").splitlines()]
    except OSError as error:
        raise ValueError(f"the report '{path}' cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"'{path}' is no report: {error}") from error


def of_kept_rows(findings: Sequence[Finding], ids: Collection[str]) -> list[Finding]:
    """``findings`` without doubts about pictures whose ids are not among ``ids``, and without duplicates."""
    return [f for f in findings if f.verdict == "rejected" or (f.verdict == "suspect" and f.id in ids)]


def _finding(found: Any) -> Finding:
    size = found.get("size")
    texts = [found["id"], found["verdict"], found["reason"], found["message"], found.get("format", "")]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("an entry holds no text where there should be some")
    return Finding(
        found["id"],
        found["verdict"],
        found["reason"],
        found["message"],
        int(found["bytes"]),
        found.get("format", ""),
        None if size is None else (int(size[0]), int(size[1])),
    )
