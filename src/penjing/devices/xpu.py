"""Intel GPUs (collectives: xccl). Nobody has run this file on one."""

import torch

from penjing.devices.device import Capability, Device


class Xpu(Device):
    label = "Intel GPU"
    supports_float64 = False  # Arc cards have no such units
    pins_memory = True

    def name(self, device: torch.device) -> str:
        return str(torch.xpu.get_device_name(device))

    def has_fast_bfloat16(self, device: torch.device, capability: Capability | None = None) -> bool:
        return bool(torch.xpu.is_bf16_supported(including_emulation=False))
