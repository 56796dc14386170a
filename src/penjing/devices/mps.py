"""Apple GPUs. Nobody has run this file on one."""

from __future__ import annotations

import torch

from penjing.devices.device import Device


class Mps(Device):
    supports_float64 = False

    def unavailable_reason(self) -> str:
        return "" if torch.backends.mps.is_available() else "this PyTorch has no Apple GPU support"

    def count(self) -> int:
        return 0 if self.unavailable_reason() else 1
