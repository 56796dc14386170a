"""The table of devices: what each type can do, which one `auto` takes, and that no other code names a device."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import penjing
from penjing import devices
from penjing.base.errors import UserError
from penjing.devices.choose import local_device
from penjing.devices.device import Device

CPU = torch.device("cpu")
ROOT = Path(penjing.__file__).parent
HELP = ("train/config.py", "commands/arguments.py")  # what a user may type
WORDS = re.compile(r"\b(cuda|mps|xpu|npu|hpu|rocm)\b", re.IGNORECASE)  # in comments and docstrings, too
MAY_NAME_DEVICES = ("devices/", "kernels/", "plan/gpu_specs.py")
NAMES = re.compile(r"""["'](cpu|cuda|mps|xpu|npu|hpu)(:\d)?["']|torch\.(cuda|mps|xpu|cpu)\b|\bis_(cuda|cpu|mps)\b""")


def test_only_devices_and_kernels_name_a_device():
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sorted(ROOT.rglob("*.py"))
        if not path.relative_to(ROOT).as_posix().startswith(MAY_NAME_DEVICES)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if (NAMES.search(line.partition("  # ")[0]) and not line.lstrip().startswith("#"))
        or (WORDS.search(line) and not path.relative_to(ROOT).as_posix().startswith(HELP))
    ]
    assert not found, "\n".join(found)


def test_the_search_finds_every_spelling():
    lines = ['x = "cuda"', "device('cpu')", 'on = "cuda:0"', "torch.cuda.empty_cache()", "if x.is_cuda:"]
    assert all(NAMES.search(line) for line in lines)
    assert not NAMES.search("from penjing.devices.cpu import Cpu; cpu_forward.run(hardware.cpu_name())")


@pytest.mark.parametrize("name", devices.DEVICES)
def test_every_row_is_a_device_of_its_name(name):
    kind = devices.of(name)
    assert isinstance(kind, Device) and kind.type == name and devices.of(name) is kind
    assert kind.is_host == (name == "cpu")


def test_a_cpu_has_what_its_callers_count_on():
    kind = devices.of(CPU)
    assert kind.compute_dtype("float32", CPU) == kind.compute_dtype("tf32", CPU) == torch.float32
    assert kind.compute_dtype("bfloat16", CPU) == torch.bfloat16
    assert kind.compute_dtype("auto", CPU) in (torch.float32, torch.bfloat16)
    values, event = kind.send_to_host(torch.ones(2))
    assert event is None and values.tolist() == [1, 1]
    assert kind.collective_backend == "gloo" and devices.of("cuda").collective_backend == "nccl"


def test_a_type_without_a_row_has_the_values_of_any_accelerator():
    kind, device = devices.of("meta"), torch.device("meta")
    assert type(kind) is Device and not kind.is_host
    assert kind.compute_dtype("auto", device) == torch.float32
    assert "meta" in kind.missing_compiler() and kind.unavailable_reason()
    assert kind.memory_bytes(device) == 0 and kind.name(device) == "meta"


def accelerators(monkeypatch: pytest.MonkeyPatch, *, cuda: int = 0, mps: bool = False, other: str = "") -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    found = torch.device(other) if other else None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: found)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: int(bool(other)))


@pytest.mark.parametrize(
    ("here", "device"),
    [
        ({}, "cpu"),
        ({"cuda": 1, "other": "cuda"}, "cuda:0"),
        ({"mps": True, "other": "mps"}, "mps:0"),
        ({"other": "xpu"}, "xpu:0"),
    ],
)
def test_auto_takes_the_accelerator_whether_or_not_it_has_a_row(monkeypatch, here, device):
    accelerators(monkeypatch, **here)
    assert str(local_device("auto")) == device
    assert local_device("cpu") == CPU, "chosen by the user"


def test_rocm_is_cuda_with_less(monkeypatch):
    """torch's ROCm build calls its devices cuda; 9.4 is an MI300, not a Hopper."""
    kind = devices.of("cuda")
    monkeypatch.setattr(type(kind), "is_rocm", True)
    assert not kind.has_tf32((9, 4)) and kind.has_fast_bfloat16(torch.device("cuda"), (9, 4))


def test_each_rank_takes_its_own_device(monkeypatch):
    accelerators(monkeypatch, cuda=2, other="cuda")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert local_device("auto") == torch.device("cuda", 1)
    assert local_device("cuda:0") == torch.device("cuda", 0)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(UserError, match=r"0\.\.1"):
        local_device("auto")


@pytest.mark.parametrize("name", ["cuda", "mps", "xpu", "npu:1", "hpu", "quantum", "cuda:x"])
def test_what_is_not_there_is_one_line_with_its_name(monkeypatch, name):
    accelerators(monkeypatch)
    with pytest.raises(UserError, match=name.partition(":")[0]):
        local_device(name)


def test_torch_compile_knows_the_capability_after_a_plan():
    """A plan for a card may be what imports torch._dynamo, which finds functions by identity."""
    program = (
        "import torch\nfrom penjing import devices\n"
        "with devices.of('cuda').pretend_capability((9, 0)): import torch.nn.attention.varlen\n"
        "from torch._dynamo import trace_rules, variables\n"
        "found = trace_rules.lookup(torch.cuda.get_device_capability)\n"
        "assert found is variables.TorchInGraphFunctionVariable, found"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
