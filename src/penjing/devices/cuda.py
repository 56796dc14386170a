"""NVIDIA GPUs, and AMD's under ROCm, which torch calls cuda too."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from penjing.devices.device import Capability, Device

BFLOAT16_CAPABILITY = (8, 0)  # of the first cards with bfloat16 and tf32 units
DYNAMO_RULES = "torch._dynamo.trace_rules"
WARM_UPS = 3  # of a pass before it is recorded


class Cuda(Device):
    supports_tf32 = True
    slow_bfloat16_dtype = torch.float16  # on V100, T4, RTX 20
    pins_memory = True
    skips_steps = True
    uses_cu_seqlens = True
    # An H200, 26M: 1.19 x and 17 s; larger models spend more of their time in matmuls, which compiling does not
    # speed up.
    compile_gain, compile_seconds, eager_share = 1.19, 20.0, 0.29
    compiles_experts = True

    # Nobody has run this file under ROCm. Graphs, tf32 and our Triton kernels (kernels/triton/ops.py) are off there.
    is_rocm = torch.version.hip is not None
    label = "ROCm" if is_rocm else "CUDA"
    has_graphs = not is_rocm

    def unavailable_reason(self) -> str:
        if torch.cuda.is_available():
            return ""
        built = self.is_rocm or torch.version.cuda is not None
        return f"no {self.label} device was found" if built else "this PyTorch has no CUDA"

    def count(self) -> int:
        return torch.cuda.device_count() if torch.cuda.is_available() else 0

    def set_current(self, device: torch.device) -> None:
        if device.index is not None:
            torch.cuda.set_device(device)

    def name(self, device: torch.device) -> str:
        return torch.cuda.get_device_name(device)

    def identity(self, device: torch.device) -> dict[str, Any]:
        driver, watts = _driver(device)
        return {"driver": driver, "power_limit_watts": watts, "devices": torch.cuda.device_count()}

    def capability(self, device: torch.device) -> Capability:
        return torch.cuda.get_device_capability(device)

    @contextmanager
    def pretend_capability(self, capability: Capability) -> Iterator[None]:
        real, had_dynamo = torch.cuda.get_device_capability, DYNAMO_RULES in sys.modules
        torch.cuda.get_device_capability = lambda device=None: capability
        try:
            yield
        finally:
            torch.cuda.get_device_capability = real
            if not had_dynamo and (rules := sys.modules.get(DYNAMO_RULES)):
                rules.clear_lru_cache()  # torch.compile finds functions by identity, and has not seen the real one

    def has_fast_bfloat16(self, device: torch.device, capability: Capability | None = None) -> bool:
        return (capability or self.capability(device)) >= BFLOAT16_CAPABILITY

    def has_tf32(self, capability: Capability) -> bool:
        return not self.is_rocm and capability >= BFLOAT16_CAPABILITY

    def memory_bytes(self, device: torch.device) -> int:
        return int(torch.cuda.get_device_properties(device).total_memory)

    def context_bytes(self, device: torch.device) -> int:
        left = torch.ones(256, 256, device=device)
        left @ left
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return int(total - free - torch.cuda.memory_reserved(device))

    def peak_memory_bytes(self, device: torch.device) -> int:
        return torch.cuda.max_memory_reserved(device)

    def activity_reader(self, device: torch.device) -> Callable[[], dict[str, float]]:
        from penjing.devices.nvml import activity_reader

        return activity_reader(str(torch.cuda.get_device_properties(device).uuid))

    def await_copies(self, device: torch.device) -> None:
        torch.cuda.current_stream(device).synchronize()

    def send_to_host(self, values: Tensor) -> tuple[Tensor, Any]:
        pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        on_host = pinned.copy_(values, non_blocking=True)
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record()
        return on_host, ready

    def time_calls(self, function: Callable[[], object], device: torch.device, times: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(times):
            function()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def missing_compiler(self) -> str:
        return "" if importlib.util.find_spec("triton") else "no triton"

    def recorder(self, device: torch.device) -> Recorder:
        return Recorder(device)


def _driver(device: torch.device) -> tuple[str, float]:
    """Driver version and power limit from nvidia-smi; `unknown` and 0 without it."""
    fields = ("--query-gpu=driver_version,power.limit", "--format=csv,noheader")
    query = ["nvidia-smi", f"--id={device.index or 0}", *fields]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
        driver, watts = output.splitlines()[0].split(", ")
        return driver, float(watts.split()[0])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return "unknown", 0.0


class Recorder:
    """Captures and replays CUDA graphs in one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, run: Callable[[], object]) -> None:
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                run()
        current.wait_stream(self._stream)

    def capture(self, run: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """The recording of what `run` launches; nothing is computed."""
        recording = torch.cuda.CUDAGraph()
        # Other threads, such as loaders that pin memory, may use CUDA meanwhile.
        with (
            torch.cuda.device(self._stream.device),
            torch.cuda.graph(recording, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
        ):
            run()
        return recording

    def replay(self, recording: torch.cuda.CUDAGraph) -> None:
        recording.replay()
