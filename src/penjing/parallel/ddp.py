"""Data parallelism under torchrun: every rank holds the full model and a share of each batch."""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from penjing import devices
from penjing.parallel.process_group import MultiProcess


class DataParallel(MultiProcess):
    """DDP. Its all-reduce takes the mean over ranks; `backward` multiplies by the world size to make it the sum."""

    _model: DistributedDataParallel

    def wrap(self, model: nn.Module) -> Callable[..., Tensor]:
        self.end_setup()
        ids = None if devices.of(self.device).is_host else [self.device.index]
        # The code that changes a buffer (a router's load or bias) keeps ranks equal; a broadcast would lose the loads.
        options = inspect.signature(DistributedDataParallel).parameters
        name = "forward_sync_buffers" if "forward_sync_buffers" in options else "broadcast_buffers"  # before torch 2.13
        # With find_unused_parameters DDP keeps its buckets. Else it orders them anew after a process's first step,
        # and of more than two ranks the gradients of that step, also of a resumed run, would be added in another order.
        kwargs: dict[str, Any] = {name: False, "gradient_as_bucket_view": True, "find_unused_parameters": True}
        self._model = DistributedDataParallel(model, device_ids=ids, **kwargs)
        return self._model

    def micro_step(self, *, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self._model.no_sync()

    def backward(self, total: Tensor) -> None:
        super().backward(total * self.world)
