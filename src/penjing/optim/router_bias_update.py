"""Balance without a loss: experts that had too few tokens are preferred a little more from the next step on
(arXiv:2408.15664)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from penjing.model.moe import moe_layers


class RouterBalance:
    """Stands among the optimizers: after each step it reads and clears every router's load, and moves its bias.

    bias_e += rate sign(mean load - load_e), over the tokens of all ranks. Routers without a bias are only watched.
    Where `found_inf` is set to 1, as torch's scalers set it, a step moves nothing.
    """

    _step_supports_amp_scaling = True
    found_inf: Tensor | None = None

    def __init__(self, model: nn.Module, rate: float, add: Callable[[Tensor], Tensor]) -> None:
        """add: sums a tensor over ranks."""
        self.layers, self.rate, self._add = moe_layers(model), rate, add
        self.param_groups: list[dict[str, Any]] = []  # nothing here follows the learning rate
        self._load_LE = torch.zeros(len(self.layers), 1)

    @torch.no_grad()
    def step(self) -> None:
        load_LE = self._add(torch.stack([layer.load_E for layer in self.layers]))
        rate = self.rate if self.found_inf is None else self.rate * (1 - self.found_inf)
        for layer, load_E in zip(self.layers, load_LE, strict=True):
            if layer.router.correction is not None:
                layer.router.correction += rate * (load_E.mean() - load_E).sign()
        self._load_LE = load_LE

    @torch.no_grad()
    def zero_grad(self, set_to_none: bool = True) -> None:
        for layer in self.layers:
            layer.load_E.zero_()

    def figures(self) -> dict[str, float]:
        """The last step's load of the busiest expert over the mean load, in the worst layer and in the mean of all."""
        over_L = self._load_LE.amax(dim=1) / self._load_LE.mean(dim=1).clamp(min=1e-9)
        return {"max_expert_load_ratio": float(over_L.max()), "mean_expert_load_ratio": float(over_L.mean())}

    def state_dict(self) -> dict[str, Any]:
        """Empty: the biases are part of the model."""
        return {"state": {}, "param_groups": []}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass
