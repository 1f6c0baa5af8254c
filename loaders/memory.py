"""How much memory this process may use: a container says less than its machine. And how much workers use."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def memory_bytes() -> int:
    """Memory of the machine in bytes, or the limit of this process's cgroup (version 2) if that is less.

    Not what is free at the moment: choices that depend on it are to be the same from run to run.
    """
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        group = next(
            line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line[:3] == "0::"
        )
        folder = _CGROUP / group.strip().lstrip("/")
        if not (folder / "memory.max").exists():
            folder = _CGROUP  # in a container the group is often shown as the root
        return min(machine, int((folder / "memory.max").read_text()))
    except (OSError, StopIteration, ValueError):  # no cgroup, or "max"
        return machine


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """Memory of one process.

    Attributes
    ----------
    pid
        Its number.
    rss_bytes
        All that it has in memory, also what it shares: the libraries, what a fork left, the page cache it maps.
    own_bytes
        What would be free if it ended: its unique set size. A leak is what lets it grow from epoch to epoch. A forked
        process also owns what it shared with its parent when that writes there: look at others, started by
        ``start_method="forkserver"`` or ``"spawn"``.
    """

    pid: int
    rss_bytes: int
    own_bytes: int


def memory_of(pids: Iterable[int]) -> list[WorkerMemory]:
    """Memory of those of the processes that are alive."""
    found = []
    for pid in pids:
        try:
            memory = psutil.Process(pid).memory_full_info()
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
        found.append(WorkerMemory(pid, memory.rss, memory.uss))
    return found
