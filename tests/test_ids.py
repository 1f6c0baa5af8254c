"""An id leads back to the bytes of one path, whatever they are."""

import os

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardwright.datasets.ids import id_to_path, path_to_id


@given(st.binary())
@example("häßlich/日本.jpg".encode())
@example(b"caf\xe9/\xff\xfe.jpg")
@example(rb"a\b\\c\x41.jpg")
@example(b"\\\xff")
def test_an_id_leads_back_to_its_path(raw: bytes) -> None:
    id = path_to_id(raw)
    id.encode("utf-8")  # no surrogates: any reader takes it
    assert os.fsencode(id_to_path(id)) == raw
    assert path_to_id(os.fsdecode(raw)) == id


@pytest.mark.parametrize(
    ("raw", "id"),
    [
        (b"cat/0012.jpg", "cat/0012.jpg"),
        ("é/日本.jpg".encode(), "é/日本.jpg"),
        (b"caf\xe9.jpg", r"caf\xE9.jpg"),
        (rb"a\b.jpg", r"a\\b.jpg"),
        (rb"\xE9.jpg", r"\\xE9.jpg"),
        (b"-v\n .jpg", "-v\n .jpg"),
    ],
)
def test_ids_are_written_so(raw: bytes, id: str) -> None:
    assert path_to_id(raw) == id


@pytest.mark.parametrize("id", ["a\\b", "\\", "\\x4", "\\xe9", "\\\\\\", "\\xGG"])
def test_other_backslashes_are_refused(id: str) -> None:
    with pytest.raises(ValueError, match="not an id"):
        id_to_path(id)


def test_the_locale_changes_no_id(python) -> None:
    code = (
        "import os, sys; from shardwright.datasets.ids import path_to_id as f; print(ascii(f(sys.argv[1])))"
    )
    found = python(
        code, os.fsdecode(b"\xff/\xc3\xa9.jpg"), LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0"
    )
    assert found.stdout.strip() == ascii("\\xFF/é.jpg"), found.stderr
