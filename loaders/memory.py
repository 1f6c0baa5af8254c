"""How much memory, and how many CPUs, this process may use: containers say less than the machine."""

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Memory that can be taken without swapping, in bytes: of the machine or of the cgroup, if that is less."""
    return min(_machine_bytes(), _cgroup_bytes(_CGROUP))


def _machine_bytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):  # not Linux: what there is, free or not
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_bytes(root: Path) -> int:
    """Room below the memory limit of this process's cgroup (version 2); a very large number without one."""
    try:
        group = next(
            line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line[:3] == "0::"
        )
        folder = root / group.strip().lstrip("/")
        if not (folder / "memory.max").exists():
            folder = root  # in a container the group is often shown as the root
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
    except (OSError, StopIteration, ValueError):
        return 1 << 62
    return 1 << 62 if limit == "max" else max(0, int(limit) - used)


def usable_cpus() -> int:
    """CPUs that this process may run on, at least 1."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        return os.cpu_count() or 1
