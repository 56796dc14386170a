"""Apple GPUs. Nobody has run this file on one."""

import torch

from penjing.devices.device import Device


class Mps(Device):
    label = "Apple GPU"
    supports_float64 = False

    def unavailable_reason(self) -> str:
        return "" if torch.backends.mps.is_available() else "this PyTorch has no Apple GPU support"

    def count(self) -> int:
        return 0 if self.unavailable_reason() else 1

    def memory_bytes(self, device: torch.device) -> int:
        """What macOS lets the GPU use of the memory that it shares with the CPU."""
        return int(torch.mps.recommended_max_memory())

    def empty_cache(self) -> None:
        torch.mps.empty_cache()
