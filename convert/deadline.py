"""How long a run may take: it ends at the boundary of a shard."""

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

Task = TypeVar("Task")


class Deadline:
    """From now on ``seconds``; None: no end."""

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds
        self._begun = False

    def in_time(self, tasks: Iterable[Task]) -> Iterator[Task]:
        """Those of ``tasks`` that may still be begun; the first of all ever, so that each run gets further."""
        for task in tasks:
            if self._begun and self._end is not None and time.monotonic() >= self._end:
                return
            self._begun = True
            yield task
