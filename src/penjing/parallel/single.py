"""One process, one device."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from penjing import devices
from penjing.parallel.base import Strategy


class Single(Strategy):
    """The strategy of a single process: nothing is exchanged."""

    rank, world = 0, 1

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Calls without a device argument, such as events, use the current device.
        devices.of(device).set_current(device)

    def wrap(self, model: nn.Module) -> Callable[..., Tensor]:
        self._model = model
        return model

    def micro_step(self, *, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def all_reduce(self, value: Tensor) -> Tensor:
        return value

    def any(self, flag: bool) -> bool:
        return flag

    def broadcast(self, value: Any) -> Any:
        return value

    def broadcast_tensors(self, tensors: Sequence[Tensor], source: int) -> None:
        pass

    def close(self) -> None:
        pass
