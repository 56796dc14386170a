"""The machine that the process runs on: cores, load, memory, the CPU's name."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from pathlib import Path

PROCESSOR = "cpu"  # the name of the processor among a machine's figures, in records and reports


def physical_cores() -> int:
    """Cores this process may use; hyper-threads are not counted where the system lists them."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError):
        folders = Path("/sys/devices/system/cpu").glob("cpu[0-9]*/topology")
        pairs = {((folder / "physical_package_id").read_text(), (folder / "core_id").read_text()) for folder in folders}
        return min(allowed, len(pairs)) or allowed
    return allowed


def load_averages() -> tuple[float, ...]:
    """Mean number of runnable processes in the last 1, 5 and 15 minutes; empty where unknown."""
    with suppress(AttributeError, OSError):
        return os.getloadavg()
    return ()


def memory_bytes() -> int:
    """Host memory that this process may use; 0 = unknown."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    return min([total, *cgroup_limits()]) if total else 0


def cgroup_limits(root: Path = Path("/")) -> list[int]:
    """The memory limits of this process's control groups, version 1 or 2, and of the groups above them."""
    limits: list[int] = []
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
            name = "memory.limit_in_bytes" if controllers else "memory.max"
            folder = top / group.strip("/")
            for path in (folder, *folder.parents):
                with suppress(OSError, ValueError):  # outside the mount of a container; "max": no limit
                    limits.append(int((path / name).read_text()))
    return limits


def cpu_name() -> str:
    """The CPU's model name."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
