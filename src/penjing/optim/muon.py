"""Muon for block matrices, AdamW for the rest (K. Jordan, 2024, "Muon: an optimizer for hidden layers";
arXiv:2502.16982).

The momentum of each matrix is replaced by the nearest orthogonal one, found in three rounds of Newton and Schulz, so
that all its directions are learned at the same speed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from penjing.base.config import BelowOne, NonNegativeFloat, PositiveFloat, Settings
from penjing.base.seeds import derive
from penjing.kernels.cpu import ops as cpu
from penjing.optim.adamw import adamw, split
from penjing.optim.low_precision_state import BYTES, KeepingOptimizer, StateDtype, pieces
from penjing.optim.param_groups import embeddings, group

# In each round X <- a X + b (X X^T) X + c (X X^T)^2 X. Of such polynomials these come nearest to 1 (the largest error
# is the least), the first for singular values of 0.01 to 1 and each later one for what the one before leaves, 2 %
# wider for rounding: after the last they are within 0.70..1.30 (after arXiv:2505.16932).
ROUNDS = ((8.0934, -23.6204, 17.4462), (3.5907, -2.5909, 0.4913), (2.6839, -1.9422, 0.4267))
ABOVE_NORM = 1.02  # room between the largest singular value and 1, where the first polynomial is steep
# Elements worked on at once, of which there are about four copies in float32 at a time: 128 MiB each on a GPU, 8 on a
# CPU, whose caches hold what is small: 26M in 195 ms instead of 280, two threads, and 100 MiB less.
STACK = {"cpu": 1 << 21, "cuda": 1 << 25}
LOWEST_RATE = 2e-3  # at and below which a rate is taken to be meant for AdamW
COMPILED_SHAPES = 8  # stacks of further shapes stay eager: torch compiles one function no more often


def orthogonalise(matrix_EMN: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The nearest semi-orthogonal matrix to each of a stack of E matrices, to the accuracy Muon needs: [..., M, N].

    The rounds begin from singular values of at most 1. The Frobenius norm would see to that, but where many values are
    alike it is far above the largest; the Schatten norm of order 8 is hardly, and is found on the way, from (X X^T)^2.
    Three rounds from there are what five from the Frobenius norm were (docs/log.md).

    dtype: of the products. bfloat16 is accurate enough and took 6 ms instead of 32 (median of 12; of five rounds) for
    the quickstart's matrices on two cores.
    """
    return _orthogonal(matrix_EMN, dtype).to(matrix_EMN.dtype)


def _orthogonal(matrix_EMN: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The same in the products' dtype. Of a tall matrix X^T X is taken, and X is multiplied from the right."""
    tall = matrix_EMN.shape[-2] > matrix_EMN.shape[-1]
    # Of this size neither x nor (X X^T)^2 is too large or too small for float16.
    size = min(matrix_EMN.shape[-2:]) ** 0.25
    norm = torch.linalg.vector_norm(matrix_EMN, dim=(-2, -1), keepdim=True)
    x: Tensor = (matrix_EMN * (size / (norm + 1e-7))).to(dtype or matrix_EMN.dtype)
    shape = x.shape
    x = x.reshape(-1, *shape[-2:])
    for number, (a, b, c) in enumerate(ROUNDS):
        square = torch.bmm(x.mT, x) if tall else torch.bmm(x, x.mT)
        if number:
            sum_EMM = torch.baddbmm(square, square, square, beta=b, alpha=c)
            x = torch.baddbmm(x, x, sum_EMM, beta=a) if tall else torch.baddbmm(x, sum_EMM, x, beta=a)
            continue
        # a (X / most) + (b S / most^2 + c S^2 / most^4) (X / most), in the products' dtype and in place: `most` is
        # rounded so that the ratio of the two terms needs no rounding.
        fourth = torch.bmm(square, square)
        most = torch.linalg.vector_norm(fourth, dim=(-2, -1), keepdim=True, dtype=torch.float32) ** 0.25 * ABOVE_NORM
        ratio = (b / c * most.clamp_min(0.25) ** 2).to(x.dtype)  # below M^(-1/8) only of zeros
        most = (ratio.float() * (c / b)).sqrt()
        fourth.addcmul_(square, ratio)
        plain, other = x * (1 / most).to(x.dtype), x * (c / most**5).to(x.dtype)
        x = torch.baddbmm(plain, other, fourth, beta=a) if tall else torch.baddbmm(plain, fourth, other, beta=a)
    return x.view(shape)


class _MuonOptimizer(KeepingOptimizer):
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
        """dtype: of the orthogonalisation's products. how: of the momentum. seed: of chance in rounding."""
        defaults = {"lr": learning_rate, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, defaults, how, seed)
        self.dtype = dtype
        self._compiled: Callable[..., Tensor] | None = None
        self._compiled_shapes: set[torch.Size] = set()

    def compile_products(self) -> None:
        """Compile the orthogonalisation, once for each shape of a stack, when it is first met."""
        self._compiled = torch.compile(orthogonalise, fullgraph=True, dynamic=False)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step from the gradients that are there, which are freed; a closure is not taken."""
        for part in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for parameter in part["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault(parameter.shape, []).append(parameter)
            # Matrices of one shape are worked on as one stack: 28 small products become 5 batched ones.
            for shape, parameters in by_shape.items():
                kind = parameters[0].device.type
                height = stack_height(len(parameters), shape.numel(), STACK.get(kind, STACK["cuda"]))
                for first in range(0, len(parameters), height):
                    self._step_stack(part, parameters[first : first + height])

    def _step_stack(self, part: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        like, bad = parameters[0], self.bad
        decay: float | Tensor = 1 - part["lr"] * part["weight_decay"]
        stack_EMN = torch.empty((len(parameters), *like.shape), dtype=torch.float32, device=like.device)
        for parameter, direction_MN in zip(parameters, stack_EMN, strict=True):
            self._direction(part["momentum"], parameter, direction_MN)
            parameter.grad = None
        scale = max(1.0, like.shape[-2] / like.shape[-1]) ** 0.5
        if bad is None and (self.dtype or stack_EMN.dtype) in cpu.TYPES and cpu.serves(wide=[stack_EMN, *parameters]):
            for parameter, found_MN in zip(parameters, _orthogonal(stack_EMN, self.dtype), strict=True):
                cpu.add_scaled(parameter, found_MN, float(decay), -part["lr"] * scale)
            return
        update_EMN = self._orthogonal(stack_EMN) * scale
        if bad is not None:
            update_EMN = torch.where(bad > 0, torch.zeros_like(update_EMN), update_EMN)
            decay = torch.where(bad > 0, 1.0, decay)
        for parameter, update_MN in zip(parameters, update_EMN, strict=True):
            parameter.mul_(decay).sub_(update_MN, alpha=part["lr"])

    def _direction(self, momentum: float, parameter: nn.Parameter, into: Tensor) -> None:
        """Take the gradient into the momentum, and write Nesterov's mean of the two."""
        assert parameter.grad is not None
        chance, bad = self.begin(parameter, "momentum"), self.bad
        gradient_N, into_N = parameter.grad.reshape(-1), into.view(-1)
        if self.how == "float32" and bad is None:
            mean_N = self.state[parameter]["momentum"].view(-1)
            if cpu.serves(wide=[gradient_N, mean_N, into_N]):
                cpu.lead(gradient_N, mean_N, into_N, momentum)
                return
        for piece in pieces(parameter.numel()):
            mean = self.recall(parameter, "momentum", piece, signed=True)
            gradient = gradient_N[piece].float()
            if bad is not None:  # a mean of the momentum with itself is itself
                gradient = torch.where(bad > 0, mean, gradient)
            mean.lerp_(gradient, 1 - momentum)
            torch.lerp(gradient, mean, momentum, out=into_N[piece])
            self.keep(parameter, "momentum", piece, mean, chance, signed=True)

    def _orthogonal(self, stack_EMN: Tensor) -> Tensor:
        known = stack_EMN.shape in self._compiled_shapes
        if self._compiled is None or not (known or len(self._compiled_shapes) < COMPILED_SHAPES):
            return orthogonalise(stack_EMN, self.dtype)
        self._compiled_shapes.add(stack_EMN.shape)
        return self._compiled(stack_EMN, self.dtype)


def stack_height(count: int, numel: int, room: int) -> int:
    """How many of `count` matrices of one shape are worked on at once: as many as `room` elements hold, the same each
    time, so that there is one shape of stack to compile."""
    most = max(1, room // numel)
    return next(height for height in range(min(count, most), 0, -1) if count % height == 0)


@dataclass(frozen=True, kw_only=True)
class Muon(Settings):
    """Muon for the blocks' matrices, AdamW for embedding, head and gains."""

    section: ClassVar = "optimizer"

    kind: Literal["muon"] = "muon"
    learning_rate: PositiveFloat = 0.02  # peak, of the matrices
    momentum: BelowOne = 0.95
    weight_decay: NonNegativeFloat = 0.0  # of the matrices
    adamw_learning_rate: PositiveFloat = 3e-3  # peak, of embedding, head and gains
    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.95
    epsilon: PositiveFloat = 1e-8
    # How the momentum (4, 2 or 1 bytes a parameter) and AdamW's moments are kept between steps; as in adamw.py.
    state: StateDtype = "float32"

    @property
    def state_bytes(self) -> int:
        """Of a parameter of the matrices, about."""
        return BYTES[self.state]

    def doubts(self) -> list[str]:
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
        dtype = getattr(model, "compute_dtype", None)  # the orthogonalisation runs in what the model's products run in
        optimizers: list[torch.optim.Optimizer] = []
        plain, small = split([{"params": groups.matrices, "peak": self.learning_rate}], self.state, set())
        settings = (self.learning_rate, self.momentum, self.weight_decay, dtype)
        hows: tuple[tuple[list[dict[str, Any]], StateDtype], ...] = ((plain, "float32"), (small, self.state))
        for parts, how in hows:
            if parts[0]["params"]:  # with frozen weights either may be empty, which torch refuses
                optimizers.append(_MuonOptimizer(parts, *settings, how, derive(seed, "matrices")))
        rest = split([{"params": groups.tables + groups.gains, "weight_decay": 0.0}], self.state, embeddings(model))
        betas, seed = (self.beta1, self.beta2), derive(seed, "rest")
        return optimizers + adamw(*rest, self.adamw_learning_rate, betas, self.epsilon, self.state, seed)
