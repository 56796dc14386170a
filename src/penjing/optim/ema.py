"""An exponential moving average of the weights (Polyak averaging; `ema_decay`), which is evaluated and saved."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from penjing import devices
from penjing.devices.shards import local_part
from penjing.kernels.cpu import tensor_arena as arena
from penjing.optim.adamw_no_dynamo import NoDynamoOptimizer
from penjing.optim.low_precision_state import chunks

Loading = Callable[[], AbstractContextManager[Any]]  # `Strategy.loading`


class Ema(NoDynamoOptimizer):
    """The last of a run's optimizers: it reads the weights that the others have changed.

    a_t = d_t a_(t-1) + (1 - d_t) w_t, in float32, with d_t = min(decay, (t - 1) / (t + 9)). As d_1 = 0, the start
    weights do not count; while the second term is the smaller one, until t = 10 decay / (1 - decay), the average covers
    the last tenth of the steps so far. `step` in the state counts steps, without skipped ones, which change nothing.
    """

    _step_supports_amp_scaling = True
    found_inf: Tensor | None = None  # set by `guarded_step`, where the device skips steps
    swapped = False  # the model has the average, and `average` in the state is the raw weight

    def __init__(self, parameters: Iterable[nn.Parameter], decay: float) -> None:
        self.decay, self.parameters = decay, list(parameters)
        super().__init__([{"params": self.parameters, "lr": 0.0, "peak": 0.0}], {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for parameter in self.parameters:
            if not self.state[parameter]:
                empty_like = arena.empty_like if devices.of(parameter.device).is_host else torch.empty_like
                count = torch.zeros((), dtype=torch.float32, device=parameter.device)
                self.state[parameter] = {"average": empty_like(parameter).copy_(parameter), "step": count}
        counts = [self.state[parameter]["step"] for parameter in self.parameters]
        good = torch.ones_like(counts[0]) if self.found_inf is None else 1 - self.found_inf.reshape(())
        torch._foreach_add_(counts, [good] * len(counts))
        fraction = good * (1 - ((counts[0] - 1) / (counts[0] + 9)).clamp(min=0, max=self.decay))
        for parameter in self.parameters:
            local_part(self.state[parameter]["average"]).lerp_(local_part(parameter), fraction)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the weights with their averages, bit for bit; nothing before the first step."""
        for parameter in filter(self.state.get, self.parameters):
            weight_N, average_N = (local_part(one).view(-1) for one in (parameter, self.state[parameter]["average"]))
            for chunk in chunks(len(weight_N)):
                raw = weight_N[chunk].clone()
                weight_N[chunk].copy_(average_N[chunk])
                average_N[chunk].copy_(raw)


def swap(optimizers: Sequence[Any], loading: Loading, *, to_average: bool) -> None:
    """Exchange weights and averages, if one of the optimizers averages. to_average: then the model has the averages."""
    for ema in (optimizer for optimizer in optimizers if isinstance(optimizer, Ema)):
        with loading():
            ema.swap()
        ema.swapped = to_average


@contextmanager
def averaged(optimizers: Sequence[Any], loading: Loading) -> Iterator[None]:
    """While it lasts the model has the averages, if the run has them. All ranks enter it; nested it does nothing.
    Checkpoints are written inside: their weights are the averages, and the state has the raw weights."""
    if any(isinstance(optimizer, Ema) and optimizer.swapped for optimizer in optimizers):
        yield
        return
    swap(optimizers, loading, to_average=True)
    try:
        yield
    finally:
        swap(optimizers, loading, to_average=False)
