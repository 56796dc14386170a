"""The machine that the process runs on: cores, load, memory, the CPU's name."""

import os
import platform
from contextlib import suppress
from functools import cache
from pathlib import Path

PROCESSOR = "cpu"  # the field of the processor's name in records


def physical_cores() -> int:
    """Cores this process may use; hyper-threads are not counted where the system lists them."""
    return len(_cores()) or os.cpu_count() or 1


@cache
def _cores() -> list[set[int]]:
    """The cores that this process may use, in order, each with its CPUs (hyper-threads); empty where unknown. Those of
    the first call: on busy cores `kernels/cpu/spinning.py` binds threads for some seconds."""
    cores: dict[tuple[int, ...], set[int]] = {}
    for cpu in sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else ():
        folder = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        key: tuple[int, ...] = (cpu,)
        with suppress(OSError, ValueError):
            key = (int((folder / "physical_package_id").read_text()), int((folder / "core_id").read_text()))
        cores.setdefault(key, set()).add(cpu)
    return [cores[key] for key in sorted(cores)]


def pin_to_share(rank: int, world: int) -> bool:
    """Keep this process, one of `world` on this machine, to its own share of the cores; False where it cannot be."""
    cores = _cores()
    if not 1 < world <= len(cores):
        return False
    share = cores[rank * len(cores) // world : (rank + 1) * len(cores) // world]
    os.sched_setaffinity(0, set().union(*share))
    _cores.cache_clear()
    return True


def load_averages() -> tuple[float, ...]:
    """Mean number of runnable processes in the last 1, 5 and 15 minutes; empty where unknown."""
    with suppress(AttributeError, OSError):
        return os.getloadavg()
    return ()


def memory_bytes() -> int:
    """Host memory that this process may use; 0 = unknown."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    return min([total, *(limit for limit, _ in cgroup_memory())]) if total else 0


def available_bytes(processes: int = 1, root: Path = Path("/")) -> int:
    """Host memory for this process, one of so many alike: its own, and its part of what no program holds; 0 = unknown.

    Page cache counts as available: the system gives it back.
    """
    try:
        free = _fields(root / "proc/meminfo")["MemAvailable:"] * 1024
        own = _fields(root / "proc/self/status")["RssAnon:"] * 1024  # mapped files count as page cache
    except (OSError, KeyError):
        return memory_bytes() // processes
    free = min([free, *(limit - used for limit, used in cgroup_memory(root))])
    return own + max(0, free) // processes


def cgroup_memory(root: Path = Path("/")) -> list[tuple[int, int]]:
    """Limit and use, page cache left out, of this process's control groups, version 1 or 2, and those above them."""
    found: list[tuple[int, int]] = []
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
            names = ("limit_in_bytes", "usage_in_bytes", "total_") if controllers else ("max", "current", "")
            folder = top / group.strip("/")
            for path in (folder, *folder.parents):
                with suppress(OSError, ValueError):  # outside the mount of a container; "max": no limit
                    limit, used = (int((path / f"memory.{name}").read_text()) for name in names[:2])
                    cache = _fields(path / "memory.stat")
                    cached = sum(cache.get(f"{names[2]}{kind}_file", 0) for kind in ("active", "inactive"))
                    found.append((limit, max(0, used - cached)))
    return found


def _fields(file: Path) -> dict[str, int]:
    """The numbers of a file with a name and a number in each line."""
    words = (line.split() for line in file.read_text().splitlines())
    return {first: int(rest[0]) for first, *rest in words if rest and rest[0].isdecimal()}


def cpu_name() -> str:
    """The CPU's model name."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
