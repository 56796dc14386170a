"""The contract of a strategy, and where it runs."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from penjing import devices
from penjing.base.errors import UserError
from penjing.base.registry import look_up
from penjing.devices.choose import local_device
from penjing.devices.shards import local_part
from penjing.kernels import ops
from penjing.parallel import STRATEGIES
from penjing.parallel.grad_scaler import LossScaler

Batch = TypeVar("Batch")


class Strategy(ABC):
    """Runs a model on its devices. `rank` of `world` processes; `device` is this one's.

    With a `scaler` (parallel/grad_scaler.py) it scales the loss and unscales the gradients.
    """

    name = "auto"  # in the table
    rank: int
    world: int
    device: torch.device
    scaler: LossScaler | None = None  # set when matmuls are in float16
    shards: frozenset[str] = frozenset()  # of "weights", "gradients", "optimizer state": a rank holds a part only
    shards_within_node = False  # the ranks of a machine hold everything together, instead of all ranks
    writers = 1  # ranks that hold all rows of all tensors together: the first ones; `first_row` says which
    wraps_shapes = False  # `wrap` also takes a model on the meta device, and makes room for a rank's parts
    reshard = "pass"  # as `parallel.reshard`, for those that exchange gradients in each pass
    offload = False  # what a rank holds lies in the host's memory, and the optimizers step there
    # Context of work of this rank alone that may take any time, such as a judge's answers: the watchdog sets it.
    untimed: Callable[[], AbstractContextManager[None]] = nullcontext
    _model: nn.Module  # the wrapped model

    @property
    def is_sharded(self) -> bool:
        """Whether a rank holds a part of the weights, so that all ranks take part in each pass."""
        return "weights" in self.shards

    def check(self, run: Any) -> None:  # noqa: B027  # most follow all
        """Refuse, before data are prepared, settings that it cannot follow. run: its settings."""

    @abstractmethod
    def wrap(self, model: nn.Module) -> Callable[..., Tensor]:
        """Return a callable model whose gradients are summed over all ranks."""

    def adopt(self, optimizers: list[Any], run: Any, geometry: Any) -> list[Any]:
        """What the loop steps instead of the run's optimizers. run: its settings. geometry: of its batches."""
        return optimizers

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
        gradients = [local_part(parameter.grad) for parameter in self._model.parameters() if parameter.grad is not None]
        if self.scaler is not None:
            self.scaler.unscale(gradients)
        norm = self.joint_norm(gradients)
        if max_norm > 0 and gradients:
            torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1))
        if self.scaler is not None:
            self.scaler.update(norm)
        return norm

    def joint_norm(self, gradients: list[Tensor]) -> Tensor:
        """The norm of all gradients. gradients: those that are here, each tensor or this rank's part of it."""
        return ops.global_norm(gradients)

    def step(self, optimizers: Sequence[Any], max_norm: float, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Clip, and take the optimizers' step: (the gradients' norm, 1.0 if it or `loss` is not finite, else 0.0).

        A bad step changes nothing. loss: over all ranks.
        """
        norm = self.clip(max_norm)
        return norm, guarded_step(optimizers, norm, loss)

    def held(self, optimizers: Sequence[Any]) -> dict[str, list[Tensor]]:
        """What this rank holds, by the names of `shards`: its tensors, or its parts of them."""
        parameters = list(self._model.parameters())
        states = [state.values() for optimizer in optimizers for state in optimizer.state.values()]
        return {
            "weights": [local_part(one) for one in parameters],
            "gradients": [local_part(one.grad) for one in parameters if one.grad is not None],
            "optimizer state": [local_part(one) for state in states for one in state if isinstance(one, Tensor)],
        }

    # --- where a rank holds a part of the weights: by default each holds them all -------------------------------------

    def full_state(self, state: Any) -> Any:
        """State dicts with whole tensors, as a single device has them. All ranks call it; rank 0 needs the result."""
        return state

    def place(self, full: Tensor, like: Tensor) -> Tensor:
        """This rank's part of a whole tensor. like: what it becomes, or the parameter that it belongs to."""
        return full

    def first_row(self, tensor: Tensor) -> int:
        """With several `writers`: the number of the first row of a tensor that this rank holds."""
        return 0

    def loading(self) -> AbstractContextManager[Any]:
        """While it lasts, whole weights can be loaded into the wrapped model. All ranks enter it."""
        return nullcontext()

    def gathered(self, model: nn.Module) -> AbstractContextManager[Any]:
        """While it lasts every rank has the whole weights, and may run the model by itself: for samples, questions and
        answers to learn from. All ranks enter it."""
        return nullcontext()

    def lockstep(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, float]]:
        """This rank's batches, and the weight of each, 1. Where all ranks take part in each pass they get equally many:
        those that have no more repeat their first, or that of rank 0, with weight 0."""
        if not self.is_sharded:
            yield from ((batch, 1.0) for batch in batches)
            return
        rest = iter(batches)
        batch = next(rest, None)
        first = self.broadcast(batch)  # rank 0 has one if any has
        filler = first if batch is None else batch
        while self.any(batch is not None):
            yield (filler, 0.0) if batch is None else (batch, 1.0)
            batch = next(rest, None)

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


def strategy_for(world: int) -> str:
    """The strategy that `auto` means, for training and plans."""
    return "ddp" if world > 1 else "single"


def become(strategy: Strategy, name: str) -> None:
    """Make a strategy of several processes another one, for all that refer to it. It has wrapped nothing yet."""
    strategy.__class__ = look_up(STRATEGIES, name, what="parallel.strategy")
    strategy.name = name


def make_strategy(device_name: str, name: str = "auto", *, offload: bool = False) -> Strategy:
    """The strategy of that name, on this process's device. offload: as `parallel.offload`."""
    world = launched_world()
    if name == "auto":
        name = strategy_for(world)
    strategy: Strategy = look_up(STRATEGIES, name, what="parallel.strategy")(local_device(device_name))
    strategy.name = name
    if strategy.world != world:
        got = f"{name} in {world} processes"
        raise UserError("works with one process", where="parallel.strategy", got=got, wanted="auto")
    if offload and not strategy.shards:
        raise UserError("needs a strategy that shards", where="parallel.offload", got=name, wanted="such as fsdp2")
    strategy.offload = offload
    return strategy
