"""What share of a GPU's units a stretch of work kept busy: read from the card where it tells, else an estimate."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from penjing.plan.device_model import Machine
from penjing.plan.step_workload import Workload

# Numbers of NVML's GPM metrics (nvml.h, nvmlGpmMetricId_t).
TENSOR, DRAM, FP32 = 5, 10, 13


@dataclass(frozen=True, kw_only=True)
class Busy:
    """Shares of what the device could do, 0 to 1; None: not known. counters: `counters`, or `estimate`: work by formula
    over time."""

    dram: float | None = None
    tensor: float | None = None
    fp32: float | None = None
    counters: str = ""


def busy(work: Callable[[], object], device: torch.device) -> Busy | None:
    """Run `work` between two samples of the card's counters; None where the card or its library has none."""
    if device.type != "cuda":
        return None
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByIndex(device.index or 0)
        if not nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
            return None
        before, after = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
        nvml.nvmlGpmSampleGet(handle, before)
    except Exception:  # no library, no right to read counters, an older card: there is an estimate
        return None
    work()
    torch.cuda.synchronize(device)
    nvml.nvmlGpmSampleGet(handle, after)
    request = nvml.c_nvmlGpmMetricsGet_t()
    request.version, request.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, 3
    request.sample1, request.sample2 = before, after
    for place, number in enumerate((DRAM, TENSOR, FP32)):
        request.metrics[place].metricId = number
    nvml.nvmlGpmMetricsGet(request)
    dram, tensor, fp32 = (request.metrics[place].value / 100 for place in range(3))
    nvml.nvmlGpmSampleFree(before)
    nvml.nvmlGpmSampleFree(after)
    return Busy(dram=dram, tensor=tensor, fp32=fp32, counters="counters")


def estimated(work: Workload, machine: Machine, seconds: float) -> Busy:
    """Bytes and FLOPs of the step by formula over the time it took. float32 units are not told apart."""
    moved = work.passes * (work.elementwise_bytes() + work.head_bytes() + work.map_bytes()) + work.optimizer_bytes()
    flops = work.passes * (work.matmul_flops() + work.attention_flops())
    peak = machine.peak_flops.get(work.dtype) or machine.rate(work.dtype)
    return Busy(
        dram=moved / seconds / machine.bytes_per_second,
        tensor=flops / seconds / peak,
        counters="estimate",
    )
