"""torch's optimizers without torch's compiler. torch's versions import it at their first call (70 MiB, 2 seconds), only
to disable it."""

import inspect
from typing import Any

import torch

from penjing import devices
from penjing.kernels.cpu import tensor_arena as arena


class NoDynamoOptimizer(torch.optim.Optimizer):
    """An optimizer whose inherited methods are called without the wrappers that import `torch._dynamo`."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        inspect.unwrap(torch.optim.Optimizer.add_param_group)(self, param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        inspect.unwrap(torch.optim.Optimizer.zero_grad)(self, set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return dict(inspect.unwrap(torch.optim.Optimizer.state_dict)(self))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        inspect.unwrap(torch.optim.Optimizer.load_state_dict)(self, state_dict)


class FusedAdamW(NoDynamoOptimizer, torch.optim.AdamW):
    """`torch.optim.AdamW(fused=True)` (arXiv:1711.05101), bit-identical.

    params: groups, each with its own `weight_decay`. Raises ValueError for what torch refuses.
    """

    def __init__(
        self, params: list[dict[str, Any]], learning_rate: float, betas: tuple[float, float], epsilon: float
    ) -> None:
        super().__init__(params, lr=learning_rate, betas=betas, eps=epsilon, fused=True)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step from the existing gradients. Closures are not supported."""
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            if devices.of(parameter.device).is_host and parameter.grad is not None and not self.state[parameter]:
                # The state that torch would make, but allocated in the arena of a step's other large tensors.
                self.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32),
                    "exp_avg": arena.empty_like(parameter).zero_(),
                    "exp_avg_sq": arena.empty_like(parameter).zero_(),
                }
        inspect.unwrap(torch.optim.AdamW.step)(self)
