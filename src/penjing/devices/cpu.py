"""The CPU, which is also the host of every other device."""

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from penjing.base.process_info import peak_resident_bytes
from penjing.devices import host
from penjing.devices.device import Capability, Device
from penjing.devices.fast_bfloat16 import cpu_has_fast_bfloat16


class Cpu(Device):
    label = "CPU"
    is_host = True
    # In bfloat16 every pass rounds its gradients, so equal bits need equal passes: with two, two processes learn
    # exactly what one does.
    min_passes = 2
    # A compiled step takes 1.3 times as long as an eager one, which has C kernels (kernels/cpu/ops.py) and computes
    # attention document by document.
    compile_seconds, eager_share = 30.0, 0.65
    decode_slots = 64  # small passes stay in the cache
    prefill_chunk = 256  # a small chunk keeps a CPU busy
    # Torch uses other kernels for fewer than four rows, and for the last few values of a tensor; they round
    # differently. For the same reason each sequence's chunk is prefilled by itself.
    row_multiple = 4

    def unavailable_reason(self) -> str:
        return ""

    def count(self) -> int:
        return 1

    def set_current(self, device: torch.device) -> None:
        pass

    def name(self, device: torch.device) -> str:
        return host.cpu_name()

    def identity(self, device: torch.device) -> dict[str, Any]:
        return {"threads": torch.get_num_threads()}

    def has_fast_bfloat16(self, device: torch.device, capability: Capability | None = None) -> bool:
        return cpu_has_fast_bfloat16(host.cpu_name())

    def memory_bytes(self, device: torch.device) -> int:
        return host.memory_bytes()

    def context_bytes(self, device: torch.device) -> int:
        return peak_resident_bytes()

    def peak_memory_bytes(self, device: torch.device) -> int:
        return peak_resident_bytes()

    def reset_peak_memory(self, device: torch.device) -> None:
        """On Linux; elsewhere the peak of resident memory cannot be reset."""
        path = Path("/proc/self/clear_refs")
        if path.exists():
            with suppress(OSError):
                path.write_text("5")

    def empty_cache(self) -> None:
        pass

    def synchronize(self, device: torch.device) -> None:
        pass

    def missing_compiler(self) -> str:
        compiler, folder = os.environ.get("CXX", "g++"), str(Path(torch.__file__).parent)
        if " " in folder:  # its linker gets the path without quotes
            return f"torch cannot compile from a folder with a space in its name ({folder})"
        return "" if shutil.which(compiler) or shutil.which("clang++") else f"no C++ compiler ({compiler})"
