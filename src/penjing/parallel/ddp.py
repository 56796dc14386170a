"""Data parallelism under torchrun: every rank holds the full model and a share of each batch (NCCL; gloo on CPUs)."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from penjing import devices
from penjing.base.errors import UserError
from penjing.parallel.base import Strategy

# A rank that waits longer than this for the others ends with an error (torch's default is 10-30 min).
TIMEOUT = timedelta(minutes=5)
# Before the model is wrapped: rank 0 may tokenize a large text for hours. train/watchdog.py checks that it is alive.
SETUP_TIMEOUT = timedelta(days=30)


class DataParallel(Strategy):
    """DDP. Its all-reduce takes the mean over ranks; `backward` multiplies by the world size to make it the sum."""

    _model: DistributedDataParallel

    def __init__(self, device: torch.device) -> None:
        self.device = device
        devices.of(device).set_current(device)
        try:
            store, rank, world = next(rendezvous("env://", timeout=TIMEOUT))
        except ValueError as error:  # a variable that torchrun sets
            next_step = "Start with `torchrun --nproc_per_node N -m penjing ...`."
            raise UserError(str(error), where="parallel.strategy=ddp", next_step=next_step) from None
        # torchrun keeps one store for all its attempts (--max-restarts): the keys of a dead attempt would be found.
        attempt = PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        backend = devices.of(device).collective_backend
        distributed.init_process_group(backend, store=attempt, rank=rank, world_size=world, timeout=TIMEOUT)
        self.rank, self.world = distributed.get_rank(), distributed.get_world_size()
        # Always gloo, also beside NCCL: exchanging values on the host does not make a GPU wait.
        self._control = distributed.new_group(backend="gloo", timeout=SETUP_TIMEOUT)

    def wrap(self, model: nn.Module) -> Callable[..., Tensor]:
        self._control = distributed.new_group(backend="gloo", timeout=TIMEOUT)
        ids = None if devices.of(self.device).is_host else [self.device.index]
        # The code that changes a buffer (a router's load or bias) keeps ranks equal; a broadcast would lose the loads.
        options = inspect.signature(DistributedDataParallel).parameters
        name = "forward_sync_buffers" if "forward_sync_buffers" in options else "broadcast_buffers"  # before torch 2.13
        kwargs: dict[str, Any] = {name: False}
        self._model = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True, **kwargs)
        return self._model

    def micro_step(self, *, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self._model.no_sync()

    def backward(self, total: Tensor) -> None:
        super().backward(total * self.world)

    def all_reduce(self, value: Tensor) -> Tensor:
        value = value.clone()
        on_device = value.device.type == self.device.type
        distributed.all_reduce(value, group=None if on_device else self._control)  # NCCL takes no CPU tensors
        return value

    def any(self, flag: bool) -> bool:
        value = torch.tensor([int(flag)])
        distributed.all_reduce(value, group=self._control)
        return bool(value.item())

    def broadcast(self, value: Any) -> Any:
        objects = [value]
        distributed.broadcast_object_list(objects, src=0, group=self._control)
        return objects[0]

    @torch.no_grad()
    def broadcast_tensors(self, tensors: Sequence[Tensor], source: int) -> None:
        packed = torch.cat([tensor.reshape(-1) for tensor in tensors])  # each message costs a wait
        distributed.broadcast(packed, src=source)
        for tensor, part in zip(tensors, torch.split(packed, [tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def close(self) -> None:
        distributed.destroy_process_group()
