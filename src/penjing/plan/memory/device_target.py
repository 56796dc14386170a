"""The device a step is traced for, as far as memory is concerned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GIB = 1 << 30
# What the traced peak may be off by, of the device's memory: of eight published edges (docs/memory.md), the three that
# it has one row too far are there with 0.3 to 1.8 % to spare.
MEMORY_MARGIN = 0.025


def is_tight(total_bytes: int, available_bytes: int) -> bool:
    """Whether it fits by less than the figure may be off."""
    return safe_bytes(available_bytes) < total_bytes <= available_bytes


def safe_bytes(available_bytes: int) -> int:
    """What a plan may take of it without being tight."""
    return int((1 - MEMORY_MARGIN) * available_bytes)


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a device does with memory.

    context_bytes: held by driver and runtime outside PyTorch's count, from the first operation on; 0.47 GiB was
    measured with modules loaded lazily on an A100 with torch 2.1 (S. Bekman, "Machine Learning Engineering"), so for
    every other card it is an estimate unless a profile measured it. Of a CPU: the process without its tensors.
    """

    kind: Literal["cuda", "cpu"] = "cuda"
    name: str = "A100"
    capability: tuple[int, int] = (8, 0)  # of CUDA's architectures
    memory_bytes: int = 0  # that the driver reports in all; 0 = not known
    context_bytes: int = int(0.47 * GIB)
    own_kernels: bool = True  # whether kernels/triton runs there, if the card is of the kind

    @property
    def workspace_bytes(self) -> int:
        """What cuBLAS is given for each handle and stream (`getChosenWorkspaceSize` in CUDABlas.cpp)."""
        if self.kind != "cuda":
            return 0
        return 32 << 20 if self.capability[0] in (9, 10, 12) else 4096 * 1024 * 2 + 16 * 1024 * 8
