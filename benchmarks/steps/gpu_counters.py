"""Utilisation of a GPU's units: from hardware counters if available, else an estimate."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from penjing import devices
from penjing.plan.device_model import Machine
from penjing.plan.step_workload import Workload

# Numbers of NVML's GPM metrics (nvml.h, nvmlGpmMetricId_t).
TENSOR, DRAM, FP32 = 5, 10, 13


@dataclass(frozen=True, kw_only=True)
class Utilisation:
    """Utilisation from 0 to 1; None: unknown. counters: the source, `counters`, or `estimate` (computed work over
    time)."""

    dram: float | None = None
    tensor: float | None = None
    fp32: float | None = None
    counters: str = ""


def measure_utilisation(function: Callable[[], object], device: torch.device) -> Utilisation | None:
    """Run `function` between two samples of the GPU's counters; None if the GPU or the library has none."""
    if devices.of(device).is_host:
        return None
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByIndex(device.index or 0)
        if not nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
            return None
        before, after = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
        nvml.nvmlGpmSampleGet(handle, before)
    except Exception:  # no library, no permission to read counters, or an older card: use the estimate
        return None
    function()
    devices.of(device).synchronize(device)
    nvml.nvmlGpmSampleGet(handle, after)
    request = nvml.c_nvmlGpmMetricsGet_t()
    request.version, request.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, 3
    request.sample1, request.sample2 = before, after
    for index, number in enumerate((DRAM, TENSOR, FP32)):
        request.metrics[index].metricId = number
    nvml.nvmlGpmMetricsGet(request)
    dram, tensor, fp32 = (request.metrics[index].value / 100 for index in range(3))
    nvml.nvmlGpmSampleFree(before)
    nvml.nvmlGpmSampleFree(after)
    return Utilisation(dram=dram, tensor=tensor, fp32=fp32, counters="counters")


def estimate_utilisation(work: Workload, machine: Machine, seconds: float) -> Utilisation:
    """Computed bytes and FLOPs of the step over its time. float32 units are not estimated separately."""
    moved = work.passes * (work.elementwise_bytes() + work.head_bytes()) + work.optimizer_bytes()
    flops = work.passes * (work.matmul_flops() + work.attention_flops())
    peak = machine.peak_flops.get(work.dtype) or machine.rate(work.dtype)
    return Utilisation(
        dram=moved / seconds / machine.bytes_per_second,
        tensor=flops / seconds / peak,
        counters="estimate",
    )
