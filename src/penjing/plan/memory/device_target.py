"""The memory properties of the device for which a step is traced."""

from dataclasses import dataclass

from penjing import devices
from penjing.devices.device import Device
from penjing.plan.gpu_specs import DEVICE_TYPE

GIB = 1 << 30
# Error margin of the traced peak, as a fraction of the device's memory. Of eight published limits (docs/memory.md) the
# trace allows one row too many in three, with 0.3 to 1.8 % to spare.
MEMORY_MARGIN = 0.025


def is_tight(total_bytes: int, available_bytes: int) -> bool:
    """Whether the plan fits, but by less than the margin."""
    return safe_bytes(available_bytes) < total_bytes <= available_bytes


def safe_bytes(available_bytes: int) -> int:
    """The largest plan that fits without being tight."""
    return int((1 - MEMORY_MARGIN) * available_bytes)


@dataclass(frozen=True, kw_only=True)
class Target:
    """A device's memory properties.

    context_bytes: used by driver and runtime, outside PyTorch's count, from the first operation on. 0.47 GiB was
    measured with lazily loaded modules on an A100 with torch 2.1 (S. Bekman, "Machine Learning Engineering"); for
    every other card it is an estimate unless a profile measured it. On a CPU: the process without its tensors.
    """

    kind: str = DEVICE_TYPE  # type of the device, as torch calls it
    name: str = "A100"
    capability: tuple[int, int] = (8, 0)  # compute capability, as NVIDIA counts it
    memory_bytes: int = 0  # total reported by the driver; 0 = unknown
    context_bytes: int = int(0.47 * GIB)
    triton_kernels: bool = True  # whether kernels/triton can run, on cards that support it

    @property
    def device(self) -> Device:
        """What a device of this kind can do."""
        return devices.of(self.kind)

    @property
    def workspace_bytes(self) -> int:
        """cuBLAS workspace per handle and stream (`getChosenWorkspaceSize`)."""
        if self.device.is_host:
            return 0
        return 32 << 20 if self.capability[0] in (9, 10, 12) else 4096 * 1024 * 2 + 16 * 1024 * 8
