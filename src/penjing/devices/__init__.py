"""What devices can do: a row for each type. Only this package, kernels/ and plan/gpu_specs.py name a device.

`devices.of(device)` answers for a `torch.device` or the name of a type. A type without a row is asked through
`torch.accelerator` (devices/device.py).
"""

from __future__ import annotations

from functools import cache

import torch

from penjing.base.registry import look_up
from penjing.devices.device import Device

HOST = torch.device("cpu")
# In the order in which `auto` looks for them: the last one is everywhere.
DEVICES = {
    "cuda": "penjing.devices.cuda:Cuda",
    "mps": "penjing.devices.mps:Mps",
    "cpu": "penjing.devices.cpu:Cpu",
}


def of(device: torch.device | str) -> Device:
    """What this device can do; a string is the name of its type."""
    return _row(device if isinstance(device, str) else device.type)


@cache
def _row(type_name: str) -> Device:
    kind: type[Device] = look_up(DEVICES, type_name, what="device") if type_name in DEVICES else Device
    return kind(type_name)


def uses_tf32() -> bool:
    """Whether float32 matmuls of this process may run in tf32 (10 bits of mantissa), where tensor cores are."""
    return bool(torch.backends.cuda.matmul.allow_tf32)


def set_tf32(allowed: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = allowed
