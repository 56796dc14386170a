"""Save while training goes on: the state is copied at once, and a thread writes the copy."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from penjing import devices
from penjing.kernels.cpu import tensor_arena as arena


def snapshot(value: Any) -> Any:
    """The same value with every tensor copied to new CPU memory, because training changes the originals.

    All copies from a GPU are started before the first is awaited.
    """
    sources: set[torch.device] = set()

    def copy(tensor: Tensor) -> Tensor:
        source = tensor.detach()
        if devices.of(source.device).is_host:  # `.cpu()` would return the same tensor, which training changes
            return arena.empty_like(source).copy_(source)
        sources.add(source.device)
        return source.to(devices.HOST, non_blocking=devices.of(source.device).pins_memory)

    copied = tree_map_only(Tensor, copy, value)
    for device in sources:
        devices.of(device).await_copies(device)
    return copied


class Background:
    """Runs one job at a time in a thread. `start` waits for the previous job, and raises the error that it raised."""

    def __init__(self) -> None:
        # At a normal exit the process waits for a pending save.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[object] | None = None

    def start(self, work: Callable[[], object]) -> None:
        self.wait()
        self._pending = self._pool.submit(work)

    def wait(self) -> None:
        """Wait for the pending job. Raises its error, once."""
        work, self._pending = self._pending, None
        if work is not None:
            work.result()
