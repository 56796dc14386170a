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
from penjing.optim.rounding import step_generator, stochastic_round

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
    """w -= rate (s orthogonal(nesterov momentum) + decay w), with s = sqrt(max(1, rows / columns)).

    Where `found_inf` is set to 1, as torch's scalers set it, a step leaves weights and momentum as they are.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: list[dict[str, Any]],
        learning_rate: float,
        momentum: float,
        weight_decay: float,
        dtype: torch.dtype | None,
        momentum_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(params, {"lr": learning_rate, "momentum": momentum, "weight_decay": weight_decay})
        self.dtype, self.momentum_dtype = dtype, momentum_dtype

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
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        decay: float | Tensor = 1 - part["lr"] * part["weight_decay"]
        directions = []
        for parameter in parameters:
            assert parameter.grad is not None
            state = self.state[parameter]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(parameter, dtype=self.momentum_dtype)
            gradient = parameter.grad
            if found_inf is not None:  # a mean of the momentum with itself is itself
                gradient = torch.where(found_inf > 0, state["momentum"], gradient)
            momentum = self._remember(state, gradient, 1 - part["momentum"])
            directions.append(gradient.lerp(momentum, part["momentum"]))
        update_EMN = orthogonalise(torch.stack(directions), self.dtype) * max(1.0, shape[-2] / shape[-1]) ** 0.5
        if found_inf is not None:
            update_EMN = torch.where(found_inf > 0, torch.zeros_like(update_EMN), update_EMN)
            decay = torch.where(found_inf > 0, 1.0, decay)
        for parameter, update in zip(parameters, update_EMN, strict=True):
            parameter.mul_(decay).sub_(update, alpha=part["lr"])

    def _remember(self, state: dict[str, Any], gradient: Tensor, share: float) -> Tensor:
        """The momentum with this gradient in it, in float32; the state holds it in `momentum_dtype`."""
        if self.momentum_dtype == torch.float32:
            momentum: Tensor = state["momentum"].lerp_(gradient, share)
            return momentum
        momentum = state["momentum"].float().lerp_(gradient, share)
        state["step"] = state.get("step", torch.zeros(())) + 1
        state["momentum"] = stochastic_round(momentum, step_generator(int(state["step"]), momentum.device))
        return momentum


@dataclass(frozen=True, kw_only=True)
class Muon:
    """Muon for the blocks' matrices, AdamW for embedding, head and gains."""

    kind: Literal["muon"] = "muon"
    learning_rate: float = 0.02  # peak, of the matrices
    momentum: float = 0.95
    weight_decay: float = 0.0  # of the matrices
    # How their momentum is kept. bfloat16 takes 2 bytes a parameter instead of 4 and is rounded up or down by chance.
    momentum_dtype: Literal["float32", "bfloat16"] = "float32"
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
            how = (self.learning_rate, self.momentum, self.weight_decay, dtype, getattr(torch, self.momentum_dtype))
            optimizers.append(_MuonOptimizer([matrices], *how))
        if rest["params"]:
            optimizers.append(adamw([rest], self.adamw_learning_rate, (self.beta1, self.beta2), self.epsilon))
        return optimizers
