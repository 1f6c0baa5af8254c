"""What can go wrong, in few classes.

Each class is also the builtin that a caller would catch, takes one string so that it pickles across
processes, and names the exit code that the command line gives it.
"""

import operator
from collections.abc import Sequence

#: How many of several places an error names.
NAMED = 5


class ShardwrightError(Exception):
    """Base of every error that this project raises on purpose."""

    exit_code = 1


class UsageError(ShardwrightError, ValueError):
    """The request itself makes no sense: an option out of range, a missing folder, nested paths."""

    exit_code = 2


class SourceError(ShardwrightError, ValueError):
    """The source tree cannot be converted as it is: empty, unreadable, ambiguous class folders."""


class OutputError(ShardwrightError, OSError):
    """The output cannot be written: foreign files in it, other options, no space."""


class LockedError(OutputError):
    """Another process writes to the output."""

    exit_code = 4


class OutOfTimeError(ShardwrightError, TimeoutError):
    """A run took as long as it may, and ended at the boundary of a shard: the same command goes on."""

    exit_code = 5


class FormatError(ShardwrightError, ValueError):
    """A folder is not a data set, or its manifest is damaged, hostile or too new."""


class ShardError(ShardwrightError, ValueError):
    """A shard is not what its manifest says: short, missing, damaged. Names the file and the rows."""


class WorkerError(ShardwrightError, RuntimeError):
    """A worker of a loader died, hangs, or made what cannot be handed over. Names the process and the cause."""


def named(names: Sequence[str]) -> str:
    """The first few of ``names`` for a message."""
    return ", ".join(f"'{name}'" for name in names[:NAMED]) + (", ..." if len(names) > NAMED else "")


def whole_number(name: str, value: object, least: int, most: int | None = None) -> int:
    """``value`` as an int, whatever kind of whole number it is; a bool is none.

    Raises
    ------
    UsageError
        It is something else, or out of range.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or number < least or (most is not None and number > most):
        limits = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise UsageError(f"{name} is {value!r}, expected a whole number {limits}")
    return number


def check_place(name: str, value: object, expected: str) -> None:
    """Refuse what is not (number, count) with 0 <= number < count, both int.

    Raises
    ------
    UsageError
        It is something else: says what was ``expected``.
    """
    match value:
        case (int(number), int(count)) if 0 <= number < count and type(number) is type(count) is int:
            return
    raise UsageError(f"{name} is {value!r}, expected {expected}")


class PictureError(ShardwrightError, ValueError):
    """One picture cannot be taken. The text reads ``<reason code>: <message>``."""

    @property
    def reason(self) -> str:
        """The reason code, as counted under ``rejected`` in the manifest."""
        return str(self).partition(":")[0]

    @property
    def message(self) -> str:
        """The text after the reason code."""
        return str(self).partition(": ")[2]
