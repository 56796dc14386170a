"""The contract of a strategy, and where it runs."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from penjing import devices
from penjing.base.errors import UserError
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
        """Scale all gradients so that their global norm is at most `max_norm` (0: no clipping); return the norm before.

        A scaler first divides the gradients by its scale.
        """
        parameters = [parameter for parameter in self._model.parameters() if parameter.grad is not None]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if self.scaler is not None:
            self.scaler.unscale(gradients)
        norm = ops.global_norm(gradients)
        if max_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        if self.scaler is not None:
            self.scaler.update(norm)
        return norm

    def step(self, optimizers: Sequence[Any], max_norm: float, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Clip, and take the optimizers' step: (the gradients' norm, 1.0 if it or `loss` is not finite, else 0.0).

        A bad step changes nothing. loss: over all ranks.
        """
        norm = self.clip(max_norm)
        return norm, guarded_step(optimizers, norm, loss)

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


def guarded_step(optimizers: Sequence[Any], norm: Tensor, loss: Tensor) -> Tensor:
    """Take the optimizers' step and return 0.0 if norm and loss (of all ranks) are finite; else skip it, return 1.0."""
    bad = (~(torch.isfinite(norm) & torch.isfinite(loss))).float()
    masked = devices.of(norm.device).skips_steps and all(takes_flag(optimizer) for optimizer in optimizers)
    skip = not masked and bool(bad)
    for optimizer in optimizers:
        if masked:
            optimizer.found_inf, optimizer.grad_scale = bad, None
        if not skip:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return bad


def takes_flag(optimizer: Any) -> bool:
    """Whether an optimizer changes nothing if its `found_inf` is 1 (the convention of torch's grad scalers)."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def launched_world() -> int:
    """The number of processes that torchrun started; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def make_strategy(device_name: str, name: str = "auto") -> Strategy:
    """The strategy of that name; `auto`: data parallel if torchrun started several processes, else a single device."""
    from penjing.base.registry import look_up
    from penjing.parallel import STRATEGIES

    world = launched_world()
    if name == "auto":
        name = "ddp" if world > 1 else "single"
    strategy: Strategy = look_up(STRATEGIES, name, what="parallel.strategy")(local_device(device_name))
    if strategy.world != world:
        got = f"{name} in {world} processes"
        raise UserError("works with one process", where="parallel.strategy", got=got, wanted="auto")
    return strategy
