"""Worker processes are started where a Ctrl-C does not reach them, and not where descriptors would run out."""

import errno
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

from shardwright.errors import ShardwrightError

#: More than loky opens to start a process, so that it does not fail halfway, and some are left to clean up with.
_DESCRIPTORS = 24
_one_at_a_time = threading.Lock()


@contextmanager
def starting_processes() -> Iterator[None]:
    """Processes that this thread starts meanwhile never see a SIGINT, which goes to all of the terminal's.

    Their parent gets it, and ends them. What they run themselves would come too late: Python takes a second to start,
    and shows a traceback if it is interrupted. A blocked signal is inherited by the process and all its threads.

    Raises
    ------
    ShardwrightError
        This process may open too few more files.
    """
    with _one_at_a_time:
        _refuse_too_few_descriptors()
        resource_tracker.ensure_running()  # a process of its own; to start it would unblock the signal
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _refuse_too_few_descriptors() -> None:
    import resource  # not on Windows, where it is to be said that this does not run

    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if allowed == resource.RLIM_INFINITY:
        return
    # Counted, not tried: to take them all for a moment would take them from the other threads.
    try:
        left = allowed - len(os.listdir("/dev/fd"))
    except FileNotFoundError:  # no /proc: it is seen when it happens
        return
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        left = 0
    if left < _DESCRIPTORS:
        raise ShardwrightError(
            f"too few files may be open at once to start worker processes: at most {allowed}. Raise that with "
            "`ulimit -n`, or use fewer --jobs: the same command goes on where it was"
        )
