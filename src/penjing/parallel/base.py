"""The contract of a strategy, and where it runs."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from penjing.devices.choose import local_device
from penjing.kernels import ops
from penjing.parallel.grad_scaler import LossScaler


class Strategy(ABC):
    """Runs a model on its devices. `rank` of `world` processes; `device` is this one's.

    With a `scaler` (parallel/grad_scaler.py) it scales the loss and unscales the gradients.
    """

    rank: int
    world: int
    device: torch.device
    scaler: LossScaler | None = None  # set when matmuls are in float16
    _model: nn.Module  # the wrapped model

    @abstractmethod
    def wrap(self, model: nn.Module) -> Callable[..., Tensor]:
        """Return a callable model whose gradients are summed over all ranks."""

    @abstractmethod
    def micro_step(self, *, last: bool) -> AbstractContextManager[Any]:
        """Context of one forward and backward pass. Ranks exchange gradients in the last pass of a step only."""

    def backward(self, total: Tensor) -> None:
        """Add the gradient of `total`, summed over ranks, to the parameters' gradients."""
        scaled = total if self.scaler is None else self.scaler.scale_loss(total)
        scaled.backward()  # type: ignore[no-untyped-call]

    def clip(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their global norm is at most `max_norm` (0: no clipping); return the norm."""
        return clip_gradients(self._model, max_norm, self.scaler)

    @abstractmethod
    def all_reduce(self, value: Tensor) -> Tensor:
        """Sum `value` over ranks; it may be on the CPU or on the device."""

    @abstractmethod
    def any(self, flag: bool) -> bool:
        """Whether any rank's flag is set; every rank gets the same answer."""

    @abstractmethod
    def broadcast(self, value: Any) -> Any:
        """Return rank 0's `value` on every rank. Before `wrap`, this method and `any` wait without a limit."""

    @abstractmethod
    def broadcast_tensors(self, tensors: Sequence[Tensor], source: int) -> None:
        """Overwrite tensors on the device, all of one dtype, with those of rank `source`."""

    @abstractmethod
    def close(self) -> None: ...


def clip_gradients(model: nn.Module, max_norm: float, scaler: LossScaler | None = None) -> Tensor:
    """Clip by the global norm; return the norm before clipping. A scaler first divides the gradients by its scale."""
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if scaler is not None:
        scaler.unscale(gradients)
    norm = ops.global_norm(gradients)
    if max_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    if scaler is not None:
        scaler.update(norm)
    return norm


def launched_world() -> int:
    """The number of processes that torchrun started; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def make_strategy(device_name: str) -> Strategy:
    """The strategy for this launch: data parallel if torchrun started several processes, else a single device."""
    from penjing.base.registry import look_up
    from penjing.parallel import STRATEGIES

    kind = "ddp" if launched_world() > 1 else "single"
    strategy: Strategy = look_up(STRATEGIES, kind, what="strategy")(local_device(device_name))
    return strategy
