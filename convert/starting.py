"""Worker processes are started where a Ctrl-C does not reach them, and it is said where descriptors run out."""

import errno
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

from shardwright.errors import ShardwrightError


@contextmanager
def starting_processes() -> Iterator[None]:
    """Processes that this thread starts meanwhile never see a SIGINT, which goes to all of the terminal's.

    Their parent gets it, and ends them. What they run themselves would come too late: Python takes a second to start,
    and shows a traceback if it is interrupted. A blocked signal is inherited by the process and all its threads.

    Raises
    ------
    ShardwrightError
        This process may open no more files.
    """
    try:
        resource_tracker.ensure_running()  # a process of its own; to start it would unblock the signal
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    except (OSError, UnboundLocalError) as error:  # loky's, where its pipes cannot be opened
        if _first(error).errno not in (errno.EMFILE, errno.ENFILE):
            raise
        raise ShardwrightError(too_few_files()) from error


def _first(error: BaseException) -> OSError:
    """The error of the system's of which ``error`` came."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__context__
    return cause or OSError()


def too_few_files() -> str:
    """Why a process cannot be started, and what to do."""
    import resource  # not on Windows

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"cannot start worker processes: this process may have {soft} files open at once (at most {hard}), and all are "
        "in use. Raise that with `ulimit -n`, or use fewer --jobs"
    )
