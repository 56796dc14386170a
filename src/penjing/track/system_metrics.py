"""What training takes of its machine: cores and memory of this process, and what its device says of itself."""

import os
import threading
import time
from typing import Self

import torch

from penjing import devices
from penjing.base.process_info import resident_bytes

INTERVAL_SECONDS = 10.0


class SystemSampler:
    """Samples in a thread of its own while it is entered; `metrics` are the means since they were last asked for."""

    def __init__(self, device: torch.device, interval_seconds: float = INTERVAL_SECONDS) -> None:
        self._device, self._interval = device, interval_seconds
        self._sums: dict[str, list[float]] = {}
        self._lock, self._end = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._sample_until_end, name="system metrics", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()

    def metrics(self) -> dict[str, float]:
        """cpu_cores: cores that this process kept busy. process_memory_bytes: resident. gpu_*: of the device, as
        `devices` names them. Empty if no sample was taken since the last call."""
        with self._lock:
            sums, self._sums = self._sums, {}
        return {name: sum(values) / len(values) for name, values in sums.items()}

    def _sample_until_end(self) -> None:
        try:
            read_device = devices.of(self._device).activity_reader(self._device)
        except Exception:  # no driver's library, or another version of it
            read_device = dict
        before, spent = time.monotonic(), _cpu_seconds()
        while not self._end.wait(self._interval):
            now, total = time.monotonic(), _cpu_seconds()
            sample = {"cpu_cores": (total - spent) / (now - before), "process_memory_bytes": float(resident_bytes())}
            before, spent = now, total
            try:
                sample |= read_device()
            except Exception:  # a driver's library that fails later is not asked again
                read_device = dict
            with self._lock:
                for name, value in sample.items():
                    self._sums.setdefault(name, []).append(value)


def _cpu_seconds() -> float:
    """Of all threads of this process, and of ended children."""
    return sum(os.times()[:4])
