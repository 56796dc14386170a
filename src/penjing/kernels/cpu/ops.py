"""The C kernels as functions of tensors (see library.py): a backend of `select.py`. Outputs are in the arena."""

from collections.abc import Sequence

import torch
from torch import Tensor

from penjing.kernels.attention_metadata import TILE
from penjing.kernels.cpu import library
from penjing.kernels.cpu import tensor_arena as arena
from penjing.kernels.reference import dropout_scale, dropout_threshold

GAIN_SUMS = 32  # partial sums of a gain's gradient, for any number of threads: results are deterministic
RUN = 4096  # values of one work item, as in kernels.c
MIN_PARALLEL = 1 << 14  # values; smaller tensors use one thread
MIN_WEIGHT_GRAD_FLOPS = 1 << 20  # multiplications; with fewer, packing the inputs takes longer than the matmul
OUT_OF_RANGE = 2  # returned by a kernel; 1: out of memory
TYPES = {torch.float32: 0, torch.bfloat16: 1}  # as types.h numbers them


# The inputs of an op from this one on are float32; those before are of any of TYPES.
_FLOAT32_FROM = {
    "rms_norm_forward": 2, "rms_norm_backward": 3, "log_sum_exp": 0, "add": 1, "add_tiles": 1, "tiles_of": 3,
    "weighted_swiglu_backward": 2, "nesterov_update": 0, "global_norm": 0, "decayed_update": 1,
}  # fmt: skip
_ALIKE = {"swiglu_forward": 2, "swiglu_backward": 3, "rms_norm_backward": 2, "softmax": 2}  # so many have one dtype


def supports(op: str, *inputs: Tensor | torch.dtype) -> str:
    """Why the op's kernel does not take these; empty: it does. On a CPU, contiguous, float32 or bfloat16."""
    if op in ("weight_grad", "write_weight_grad", "add_matmul"):
        return _weight_grad_reason(*inputs)  # type: ignore[arg-type]
    float32_from = _FLOAT32_FROM.get(op, len(inputs))
    for number, x in enumerate(inputs):
        if isinstance(x, Tensor) and x.device.type != "cpu":
            return "for CPUs only"
        dtype = x.dtype if isinstance(x, Tensor) else x
        if dtype not in TYPES or (number >= float32_from and dtype != torch.float32):
            return f"for {'float32' if number >= float32_from else 'float32 and bfloat16'}, not {_name(dtype)}"
        if isinstance(x, Tensor) and (not x.is_contiguous() or type(x) not in (Tensor, torch.nn.Parameter)):
            return "for plain contiguous tensors only"
    if op in _ALIKE and len({x.dtype for x in inputs[: _ALIKE[op]]}) > 1:  # type: ignore[union-attr]
        return "for tensors of one dtype"
    return missing()


def missing() -> str:
    """Why no kernel can be used here and now; empty: they can."""
    if torch.compiler.is_compiling():
        return "torch.compile cannot look into them"
    return "" if library.kernels() is not None else library.unavailable_reason() or "they were switched off"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _threads(values: int) -> int:
    return 1 if values < MIN_PARALLEL else torch.get_num_threads()


def _run(name: str, tensors: Sequence[Tensor | None], *args: float) -> None:
    """Call a kernel with the tensors' addresses and `args`. Raises MemoryError, and IndexError for a target out of
    range."""
    if arena.is_disabled():
        return  # fake tensors
    lib = library.kernels()
    assert lib is not None, "call supports first"
    failed = getattr(lib, name)(*(None if x is None else x.data_ptr() for x in tensors), *args)
    if failed:
        raise IndexError("a target is out of range") if failed == OUT_OF_RANGE else MemoryError(f"no memory for {name}")


def _empty_float32(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.float32)


def rms_norm_forward(x_ND: Tensor, gain: Tensor, epsilon: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The RMSNorm of x in `dtype`, and scale_N1, 1 / its root mean square, in float32."""
    rows, width = x_ND.shape
    out_ND, scale_N1 = arena.empty(x_ND, x_ND.shape, dtype), _empty_float32(x_ND, rows, 1)
    types = TYPES[x_ND.dtype], TYPES[dtype]
    _run("rms_norm", (x_ND, gain, out_ND, scale_N1), rows, width, epsilon, *types, _threads(x_ND.numel()))
    return out_ND, scale_N1


def rms_norm_backward(
    x_ND: Tensor, scale_N1: Tensor, gain: Tensor, grad_out_ND: Tensor, residual_ND: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gradients of x, plus `residual` (in x's dtype), and of the gain."""
    rows, width = x_ND.shape
    grad_ND, sums_LD = arena.empty_like(x_ND), _empty_float32(x_ND, GAIN_SUMS, width).zero_()
    args, types = (x_ND, scale_N1, gain, grad_out_ND, residual_ND, grad_ND, sums_LD), (x_ND.dtype, grad_out_ND.dtype)
    _run("rms_norm_backward", args, GAIN_SUMS, rows, width, *map(TYPES.__getitem__, types), _threads(x_ND.numel()))
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
    lib = library.kernels()
    return dtype == torch.bfloat16 and lib is not None and lib.has_tiles


def _weight_grad_reason(grad_out_BO: Tensor, x_BN: Tensor, out: Tensor | torch.dtype = torch.float32) -> str:
    """Why `weight_grad` does not take these. grad_out_BO may be columns of a wider matrix."""
    if grad_out_BO.dtype != x_BN.dtype or grad_out_BO.stride(1) != 1:
        return "for tensors of one dtype, with rows in memory"
    if reason := supports("", grad_out_BO[:1], x_BN):
        return reason
    if not supports_weight_grad_in(x_BN.dtype):
        return "for bfloat16 on processors with matrix units (AMX)"
    if grad_out_BO.numel() * x_BN.shape[1] < MIN_WEIGHT_GRAD_FLOPS:
        return "the matmul is too small"
    if isinstance(out, Tensor):
        return supports("nesterov_update", out)
    return "" if out == torch.float32 else "for gradients in float32"


def weight_grad(grad_out_BO: Tensor, x_BN: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """grad_out^T x, the gradient of a weight, in float32."""
    return write_weight_grad(grad_out_BO, x_BN, arena.empty(x_BN, (grad_out_BO.shape[1], x_BN.shape[1]), torch.float32))


def add_matmul(grad_out_BO: Tensor, x_BN: Tensor, into_ON: Tensor) -> None:
    write_weight_grad(grad_out_BO, x_BN, into_ON, adds=True)


def write_weight_grad(grad_out_BO: Tensor, x_BN: Tensor, out_ON: Tensor, *, adds: bool = False) -> Tensor:
    """out = grad_out^T x, or with `adds` out += grad_out^T x."""
    (tokens, outputs), inputs = grad_out_BO.shape, x_BN.shape[1]
    args = tokens, outputs, inputs, grad_out_BO.stride(0), adds, torch.get_num_threads()
    _run("weight_grad", (grad_out_BO, x_BN, out_ON), *args)
    return out_ON


def nesterov_update(gradient: Tensor, mean: Tensor, out: Tensor, momentum: float) -> None:
    """mean <- mean + (1 - momentum) (gradient - mean), and Nesterov's out = gradient + momentum (mean - gradient), all
    in float32."""
    _run("nesterov_update", (gradient, mean, out), momentum, gradient.numel(), _threads(gradient.numel()))


def decayed_update(
    update_EMN: Tensor, parameters: Sequence[Tensor], decay: float, scale: float, rate: float, bad: None = None
) -> None:
    """w <- decay w - rate scale update for each parameter, in float32."""
    for parameter, update_MN in zip(parameters, update_EMN, strict=True):
        add_scaled(parameter, update_MN, float(decay), -rate * scale)


def global_norm(*tensors: Tensor) -> Tensor:
    """The norm of all numbers in float32 tensors, by sums in float64."""
    return torch.cat([sum_squares(tensor) for tensor in tensors]).sum().sqrt().float()


def sum_squares(x: Tensor) -> Tensor:
    """The sum of squares of each run of x, in float64, whatever the number of threads. x: float32."""
    sums = torch.empty(-(-x.numel() // RUN), dtype=torch.float64, device=x.device)
    _run("sum_squares", (x, sums), x.numel(), _threads(x.numel()))
    return sums


def dropout_forward(x_BTD: Tensor, seed_BT1: Tensor, share: float) -> Tensor:
    """As `dropout` of reference.py, with the same bits."""
    out_BTD, width, factors = arena.empty_like(x_BTD), x_BTD.shape[-1], (dropout_threshold(share), dropout_scale(share))
    shape = x_BTD.numel() // width, width, *factors, TYPES[x_BTD.dtype], _threads(x_BTD.numel())
    _run("dropout", (x_BTD, seed_BT1.contiguous(), out_BTD), *shape)
    return out_BTD


def swiglu_forward(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up. Both may be columns of a wider matrix."""
    inner = arena.empty_like(gate)
    width = gate.shape[-1]
    shape = gate.numel() // width, width, width if gate.is_contiguous() else gate.stride(-2)
    _run("swiglu", (gate, up, inner), *shape, TYPES[gate.dtype], _threads(gate.numel()))
    return inner


def swiglu_backward(grad_out: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    grad_gate, grad_up = arena.empty_like(gate), arena.empty_like(up)
    _swiglu_backward(grad_out, gate, up, None, grad_gate, grad_up)
    return grad_gate, grad_up


def swiglu_backward_and_forward(grad_out: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of gate and up, the latter in the place of `grad_out`, and silu(gate) * up."""
    grad_gate, inner = arena.empty_like(gate), arena.empty_like(gate)
    _swiglu_backward(grad_out, gate, up, inner, grad_gate, grad_out)
    return grad_gate, grad_out, inner


def _swiglu_backward(grad_out: Tensor, gate: Tensor, up: Tensor, *outputs: Tensor | None) -> None:
    width = gate.shape[-1]
    shape = gate.numel() // width, width, width, width
    args = (grad_out, gate, up, *outputs, None, None)
    _run("swiglu_backward", args, *shape, TYPES[gate.dtype], _threads(gate.numel()))


def expert_swiglu(gate_up_RG: Tensor) -> Tensor:
    return swiglu_forward(*gate_up_RG.chunk(2, dim=-1))


def weighted_swiglu_backward(
    grad_inner_RF: Tensor, gate_up_RG: Tensor, weight_R: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of gate and up, concatenated as in gate_up_RG; weight * silu(gate) * up; and the weights' gradient.
    Each row has a weight; `grad_inner` is the gradient for weight 1."""
    (rows, width), grad_gate_up_RG = grad_inner_RF.shape, arena.empty_like(gate_up_RG)
    (gate, up), (grad_gate, grad_up) = gate_up_RG.chunk(2, dim=-1), grad_gate_up_RG.chunk(2, dim=-1)
    inner_RF, grad_weight_R = arena.empty_like(grad_inner_RF), torch.empty_like(weight_R)
    args = (grad_inner_RF, gate, up, inner_RF, grad_gate, grad_up, weight_R, grad_weight_R)
    _run("swiglu_backward", args, rows, width, 2 * width, 2 * width, TYPES[gate.dtype], _threads(grad_inner_RF.numel()))
    return grad_gate_up_RG, inner_RF, grad_weight_R


def tiles_of(x_BTHK: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
    """[tiles of all rows, H, tile, K]: heads rotated by `rotary` (cosines, sines) and split into tiles, padded
    with zeros."""
    rows, num_tokens, num_attention_heads, size = x_BTHK.shape
    out = arena.empty(x_BTHK, (rows * -(-num_tokens // TILE), num_attention_heads, TILE, size), x_BTHK.dtype)
    _apply_rope(x_BTHK, out, rotary, 1.0, (rows, num_tokens, num_attention_heads, size), (0, 1))
    return out


def rows_of(x_NHTK: Tensor, num_tokens: int, dtype: torch.dtype, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
    """The inverse of `tiles_of`, and so its gradient: x_BTHK in `dtype`, with the inverse rotation."""
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


def attention_reason(dtype: torch.dtype, head_dim: int, num_units: int) -> str:
    """Why `attention` does not take such queries: for heads of 16, 32, ... dimensions, in float32 or, on processors
    with matrix units for it, bfloat16. num_units: key heads of all rows; the backward pass gives each to one thread,
    and at most half of the threads may idle."""
    if dtype not in TYPES or head_dim % 16:
        return f"for heads of 16, 32, ... dimensions in float32 or bfloat16, not {head_dim} in {_name(dtype)}"
    if 2 * num_units < torch.get_num_threads():
        return "more threads than key heads"
    if reason := missing():
        return reason
    lib = library.kernels()
    return "" if lib and lib.types & 1 << TYPES[dtype] else f"no matrix units for {_name(dtype)} in this processor"


def attention(
    q_NHTK: Tensor, k_NGTK: Tensor, v_NGTK: Tensor, first_BT: Tensor, subtree_end_BT: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """softmax(q k^T / sqrt(K)) v of tiles, and norm_NHT, each softmax's logsumexp in float32."""
    out_NHTK, norm_NHT = arena.empty_like(q_NHTK), _empty_float32(q_NHTK, *q_NHTK.shape[:3])
    args = (q_NHTK, k_NGTK, v_NGTK, first_BT, subtree_end_BT, out_NHTK, norm_NHT)
    _run("attention", args, *_attention_args(q_NHTK, k_NGTK, first_BT))
    return out_NHTK, norm_NHT


def attention_backward(
    grad_out_NHTK: Tensor,
    q_NHTK: Tensor,
    k_NGTK: Tensor,
    v_NGTK: Tensor,
    out_NHTK: Tensor,
    norm_NHT: Tensor,
    first_BT: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, and in float32 of k and v."""
    grad_q_NHTK = arena.empty_like(q_NHTK)
    grad_k_NGTK, grad_v_NGTK = (arena.empty(k_NGTK, k_NGTK.shape, torch.float32) for _ in range(2))
    args = (grad_out_NHTK, q_NHTK, k_NGTK, v_NGTK, out_NHTK, norm_NHT, first_BT)
    grads = (grad_q_NHTK, grad_k_NGTK, grad_v_NGTK)
    _run("attention_backward", (*args, *grads), *_attention_args(q_NHTK, k_NGTK, first_BT))
    return grads


def _attention_args(q_NHTK: Tensor, k_NGTK: Tensor, first_BT: Tensor) -> tuple[float, ...]:
    (num_tiles, num_attention_heads, _, size), rows = q_NHTK.shape, len(first_BT)
    shape = (rows, num_tiles // rows, num_attention_heads, k_NGTK.shape[1], size)
    return (*shape, size**-0.5, TYPES[q_NHTK.dtype], _threads(q_NHTK.numel()))


def softmax(scores_NQS: Tensor, bias_LTS: Tensor, out_NQS: Tensor | None = None) -> Tensor:
    """softmax(scores + bias) over the last dimension; out None: in the place of the scores. Each tile's bias is shared
    by N / L key heads, and by the Q / T query heads of each."""
    out_NQS = scores_NQS if out_NQS is None else out_NQS
    count, queries, width = scores_NQS.shape
    shape = len(bias_LTS), count // len(bias_LTS), queries, width
    _run("softmax", (scores_NQS, bias_LTS, out_NQS), *shape, TYPES[scores_NQS.dtype], _threads(scores_NQS.numel()))
    return out_NQS


def add_tiles(into_ME: Tensor, index_N: Tensor, value_NE: Tensor) -> None:
    """into[index] += value, in the order of N. into in float32; a tile has E values."""
    shape = len(index_N), into_ME[0].numel()
    _run("add_tiles", (into_ME, index_N, value_NE), *shape, TYPES[value_NE.dtype], _threads(value_NE.numel()))


def cross_entropy_inplace(logits_CV: Tensor, target_C: Tensor, weight_C: Tensor, with_grad: bool) -> Tensor:
    """weight * -log softmax(logits)[target] of each position, in float32. `with_grad`: overwrite the logits with
    their gradient, (softmax - one_hot) * weight."""
    rows, width = logits_CV.shape
    loss_C, target_C, weight_C = _empty_float32(logits_CV, rows), target_C.contiguous(), weight_C.contiguous()
    args = logits_CV, target_C, weight_C, loss_C
    _run("cross_entropy", args, rows, width, with_grad, TYPES[logits_CV.dtype], _threads(logits_CV.numel()))
    return loss_C


def log_probs(logits_CV: Tensor, target_C: Tensor, logp_C: Tensor, entropy_C: Tensor, norm_C: Tensor) -> None:
    """Write, in float32, log softmax(logits)[target], the entropy in nats, and the logsumexp."""
    args = (logits_CV, target_C.contiguous(), logp_C, entropy_C, norm_C)
    _run("log_probs", args, *logits_CV.shape, TYPES[logits_CV.dtype], _threads(logits_CV.numel()))


def log_sum_exp(logits_NV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    largest_N, log_sum_N = (logits_NV.new_empty(len(logits_NV), dtype=x) for x in (torch.float32, torch.float64))
    equal_N = torch.empty(len(logits_NV), dtype=torch.int64)
    _run("log_sum_exp", (logits_NV, largest_N, equal_N, log_sum_N), *logits_NV.shape, _threads(logits_NV.numel()))
    return largest_N, equal_N, log_sum_N


def log_softmax_backward(logits_CV: Tensor, target_C: Tensor, norm_C: Tensor, grad_logp_C: Tensor) -> Tensor:
    """Overwrite logits with (one_hot - softmax(logits)) * grad_logp. norm_C: from `log_probs`."""
    args = (logits_CV, target_C.contiguous(), norm_C, grad_logp_C.contiguous())
    _run("log_softmax_backward", args, *logits_CV.shape, TYPES[logits_CV.dtype], _threads(logits_CV.numel()))
    return logits_CV
