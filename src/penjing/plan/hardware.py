"""This machine's devices, and their matmul rates: from data sheets for GPUs, measured for CPUs."""

import importlib.metadata
import math
import platform
import threading
import time
from contextlib import suppress
from functools import cache
from typing import Any

import torch

import penjing
from penjing import devices
from penjing.devices import host
from penjing.plan.gpu_specs import match_gpu_spec

PACKAGES = ("torch", "transformers", "trl", "accelerate", "litgpt", "llama-cpp-python")  # versions are recorded
SLOW_MATMUL_SECONDS = 0.5  # a slower one is timed only once


def peak(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak FLOPs per second for MFU; for float32 of tf32 matmuls if they are allowed. None: unknown."""
    kind = devices.of(device)
    if kind.is_host:
        return _host_rate(dtype)
    if dtype in (torch.bfloat16, torch.float16, torch.float32):
        # `compute.dtype=tf32` is float32 with this switch on (train/precision.py).
        in_tf32 = dtype == torch.float32 and devices.uses_tf32()
        return data_sheet_peak(kind.name(device), "tf32" if in_tf32 else str(dtype).removeprefix("torch."))
    return None


def data_sheet_peak(name: str, dtype: str = "bfloat16") -> float | None:
    """The peak of the GPU whose driver name is `name`. A Ti or laptop card does not match the plain card."""
    card = match_gpu_spec(name)
    return None if card is None or (dtype == "bfloat16" and not card.has_bfloat16) else card.peak_flops(dtype)


def cpu_matmul_rate(dtype: torch.dtype) -> float:
    """FLOPs per second of concurrent 1024 x 512 x 1024 matmuls, one on each thread in use.

    Measured in CPU time, unlike plan/microbenchmarks.py: load of other processes does not count, and no thread waits.
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


_host_rate = cache(cpu_matmul_rate)  # measured once in a process


def describe(device: torch.device, dtype: torch.dtype) -> dict[str, object]:
    """The machine, for reports."""
    kind = devices.of(device)
    return {
        host.PROCESSOR: host.cpu_name(),
        "cores": host.physical_cores(),
        "threads": torch.get_num_threads(),
        "memory_bytes": host.memory_bytes(),
        "device": kind.type if kind.is_host else kind.name(device),
        "compute_dtype": str(dtype).removeprefix("torch."),
    }


def environment(device: torch.device, dtype: torch.dtype, **more: object) -> dict[str, Any]:
    """Date, machine and versions, for the record of a measurement. more: further fields of the machine."""
    versions = {"python": platform.python_version(), "penjing": penjing.__version__}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {"date": time.strftime("%Y-%m-%d"), "machine": {**describe(device, dtype), **more}, "versions": versions}
