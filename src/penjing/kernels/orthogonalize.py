"""The nearest orthogonal matrix by rounds of Newton and Schulz, for Muon."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# In each round X <- a X + b (X X^T) X + c (X X^T)^2 X. Of such polynomials these come nearest to 1 (the largest error
# is the least), the first for singular values of 0.01 to 1 and each later one for what the one before leaves, 2 %
# wider for rounding: after the last they are within 0.70..1.30 (after arXiv:2505.16932).
ROUNDS = ((8.0934, -23.6204, 17.4462), (3.5907, -2.5909, 0.4913), (2.6839, -1.9422, 0.4267))
ABOVE_NORM = 1.02  # room between the largest singular value and 1, where the first polynomial is steep
# Elements worked on at once, of which there are about four copies in float32 at a time: 128 MiB each on a GPU, 8 on a
# CPU, whose caches hold what is small: 26M in 195 ms instead of 280, two threads, and 100 MiB less.
STACK = {"cpu": 1 << 21, "cuda": 1 << 25}
COMPILED_SHAPES = 8  # stacks of further shapes stay eager: torch compiles one function no more often


def orthogonalize(matrix_EMN: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The nearest semi-orthogonal matrix to each of a stack of E matrices, to the accuracy Muon needs: [..., M, N].

    The rounds begin from singular values of at most 1. The Frobenius norm would see to that, but where many values are
    alike it is far above the largest; the Schatten norm of order 8 is hardly, and is found on the way, from (X X^T)^2.
    Three rounds from there are what five from the Frobenius norm were (docs/log.md).

    dtype: of the matmuls. bfloat16 is accurate enough and took 6 ms instead of 32 (median of 12; of five rounds) for
    the quickstart's matrices on two cores.
    """
    # Of a tall matrix X^T X is taken, and X is multiplied from the right.
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
        # a (X / most) + (b S / most^2 + c S^2 / most^4) (X / most), in the matmuls' dtype and in place: `most` is
        # rounded so that the ratio of the two terms needs no rounding.
        fourth = torch.bmm(square, square)
        most = torch.linalg.vector_norm(fourth, dim=(-2, -1), keepdim=True, dtype=torch.float32) ** 0.25 * ABOVE_NORM
        ratio = (b / c * most.clamp_min(0.25) ** 2).to(x.dtype)  # below M^(-1/8) only of zeros
        most = (ratio.float() * (c / b)).sqrt()
        fourth.addcmul_(square, ratio)
        plain, other = x * (1 / most).to(x.dtype), x * (c / most**5).to(x.dtype)
        x = torch.baddbmm(plain, other, fourth, beta=a) if tall else torch.baddbmm(plain, fourth, other, beta=a)
    return x.view(shape)


class Orthogonalize:
    """`orthogonalize` with its matmuls in `dtype`, as one optimizer calls it: eager, or compiled for a few shapes."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype
        self._compiled: Callable[..., Tensor] | None = None
        self._compiled_shapes: set[torch.Size] = set()

    def compile(self) -> None:
        """Compile once for each shape of a stack, when it is first met."""
        self._compiled = torch.compile(orthogonalize, fullgraph=True, dynamic=False)

    def __call__(self, stack_EMN: Tensor) -> Tensor:
        known = stack_EMN.shape in self._compiled_shapes
        if self._compiled is None or not (known or len(self._compiled_shapes) < COMPILED_SHAPES):
            return orthogonalize(stack_EMN, self.dtype)
        self._compiled_shapes.add(stack_EMN.shape)
        return self._compiled(stack_EMN, self.dtype)


def stack_height(count: int, like: Tensor) -> int:
    """How many of `count` matrices of one shape are orthogonalized at once: as many as STACK elements hold, the same
    each time, so that there is one shape of stack to compile."""
    most = max(1, STACK.get(like.device.type, STACK["cuda"]) // like.numel())
    return next(height for height in range(min(count, most), 0, -1) if count % height == 0)
