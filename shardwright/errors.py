"""What can go wrong, in few classes.

Each class is also the builtin that a caller would catch, takes one string so that it pickles across
processes, and names the exit code that the command line gives it.
"""


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


class FormatError(ShardwrightError, ValueError):
    """A folder is not a data set, or its manifest is damaged, hostile or too new."""


class ShardError(ShardwrightError, ValueError):
    """A shard is not what its manifest says: short, missing, damaged. Names the file and the rows."""


class WorkerError(ShardwrightError, RuntimeError):
    """A worker of a loader died, hangs, or made what cannot be handed over. Names the process and the cause."""


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
