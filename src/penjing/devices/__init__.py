"""What devices can do: a row for each type. Only this package, kernels/ and plan/gpu_specs.py name a device.

`devices.of(device)` answers for a `torch.device` or the name of a type. A type without a row is asked through
`torch.accelerator` (devices/device.py). torch is imported when it is first needed.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from penjing.base.registry import look_up

if TYPE_CHECKING:
    import torch

    from penjing.devices.device import Device

    HOST: torch.device

HOST_TYPE = "cpu"
# In the order in which `auto` looks for them: the last one is everywhere.
DEVICES = {
    "cuda": "penjing.devices.cuda:Cuda",
    "xpu": "penjing.devices.xpu:Xpu",
    "npu": "penjing.devices.npu:Npu",
    "mps": "penjing.devices.mps:Mps",
    HOST_TYPE: "penjing.devices.cpu:Cpu",
}
_ANY = "penjing.devices.device:Device"


def __getattr__(name: str) -> Any:
    if name != "HOST":
        raise AttributeError(name)
    import torch

    return torch.device(HOST_TYPE)


def of(device: torch.device | str) -> Device:
    """What this device can do; a string is the name of its type."""
    return _row(device if isinstance(device, str) else device.type)


@cache
def _row(type_name: str) -> Device:
    row: Device = look_up({type_name: DEVICES.get(type_name, _ANY)}, type_name, what="device")(type_name)
    return row


def uses_tf32() -> bool:
    """Whether float32 matmuls of this process may run in tf32 (10 bits of mantissa), where tensor cores are."""
    import torch

    return bool(torch.backends.cuda.matmul.allow_tf32)


def set_tf32(allowed: bool) -> None:
    import torch

    torch.backends.cuda.matmul.allow_tf32 = allowed
