"""Sharded data parallelism (FSDP2; arXiv:2304.11277): each rank holds a part of weights, gradients and optimizer state.

A block's weights are gathered in float32 before its pass and freed after it; matmuls cast them as on a single device,
so all strategies compute the same. Gradients are reduced in each pass, so no rank ever holds them whole. Where there is
memory for both (`parallel.reshard`), they stay whole until a step ends, and ranks exchange them once a step. Run with
gloo on CPUs; not run on GPUs by us.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from penjing import devices
from penjing.base.errors import UserError
from penjing.model.block import Block
from penjing.parallel.process_group import MultiProcess


class FullyShardedDataParallel(MultiProcess):
    """Every block is a unit, and so is what is around the blocks. Smaller units would not gather the weights that one
    layer reads of another (model/linear.py)."""

    shards = frozenset({"weights", "gradients", "optimizer state"})
    wraps_shapes = True
    replicas = 1  # groups of ranks that hold the whole model together
    _gathered = False

    def wrap(self, model: nn.Module) -> Callable[..., Tensor]:
        self.end_setup()
        self.writers = self.world // self.replicas
        mesh = self._mesh()
        blocks = [module for module in model.modules() if isinstance(module, Block)]
        policy = OffloadPolicy()
        if self.offload:
            policy = CPUOffloadPolicy(pin_memory=devices.of(self.device).pins_memory)
        for module in (*blocks, model):  # moves its weights from the host to the device, and keeps this rank's part
            fully_shard(module, mesh=mesh, offload_policy=policy)
        self._model = model
        if next(model.parameters()).is_meta:
            self._make_room(model)
        self._root()._get_fsdp_state()._lazy_init()  # else a block that is called by itself takes itself for the root
        for unit in self._units():
            unit.set_gradient_divide_factor(1.0)  # the sum over ranks, not the mean
            unit.set_force_sum_reduction_for_comms(True)  # gloo has no other
        return model

    def _mesh(self) -> DeviceMesh:
        return init_device_mesh(self.device.type, (self.world,))

    def _make_room(self, model: nn.Module) -> None:
        """Memory for this rank's parts of a model that has shapes only; its buffers begin as zeros."""
        model.to_empty(device=devices.HOST if self.offload else self.device)
        for module in model.modules():
            for name, value in module.named_buffers(recurse=False):
                setattr(module, name, torch.zeros_like(value, device=self.device))

    def _root(self) -> FSDPModule:
        assert isinstance(self._model, FSDPModule)
        return self._model

    def _units(self) -> list[FSDPModule]:
        return [module for module in self._model.modules() if isinstance(module, FSDPModule)]

    @contextmanager
    def micro_step(self, *, last: bool) -> Iterator[None]:
        """With `reshard` at the end of a step, the last of its passes frees what the first one gathered."""
        root = self._root()
        root.set_is_last_backward(last)
        root.set_requires_all_reduce(last)  # between replicas: once a step
        if self.reshard == "step":
            root.set_requires_gradient_sync(last)
            root.set_reshard_after_backward(last)
            root.set_reshard_after_forward(False)
        try:
            yield
        finally:
            if self.reshard == "step":
                self._reshard_after_forward()

    def _reshard_after_forward(self) -> None:
        for unit in self._units():  # the root's are needed at once again
            unit.set_reshard_after_forward(unit is not self._root(), recurse=False)

    def joint_norm(self, gradients: list[Tensor]) -> Tensor:
        square = super().joint_norm(gradients).double().square()
        return (self.all_reduce(square) / self.replicas).sqrt().float()

    def step(self, optimizers: Sequence[Any], max_norm: float, loss: Tensor) -> tuple[Tensor, Tensor]:
        norm, bad = super().step(optimizers, max_norm, loss)
        return norm.to(self.device), bad.to(self.device)  # with `offload` they are on the host

    def full_state(self, state: Any) -> Any:
        def whole(part: Any) -> Tensor:
            full: Tensor = part.to(self.device).full_tensor()  # one at a time: the device needs room for one
            return full.to(devices.HOST) if self.rank == 0 else full.new_empty(0)

        return tree_map_only(DTensor, whole, state)

    def place(self, full: Tensor, like: Tensor) -> Tensor:
        if not isinstance(like, DTensor):
            return full
        mesh, local = like.device_mesh, like.to_local()
        number, size = mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
        parts = full.chunk(size)
        part = (parts[number] if number < len(parts) else full[:0]).to(local.device, copy=True)
        return DTensor.from_local(
            part, mesh, like.placements, run_check=False, shape=full.shape, stride=full.contiguous().stride()
        )

    def first_row(self, tensor: Tensor) -> int:
        return self.rank % self.writers * -(-tensor.shape[0] // self.writers)

    @contextmanager
    def loading(self) -> Iterator[None]:
        yield
        for unit in self._units():  # the last pass may have left whole weights, which are the old ones
            unit.reshard()

    @contextmanager
    def gathered(self, model: nn.Module) -> Iterator[None]:
        if self._gathered:
            yield
            return
        root, units = self._root(), self._units()
        self._gathered = True
        root.set_reshard_after_forward(False)
        for unit in units:
            unit.unshard()
        try:
            yield
        finally:
            for unit in units:
                unit.reshard()
            self._reshard_after_forward()
            self._gathered = False


class HybridShardedDataParallel(FullyShardedDataParallel):
    """HSDP: the ranks of a machine share a model as above, and machines hold copies of it, so that weights never cross
    the network between them; gradients do. On one machine each half of its ranks is such a group."""

    shards_within_node = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        local = int(os.environ.get("LOCAL_WORLD_SIZE", self.world))
        self.replicas, rest = divmod(self.world, local) if local < self.world else (2, self.world % 2)
        if rest:
            got = f"{self.world} processes"
            raise UserError("makes groups of equal size", where="parallel.strategy=hsdp", got=got, wanted="fsdp2")

    def _mesh(self) -> DeviceMesh:
        shape = (self.replicas, self.world // self.replicas)
        return init_device_mesh(self.device.type, shape, mesh_dim_names=("replicas", "shards"))
