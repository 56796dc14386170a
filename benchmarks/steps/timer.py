"""Time training steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from penjing import devices


def time_steps(
    step: Callable[[int], object],
    device: torch.device,
    *,
    steps: int,
    warmup: int = 0,
    group_size: int = 1,
    seconds: float = math.inf,
) -> list[float]:
    """Mean seconds per step of each group of steps after warm-up; the device is synchronized after each group.

    Times at least two groups, and stops once they took `seconds`.
    """

    def wait() -> None:
        devices.of(device).synchronize(device)

    for number in range(warmup):
        step(number)
    wait()
    step_seconds: list[float] = []
    for first in range(warmup, warmup + steps, group_size):
        began = time.perf_counter()
        for number in range(first, first + group_size):
            step(number)
        wait()
        step_seconds.append((time.perf_counter() - began) / group_size)
        if len(step_seconds) >= 2 and sum(step_seconds) * group_size > seconds:
            break
    return step_seconds
