"""A worker ends when the process that started it is gone: loky's would go on, or wait for ever."""

import os
import threading
import time

_LOOK_EVERY_SECONDS = 0.25


def end_with_parent(parent: int) -> None:
    """From now on, end this process within a fraction of a second when ``parent`` is no longer its parent.

    At once and without cleaning up: what it wrote lies in the work folder of that run, which the next run
    removes.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_EVERY_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="shardwright-orphan", daemon=True).start()
