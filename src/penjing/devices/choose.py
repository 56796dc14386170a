"""Choose this process's device."""

import os

import torch

from penjing import devices
from penjing.base.errors import UserError


def local_device(name: str) -> torch.device:
    """The device called `name` for this process; `auto` takes the accelerator if there is one, else the CPU.

    Raises UserError if the named device is not available.
    """
    wanted = _auto_type() if name == "auto" else name
    kind = devices.of(wanted.partition(":")[0])
    called = kind.label or kind.type
    if kind.type in devices.DEVICES and (reason := kind.unavailable_reason()):
        next_step = f"Use device={devices.HOST} or device=auto."
        raise UserError(f"cannot use {called}: {reason}", where="device", got=name, next_step=next_step)
    try:
        device = torch.device(wanted)
        reason = kind.unavailable_reason()
    except RuntimeError:
        reason = "unknown"
    if reason:
        known = ", ".join(devices.DEVICES)
        raise UserError("no such device", where="device", got=repr(name), wanted=f"auto, {known}")
    if kind.is_host:
        return device
    count = kind.count()
    index = int(os.environ.get("LOCAL_RANK", "0")) if device.index is None else device.index
    if index >= count:
        raise UserError(f"no such {called} device", where="device", got=name, wanted=f"0..{count - 1}")
    return torch.device(device.type, index)


def _auto_type() -> str:
    """The first row of the table that is available, but the host last: before it, an accelerator without a row."""
    rows = [name for name in devices.DEVICES if name != devices.HOST.type]
    found = next((name for name in rows if not devices.of(name).unavailable_reason()), None)
    other = torch.accelerator.current_accelerator(check_available=True)
    return found or (other.type if other is not None else devices.HOST.type)
