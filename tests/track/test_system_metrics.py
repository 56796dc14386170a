"""What a run takes of its machine: of this process by /proc, of a card by a stand-in for NVML."""

import sys
import time
import types

import pytest
import torch

from penjing import devices
from penjing.devices.nvml import activity_reader
from penjing.track.system_metrics import SystemSampler


def wait_for(sampler, seconds=20):
    deadline = time.monotonic() + seconds
    while not (metrics := sampler.metrics()) and time.monotonic() < deadline:
        sum(range(20_000))
    return metrics


def test_it_says_what_this_process_takes():
    held = bytearray(64 << 20)
    with SystemSampler(torch.device("cpu"), interval_seconds=0.2) as sampler:
        wait_for(sampler)
        metrics = wait_for(sampler)
    assert set(metrics) == {"cpu_cores", "process_memory_bytes"}
    assert 0 < metrics["cpu_cores"] < 64
    assert len(held) < metrics["process_memory_bytes"] < 64 << 30
    assert not sampler.metrics(), "each sample counts once"


def test_a_driver_that_fails_is_asked_no_more(monkeypatch):
    asked = []

    def fail():
        asked.append(1)
        raise OSError("the driver is gone")

    monkeypatch.setattr(devices.of("cpu"), "activity_reader", lambda device: fail)
    with SystemSampler(torch.device("cpu"), interval_seconds=0.05) as sampler:
        assert wait_for(sampler) and wait_for(sampler) and wait_for(sampler)
    assert asked == [1]


class NvmlError(Exception):
    pass


def stand_in(has_counters=True):
    """NVML of one card, with the names and the structures of nvidia-ml-py."""
    metric = [types.SimpleNamespace(metricId=0, nvmlReturn=0, value=0.0) for _ in range(4)]
    taken = []

    def get(query):
        assert (query.version, query.numMetrics) == (1, 2) and query.sample1 is not query.sample2
        assert taken.index(id(query.sample1)) < len(taken) - 1 and taken[-1] == id(query.sample2), "older, newer"
        for one in query.metrics[:2]:
            one.value = {10: 55.0, 5: 31.0}[one.metricId]
        return query

    def power(handle):
        raise NvmlError("not supported")

    return types.SimpleNamespace(
        NVMLError=NvmlError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: {"GPU-12ab": "card"}[uuid],
        nvmlDeviceGetUtilizationRates=lambda card: types.SimpleNamespace(gpu=87, memory=40),
        nvmlDeviceGetMemoryInfo=lambda card: types.SimpleNamespace(used=5 << 30),
        nvmlDeviceGetPowerUsage=power if not has_counters else lambda card: 312_500,
        nvmlGpmQueryDeviceSupport=lambda card: types.SimpleNamespace(isSupportedDevice=int(has_counters)),
        nvmlGpmSampleAlloc=lambda: types.SimpleNamespace(),
        nvmlGpmSampleGet=lambda card, sample: taken.append(id(sample)),
        nvmlGpmMetricsGet=get,
        c_nvmlGpmMetricsGet_t=lambda: types.SimpleNamespace(metrics=metric),
        NVML_GPM_METRICS_GET_VERSION=1,
        NVML_GPM_METRIC_DRAM_BW_UTIL=10,
        NVML_GPM_METRIC_ANY_TENSOR_UTIL=5,
    )


def test_a_card_tells_use_memory_power_and_its_counters(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", stand_in())
    read = activity_reader("12ab")
    expected = {"gpu_utilization": 0.87, "gpu_memory_bytes": 5 << 30, "gpu_power_watts": 312.5}
    expected |= {"gpu_dram_active": 0.55, "gpu_tensor_active": 0.31}
    assert read() == pytest.approx(expected) == read()


def test_a_card_without_counters_or_power_tells_the_rest(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", stand_in(has_counters=False))
    assert activity_reader("GPU-12ab")() == pytest.approx({"gpu_utilization": 0.87, "gpu_memory_bytes": 5 << 30})


def test_the_package_has_the_names_that_are_used():
    pynvml = pytest.importorskip("pynvml")
    missing = [name for name in vars(stand_in()) if not hasattr(pynvml, name)]
    assert not missing
    query = pynvml.c_nvmlGpmMetricsGet_t()
    query.sample1, query.sample2 = pynvml.c_nvmlGpmSample_t(), pynvml.c_nvmlGpmSample_t()
    assert {"metricId", "nvmlReturn", "value"} <= {name for name, _ in query.metrics[0]._fields_}
