"""Huawei's Ascend NPUs, with the package torch_npu, which torch loads by itself. Nobody has run this file on one."""

from typing import Any

import torch

from penjing.devices.device import Capability, Device


class Npu(Device):
    label = "Ascend NPU"
    supports_float64 = False
    pins_memory = True
    collective_backend = "hccl"

    def unavailable_reason(self) -> str:
        missing = not hasattr(torch, "npu")
        return "the package torch_npu is not installed" if missing else super().unavailable_reason()

    @property
    def _module(self) -> Any:
        return getattr(torch, "npu")  # noqa: B009  # torch_npu adds it

    def name(self, device: torch.device) -> str:
        return str(self._module.get_device_name(device))

    def has_fast_bfloat16(self, device: torch.device, capability: Capability | None = None) -> bool:
        return bool(self._module.is_bf16_supported())
