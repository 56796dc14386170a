"""The machine that the process runs on."""

from __future__ import annotations

import os

import pytest
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


GROUPS = {
    "2": ("0::/user/run\n", "max", "current", ""),
    "1": ("4:memory:/run\n", "limit_in_bytes", "usage_in_bytes", "total_"),
}


def a_machine(root, version: str, limit: str, used: int):
    """A machine with 10,000 kB free, and a process of 1,000 kB in a control group with 3,000 bytes of page cache."""
    groups, limit_name, used_name, prefix = GROUPS[version]
    top = root / ("sys/fs/cgroup/user/run" if version == "2" else "sys/fs/cgroup/memory/run")
    files = {
        root / "proc/meminfo": "MemTotal: 20000 kB\nMemFree: 1 kB\nMemAvailable: 10000 kB\n",
        root / "proc/self/status": "Name: python\nVmHWM: 9000 kB\nVmRSS: 1700 kB\nRssAnon: 1000 kB\n",
        root / "proc/self/cgroup": groups,
        top / f"memory.{limit_name}": limit,
        top / f"memory.{used_name}": str(used),
        top / "memory.stat": f"{prefix}active_file 1000\n{prefix}inactive_file 2000\n{prefix}anon 5\n",
    }
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize("version", ["1", "2"])
def test_memory_that_others_hold_is_not_available(tmp_path, version):
    """The least of the machine's and each group's free memory, shared by processes alike, with the process's own."""
    own, free = 1000 * 1024, 10_000 * 1024
    root = a_machine(tmp_path, version, str(6_000_000), 4_003_000)
    assert host.cgroup_memory(root) == [(6_000_000, 4_000_000)]
    assert host.available_bytes(root=root) == own + 2_000_000
    assert host.available_bytes(4, root) == own + 500_000
    a_machine(root, version, str(6_000_000), 7_000_000)  # a limit lowered below the use
    assert host.available_bytes(root=root) == own
    a_machine(root, version, "max" if version == "2" else str(1 << 62), 4_003_000)
    assert host.available_bytes(root=root) == own + free


def test_limits_of_groups_above_count(tmp_path):
    a_machine(tmp_path, "2", "max", 5000)
    above = tmp_path / "sys/fs/cgroup/user"
    for name, text in {"max": "9000", "current": "7000", "stat": ""}.items():
        (above / f"memory.{name}").write_text(text)
    assert host.cgroup_memory(tmp_path) == [(9000, 7000)]


def test_the_memory_of_this_machine_is_the_least_limit(monkeypatch):
    total = host.memory_bytes()
    monkeypatch.setattr(host, "cgroup_memory", lambda root=None: [(total // 2, 0), (1 << 62, 0)])
    assert host.memory_bytes() == total // 2
    assert 0 < host.available_bytes() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
