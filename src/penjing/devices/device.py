"""The contract of a device type. The values here hold for any accelerator that torch knows."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from penjing.base.process_info import peak_resident_bytes

Capability = tuple[int, int]


class Device:
    """What the devices of one torch type can do, and how to ask one of them."""

    label = ""  # of the type, for messages; empty: torch's name
    is_host = False  # tensors are in host memory, and an operation has ended when its call returns

    # Numbers
    supports_float64 = True
    supports_tf32 = False
    slow_bfloat16_dtype = torch.float32  # of matmuls, by default, where bfloat16 is not fast

    # Training
    pins_memory = False  # copies from and to pinned host memory do not wait
    skips_steps = False  # its fused optimizers take `found_inf`, so that a bad step costs no wait
    uses_cu_seqlens = False  # its attention kernels take the documents' borders as `cu_seqlens_S`
    min_passes = 1  # of a step on one device, if the micro-batch is not set

    # torch.compile (train/compile_policy.py)
    compile_gain = 1.0  # speedup of a compiled step
    compile_seconds = 0.0  # cost of compiling
    eager_share = 0.4  # of the peak rate that an eager step reaches
    compiles_experts = False
    has_graphs = False  # passes can be recorded and replayed

    # Generation
    decode_slots = 256  # answers generated at once
    prefill_chunk = 4096  # prompt tokens of one step
    # Rows of a decoding pass are padded to a multiple of this, so that an answer's bits do not depend on how many
    # others are running.
    row_multiple = 1

    def __init__(self, type_name: str) -> None:
        self.type = type_name

    def unavailable_reason(self) -> str:
        """Why no device of this type can be used here; empty: one can."""
        found = torch.accelerator.current_accelerator(check_available=True)
        return "" if found is not None and found.type == self.type else f"this PyTorch has no {self.type} device"

    def count(self) -> int:
        """Devices of this type in this machine."""
        return 0 if self.unavailable_reason() else torch.accelerator.device_count()

    def set_current(self, device: torch.device) -> None:
        """Make `device` the one that calls without a device use. Every thread has its own."""
        if device.index is not None:
            torch.accelerator.set_device_index(device.index)

    @property
    def collective_backend(self) -> str:
        """The backend of torch.distributed."""
        return str(torch.distributed.Backend.default_device_backend_map.get(self.type, "gloo"))

    def name(self, device: torch.device) -> str:
        """The model's name, as the driver gives it."""
        return self.type

    def identity(self, device: torch.device) -> dict[str, Any]:
        """What a measurement of this device is valid for, besides its name and torch (plan/profile.py)."""
        return {}

    def capability(self, device: torch.device) -> Capability:
        """CUDA's compute capability; (0, 0) for other types."""
        return 0, 0

    @contextmanager
    def pretend_capability(self, capability: Capability) -> Iterator[None]:
        """For plans: inside, devices of this type report this capability, whether or not there are any."""
        yield

    def has_fast_bfloat16(self, device: torch.device, capability: Capability | None = None) -> bool:
        """Whether bf16 matmuls are faster than float32; depends on the hardware only. capability: None = ask."""
        return False

    def has_tf32(self, capability: Capability) -> bool:
        """Whether a device of this capability has tf32 units."""
        return False

    def compute_dtype(self, setting: str, device: torch.device, capability: Capability | None = None) -> torch.dtype:
        """The dtype of matmuls for a `compute.dtype` setting; on one machine `auto` is always the same."""
        if setting == "auto":
            fast = self.has_fast_bfloat16(device, capability)
            return torch.bfloat16 if fast else self.slow_bfloat16_dtype
        return getattr(torch, "float32" if setting == "tf32" else setting)  # type: ignore[no-any-return]

    def dtype_name(self, setting: str, device: torch.device, capability: Capability | None = None) -> str:
        """The name of `compute_dtype`, such as bfloat16."""
        return str(self.compute_dtype(setting, device, capability)).removeprefix("torch.")

    def memory_bytes(self, device: torch.device) -> int:
        """Memory of the device; 0 = unknown."""
        with suppress(RuntimeError, AttributeError, ValueError):  # ValueError: torch has another accelerator
            return int(torch.accelerator.get_memory_info(device)[1])
        return 0

    def context_bytes(self, device: torch.device) -> int:
        """Memory used besides tensors; 0 = unknown."""
        return 0

    def peak_memory_bytes(self, device: torch.device) -> int:
        """Peak memory of this process: reserved on the device, or resident where the device does not say."""
        with suppress(RuntimeError, AttributeError, ValueError):
            return int(torch.accelerator.max_memory_reserved(device))
        return peak_resident_bytes()

    def reset_peak_memory(self, device: torch.device) -> None:
        with suppress(RuntimeError, AttributeError, ValueError):
            torch.accelerator.reset_peak_memory_stats(device)

    def empty_cache(self) -> None:
        """Free cached memory that no tensor uses."""
        with suppress(RuntimeError, AttributeError):
            torch.accelerator.empty_cache()

    def activity_reader(self, device: torch.device) -> Callable[[], dict[str, float]]:
        """Reads what the device does now, by metric: `gpu_utilization` and so on, see devices/nvml.py."""
        return dict

    def synchronize(self, device: torch.device) -> None:
        """Wait until the device has done its work."""
        torch.accelerator.synchronize(device)

    def await_copies(self, device: torch.device) -> None:
        """Wait until copies that were started without waiting are done."""
        self.synchronize(device)

    def send_to_host(self, values: Tensor) -> tuple[Tensor, Any]:
        """The values on the host, and an event to synchronize with before they are read; None: they are there."""
        return values, None

    def time_calls(self, function: Callable[[], object], device: torch.device, times: int) -> float:
        """Seconds of `times` calls."""
        start = time.perf_counter()
        for _ in range(times):
            function()
        self.synchronize(device)
        return time.perf_counter() - start

    def missing_compiler(self) -> str:
        """What this machine lacks to compile for the device; empty: nothing."""
        return f"torch.compile is not used on {self.type}"

    def recorder(self, device: torch.device) -> Any:
        """A recorder of passes, on a type that `has_graphs`."""
        raise NotImplementedError
