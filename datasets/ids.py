"""The id of a sample: its path relative to the source, as text that any file name can be turned into.

POSIX separators. Bytes that are not UTF-8 stand as ``\\xHH``, a backslash as ``\\\\``; the mapping can be
inverted, so an id always leads back to its file.
"""

import os
import re

_ESCAPE = re.compile(rb"\\(?:\\|x([0-9A-F]{2}))")


def path_to_id(path: str | bytes) -> str:
    """Turn a relative path, as the operating system gave it, into an id.

    Parameters
    ----------
    path
        A path relative to the source. A ``str`` is taken back to the file system's own bytes first
        (`os.fsencode`), so that the id does not depend on the locale.
    """
    raw = os.fsencode(path).replace(b"\\", b"\\\\")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        text = raw.decode("utf-8", "surrogateescape")
        return "".join(f"\\x{ord(c) - 0xDC00:02X}" if 0xDC80 <= ord(c) <= 0xDCFF else c for c in text)


def id_to_path(id: str) -> str:
    """Turn an id back into the relative path, as `open` takes it.

    Raises
    ------
    ValueError
        The id holds a backslash that starts no escape.
    """
    raw = id.encode("utf-8")
    if b"\\" in _ESCAPE.sub(b"", raw):
        raise ValueError(f"not an id: {id!r} holds a backslash that starts neither \\\\ nor \\xHH")
    return os.fsdecode(_ESCAPE.sub(lambda m: bytes.fromhex(m[1].decode()) if m[1] else b"\\", raw))
