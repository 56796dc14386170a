"""The nearest orthogonal matrix by Newton-Schulz iterations, for Muon."""

from collections.abc import Callable

import torch
from torch import Tensor

# In each round X <- a X + b (X X^T) X + c (X X^T)^2 X. Each polynomial is the minimax approximation of 1: the first for
# singular values of 0.01 to 1, each later one for the range that the previous one leaves, 2 % wider for rounding. After
# the last, singular values are within 0.70..1.30 (after arXiv:2505.16932).
ROUNDS = ((8.0934, -23.6204, 17.4462), (3.5907, -2.5909, 0.4913), (2.6839, -1.9422, 0.4267))
NORM_MARGIN = 1.02  # margin between the largest singular value and 1, where the first polynomial is steep
# Elements of one stack, with about four float32 copies at a time: 128 MiB each on a GPU, 8 MiB on a CPU, whose caches
# hold small stacks: 26M in 195 ms instead of 280, on two threads, and 100 MiB less.
MAX_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 25}
COMPILED_SHAPES = 8  # further shapes stay eager: torch's limit of recompilations of one function


def orthogonalize(matrix_EMN: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The nearest semi-orthogonal matrix to each of a stack of E matrices, to the accuracy Muon needs: [..., M, N].

    The rounds need singular values of at most 1. Dividing by the Frobenius norm ensures that, but if many values are
    alike it is far above the largest. The Schatten norm of order 8 is close to it, and follows from (X X^T)^2, which is
    computed anyway. Three rounds from there equal five from the Frobenius norm (docs/log.md).

    dtype: of the matmuls. bfloat16 is accurate enough and took 6 ms instead of 32 (median of 12; of five rounds) for
    the quickstart's matrices on two cores.
    """
    # For a tall matrix X^T X is used, and X is multiplied from the right.
    tall = matrix_EMN.shape[-2] > matrix_EMN.shape[-1]
    # At this scale neither x nor (X X^T)^2 overflows or underflows in float16.
    size = min(matrix_EMN.shape[-2:]) ** 0.25
    norm = _frobenius_norm(matrix_EMN)
    x: Tensor = (matrix_EMN * (size / (norm + 1e-7))).to(dtype or matrix_EMN.dtype)
    shape = x.shape
    x = x.reshape(-1, *shape[-2:])
    for number, (a, b, c) in enumerate(ROUNDS):
        square = torch.bmm(x.mT, x) if tall else torch.bmm(x, x.mT)
        if number:
            sum_EMM = torch.baddbmm(square, square, square, beta=b, alpha=c)
            x = torch.baddbmm(x, x, sum_EMM, beta=a) if tall else torch.baddbmm(x, sum_EMM, x, beta=a)
            continue
        # a (X / bound) + (b S / bound^2 + c S^2 / bound^4) (X / bound), in the matmuls' dtype and in place: `bound` is
        # rounded so that the ratio of the two terms needs no rounding.
        fourth = torch.bmm(square, square)
        bound = _frobenius_norm(fourth) ** 0.25 * NORM_MARGIN
        ratio = (b / c * bound.clamp_min(0.25) ** 2).to(x.dtype)  # below M^(-1/8) only for a zero matrix
        bound = (ratio.float() * (c / b)).sqrt()
        fourth.addcmul_(square, ratio)
        plain, other = x * (1 / bound).to(x.dtype), x * (c / bound**5).to(x.dtype)
        x = torch.baddbmm(plain, other, fourth, beta=a) if tall else torch.baddbmm(plain, fourth, other, beta=a)
    return x.view(shape)


def _frobenius_norm(matrix_EMN: Tensor) -> Tensor:
    """Of each matrix, [..., 1, 1], from its rows' norms: on a CPU one float32 sum of millions is wrong by 1e-4."""
    row_norm_EM1 = torch.linalg.vector_norm(matrix_EMN, dim=-1, keepdim=True, dtype=torch.float32)
    norm_E11: Tensor = torch.linalg.vector_norm(row_norm_EM1, dim=-2, keepdim=True)
    return norm_E11


class Orthogonalize:
    """`orthogonalize` with its matmuls in `dtype`, for one optimizer: eager, or compiled for a few shapes."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype
        self._compiled: Callable[..., Tensor] | None = None
        self._compiled_shapes: set[torch.Size] = set()

    def compile(self) -> None:
        """Compile once for each stack shape, on first use."""
        self._compiled = torch.compile(orthogonalize, fullgraph=True, dynamic=False)

    def __call__(self, stack_EMN: Tensor) -> Tensor:
        known = stack_EMN.shape in self._compiled_shapes
        if self._compiled is None or not (known or len(self._compiled_shapes) < COMPILED_SHAPES):
            return orthogonalize(stack_EMN, self.dtype)
        self._compiled_shapes.add(stack_EMN.shape)
        return self._compiled(stack_EMN, self.dtype)


def stack_height(count: int, like: Tensor) -> int:
    """How many of `count` matrices of one shape are orthogonalized at once: as many as fit MAX_ELEMENTS, and a
    divisor of `count`, so that there is one stack shape to compile."""
    max_height = max(1, MAX_ELEMENTS.get(like.device.type, MAX_ELEMENTS["cuda"]) // like.numel())
    return next(height for height in range(min(count, max_height), 0, -1) if count % height == 0)
