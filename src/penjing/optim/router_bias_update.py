"""Load balancing without a loss: the router's bias of experts with too few tokens is raised after each step
(arXiv:2408.15664)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from penjing.model.moe import moe_layers


class RouterBalance:
    """One of a run's optimizers. Each step reads and clears every router's load, and changes the router's bias.

    bias_e += rate sign(mean load - load_e), over the tokens of all ranks. Of routers that are frozen or
    have no bias only the load is measured. If `found_inf` is 1, which torch's grad scalers set, a step changes nothing.
    """

    _step_supports_amp_scaling = True
    found_inf: Tensor | None = None

    def __init__(self, model: nn.Module, rate: float, all_reduce: Callable[[Tensor], Tensor]) -> None:
        """all_reduce: sums a tensor over ranks."""
        self.layers, self.rate, self._all_reduce = moe_layers(model), rate, all_reduce
        self.param_groups: list[dict[str, Any]] = []  # empty: the learning rate does not apply
        self._load_LE = torch.zeros(len(self.layers), 1)

    @torch.no_grad()
    def step(self) -> None:
        load_LE = self._all_reduce(torch.stack([layer.load_E for layer in self.layers]))
        rate = self.rate if self.found_inf is None else self.rate * (1 - self.found_inf)
        for layer, load_E in zip(self.layers, load_LE, strict=True):
            if layer.router.correction is not None and layer.router.weight.requires_grad:
                layer.router.correction += rate * (load_E.mean() - load_E).sign()
        self._load_LE = load_LE

    @torch.no_grad()
    def zero_grad(self, set_to_none: bool = True) -> None:
        for layer in self.layers:
            layer.load_E.zero_()

    def metrics(self) -> dict[str, float]:
        """The busiest expert's load in the last step over the mean load: the largest and the mean of all layers."""
        ratio_L = self._load_LE.amax(dim=1) / self._load_LE.mean(dim=1).clamp(min=1e-9)
        return {"max_expert_load_ratio": float(ratio_L.max()), "mean_expert_load_ratio": float(ratio_L.mean())}

    def state_dict(self) -> dict[str, Any]:
        """Empty: the biases are part of the model."""
        return {"state": {}, "param_groups": []}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass
