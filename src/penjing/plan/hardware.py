"""This machine's devices, and their matmul rates: from data sheets for GPUs, measured for CPUs."""

from __future__ import annotations

import math
import os
import platform
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from penjing.base.process_info import peak_resident_bytes
from penjing.plan.fast_bfloat16 import cpu_has_fast_bfloat16
from penjing.plan.gpu_specs import match_gpu_spec

SLOW_MATMUL_SECONDS = 0.5  # a slower one is timed only once


@dataclass(frozen=True, slots=True)
class Peak:
    """Peak FLOPs per second for MFU, and the source of the figure. None: unknown."""

    flops_per_second: float | None
    source: str


def has_fast_bfloat16(device: torch.device) -> bool:
    """Whether bf16 matmuls are faster than float32 on `device`; depends on the hardware only."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type == "cpu":
        return cpu_has_fast_bfloat16(cpu_name())
    return False


def compute_dtype(setting: str, device: torch.device) -> torch.dtype:
    """The dtype of matmuls for a `compute.dtype` setting.

    `auto` is bf16 where that is faster, float16 on CUDA cards without bf16 units (V100, T4, RTX 20), else float32. On
    one machine it is always the same.
    """
    if setting == "auto":
        if has_fast_bfloat16(device):
            return torch.bfloat16
        return torch.float16 if device.type == "cuda" else torch.float32
    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "tf32": torch.float32}
    return dtypes[setting]


def peak(device: torch.device, dtype: torch.dtype) -> Peak:
    """The peak rate for MFU; for float32 the tf32 rate if tf32 matmuls are allowed."""
    if device.type == "cpu":
        return Peak(_cpu_rate(dtype), "measured matmul")
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16, torch.float32):
        # `compute.dtype=tf32` is float32 with this switch on (parallel/base.py).
        in_tf32 = dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
        name = "tf32" if in_tf32 else str(dtype).removeprefix("torch.")
        return data_sheet_peak(torch.cuda.get_device_name(device), name)
    return Peak(None, "unknown device")


def data_sheet_peak(name: str, dtype: str = "bfloat16") -> Peak:
    """The peak of the GPU whose driver name is `name`. A Ti or laptop card does not match the plain card."""
    card = match_gpu_spec(name)
    if card is None or (dtype == "bfloat16" and not card.has_bfloat16):
        return Peak(None, "unknown device")
    return Peak(card.peak_flops(dtype), f"{card.name} data sheet")


def cpu_matmul_rate(dtype: torch.dtype) -> float:
    """FLOPs per second of concurrent 1024 x 512 x 1024 matmuls, one on each thread in use.

    Measured in CPU time: load of other processes does not count, and no thread waits for another.
    """
    threads, rates = torch.get_num_threads(), list[float]()

    def measure() -> None:
        torch.set_num_threads(1)
        rates.append(_one_thread_rate(dtype))

    workers = [threading.Thread(target=measure) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    torch.set_num_threads(threads)  # it is process-wide; for threads started later
    return sum(rates)


def _one_thread_rate(dtype: torch.dtype) -> float:
    """The best of six tries, or a single one if that is slow (float16 takes seconds)."""
    left, right = torch.ones(1024, 512, dtype=dtype), torch.ones(512, 1024, dtype=dtype)
    best = math.inf
    for count in (1, 4, 4, 4, 4, 4, 4):
        begun = time.thread_time()
        for _ in range(count):
            torch.matmul(left, right)
        best = min(best, (time.thread_time() - begun) / count)
        if best > SLOW_MATMUL_SECONDS:
            break
    return 2 * 1024 * 512 * 1024 / best


_cpu_rate = cache(cpu_matmul_rate)  # measured once in a process


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory of this process: reserved on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return peak_resident_bytes()


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


def describe(device: torch.device, dtype: torch.dtype) -> dict[str, object]:
    """The machine, for reports."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        "cpu": cpu_name(),
        "cores": physical_cores(),
        "threads": torch.get_num_threads(),
        "memory_bytes": memory_bytes(),
        "device": name,
        "compute_dtype": str(dtype).removeprefix("torch."),
    }


def cpu_name() -> str:
    """The CPU's model name."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
