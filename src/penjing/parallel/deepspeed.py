"""ZeRO stages 1, 2 and 3 by DeepSpeed (arXiv:1910.02054), with AdamW. Tried on CPU ranks, and ZeRO-2 on one GPU;
nobody has run it on several.

DeepSpeed's engine owns the backward pass, the exchange of gradients, clipping and the step. Weights, gradients and
state stay float32, as in the other strategies: the model casts at its matmuls, so DeepSpeed's mixed precision is off.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as distributed
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from penjing import devices
from penjing.base.errors import import_extra
from penjing.parallel.base import guarded_step
from penjing.parallel.ds_config import check_file, engine_config
from penjing.parallel.process_group import MultiProcess


class _Zero(MultiProcess):
    """A stage of ZeRO. `wrap` keeps the model; `adopt`, which gets the optimizer too, makes the engine."""

    stage: ClassVar[int]
    _engine: Any = None  # of DeepSpeed
    _adamw: ZeroAdamW

    def __init__(self, device: torch.device) -> None:
        self._deepspeed = _import_deepspeed(device)
        super().__init__(device)

    def check(self, run: Any) -> None:
        check_file(run, self.stage)

    def wrap(self, model: nn.Module) -> Callable[..., Tensor]:
        self.end_setup()
        self._model = model.to(self.device)
        return lambda *args, **kwargs: self._engine(*args, **kwargs)

    def adopt(self, optimizers: list[Any], run: Any, geometry: Any) -> list[Any]:
        (ours,) = (optimizer for optimizer in optimizers if isinstance(optimizer, torch.optim.Optimizer))
        groups = [{**group, "params": list(group["params"])} for group in ours.param_groups]
        config = engine_config(run, geometry, self.stage)
        self._engine, *_ = self._deepspeed.initialize(model=self._model, optimizer=ours, config=config)
        self._adamw = ZeroAdamW(self._engine.optimizer, groups, self.stage)
        return [self._adamw, *(optimizer for optimizer in optimizers if optimizer is not ours)]

    def micro_step(self, *, last: bool) -> AbstractContextManager[Any]:
        """With `reshard` at the end of a step, gradients add up whole until its last pass. The engine's own context for
        that, `coalesce_grad_reduction`, exchanges them at its end also after an error, and the rank would hang."""
        self._engine.set_gradient_accumulation_boundary(last)
        keeps_whole = self.reshard == "step" and not last
        self._adamw.zero._coalesce_grad_reduction = self._engine.inside_no_sync_ctxt = keeps_whole
        return nullcontext()

    def backward(self, total: Tensor) -> None:
        """The engine takes the mean over ranks. A sum that is not finite makes all gradients so: the engine then skips
        the step, also if a mask has hidden it from them."""
        total = total * torch.where(torch.isfinite(total.detach()), self.world, torch.nan)
        if self.scaler is not None:
            self._adamw.zero.loss_scale = self.scaler.state()["scale"]
        self._engine.backward(total, scale_wrt_gas=False)

    def step(self, optimizers: Sequence[Any], max_norm: float, loss: Tensor) -> tuple[Tensor, Tensor]:
        zero = self._adamw.zero
        zero.clip_grad = max_norm
        self._adamw.pass_rates()
        self._engine.step()
        norm = torch.tensor(float("inf") if zero.overflow else float(self._engine.get_global_grad_norm()))
        norm = norm.to(self.device)
        if self.scaler is not None:
            self.scaler.update(norm)
        others = [optimizer for optimizer in optimizers if optimizer is not self._adamw]
        return norm, guarded_step(others, norm, loss)

    def held(self, optimizers: Sequence[Any]) -> dict[str, list[Tensor]]:
        zero, others = self._adamw.zero, [one for one in optimizers if one is not self._adamw]
        held = super().held([zero.optimizer, *others])
        held["weights"] = [getattr(one, "ds_tensor", one) for one in held["weights"]]
        held["gradients"] += [one for one in tree_leaves(zero.averaged_gradients) if isinstance(one, Tensor)]
        held["optimizer state"] += zero.optimizer.state  # its keys are the float32 copies of the weights
        return held

    def full_state(self, state: Any) -> Any:
        return tree_map_only(Part, lambda part: part.whole(self.rank, self.device), state)

    @contextmanager
    def loading(self) -> Iterator[None]:
        yield
        self._adamw.zero.refresh_fp32_params()

    def close(self) -> None:
        if self._engine is None:
            super().close()
        else:
            self._engine.destroy()
            self._deepspeed.comm.destroy_process_group()  # it also keeps groups, which the next run must not find


class Zero1(_Zero):
    """Each rank keeps a part of the optimizer's state; weights and gradients are whole."""

    stage, shards = 1, frozenset({"optimizer state"})


class Zero2(_Zero):
    """As stage 1, and a part of the gradients."""

    stage, shards = 2, frozenset({"gradients", "optimizer state"})


class Zero3(_Zero):
    """As stage 2, and a part of the weights: they are gathered where a pass reads them."""

    stage, shards = 3, frozenset({"weights", "gradients", "optimizer state"})
    _gathered = False

    def full_state(self, state: Any) -> Any:
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        if not isinstance(state, dict):  # of the optimizers
            return super().full_state(state)
        return {name: self._whole(parameters.get(name), value) for name, value in state.items()}

    def _whole(self, parameter: nn.Parameter | None, value: Tensor) -> Tensor:
        if parameter is None:
            return value
        with self._deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().to(devices.HOST, copy=True) if self.rank == 0 else value

    @contextmanager
    def gathered(self, model: nn.Module) -> Iterator[None]:
        if self._gathered:
            yield
            return
        coordinator = self._adamw.zero.parameter_offload.get_param_coordinator()
        coordinator.reset_step = lambda: None  # before a pass it compares the passes of all ranks, which differ here
        self._gathered = True
        try:
            with self._deepspeed.runtime.zero.stage3.unwrap_model_for_generation(self._engine):
                yield
        finally:
            self._gathered = False
            del coordinator.reset_step

    @contextmanager
    def loading(self) -> Iterator[None]:
        with super().loading(), self._deepspeed.zero.GatheredParameters(self._model.parameters(), modifier_rank=0):
            yield


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a parameter's numbers from `first` on are: `count` numbers of a flat float32 copy, from `start` on."""

    flat: Tensor
    start: int
    count: int
    first: int
    shape: torch.Size

    def part(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.start + self.count]

    def own(self, whole: Tensor) -> Tensor:
        return whole.reshape(-1)[self.first : self.first + self.count]


@dataclass(frozen=True, slots=True)
class Part:
    """A rank's part of a state that has a parameter's shape."""

    slot: Slot
    local_N: Tensor

    def whole(self, rank: int, device: torch.device) -> Tensor:
        """The whole state, for rank 0. All ranks call it. device: of the exchange."""
        whole = torch.zeros(self.slot.shape, dtype=self.local_N.dtype, device=device)
        self.slot.own(whole).copy_(self.local_N)
        distributed.all_reduce(whole)
        return whole.to(devices.HOST) if rank == 0 else self.local_N


class ZeroAdamW:
    """The engine's AdamW: its parameter groups and its state dict are those of a single device, the latter in parts."""

    def __init__(self, zero: Any, param_groups: list[dict[str, Any]], stage: int) -> None:
        """zero: the engine's optimizer. param_groups: of AdamW, before the engine took its parameters."""
        self.zero, self.param_groups = zero, param_groups
        slot = self._sharded_slot if stage == 3 else self._slot
        self._slots = [slot(n, parameter) for n, group in enumerate(param_groups) for parameter in group["params"]]

    def _slot(self, group: int, parameter: Any) -> Slot:
        flat, fragment = self.zero.single_partition_of_fp32_groups[group], parameter._hp_mapping
        if fragment is None:  # other ranks have it
            return Slot(flat, 0, 0, 0, parameter.shape)
        theirs, ours = fragment.hp_fragment_address, fragment.lp_fragment_address
        return Slot(flat, theirs.start, theirs.numel, ours.start, parameter.shape)

    def _sharded_slot(self, group: int, parameter: Any) -> Slot:
        subgroup, start, size = self.zero.grad_position[self.zero.get_param_id(parameter)]
        first = min(size * distributed.get_rank(), parameter.ds_numel)
        count = min(size, parameter.ds_numel - first)  # the rest is padding
        return Slot(self.zero.fp32_partitioned_groups_flat[subgroup], start, count, first, parameter.ds_shape)

    def pass_rates(self) -> None:
        """Give the engine the groups' learning rates and weight decays."""
        for theirs, ours in zip(self.zero.optimizer.param_groups, self.param_groups, strict=True):
            theirs["lr"], theirs["weight_decay"] = ours["lr"], ours["weight_decay"]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.zero.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """As a single device's, but a state that has the parameter's shape is a `Part`."""
        states, indices = self.zero.optimizer.state, iter(range(len(self._slots)))
        groups = [{**group, "params": [next(indices) for _ in group["params"]]} for group in self.param_groups]
        state = {
            number: {
                name: Part(slot, slot.part(value)) if value.shape == slot.flat.shape else value
                for name, value in states[slot.flat].items()
            }
            for number, slot in enumerate(self._slots)
            if states.get(slot.flat)
        }
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """state_dict: as `state_dict` returns it, or with whole tensors."""
        states = self.zero.optimizer.state
        states.clear()
        for number, values in state_dict["state"].items():
            slot = self._slots[number]
            for name, value in values.items():
                if isinstance(value, Part) or value.shape == slot.shape:
                    own = value.local_N if isinstance(value, Part) else slot.own(value)
                    slot.part(states[slot.flat].setdefault(name, torch.zeros_like(slot.flat))).copy_(own)
                else:
                    states[slot.flat][name] = value.clone()


def _import_deepspeed(device: torch.device) -> Any:
    """DeepSpeed, for this type of device."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    deepspeed = import_extra("deepspeed", "deepspeed", where="parallel.strategy")
    deepspeed.utils.logger.setLevel("ERROR")
    # It calls torch by names that are going to change.
    warnings.filterwarnings("ignore", message="`torch.distributed.*` is deprecated", category=FutureWarning)
    if devices.of(device).is_host:  # an operator for inference alone, which takes a compiler and a minute to build
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
