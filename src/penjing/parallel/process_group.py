"""What all strategies of several processes share: how the ranks meet, exchange values and part (NCCL; gloo on CPUs)."""

import os
from collections.abc import Sequence
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from penjing import devices
from penjing.base.errors import UserError
from penjing.parallel.base import Strategy

# A rank that waits longer than this for the others ends with an error (torch's default is 10-30 min).
TIMEOUT = timedelta(minutes=5)
# Before the model is wrapped: rank 0 may tokenize a large text for hours. train/watchdog.py checks that it is alive.
SETUP_TIMEOUT = timedelta(days=30)
RUNS = count()  # of this process


class MultiProcess(Strategy):
    """A strategy of the processes that torchrun started. `wrap` of a subclass first calls `end_setup`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        devices.of(device).set_current(device)
        try:
            store, rank, world = next(rendezvous("env://", timeout=TIMEOUT))
        except ValueError:  # a variable that torchrun sets is missing
            next_step = "Add --gpus 2, or --nproc-per-node 2 on a CPU; or start with torchrun."
            raise UserError("needs several processes", where="parallel.strategy", next_step=next_step) from None
        # A process may train several runs one after another; their keys in the store must differ.
        prefix = f"run {next(RUNS)}"
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            # One store for all attempts of torchrun (--max-restarts): the keys of a dead attempt would be found.
            prefix += f" attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}"
        backend = devices.of(device).collective_backend
        store = PrefixStore(prefix, store)
        distributed.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=TIMEOUT)
        self.rank, self.world = distributed.get_rank(), distributed.get_world_size()
        # Always gloo, also beside NCCL: exchanging values on the host does not make a GPU wait.
        self._control = distributed.new_group(backend="gloo", timeout=SETUP_TIMEOUT)

    def end_setup(self) -> None:
        """From here on no rank waits long for another."""
        self._control = distributed.new_group(backend="gloo", timeout=TIMEOUT)

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
