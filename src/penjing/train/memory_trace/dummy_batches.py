"""Stand-ins for a run's values, batches and strategy while its step is traced."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from penjing.kernels import experts
from penjing.loader.batch_source import Source
from penjing.parallel.ds_config import BUCKET
from penjing.parallel.single import Single
from penjing.plan.layout import Layout
from penjing.plan.memory.device_target import Target
from penjing.plan.memory.fake_device_mode import FakeDeviceMode
from penjing.plan.memory.sharded_memory import GatheredUnits, GradientBuckets, ZeroBuffers
from penjing.plan.memory.trace import Tracer

META = torch.device("meta")
_experts: Any = experts  # a module that is patched here


@contextmanager
def on_target(target: Target) -> Iterator[None]:
    """Run as on the target; for a CPU also without the values that the model reads there."""
    if not target.device.is_host:
        with FakeDeviceMode(target):
            yield
        return
    with _without_values(), FakeDeviceMode(target):
        try:
            _clear_caches()
            yield
        finally:
            _clear_caches()


def _clear_caches() -> None:
    """Clear the caches of model code, so that tensors with and without values do not mix."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("penjing.model.", "penjing.kernels.")):
            for value in vars(module).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


@contextmanager
def _without_values() -> Iterator[None]:
    """On a CPU the model reads each expert's number of rows. Assume equal shares."""
    real_dispatch = experts.dispatch_to_experts

    def even_experts(expert_Nk: Tensor, num_experts: int, *, on_host: bool) -> experts.ExpertDispatch:
        dispatch = real_dispatch(expert_Nk, num_experts, on_host=False)
        if not on_host:
            return dispatch
        tile = experts.rows_per_tile(expert_Nk.numel(), num_experts)
        rows = -(-expert_Nk.numel() // num_experts // tile) * tile
        ends = [rows * (expert + 1) for expert in range(num_experts)]
        return dispatch._replace(token_R=torch.empty(ends[-1], dtype=torch.long, device=META), ends=ends)

    _experts.dispatch_to_experts = even_experts
    try:
        yield
    finally:
        _experts.dispatch_to_experts = real_dispatch


def tensors_of(batch: Any) -> list[Tensor]:
    """Every tensor of a batch."""
    return [leaf for leaf in tree_leaves(vars(batch)) if isinstance(leaf, Tensor)]


class DummySource(Source):
    """Batches without values; as many exist in advance as the run prefetches."""

    def __init__(self, make: Callable[[], Any], tracer: Tracer, depth: int) -> None:
        """make: returns a batch. depth: prefetched batches."""
        self._make, self._tracer = make, tracer
        self._prefetched = [self._new() for _ in range(depth)]

    def _new(self) -> Any:
        batch = self._make()
        self._tracer.tag(tensors_of(batch), "batch")
        return batch

    def __next__(self) -> Any:
        self._prefetched.append(self._new())
        return self._prefetched.pop(0)

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass


class TraceStrategy(Single):
    """A strategy that tells the tracer the phase of the step. With several ranks it holds what their strategy does."""

    def __init__(self, tracer: Tracer, device: torch.device, layout: Layout) -> None:
        self.device, self.rank, self.world = device, 0, layout.ranks
        self._tracer, self._layout = tracer, layout
        self._buckets: GradientBuckets | None = None
        self._units: GatheredUnits | None = None
        self._zero: ZeroBuffers | None = None
        self._is_last = True

    def wrap(self, model: nn.Module) -> Callable[..., Tensor]:
        self._model = model
        if self.world > 1 and not self._layout.shards:
            self._buckets = GradientBuckets(model)
            self._tracer.tag(self._buckets.tensors, "communication")
        elif self.world > 1 and self._layout.strategy.startswith("zero"):
            self._zero = ZeroBuffers(model, self._tracer, self._layout, BUCKET)
        elif self.world > 1 and "weights" in self._layout.shards:
            self._units = GatheredUnits(model, self._tracer, keeps_whole=self._layout.keeps_whole)
        return model

    def micro_step(self, *, last: bool) -> AbstractContextManager[Any]:
        self._tracer.phase = "forward"
        if self._buckets is not None:
            self._buckets.requires_sync = last
        self._is_last = last
        if self._units is not None:
            self._units.before_pass(last=last)
        if self._zero is not None:
            self._zero.before_pass(last=last)
        return nullcontext()

    def backward(self, total: Tensor) -> None:
        if self._zero is not None:
            self._zero.backward(total)
            return
        (total * self.world if self._buckets is not None else total).backward()  # type: ignore[no-untyped-call]
        if self._units is None:
            self._tracer.tag_gradients(self._model)
        else:
            self._units.after_pass(last=self._is_last)

    def clip(self, max_norm: float) -> Tensor:
        self._tracer.phase = "optimizer"
        return super().clip(max_norm)

    def all_reduce(self, value: Tensor) -> Tensor:
        return value.clone() if self.world > 1 else value
