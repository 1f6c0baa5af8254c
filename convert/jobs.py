"""How many worker processes: what CPUs and memory allow that this process may use, which is less than the machine's."""

import math
import resource
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import joblib
import psutil

_CGROUPS = "sys/fs/cgroup"


@dataclass(frozen=True, slots=True)
class Need:
    """Memory that workers take.

    Attributes
    ----------
    worker_bytes
        Each of them, all the time.
    spare_bytes
        One of them for a moment, over a large picture. Where several come to one at once and memory ends, the
        system kills a worker, and its shard is made again.
    """

    worker_bytes: int
    spare_bytes: int = 0


def decoding(max_pixels: int = 64_000_000) -> Need:
    """What workers need that decode pictures: 255 MB with all imports, some for chunks; a picture twice in RGB."""
    return Need(300_000_000, 6 * max_pixels)


#: What workers need that copy rows: 105 MB with all imports, and some for chunks.
COPYING = Need(120_000_000)


def _address_bytes() -> int | None:
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


@dataclass(frozen=True, slots=True)
class System:
    """Where it is read what this process may use.

    Attributes
    ----------
    root
        The root of the file system, for ``proc/self/cgroup`` and ``sys/fs/cgroup``.
    cpus
        CPUs by affinity, by a container's quota, and by the environment.
    free_bytes
        Memory that the machine has available.
    address_bytes
        ``ulimit -v``, None for no limit. It is one of each process, but who sets it means the job.
    """

    root: Path = Path("/")
    cpus: Callable[[], int] = joblib.cpu_count
    free_bytes: Callable[[], int] = field(default=lambda: int(psutil.virtual_memory().available))
    address_bytes: Callable[[], int | None] = _address_bytes


@dataclass(frozen=True, slots=True)
class Allowance:
    """``jobs`` workers of ``need`` are allowed, where ``cpus`` and ``memory_bytes`` may be used."""

    jobs: int
    cpus: int
    memory_bytes: int
    need: Need

    @property
    def short_of_memory(self) -> bool:
        """Whether memory is what allows no more."""
        return self.jobs < self.cpus


def allowance(need: Need, system: System | None = None) -> Allowance:
    """How many workers of ``need`` may run, at least one, and what decides that.

    What is free at the moment has a part in it: the bytes of shards do not depend on the number of workers.
    """
    system = system or System()
    cpus = max(1, min([system.cpus(), *_cpu_quotas(system.root)]))
    limits = [system.free_bytes(), system.address_bytes(), *_free_in_groups(system.root)]
    memory_bytes = max(0, min(limit for limit in limits if limit is not None))
    fitting = (memory_bytes - need.spare_bytes) // need.worker_bytes
    return Allowance(max(1, min(cpus, fitting)), cpus, memory_bytes, need)


def jobs_allowed(need: Need, system: System | None = None) -> int:
    """How many workers of ``need`` may run, at least one."""
    return allowance(need, system).jobs


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's control groups, innermost first: each may limit it.

    A group that is not to be seen from inside a container is shown as the root there.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, names, path = line.split(":", 2)
        if (number, names) == ("0", ""):  # version 2
            mounted = root / _CGROUPS
        elif controller in names.split(","):
            mounted = root / _CGROUPS / controller
        else:
            continue
        inner = PurePosixPath(path).parts[1:]
        if ".." in inner:  # outside of what is mounted here
            inner = ()
        for depth in range(len(inner), -1, -1):
            yield mounted.joinpath(*inner[:depth])


def _free_in_groups(root: Path) -> Iterator[int]:
    """Bytes that each group with a limit still has; its page cache gives way, and counts as free."""
    for group in _groups(root, "memory"):
        limits = [_number(group / name) for name in ("memory.max", "memory.high", "memory.limit_in_bytes")]
        known = [limit for limit in limits if limit is not None]
        if known:
            used = _number(group / "memory.current") or _number(group / "memory.usage_in_bytes") or 0
            yield min(known) - max(0, used - _page_cache(group))


def _page_cache(group: Path) -> int:
    try:
        words = (group / "memory.stat").read_text().split()
        stat = dict(zip(words[::2], map(int, words[1::2]), strict=True))
    except (OSError, ValueError):
        return 0
    prefix = "total_" if "total_inactive_file" in stat else ""  # version 1 counts inner groups apart
    return sum(stat.get(f"{prefix}{name}", 0) for name in ("inactive_file", "active_file"))


def _cpu_quotas(root: Path) -> Iterator[int]:
    """CPUs that each group with a quota may use: joblib knows that of a container's root alone."""
    for group in _groups(root, "cpu"):
        quota, period = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
        with suppress(OSError, ValueError):
            quota, period = map(int, (group / "cpu.max").read_text().split())
        if quota is not None and period is not None and quota > 0 and period > 0:
            yield math.ceil(quota / period)


def _number(path: Path) -> int | None:
    """The number in a file; None where there is no file, or no number, such as ``max``."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
