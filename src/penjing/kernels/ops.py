"""The entry point of all ops with several backends (select.py): on tensors and numbers, never on modules.

`report(device, dtype)` says which backend computes each op on this machine, and why others do not.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penjing.kernels import reference, select
from penjing.kernels.attention_metadata import (
    AttentionInputs,
    AttentionMetadata,
    QKNorm,
    Rotary,
    make_attention_metadata,
    split_heads,
)
from penjing.kernels.autograd_functions import apply_rope
from penjing.kernels.cpu import library
from penjing.kernels.experts import experts
from penjing.kernels.fp8 import linear_float8
from penjing.kernels.fused_linear_cross_entropy import fused_linear_cross_entropy, log_probs, logits
from penjing.kernels.orthogonalize import Orthogonalize, stack_height
from penjing.kernels.select import find, find_fused

__all__ = [
    "AttentionMetadata", "CacheWrite", "Orthogonalize", "QKNorm", "apply_rope", "attention", "decayed_update",
    "dropout", "experts", "fused_attention", "fused_linear_cross_entropy", "global_norm", "linear", "linears",
    "log_probs", "log_sum_exp", "logits", "make_attention_metadata", "nesterov_update", "report", "residual_add",
    "rms_norm", "rms_norm_with_residual", "split_heads", "stack_height", "swiglu", "swiglu_linear", "takes_packed",
]  # fmt: skip
select.load()
CacheWrite = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # stores new keys and values; returns all, block_BGSK


def rms_norm(x: Tensor, gain: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
    """x / sqrt(mean(x^2) + epsilon) * gain over the last dimension (arXiv:1910.07467, equation 4), in `dtype`. The
    statistics are in float32 whatever the input."""
    return rms_norm_with_residual(x, gain, epsilon, dtype)[1]


def rms_norm_with_residual(x: Tensor, gain: Tensor, epsilon: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x and its norm, for a residual stream: on a CPU one kernel adds both gradients of x."""
    same, normal = find("rms_norm_with_residual", x)(x, gain, epsilon, dtype)
    return same, normal


def residual_add(x: Tensor, y: Tensor) -> Tensor:
    """x + y, in the wider dtype of the two."""
    return find("residual_add", x)(x, y)


def dropout(x_BTD: Tensor, seed_BT1: Tensor, share: float) -> Tensor:
    """x with a share of its values 0, the others scaled up; what is 0 is a hash of the positions' seeds."""
    return find("dropout", x_BTD)(x_BTD, seed_BT1, share)


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, dtype: torch.dtype, *, fp8: bool = False) -> Tensor:
    """x W^T + b in `dtype`. fp8: use float8 when gradients are taken (see fp8.py)."""
    if fp8 and torch.is_grad_enabled():
        out = linear_float8(x.to(dtype), weight_OI)
        return out if bias_O is None else out + bias_O.to(dtype)
    return linears(x, dtype, [weight_OI], [bias_O])[0]


def linears(
    x: Tensor, dtype: torch.dtype, weights_OI: Sequence[Tensor], biases_O: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """x W^T + b in `dtype` for each of several layers."""
    return tuple(find("linears", x)(x, dtype, weights_OI, biases_O))


def takes_packed(consumer: AttentionMetadata | str, x: Tensor, dtype: torch.dtype | None) -> bool:
    """Whether attention with this metadata, or `swiglu`, takes its inputs concatenated in one tensor. SwiGLU not
    without gradients: generation has few tokens in a pass, and would concatenate the weights for each pass."""
    if isinstance(consumer, AttentionMetadata):
        return consumer.ranges is not None
    return torch.is_grad_enabled() and find_fused("packed_swiglu", x, dtype or x.dtype) is not None


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """silu(gate) * up (arXiv:2002.05202, equation 6, without the matrices). up None: both in one tensor, [..., 2F]."""
    return find("packed_swiglu", gate)(gate) if up is None else find("swiglu", gate, up)(gate, up)


def swiglu_linear(
    gate_and_up: Sequence[Tensor], down: Callable[[Tensor], Tensor], weight_DF: Tensor | None = None
) -> Tensor:
    """down(silu(gate) * up). gate_and_up: as `swiglu` takes them. weight_DF: W if down(x) is just x W^T."""
    fused = find_fused("swiglu_linear", *gate_and_up) if weight_DF is not None and len(gate_and_up) == 2 else None
    return down(swiglu(*gate_and_up)) if fused is None else fused(*gate_and_up, weight_DF)


def fused_attention(
    qkv: tuple[Tensor, ...],
    num_heads: int,
    num_key_value_heads: int,
    norm: QKNorm | None,
    rotary: Rotary | None,
    metadata: AttentionMetadata,
) -> Tensor | None:
    """out_BTHK of `attention`, and what is before it: RMSNorm of query and key heads, and `apply_rope`. None: the
    selected backend has no kernel for all of them.

    qkv: q, k and v, [B, T, heads x K] each, or all in one (`takes_packed`).
    """
    fused = getattr(select.load()[metadata.backend], "fused_attention", None)
    out_BTHK: Tensor | None = fused and fused(qkv, num_heads, num_key_value_heads, norm, rotary, metadata)
    return out_BTHK


def attention(
    q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, metadata: AttentionMetadata, cache: CacheWrite | None = None
) -> Tensor:
    """out_BTHK = softmax(q k^T / sqrt(K)) v over the keys that `metadata` allows for a query (arXiv:1706.03762,
    equation 1)."""
    if cache is not None:
        k_BGSK, v_BGSK = (x.to(q_BTHK.dtype) for x in cache(k_BTGK, v_BTGK))
        attend = reference.cached_attention if q_BTHK.device.type == "cuda" else reference.masked_attention
        return attend(q_BTHK, k_BGSK, v_BGSK, metadata.mask_B1TS)
    out_BTHK: Tensor = select.load()[metadata.backend].attention(q_BTHK, k_BTGK, v_BTGK, metadata)
    return out_BTHK


def log_sum_exp(logits_NV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """largest_N, equal_N, log_sum_N: see `reference.log_sum_exp`."""
    largest_N, equal_N, log_sum_N = find("log_sum_exp", logits_NV)(logits_NV)
    return largest_N, equal_N, log_sum_N


def nesterov_update(gradient: Tensor, mean: Tensor, out: Tensor, momentum: float) -> None:
    """mean <- momentum mean + (1 - momentum) gradient; out <- momentum mean + (1 - momentum) gradient of the new
    mean."""
    find("nesterov_update", gradient, mean, out)(gradient, mean, out, momentum)


def global_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The Euclidean norm of all numbers in the tensors, in float32."""
    return find("global_norm", *tensors)(*tensors) if tensors else reference.global_norm()


def decayed_update(
    parameters: Sequence[Tensor], update_EMN: Tensor, decay: float, rate: float, scale: float, bad: Tensor | None = None
) -> None:
    """w <- decay w - rate scale update, for each parameter and its matrix of a stack of updates in any dtype. bad: 1 on
    the device if the update must be skipped; None: never skip."""
    update = find("decayed_update", update_EMN, *parameters) if bad is None else reference.decayed_update
    update(update_EMN, parameters, decay, scale, rate, bad)


class Choice(NamedTuple):
    """Which backend computes an op, and why those before it do not."""

    op: str
    backend: str
    others: str


def report(device: torch.device, dtype: torch.dtype) -> list[Choice]:
    """The backend of each op in training on `device`, with matmuls in `dtype`, heads of 64 dimensions and wide
    layers."""
    x, wide = (torch.zeros(1024, 1024, device=device, dtype=each) for each in (dtype, torch.float32))
    position_BT = torch.zeros(8, 64, dtype=torch.long, device=device)
    documents = AttentionInputs(
        position_BT=position_BT, document_BT=position_BT, heads=(8, 64), dtype=dtype, cu_seqlens_S=position_BT[0]
    )
    inputs: dict[str, tuple[Any, ...]] = {
        "attention_metadata": (documents,),
        "rms_norm_forward": (x, dtype, wide),
        "rotate": (x,),
        "linears": (x,),
        "weight_grad": (x, x, torch.float32),
        "swiglu_forward": (x, x),
        "residual_add": (x,),
        "expert_swiglu": (x,),
        "cross_entropy_inplace": (x,),
        "nesterov_update": (wide, wide, wide),
    }
    choices = []
    for op, given in inputs.items():
        name, why_not = select.reasons(op, *given)
        others = "; ".join(f"{other}: {why}" for other, why in why_not.items())
        choices.append(Choice(op.removesuffix("_metadata").removesuffix("_forward"), name or "torch", others))
    if device.type == "cpu":
        reason = library.unavailable_decode_reason()
        choices.append(Choice("decode", "torch" if reason else "C", f"C: {reason}" if reason else ""))
    return choices
