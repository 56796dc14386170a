"""Float8 matmuls with one scale per tensor, for large models on GPUs of compute capability 8.9 or later.

Inputs and weights are rounded to e4m3, gradients of outputs to e5m2: activations and weights need the mantissa,
gradients the range (arXiv:2209.05433, section 3). The scale maps a tensor's largest value to the largest number of
the format. It is computed for each matmul, so no state has to be saved. Matmuls accumulate in float32 and return
bfloat16; weights, accumulated gradients and the optimizer are unchanged.

With one scale per tensor, the rounding of a value depends slightly on every other position of the pass. So float8 is
used only with gradients: validation, sampling and other forward passes compute in bfloat16, as an exported model
does.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.autograd.function import once_differentiable

from penjing.base.errors import UserError

Float8 = Literal["off", "tensorwise"]
FORWARD = torch.float8_e4m3fn  # largest number 448, 3 bits of mantissa
BACKWARD = torch.float8_e5m2  # largest number 57,344, 2 bits of mantissa
TILE = 16  # the kernels need matmul sides that are multiples of this
CAPABILITY = (8, 9)  # of the first NVIDIA GPUs with float8 units
# Below about this size quantization costs more than the matmuls save: on H100s nanochat's 12-layer model was slower,
# and its 26-layer model 17 % faster per token, about 5 % at equal quality (its dev/LOG.md, 2026-02-02).
WORTH_PARAMETERS = 700_000_000
_SMALLEST = 1e-30  # a tensor of zeros gets a finite scale


def require_float8(device_type: str, capability: tuple[int, int], dtype: torch.dtype) -> None:
    """Raises UserError where float8 matmuls are not supported. A CPU supports them, slowly, for tests. capability: of a
    CUDA device. dtype: the resolved `compute.dtype`."""
    where, next_step = "compute.fp8", "Use compute.fp8=off."
    if device_type not in ("cuda", "cpu"):
        raise UserError("needs an NVIDIA card", where=where, got=device_type, next_step=next_step)
    if device_type == "cuda" and capability < CAPABILITY:
        what = "needs an NVIDIA card of compute capability 8.9 or later"
        raise UserError(what, where=where, got=".".join(map(str, capability)), next_step=next_step)
    if dtype != torch.bfloat16:
        what = "goes with bfloat16 only"
        wanted = "compute.dtype=bfloat16"
        raise UserError(what, where=where, got=str(dtype).removeprefix("torch."), wanted=wanted, next_step=next_step)


def fp8_warnings(device_type: str, num_parameters: int) -> list[str]:
    """Reasons why float8 is probably not faster here, one line each."""
    if device_type == "cpu":
        return ["float8 is slower than bfloat16 on a CPU; it is there to try things out"]
    if num_parameters < WORTH_PARAMETERS:
        size = f"{num_parameters / 1e6:.0f}M parameters"
        return [f"float8 is not likely to be faster for {size}; it begins to pay at about 700M"]
    return []


def fits_float8(inputs: int, outputs: int) -> bool:
    """Whether a layer of these sizes can be multiplied in float8."""
    return inputs % TILE == 0 and outputs % TILE == 0


def quantize(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Float8 numbers, and the float32 scale that multiplies them back to `values`. Nothing overflows, as the largest
    value becomes the largest number; infinite and NaN values become NaN."""
    largest = values.abs().amax().float().clamp(min=_SMALLEST)
    scale = torch.finfo(dtype).max / largest
    return (values.float() * scale).to(dtype), scale.reciprocal()


def linear_float8(x: Tensor, weight_OI: Tensor) -> Tensor:
    """x W^T in bfloat16, for any leading shape of x [..., I]. The weight's gradient comes in the weight's own dtype."""
    x_NI = x.reshape(-1, x.shape[-1])
    num_rows = x_NI.shape[0]
    if num_rows % TILE:  # the weight's gradient sums over rows: zero rows change neither it nor a scale
        x_NI = functional.pad(x_NI, (0, 0, 0, -num_rows % TILE))
    out_NO: Tensor = _Float8Matmul.apply(x_NI, weight_OI)  # type: ignore[no-untyped-call]
    return out_NO[:num_rows].view(*x.shape[:-1], -1)


def _multiply(left_MK: Tensor, left_scale: Tensor, right_NK: Tensor, right_scale: Tensor, *, fast: bool) -> Tensor:
    """left right^T in bfloat16. Both are row-major with K last, as the kernels need.

    fast: partial sums in fewer bits than float32, on Hopper; torchao does so in the forward pass only.

    On a CPU the same numbers are multiplied in float32: torch's kernel for two e4m3 took 0.13 s for 512 x 64 x 64 on
    one, and 0.2 ms where one of them is e5m2.
    """
    if left_MK.device.type == "cpu":
        return (left_MK.float() @ right_NK.float().t()).mul_(left_scale * right_scale).bfloat16()
    return torch._scaled_mm(
        left_MK, right_NK.t(), left_scale, right_scale, out_dtype=torch.bfloat16, use_fast_accum=fast
    )


class _Float8Matmul(torch.autograd.Function):
    """x W^T. The quantized tensors are saved for the backward pass by each layer: layers with the same input save it
    several times, unless a compiler merges them."""

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_OI: Tensor) -> Tensor:
        x, x_scale = quantize(x_NI, FORWARD)
        weight, weight_scale = quantize(weight_OI, FORWARD)
        needs_x, needs_weight = ctx.needs_input_grad
        ctx.save_for_backward(
            x if needs_weight else None,
            x_scale if needs_weight else None,
            weight if needs_x else None,
            weight_scale if needs_x else None,
        )
        ctx.dtypes = x_NI.dtype, weight_OI.dtype
        return _multiply(x, x_scale, weight, weight_scale, fast=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, x_scale, weight, weight_scale = ctx.saved_tensors
        x_dtype, weight_dtype = ctx.dtypes
        grad_out, grad_out_scale = quantize(upstream[0], BACKWARD)
        grad_x_NI = grad_weight_OI = None
        if weight is not None:
            grad_x_NI = _multiply(grad_out, grad_out_scale, weight.t().contiguous(), weight_scale, fast=False).to(
                x_dtype
            )
        if x is not None:
            grad_weight_OI = _multiply(
                grad_out.t().contiguous(), grad_out_scale, x.t().contiguous(), x_scale, fast=False
            ).to(weight_dtype)
        return grad_x_NI, grad_weight_OI
