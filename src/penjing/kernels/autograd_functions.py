"""CPU ops with manual backward passes: fewer passes over memory than autograd, and less saved for the backward pass.
Each part is a C kernel if it supports the tensors, else torch's operations on chunks that stay in cache."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from penjing.kernels import casts, reference
from penjing.kernels.cpu import tensor_arena as arena
from penjing.kernels.select import find, find_fused

LARGE_VALUES = 1 << 19  # elements of a large tensor
WIDE = 512  # width of a wide tensor
# Values of a chunk, 1 MiB in float32, which stay in a core's cache: each eager operation reads and writes all of its
# operands, over 8 MB from and to main memory. Chunk by chunk, only the first read and the last write of each chunk do.
CHUNK = 1 << 18
# Ops that also recompute to save memory. The others are parts of those with a backward pass, and take any tensors.
_SAVING = ("linears", "swiglu_linear")
_WHOLE = ("rms_norm_with_residual", "residual_add", "dropout", "swiglu", "rotate", "add_matmul")


def uses_manual_backward(x: Tensor) -> bool:
    """Whether ops on x use `autograd_functions`: on a CPU, not compiled, and either in training or with a large
    x."""
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return torch.is_grad_enabled() or x.numel() >= LARGE_VALUES


def saves_memory(x: Tensor) -> bool:
    """Whether ops also recompute to save memory: if x is wide. Steps of narrow models would take a tenth longer. In
    training this depends on the width alone, so that the planner's few rows take the same path as many."""
    return x.shape[-1] >= WIDE and uses_manual_backward(x)


def chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Chunks of contiguous tensors of one shape, flattened."""
    flat = [tensor.view(-1) for tensor in tensors]
    for start in range(0, flat[0].numel(), CHUNK):
        yield tuple(tensor[start : start + CHUNK] for tensor in flat)


def row_chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Chunks of full rows of tensors with equally many rows; their size is that of the first tensor's rows."""
    rows = max(1, CHUNK // max(1, tensors[0][:1].numel()))
    for start in range(0, len(tensors[0]), rows):
        yield tuple(tensor[start : start + rows] for tensor in tensors)


def supports(op: str, x: Tensor, *others: Any) -> str:
    """Why torch's own operations are used instead, or those of another backend; empty: these here are."""
    if op in _SAVING:
        if not saves_memory(x):
            return "for wide tensors in training on a CPU"
        return "the weights are cast already" if casts.active() else ""
    if op in _WHOLE and not uses_manual_backward(others[-1] if op == "add_matmul" else x):
        return "for training and large tensors on a CPU, not compiled"
    return ""


class RMSNormFunction(torch.autograd.Function):
    """Returns x and its RMSNorm in `dtype`. The backward pass adds both gradients of x in one pass. With n = x / rms(x)
    and g = gain * upstream: dx = (g - n mean(g n)) / rms(x), d gain = sum of upstream * n."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, epsilon: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        x_ND = x.reshape(-1, x.shape[-1])
        ctx.set_materialize_grads(False)
        out_ND, scale_N1 = find("rms_norm_forward", x_ND, dtype, gain)(x_ND, gain, epsilon, dtype)
        ctx.save_for_backward(x_ND, scale_N1, gain)
        return x, out_ND.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        x_ND, scale_N1, gain = ctx.saved_tensors
        residual, grad_out = upstream
        if grad_out is None:
            return residual, None, None, None
        grad_out_ND = grad_out.reshape(x_ND.shape)
        residual_ND = None if residual is None else residual.reshape(x_ND.shape)
        kernel = find(
            "rms_norm_backward", x_ND, x_ND if residual_ND is None else residual_ND, grad_out_ND, gain, scale_N1
        )
        grad_ND, grad_gain = kernel(x_ND, scale_N1, gain, grad_out_ND, residual_ND)
        return grad_ND.view(grad_out.shape), grad_gain if ctx.needs_input_grad[1] else None, None, None


rms_norm_with_residual = RMSNormFunction.apply


def rms_norm_forward(x_ND: Tensor, gain: Tensor, epsilon: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The RMSNorm of x in `dtype`, and scale_N1, 1 / its root mean square, in float32 or wider."""
    wide = torch.promote_types(x_ND.dtype, torch.float32)
    out_ND, scale_N1 = arena.empty(x_ND, x_ND.shape, dtype), torch.empty(len(x_ND), 1, dtype=wide)
    parts = list(row_chunks(out_ND, scale_N1, x_ND))
    buffer_CD = arena.empty(x_ND, parts[0][0].shape, wide) if parts else x_ND
    for out_CD, scale_C1, x_CD in parts:
        wide_CD = buffer_CD[: len(x_CD)].copy_(x_CD)
        norm_C1 = torch.linalg.vector_norm(wide_CD, dim=-1, keepdim=True)
        torch.rsqrt(norm_C1.square_().div_(x_ND.shape[-1]).add_(epsilon), out=scale_C1)
        out_CD.copy_(wide_CD.mul_(scale_C1).mul_(gain))
    return out_ND, scale_N1


def rms_norm_backward(
    x_ND: Tensor, scale_N1: Tensor, gain: Tensor, grad_out_ND: Tensor, residual_ND: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gradients of x, plus `residual`, and of the gain."""
    grad_ND, grad_gain = arena.empty_like(x_ND), torch.zeros_like(gain)
    parts = list(row_chunks(grad_ND, x_ND, scale_N1, grad_out_ND, x_ND if residual_ND is None else residual_ND))
    buffers = arena.empty(x_ND, (3, *parts[0][0].shape), scale_N1.dtype) if parts else x_ND
    for grad_CD, x_CD, scale_C1, grad_out_CD, residual_CD in parts:
        normal_CD, grad_norm_CD, product_CD = buffers[:, : len(x_CD)]
        normal_CD.copy_(x_CD).mul_(scale_C1)
        grad_norm_CD.copy_(grad_out_CD)
        torch.mul(grad_norm_CD, normal_CD, out=product_CD)
        grad_gain += product_CD.sum(dim=0)
        mean_C1 = (product_CD @ gain).div_(x_ND.shape[-1])[:, None]
        grad_norm_CD.mul_(gain).addcmul_(normal_CD, mean_C1, value=-1).mul_(scale_C1)
        grad_CD.copy_(grad_norm_CD if residual_ND is None else grad_norm_CD.add_(residual_CD))
    return grad_ND, grad_gain


def apply_rope(x_BTHK: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate each pair of dimensions (i, i + n) by its position's angle (arXiv:2104.09864, equation 34), in float32:
    `reference.rotate`, with a manual backward pass."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return ApplyRopeFunction.apply(x_BTHK, cosine, sine)  # type: ignore[no-any-return,no-untyped-call]
    return find("rotate", x_BTHK)(x_BTHK, cosine, sine)


class ApplyRopeFunction(torch.autograd.Function):
    """`reference.rotate`. Its gradient is the inverse rotation: autograd would record three times as much. On any
    device."""

    @staticmethod
    def forward(ctx: Any, x_BTHK: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        return find("rotate", x_BTHK)(x_BTHK, cosine, sine)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        cosine, sine = ctx.saved_tensors
        return find("rotate", upstream[0])(upstream[0], cosine, -sine), None, None


def rotate(x_BTHK: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """`reference.rotate` chunk by chunk."""
    size = 2 * cosine.shape[-1]
    out_BTHK = arena.empty_like(x_BTHK)
    cosine, sine = (each.expand(*x_BTHK.shape[:2], -1, -1).flatten(0, 1) for each in (cosine, sine))
    parts = row_chunks(out_BTHK.flatten(0, 1), x_BTHK.flatten(0, 1), torch.cat((cosine, cosine), dim=-1), sine)
    for out_CHK, x_CHK, cosine_C1R, sine_C1P in parts:
        wide = arena.cast(x_CHK[..., :size], torch.float32)
        out_CHK[..., :size] = reference.rotate_pairs(wide, cosine_C1R, sine_C1P, arena.empty_like(wide))
        out_CHK[..., size:] = x_CHK[..., size:]
    return out_BTHK


class SwiGLUFunction(torch.autograd.Function):
    """silu(gate) * up; silu(gate) is recomputed in the backward pass."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return find("swiglu_forward", gate, up)(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor]:
        inputs = upstream[0].contiguous(), *ctx.saved_tensors
        grad_gate, grad_up = find("swiglu_backward", *inputs)(*inputs)
        return grad_gate, grad_up


swiglu = SwiGLUFunction.apply


class SwiGLULinearFunction(torch.autograd.Function):
    """(silu(gate) * up) W^T, in the dtype of gate and up. The product in brackets and the weight's cast are recomputed
    in the backward pass."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight_DF: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weight_DF)
        inner_BF = find("swiglu_forward", gate, up)(gate, up).flatten(0, -2)
        return arena.matmul(inner_BF, arena.cast(weight_DF, gate.dtype).T).view(*gate.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (gate, up, weight_DF), grad_gate, grad_up, grad_weight_DF = ctx.saved_tensors, None, None, None
        grad_out_BD = upstream[0].flatten(0, -2)
        both = find_fused("swiglu_backward_and_forward", gate, up, grad_out_BD) if all(ctx.needs_input_grad) else None
        if both is not None:
            grad_inner = arena.matmul(grad_out_BD, arena.cast(weight_DF, gate.dtype)).view(gate.shape)
            grad_gate, grad_up, inner = both(grad_inner, gate, up)
            grad_weight_DF = _weight_grad(grad_out_BD, inner.flatten(0, -2), weight_DF.dtype)
            return grad_gate, grad_up, grad_weight_DF
        if ctx.needs_input_grad[2]:
            inner_BF = find("swiglu_forward", gate, up)(gate, up).flatten(0, -2)
            grad_weight_DF = _weight_grad(grad_out_BD, inner_BF, weight_DF.dtype)
            del inner_BF
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            grad_inner = arena.matmul(grad_out_BD, arena.cast(weight_DF, gate.dtype)).view(gate.shape)
            grad_gate, grad_up = find("swiglu_backward", grad_inner, gate, up)(grad_inner, gate, up)
        return grad_gate, grad_up, grad_weight_DF


swiglu_linear = SwiGLULinearFunction.apply


def swiglu_forward(gate: Tensor, up: Tensor) -> Tensor:
    inner = arena.empty_like(gate)
    for inner_C, gate_C, up_C in chunks(inner, gate, up):
        torch.ops.aten.silu.out(gate_C, out=inner_C).mul_(up_C)
    return inner


def swiglu_backward(grad_out: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up."""
    grad_gate, grad_up = arena.empty_like(gate), arena.empty_like(up)
    buffer_C = arena.empty(gate, (min(CHUNK, gate.numel()),), gate.dtype)
    for grad_gate_C, grad_up_C, grad_out_C, gate_C, up_C in chunks(grad_gate, grad_up, grad_out, gate, up):
        torch.ops.aten.silu.out(gate_C, out=grad_up_C).mul_(grad_out_C)
        grad_silu_C = torch.mul(grad_out_C, up_C, out=buffer_C[: len(gate_C)])
        torch.ops.aten.silu_backward.grad_input(grad_silu_C, gate_C, grad_input=grad_gate_C)
    return grad_gate, grad_up


class LinearsFunction(torch.autograd.Function):
    """x W^T for several W. Each gradient of x is added by its matmul, and the weights' casts are recomputed: 45 MB less
    for a 26M model, for up to 4 % of the time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, *weights_ON: Tensor) -> tuple[Tensor, ...]:
        x_BN = arena.cast(x.reshape(-1, x.shape[-1]), dtype)
        ctx.save_for_backward(x_BN, *weights_ON)
        ctx.dtype, ctx.shape = x.dtype, x.shape
        return tuple(
            arena.matmul(x_BN, arena.cast(weight_ON, dtype).T).view(*x.shape[:-1], -1) for weight_ON in weights_ON
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        x_BN, *weights_ON = ctx.saved_tensors
        grad_BN: Tensor | None = None
        grads_ON: list[Tensor | None] = [None] * len(weights_ON)
        for number, (weight_ON, each) in enumerate(zip(weights_ON, upstream, strict=True)):
            grad_out_BO = each.reshape(len(x_BN), -1)
            if ctx.needs_input_grad[0]:
                cast_ON = arena.cast(weight_ON, x_BN.dtype)
                if grad_BN is None:
                    grad_BN = arena.matmul(grad_out_BO, cast_ON)
                else:
                    torch.addmm(grad_BN, grad_out_BO, cast_ON, out=grad_BN)  # FLOP counters do not count `addmm_`
            if ctx.needs_input_grad[2 + number]:
                grads_ON[number] = _weight_grad(grad_out_BO, x_BN, weight_ON.dtype)
        grad_x = None if grad_BN is None else arena.cast(grad_BN, ctx.dtype).view(ctx.shape)
        return grad_x, None, *grads_ON


def linears(
    x: Tensor, dtype: torch.dtype, weights_OI: Sequence[Tensor], biases_O: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    outs = LinearsFunction.apply(x, dtype, *weights_OI)  # type: ignore[no-untyped-call]
    return tuple(out if bias is None else out + bias.to(dtype) for out, bias in zip(outs, biases_O, strict=True))


def _weight_grad(grad_out_BO: Tensor, x_BN: Tensor, dtype: torch.dtype) -> Tensor:
    grad_ON: Tensor = find("weight_grad", grad_out_BO, x_BN, dtype)(grad_out_BO, x_BN, dtype)
    return grad_ON


def weight_grad(grad_out_BO: Tensor, x_BN: Tensor, dtype: torch.dtype) -> Tensor:
    """grad_out^T x in `dtype`: the gradient of a weight W used as x W^T."""
    return arena.cast(arena.matmul(grad_out_BO.T, x_BN), dtype)


def add_matmul(grad_out_BO: Tensor, x_BN: Tensor, into_ON: Tensor) -> None:
    """into += grad_out^T x in a wider dtype, without casting the whole product first."""
    update_ON = arena.matmul(grad_out_BO.T, x_BN)
    if (add := find_fused("add", update_ON, into_ON)) is not None:
        add(into_ON, update_ON, into_ON)
        return
    for into_CN, update_CN in row_chunks(into_ON, update_ON):
        into_CN += arena.cast(update_CN, into_CN.dtype)


class ResidualAddFunction(torch.autograd.Function):
    """x + y without casting one to the other's dtype first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.dtypes = x.dtype, y.dtype
        if (add := find_fused("add", y, x)) is not None:
            out: Tensor = add(x, y, arena.empty_like(x))
            return out
        return arena.empty(x, x.shape, torch.promote_types(x.dtype, y.dtype)).copy_(y).add_(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor]:
        x_dtype, y_dtype = ctx.dtypes
        return arena.cast(upstream[0], x_dtype), arena.cast(upstream[0], y_dtype)


residual_add = ResidualAddFunction.apply


class DropoutFunction(torch.autograd.Function):
    """Saves the seeds, not the mask."""

    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, seed_BT1: Tensor, share: float) -> Tensor:
        ctx.share = share
        ctx.save_for_backward(seed_BT1)
        return find("dropout_forward", x_BTD)(x_BTD, seed_BT1, share)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        return find("dropout_forward", upstream[0])(upstream[0], *ctx.saved_tensors, ctx.share), None, None


dropout = DropoutFunction.apply
