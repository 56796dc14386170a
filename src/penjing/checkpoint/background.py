"""Save while training goes on: what is to be saved is copied at once, and a thread writes it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from penjing.kernels.cpu import tensor_arena as arena


def snapshot(value: Any) -> Any:
    """The same value with every tensor in it copied to memory of its own on the CPU: training changes the originals.

    Copies from a GPU are started together and awaited once.
    """
    copied = tree_map_only(Tensor, _copy, value)
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()
    return copied


def _copy(tensor: Tensor) -> Tensor:
    source = tensor.detach()
    kind = source.device.type
    if kind == "cpu":  # `.cpu()` of it would be the very tensor that training goes on changing
        return arena.empty_like(source).copy_(source)
    return source.to("cpu", non_blocking=kind == "cuda")  # of other devices nothing would be awaited


class Background:
    """One piece of work at a time in a thread. `start` waits for the one before, and raises what that one raised."""

    def __init__(self) -> None:
        # A process that ends by itself waits for a save that is under way.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._under_way: Future[object] | None = None

    def start(self, work: Callable[[], object]) -> None:
        self.wait()
        self._under_way = self._pool.submit(work)

    def wait(self) -> None:
        """Until nothing is under way. Raises what the work raised, once."""
        work, self._under_way = self._under_way, None
        if work is not None:
            work.result()
