"""One process, one device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from penjing.parallel.base import Strategy


class Single(Strategy):
    """The strategy without neighbours: every operation is the plain one."""

    rank, world = 0, 1

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)  # what names no device, such as an event, means the current one

    def wrap(self, model: nn.Module) -> Callable[..., Tensor]:
        self._model = model
        return model

    def micro_step(self, *, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def add(self, value: Tensor) -> Tensor:
        return value

    def any(self, flag: bool) -> bool:
        return flag

    def broadcast(self, value: Any) -> Any:
        return value

    def close(self) -> None:
        pass
