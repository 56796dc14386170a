"""Muon for block matrices, AdamW for the rest (K. Jordan, 2024, "Muon: an optimizer for hidden layers";
arXiv:2502.16982).

The momentum of each matrix is replaced by the nearest orthogonal one, found in three rounds of Newton and Schulz, so
that all its directions are learned at the same speed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from penjing.base.config import BelowOne, NonNegativeFloat, PositiveFloat, Settings
from penjing.base.seeds import derive
from penjing.kernels import ops, reference
from penjing.optim.adamw import adamw, split
from penjing.optim.low_precision_state import BYTES, LowPrecisionOptimizer, StateDtype, pieces
from penjing.optim.param_groups import embeddings, group

LOWEST_RATE = 2e-3  # at and below which a rate is taken to be meant for AdamW


class _MuonOptimizer(LowPrecisionOptimizer):
    """w -= rate (s orthogonal(nesterov momentum) + decay w), with s = sqrt(max(1, rows / columns))."""

    def __init__(
        self,
        params: list[dict[str, Any]],
        learning_rate: float,
        momentum: float,
        weight_decay: float,
        dtype: torch.dtype | None,
        how: StateDtype = "float32",
        seed: int = 0,
    ) -> None:
        """dtype: of the orthogonalization's matmuls. how: how the momentum is kept. seed: of stochastic rounding."""
        defaults = {"lr": learning_rate, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, defaults, how, seed)
        self.orthogonalize = ops.Orthogonalize(dtype)

    def compile_update(self) -> None:
        """Compile the orthogonalization, once for each shape of a stack, when it is first met."""
        self.orthogonalize.compile()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step from the gradients that are there, which are freed; a closure is not taken."""
        for part in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for parameter in part["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault(parameter.shape, []).append(parameter)
            # Matrices of one shape are worked on as one stack: 28 small matmuls become 5 batched ones.
            for parameters in by_shape.values():
                height = ops.stack_height(len(parameters), parameters[0])
                for first in range(0, len(parameters), height):
                    self._step_stack(part, parameters[first : first + height])

    def _step_stack(self, part: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        like = parameters[0]
        stack_EMN = torch.empty((len(parameters), *like.shape), dtype=torch.float32, device=like.device)
        for parameter, direction_MN in zip(parameters, stack_EMN, strict=True):
            self._direction(part["momentum"], parameter, direction_MN)
            parameter.grad = None
        scale = max(1.0, like.shape[-2] / like.shape[-1]) ** 0.5
        decay = 1 - part["lr"] * part["weight_decay"]
        ops.decayed_update(parameters, self.orthogonalize(stack_EMN), decay, part["lr"], scale, self.bad)

    def _direction(self, momentum: float, parameter: nn.Parameter, into: Tensor) -> None:
        """Take the gradient into the momentum, and write Nesterov's mean of the two."""
        assert parameter.grad is not None
        chance, bad = self.begin(parameter, "momentum"), self.bad
        gradient_N, into_N = parameter.grad.reshape(-1), into.view(-1)
        if self.how == "float32" and bad is None:
            ops.nesterov_update(gradient_N, self.state[parameter]["momentum"].view(-1), into_N, momentum)
            return
        for piece in pieces(parameter.numel()):
            mean = self.recall(parameter, "momentum", piece, signed=True)
            gradient = gradient_N[piece].float()
            if bad is not None:  # a mean of the momentum with itself is itself
                gradient = torch.where(bad > 0, mean, gradient)
            reference.nesterov_update(gradient, mean, into_N[piece], momentum)
            self.keep(parameter, "momentum", piece, mean, chance, signed=True)


@dataclass(frozen=True, kw_only=True)
class Muon(Settings):
    """Muon for the blocks' matrices, AdamW for embedding, head and gains."""

    section: ClassVar = "optimizer"

    name: Literal["muon"] = "muon"
    learning_rate: PositiveFloat = 0.02  # peak, of the matrices
    momentum: BelowOne = 0.95
    weight_decay: NonNegativeFloat = 0.0  # of the matrices
    adamw_learning_rate: PositiveFloat = 3e-3  # peak, of embedding, head and gains
    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.95
    eps: PositiveFloat = 1e-8
    # How the momentum (4, 2 or 1 bytes a parameter) and AdamW's moments are kept between steps; as in adamw.py.
    state_dtype: StateDtype = "float32"

    @property
    def state_bytes(self) -> int:
        """Of a parameter of the matrices, about."""
        return BYTES[self.state_dtype]

    def warnings(self) -> list[str]:
        """What to tell the user about settings that were hardly meant so."""
        if self.learning_rate > LOWEST_RATE:
            return []
        return [
            f"optimizer.learning_rate={self.learning_rate:g} is small for Muon, whose steps have one size whatever the "
            "gradient's; its usual rate is 0.02. optimizer=adamw learns with AdamW"
        ]

    def build(self, model: nn.Module, seed: int = 0) -> list[torch.optim.Optimizer]:
        """seed: of chance in rounding the state."""
        groups = group(model)
        dtype = getattr(model, "compute_dtype", None)  # the orthogonalisation runs in what the model's matmuls run in
        optimizers: list[torch.optim.Optimizer] = []
        plain, small = split([{"params": groups.matrices, "peak": self.learning_rate}], self.state_dtype, set())
        settings = (self.learning_rate, self.momentum, self.weight_decay, dtype)
        hows: tuple[tuple[list[dict[str, Any]], StateDtype], ...] = ((plain, "float32"), (small, self.state_dtype))
        for parts, how in hows:
            if parts[0]["params"]:  # with frozen weights either may be empty, which torch refuses
                optimizers.append(_MuonOptimizer(parts, *settings, how, derive(seed, "matrices")))
        rest = [{"params": groups.tables + groups.gains, "weight_decay": 0.0}]
        rate, betas, seed = self.adamw_learning_rate, (self.beta1, self.beta2), derive(seed, "rest")
        return optimizers + adamw(rest, embeddings(model), rate, betas, self.eps, self.state_dtype, seed)
