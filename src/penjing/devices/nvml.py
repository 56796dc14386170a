"""What an NVIDIA card does now, from NVML through the package nvidia-ml-py, which the extra `trackers` installs.

Tested with a stand-in for the package: nobody has run this file on a card.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any


def activity_reader(uuid: str) -> Callable[[], dict[str, float]]:
    """A function that reads a card, which is found by its UUID. Raises ImportError, or NVML's errors.

    gpu_utilization: fraction of time in which a kernel ran. gpu_memory_bytes: of all processes. gpu_power_watts. From
    Hopper on also, as means since the last call, gpu_dram_active and gpu_tensor_active: the fractions of time in which
    the memory's and the tensor cores' pipes were busy (NVML's GPM metrics).
    """
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
    single: dict[str, Callable[[], float]] = {
        "gpu_utilization": lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
        "gpu_memory_bytes": lambda: float(pynvml.nvmlDeviceGetMemoryInfo(handle).used),
        "gpu_power_watts": lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
    }
    counters = _counters(pynvml, handle)

    def read() -> dict[str, float]:
        values = dict(counters())
        for name, value in single.items():
            with suppress(pynvml.NVMLError):  # a card may not tell some of them
                values[name] = value()
        return values

    return read


def _counters(pynvml: Any, handle: Any) -> Callable[[], dict[str, float]]:
    """Reads the hardware counters, which are differences of two samples; nothing on cards without them."""
    try:
        if not pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
            return dict
        samples = [pynvml.nvmlGpmSampleAlloc() for _ in range(2)]
        pynvml.nvmlGpmSampleGet(handle, samples[0])
    except (pynvml.NVMLError, AttributeError):  # an older driver or package
        return dict
    numbers = {
        "gpu_dram_active": pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
        "gpu_tensor_active": pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
    }

    def read() -> dict[str, float]:
        pynvml.nvmlGpmSampleGet(handle, samples[1])
        query = pynvml.c_nvmlGpmMetricsGet_t()
        query.version, query.numMetrics = pynvml.NVML_GPM_METRICS_GET_VERSION, len(numbers)
        query.sample1, query.sample2 = samples
        for index, number in enumerate(numbers.values()):
            query.metrics[index].metricId = number
        found = pynvml.nvmlGpmMetricsGet(query).metrics
        samples.reverse()
        return {name: found[index].value / 100 for index, name in enumerate(numbers) if not found[index].nvmlReturn}

    return read
