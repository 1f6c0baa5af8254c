"""Room on the disk: whether a conversion fits before it starts, and what to say when it did not."""

import errno
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from shardwright.convert.encode import encode_chunk
from shardwright.convert.write import ShardTask
from shardwright.datasets.pixels import decode
from shardwright.errors import OutputError, PictureError

_FULL = {
    errno.ENOSPC: "the disk is full, or has no inodes left",
    errno.EDQUOT: "the quota is used up",
    errno.EFBIG: "a file would be larger than allowed (see `ulimit -f`)",
}


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still write where ``folder`` is, or will be made."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def check_room(out: Path, at_most_bytes: int, share: Callable[[], float] = lambda: 1.0) -> None:
    """Refuse what does not fit. ``share``, of those bytes, that will be needed is asked for where it is tight.

    Raises
    ------
    OutputError
        Names both figures.
    """
    free = free_bytes(out)
    needed_bytes = int(at_most_bytes * share()) if at_most_bytes > free else 0
    if needed_bytes > free:
        raise OutputError(
            f"'{out}' needs {_words(needed_bytes)}, its disk has {_words(free)} free. "
            "Make room and run the same command again, or use another output"
        )


def full_disk(
    error: OSError, out: Path, needed_bytes: int, published: Sequence[str] = ()
) -> OutputError | None:
    """What to say of ``error`` if it is for want of room, where at most ``needed_bytes`` were still to come."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return OutputError(
            f"cannot write '{out}': {error.strerror} (`ulimit -n`; each of --jobs takes some 7 in this process). "
            "Finished shards are kept: the same command with fewer --jobs goes on from there"
        )
    why = _FULL.get(error.errno or 0)
    if why is None:
        return None
    missing = f" What is missing needs at most {_words(needed_bytes)}," if needed_bytes else ""
    done = f"Published before that: {', '.join(published)}." if published else "Nothing was published."
    return OutputError(
        f"cannot write '{out}': {why}.{missing or ' There,'} its disk has {_words(free_bytes(out))} free. {done} "
        "Finished shards are kept: make room, or raise the limit, and the same command goes on from there"
    )


def unwritable(
    error: OSError, out: Path, needed_bytes: int = 0, published: Sequence[str] = ()
) -> OutputError:
    """What to say of an ``error`` of writing to ``out``; the other two as in `full_disk`."""
    full = full_disk(error, out, needed_bytes, published)
    if full is not None:
        return full
    what = f": '{error.filename}'" if error.filename and str(error.filename) != str(out) else ""
    return OutputError(
        f"cannot write '{out}'{what}: {error.strerror or error}. See to its disk, to the right to write there, and to "
        "what lies in the way: the same command then goes on. Or use another output"
    )


def stored_share(task: ShardTask) -> float:
    """Share of its pixels' bytes that a shard will have on disk, from its first chunk; decodes that."""
    pixels = []
    for path in task.paths[: task.options.store.chunk_rows]:
        with suppress(PictureError, OSError):
            pixels.append(decode((task.root / path).read_bytes(), task.options.pixels).pixels)
    if not pixels or task.options.store.codec == "none":
        return 1.0
    store = task.options.store
    payload, _, _ = encode_chunk(np.stack(pixels), len(pixels), store.codec, store.min_saving)
    return len(payload) / (len(pixels) * task.options.row_bytes)


def _words(size: int) -> str:
    return f"{size / 1e6:,.1f} MB ({size:,} bytes)"
