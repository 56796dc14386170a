"""Muon for block matrices, AdamW for the rest (K. Jordan, 2024, "Muon: an optimizer for hidden layers";
arXiv:2502.16982).

The momentum of each matrix is replaced by the nearest orthogonal one, found with five Newton-Schulz steps, so that
all its directions are learned at the same speed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from penjing.optim.adamw import adamw, check_settings
from penjing.optim.groups import group

NEWTON_SCHULZ_STEPS = 5
# X <- a X + b (X X^T) X + c (X X^T)^2 X; these make the slope at zero large, and leave singular values in 0.7..1.2.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrix_EMN: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The nearest semi-orthogonal matrix to each of a stack of E matrices, to the accuracy Muon needs: [..., M, N].

    dtype: of the products. bfloat16 is accurate enough (the steps pull singular values back to 0.7..1.2 whatever their
    rounding) and took 6 ms instead of 32 (median of 12) for the quickstart's matrices on two cores.
    """
    x: Tensor = matrix_EMN / (matrix_EMN.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    x = x.to(dtype or matrix_EMN.dtype)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    a, b, c = NEWTON_SCHULZ
    shape = x.shape
    x = x.reshape(-1, *shape[-2:])
    for _ in range(NEWTON_SCHULZ_STEPS):
        square = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    x = x.view(shape)
    return (x.mT if tall else x).to(matrix_EMN.dtype)


class _MuonOptimizer(torch.optim.Optimizer):
    """w -= rate (s orthogonal(nesterov momentum) + decay w), with s = sqrt(max(1, rows / columns))."""

    def __init__(
        self,
        params: list[dict[str, Any]],
        learning_rate: float,
        momentum: float,
        weight_decay: float,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__(params, {"lr": learning_rate, "momentum": momentum, "weight_decay": weight_decay})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step from the gradients that are there; a closure is not taken."""
        for part in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for parameter in part["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault(parameter.shape, []).append(parameter)
            # Matrices of one shape are worked on as one stack: 28 small products become 5 batched ones.
            for shape, parameters in by_shape.items():
                self._step_stack(part, shape, parameters)

    def _step_stack(self, part: dict[str, Any], shape: torch.Size, parameters: list[nn.Parameter]) -> None:
        directions = []
        for parameter in parameters:
            assert parameter.grad is not None
            state = self.state[parameter]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(parameter)
            momentum = state["momentum"].lerp_(parameter.grad, 1 - part["momentum"])
            directions.append(parameter.grad.lerp(momentum, part["momentum"]))
        update_EMN = orthogonalise(torch.stack(directions), self.dtype) * max(1.0, shape[-2] / shape[-1]) ** 0.5
        for parameter, update in zip(parameters, update_EMN, strict=True):
            parameter.mul_(1 - part["lr"] * part["weight_decay"]).sub_(update, alpha=part["lr"])


@dataclass(frozen=True, kw_only=True)
class Muon:
    """Muon for the blocks' matrices, AdamW for embedding, head and gains."""

    kind: Literal["muon"] = "muon"
    learning_rate: float = 0.02  # peak, of the matrices
    momentum: float = 0.95
    weight_decay: float = 0.0  # of the matrices
    adamw_learning_rate: float = 3e-3  # peak, of embedding, head and gains
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        check_settings(self)

    def build(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        groups = group(model)
        dtype = getattr(model, "compute_dtype", None)  # the orthogonalisation runs in what the model's products run in
        matrices = {"params": groups.matrices, "peak": self.learning_rate}
        rest = {"params": groups.tables + groups.gains, "weight_decay": 0.0}
        optimizers: list[torch.optim.Optimizer] = []
        if matrices["params"]:  # with frozen weights either half may be empty, which torch refuses
            optimizers.append(_MuonOptimizer([matrices], self.learning_rate, self.momentum, self.weight_decay, dtype))
        if rest["params"]:
            optimizers.append(adamw([rest], self.adamw_learning_rate, (self.beta1, self.beta2), self.epsilon))
        return optimizers
