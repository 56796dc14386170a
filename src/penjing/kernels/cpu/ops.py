"""The C kernels as functions of tensors (see library.py). Ask `supports...` first; outputs are made in the arena."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penjing.kernels.cpu import library
from penjing.kernels.cpu import tensor_arena as arena

GAIN_SUMS = 32  # partial sums of a gain's gradient, whatever the number of threads: equal steps give equal bits
SMALL = 1 << 14  # values; smaller tensors are not worth a second thread
MIN_WEIGHT_GRAD_FLOPS = 1 << 20  # multiplications; packing the inputs would take longer than fewer
OUT_OF_RANGE = 2  # returned by a kernel; 1: out of memory
TILE = 64  # positions of queries and keys in one tile of attention
TYPES = {torch.float32: 0, torch.bfloat16: 1}  # as types.h numbers them


def supports(*tensors: Tensor, wide: Sequence[Tensor] = ()) -> bool:
    """Whether the kernels take these tensors: on a CPU, contiguous, float32 or bfloat16. wide: float32 only."""
    for x in (*tensors, *wide):
        if x.device.type != "cpu" or x.dtype not in TYPES or not x.is_contiguous():
            return False
        if type(x) not in (Tensor, torch.nn.Parameter):
            return False
    if any(x.dtype != torch.float32 for x in wide):
        return False
    return not torch.compiler.is_compiling() and library.kernels() is not None


def _threads(values: int) -> int:
    return 1 if values < SMALL else torch.get_num_threads()


def _run(name: str, tensors: Sequence[Tensor | None], *given: float) -> None:
    """Call a kernel with tensors' addresses and numbers. Raises MemoryError, and IndexError for a target out of
    range."""
    if arena.is_set_aside():
        return  # stand-ins without memory
    found = library.kernels()
    assert found is not None, "ask supports first"
    failed = getattr(found, name)(*(None if x is None else x.data_ptr() for x in tensors), *given)
    if failed:
        raise IndexError("a target is out of range") if failed == OUT_OF_RANGE else MemoryError(f"no memory for {name}")


def _wide(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.float32)


def rms_norm(x_ND: Tensor, gain: Tensor, epsilon: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The RMSNorm of x in `dtype`, and 1 / its root mean square, scale_N1, in float32."""
    rows, width = x_ND.shape
    out_ND, scale_N1 = arena.empty(x_ND, x_ND.shape, dtype), _wide(x_ND, rows, 1)
    types = TYPES[x_ND.dtype], TYPES[dtype]
    _run("rms_norm", (x_ND, gain, out_ND, scale_N1), rows, width, epsilon, *types, _threads(x_ND.numel()))
    return out_ND, scale_N1


def rms_norm_backward(
    x_ND: Tensor, scale_N1: Tensor, gain: Tensor, grad_out_ND: Tensor, residual_ND: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gradients of x, with `residual` (of x's dtype too) added, and of the gain."""
    rows, width = x_ND.shape
    grad_ND, sums_LD = arena.empty_like(x_ND), _wide(x_ND, GAIN_SUMS, width).zero_()
    given, types = (x_ND, scale_N1, gain, grad_out_ND, residual_ND, grad_ND, sums_LD), (x_ND.dtype, grad_out_ND.dtype)
    _run("rms_norm_backward", given, GAIN_SUMS, rows, width, *map(TYPES.__getitem__, types), _threads(x_ND.numel()))
    return grad_ND, sums_LD.sum(dim=0)


def add(x: Tensor, y: Tensor, out: Tensor) -> Tensor:
    """out = x + y, with x and out in float32; out may be x."""
    _run("add", (x, y, out), x.numel(), TYPES[y.dtype], _threads(x.numel()))
    return out


def add_scaled(x: Tensor, y: Tensor, keep: float, scale: float) -> None:
    """x <- keep x + scale y, with x in float32."""
    _run("add_scaled", (x, y), keep, scale, x.numel(), TYPES[y.dtype], _threads(x.numel()))


def supports_weight_grad_in(dtype: torch.dtype) -> bool:
    """Whether `weight_grad` exists for this dtype: bfloat16, on a processor with matrix units."""
    found = library.kernels()
    return dtype == torch.bfloat16 and found is not None and found.has_tiles


def supports_weight_grad(grad_out_BO: Tensor, x_BN: Tensor) -> bool:
    """Whether `weight_grad` takes these. grad_out_BO may be some columns of a wider matrix."""
    if grad_out_BO.dtype != x_BN.dtype or grad_out_BO.stride(1) != 1 or not supports(grad_out_BO[:1], x_BN):
        return False
    return supports_weight_grad_in(x_BN.dtype) and grad_out_BO.numel() * x_BN.shape[1] >= MIN_WEIGHT_GRAD_FLOPS


def weight_grad(grad_out_BO: Tensor, x_BN: Tensor, out_ON: Tensor | None = None, *, adds: bool = False) -> Tensor:
    """grad_out^T x, the gradient of a weight, in float32. adds: added to what `out` holds."""
    (tokens, outputs), inputs = grad_out_BO.shape, x_BN.shape[1]
    out_ON = arena.empty(x_BN, (outputs, inputs), torch.float32) if out_ON is None else out_ON
    given = tokens, outputs, inputs, grad_out_BO.stride(0), adds, torch.get_num_threads()
    _run("weight_grad", (grad_out_BO, x_BN, out_ON), *given)
    return out_ON


def nesterov_update(gradient: Tensor, mean: Tensor, out: Tensor, momentum: float) -> None:
    """mean <- mean + (1 - momentum) (gradient - mean), and Nesterov's out = gradient + momentum (mean - gradient), all
    in float32."""
    _run("nesterov_update", (gradient, mean, out), momentum, gradient.numel(), _threads(gradient.numel()))


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up. Both may be columns of one wider matrix."""
    inner = arena.empty_like(gate)
    width = gate.shape[-1]
    shape = gate.numel() // width, width, width if gate.is_contiguous() else gate.stride(-2)
    _run("swiglu", (gate, up, inner), *shape, TYPES[gate.dtype], _threads(gate.numel()))
    return inner


def swiglu_backward(
    grad_out: Tensor, gate: Tensor, up: Tensor, *, recompute: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of gate and up. recompute: returns silu(gate) * up too; up's gradient then overwrites
    `grad_out`."""
    grad_gate, inner = arena.empty_like(gate), arena.empty_like(gate) if recompute else None
    grad_up = grad_out if recompute else arena.empty_like(up)
    given = (grad_out, gate, up, inner, grad_gate, grad_up, None, None)
    width = gate.shape[-1]
    shape = gate.numel() // width, width, width, width
    _run("swiglu_backward", given, *shape, TYPES[gate.dtype], _threads(gate.numel()))
    return grad_gate, grad_up, inner


def weighted_swiglu_backward(
    grad_inner_RF: Tensor, both_RG: Tensor, weight_R: Tensor, grad_weight_R: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up side by side, as they stand in both_RG, and weight * silu(gate) * up, where each row
    has a weight and `grad_inner` is the gradient for weight 1. Writes the weights' gradient."""
    (rows, width), grad_both_RG = grad_inner_RF.shape, arena.empty_like(both_RG)
    (gate, up), (grad_gate, grad_up) = both_RG.chunk(2, dim=-1), grad_both_RG.chunk(2, dim=-1)
    inner_RF = arena.empty_like(grad_inner_RF)
    given = (grad_inner_RF, gate, up, inner_RF, grad_gate, grad_up, weight_R, grad_weight_R)
    _run(
        "swiglu_backward", given, rows, width, 2 * width, 2 * width, TYPES[gate.dtype], _threads(grad_inner_RF.numel())
    )
    return grad_both_RG, inner_RF


def tiles_of(x_BTHK: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
    """[tiles of all rows, H, tile, K]: heads rotated by `rotary` (cosines, sines) and cut into tiles, padded with
    zeros."""
    rows, num_tokens, num_attention_heads, size = x_BTHK.shape
    out = arena.empty(x_BTHK, (rows * -(-num_tokens // TILE), num_attention_heads, TILE, size), x_BTHK.dtype)
    _apply_rope(x_BTHK, out, rotary, 1.0, (rows, num_tokens, num_attention_heads, size), (0, 1))
    return out


def rows_of(x_NHTK: Tensor, num_tokens: int, dtype: torch.dtype, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
    """The inverse of `tiles_of`, and so its gradient: x_BTHK in `dtype`, rotated back."""
    num_tiles, num_attention_heads, _, size = x_NHTK.shape
    rows = num_tiles // -(-num_tokens // TILE)
    out_BTHK = arena.empty(x_NHTK, (rows, num_tokens, num_attention_heads, size), dtype)
    _apply_rope(x_NHTK, out_BTHK, rotary, -1.0, out_BTHK.shape, (1, 0))
    return out_BTHK


def _apply_rope(
    x: Tensor,
    out: Tensor,
    rotary: tuple[Tensor, Tensor] | None,
    sign: float,
    shape: Sequence[int],
    tiled: tuple[int, int],
) -> None:
    cosine, sine = rotary or (None, None)
    pairs = 0 if cosine is None else cosine.shape[-1]
    table_step = 0 if cosine is None or len(cosine) == 1 else cosine[0].numel()
    types = TYPES[x.dtype], TYPES[out.dtype]
    _run("apply_rope", (x, out, cosine, sine), table_step, sign, pairs, *shape, *tiled, *types, _threads(x.numel()))


def supports_attention(dtype: torch.dtype, head_dim: int, num_units: int) -> bool:
    """Whether `attention` takes queries of this kind: heads of 16, 32, ... dimensions, in float32 or, where the
    processor has matrix units for it, bfloat16. num_units: key heads of all rows; each is one thread's in the backward
    pass, where at most half of the threads may be without one."""
    found = None if torch.compiler.is_compiling() else library.kernels()
    if found is None or dtype not in TYPES or head_dim % 16 or 2 * num_units < torch.get_num_threads():
        return False
    return bool(found.types & 1 << TYPES[dtype])


def attention(q_NHTK: Tensor, k_NGTK: Tensor, v_NGTK: Tensor, first_BT: Tensor) -> tuple[Tensor, Tensor]:
    """softmax(q k^T / sqrt(K)) v of tiles, and norm_NHT, the logsumexp of each softmax, in float32."""
    mixed_NHTK, norm_NHT = arena.empty_like(q_NHTK), _wide(q_NHTK, *q_NHTK.shape[:3])
    given = (q_NHTK, k_NGTK, v_NGTK, first_BT, mixed_NHTK, norm_NHT)
    _run("attention", given, *_attended(q_NHTK, k_NGTK, first_BT))
    return mixed_NHTK, norm_NHT


def attention_backward(
    grad_out_NHTK: Tensor,
    q_NHTK: Tensor,
    k_NGTK: Tensor,
    v_NGTK: Tensor,
    mixed_NHTK: Tensor,
    norm_NHT: Tensor,
    first_BT: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, and in float32 of k and v."""
    grad_q_NHTK = arena.empty_like(q_NHTK)
    grad_k_NGTK, grad_v_NGTK = (arena.empty(k_NGTK, k_NGTK.shape, torch.float32) for _ in range(2))
    given = (grad_out_NHTK, q_NHTK, k_NGTK, v_NGTK, mixed_NHTK, norm_NHT, first_BT)
    made = (grad_q_NHTK, grad_k_NGTK, grad_v_NGTK)
    _run("attention_backward", (*given, *made), *_attended(q_NHTK, k_NGTK, first_BT))
    return made


def _attended(q_NHTK: Tensor, k_NGTK: Tensor, first_BT: Tensor) -> tuple[float, ...]:
    (num_tiles, num_attention_heads, _, size), rows = q_NHTK.shape, len(first_BT)
    shape = (rows, num_tiles // rows, num_attention_heads, k_NGTK.shape[1], size)
    return (*shape, size**-0.5, TYPES[q_NHTK.dtype], _threads(q_NHTK.numel()))


def softmax(scores_NQS: Tensor, bias_LTS: Tensor, out_NQS: Tensor) -> Tensor:
    """softmax(scores + bias) over the last dimension. Each tile's bias is for N / L key heads, and of each the query
    heads that share it, Q / T."""
    count, queries, width = scores_NQS.shape
    shape = len(bias_LTS), count // len(bias_LTS), queries, width
    _run("softmax", (scores_NQS, bias_LTS, out_NQS), *shape, TYPES[scores_NQS.dtype], _threads(scores_NQS.numel()))
    return out_NQS


def add_tiles(into_ME: Tensor, place_N: Tensor, value_NE: Tensor) -> None:
    """into[place] += value, in the order of N. into in float32; E values are a tile."""
    shape = len(place_N), into_ME[0].numel()
    _run("add_tiles", (into_ME, place_N, value_NE), *shape, TYPES[value_NE.dtype], _threads(value_NE.numel()))


def cross_entropy_inplace(logits_CV: Tensor, target_C: Tensor, weight_C: Tensor, with_grad: bool) -> Tensor:
    """weight * -log softmax(logits)[target] of each position, in float32. With `with_grad` its gradient for the logits,
    (softmax - one_hot) * weight, takes their place."""
    rows, width = logits_CV.shape
    loss_C, target_C, weight_C = _wide(logits_CV, rows), target_C.contiguous(), weight_C.contiguous()
    given = logits_CV, target_C, weight_C, loss_C
    _run("cross_entropy", given, rows, width, with_grad, TYPES[logits_CV.dtype], _threads(logits_CV.numel()))
    return loss_C


def log_probs(logits_CV: Tensor, target_C: Tensor, logp_C: Tensor, entropy_C: Tensor, norm_C: Tensor) -> None:
    """Write, in float32, log softmax(logits)[target], the entropy in nats and the logarithm of the softmax's sum."""
    given = (logits_CV, target_C.contiguous(), logp_C, entropy_C, norm_C)
    _run("log_probs", given, *logits_CV.shape, TYPES[logits_CV.dtype], _threads(logits_CV.numel()))


def log_softmax_backward(logits_CV: Tensor, target_C: Tensor, norm_C: Tensor, grad_logp_C: Tensor) -> Tensor:
    """(one_hot - softmax(logits)) * grad_logp, in the logits' place. norm_C: of `log_probs`."""
    given = (logits_CV, target_C.contiguous(), norm_C, grad_logp_C.contiguous())
    _run("log_softmax_backward", given, *logits_CV.shape, TYPES[logits_CV.dtype], _threads(logits_CV.numel()))
    return logits_CV
