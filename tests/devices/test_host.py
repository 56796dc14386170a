"""The machine that the process runs on."""

from __future__ import annotations

import os

import torch

from penjing import devices
from penjing.devices import host

CPU = torch.device("cpu")


def test_cores_are_no_more_than_the_system_has():
    assert 1 <= host.physical_cores() <= os.cpu_count()


def test_peak_memory_is_in_bytes_and_grows():
    before = devices.of(CPU).peak_memory_bytes(CPU)
    assert before > 50 * 2**20, "Python and torch alone hold more"
    held = bytearray(before + 64 * 2**20 - before)
    del held
    assert devices.of(CPU).peak_memory_bytes(CPU) >= before


def test_limits_of_control_groups_count(tmp_path):
    """Version 2, version 1, and the groups above; `max` and a path outside the container's mount are no limits."""
    (tmp_path / "proc/self").mkdir(parents=True)
    files = {
        "sys/fs/cgroup/user/run/memory.max": "max",
        "sys/fs/cgroup/user/memory.max": "4096",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "8192",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    groups = tmp_path / "proc/self/cgroup"
    groups.write_text("0::/user/run\n")
    assert host.cgroup_limits(tmp_path) == [4096]
    groups.write_text("9:cpu,cpuacct:/other\n4:memory:/docker/4f2a\n")
    assert host.cgroup_limits(tmp_path) == [8192]


def test_the_memory_of_this_machine_is_the_least_limit(monkeypatch):
    total = host.memory_bytes()
    monkeypatch.setattr(host, "cgroup_limits", lambda: [total // 2, 1 << 62])
    assert host.memory_bytes() == total // 2
