"""What the machine says of itself, and data-sheet figures that go to the right card."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from penjing.plan import hardware

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 3090", 71),
        ("NVIDIA GeForce RTX 4090", 165.2),
        # Their names hold another card's, their rates are their own.
        ("NVIDIA A10G", None),
        ("NVIDIA L40", None),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("Some GPU", None),
    ],
)
def test_data_sheet_peaks(name, tflops):
    found = hardware.data_sheet_peak(name)
    assert found == (None if tflops is None else pytest.approx(tflops * 1e12))


@pytest.mark.parametrize(
    ("dtype", "in_tf32", "tflops"),
    [
        (torch.bfloat16, False, 989),
        (torch.float16, True, 989),
        (torch.float32, False, 67),
        (torch.float32, True, 494.5),
        (torch.float64, False, None),
    ],
)
def test_the_peak_of_a_gpu_is_that_of_the_units_in_use(dtype, in_tf32, tflops, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H100 80GB HBM3")
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = in_tf32
    try:
        found = hardware.peak(torch.device("cuda"), dtype)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert found == (None if tflops is None else pytest.approx(tflops * 1e12))


def test_the_peak_of_a_cpu_is_measured_and_that_of_an_unknown_device_is_not_known():
    assert hardware.peak(CPU, torch.float32) > 1e8
    assert hardware.peak(torch.device("meta"), torch.float32) is None


def test_waiting_for_a_core_is_no_part_of_a_matmuls_time(monkeypatch):
    """On a busy machine a thread waits; MFU was 142 % there while the wall clock was read."""
    monkeypatch.setattr(torch, "matmul", lambda left, right: time.sleep(0.002))
    flops_while_asleep = 2 * 1024 * 512 * 1024 / 0.002
    assert hardware.cpu_matmul_rate(torch.float32) > 3 * flops_while_asleep


def test_every_thread_in_use_counts(monkeypatch):
    monkeypatch.setattr(hardware, "_one_thread_rate", lambda dtype: float(torch.get_num_threads()))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert hardware.cpu_matmul_rate(torch.float32) == 3.0, "one thread each"
        assert torch.get_num_threads() == 3
        later = []
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert later == [3], "threads to come have as many"
    finally:
        torch.set_num_threads(before)


def test_the_machine_described():
    facts = hardware.describe(CPU, torch.bfloat16)
    assert facts["device"] == "cpu"
    assert facts["compute_dtype"] == "bfloat16"
    assert facts["cpu"]
    assert facts["threads"] == torch.get_num_threads()
    assert facts["memory_bytes"] > 2**30
