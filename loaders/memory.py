"""How much memory this process may use: a container says less than its machine."""

import os
from pathlib import Path

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
