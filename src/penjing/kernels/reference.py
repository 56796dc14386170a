"""Every op in plain torch: what a backend must compute, and the fallback for tensors that no backend supports."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from penjing.kernels import casts
from penjing.kernels.attention_metadata import (
    AttentionInputs,
    AttentionMetadata,
    additive_mask,
    cache_mask,
    causal_mask,
    document_mask,
    tree_mask,
)


def supports(op: str, *inputs: Any) -> str:
    """It takes everything."""
    return ""


def rms_norm(x: Tensor, gain: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
    """x / sqrt(mean(x^2) + epsilon) * gain over the last dimension, in float32; returned in `dtype`."""
    return functional.rms_norm(x.float(), gain.shape, gain, epsilon).to(dtype)


def rms_norm_with_residual(x: Tensor, gain: Tensor, epsilon: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return x, rms_norm(x, gain, epsilon, dtype)


def residual_add(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def dropout(x_BTD: Tensor, seed_BT1: Tensor, share: float) -> Tensor:
    """x with this share of its values 0, the others scaled up. seed_BT1: int32, of each position's mask, which is a
    hash of it and the channel, in few operations: 100 times as many values as seeds."""
    bits_BTD = seed_BT1 + torch.arange(x_BTD.shape[-1], dtype=torch.int32, device=x_BTD.device)
    bits_BTD *= 0x2C1B3C6D
    bits_BTD ^= bits_BTD >> 15
    bits_BTD *= 0x297A2D39
    # Multiplied: torch's masked_fill takes 10 times as long on a CPU.
    x_BTD = x_BTD * (bits_BTD >= dropout_threshold(share)).to(x_BTD.dtype)
    return x_BTD * dropout_scale(share)


dropout_forward = dropout


def dropout_threshold(share: float) -> int:
    """This share of all int32 is below it."""
    return round(share * 2**32) - 2**31


def dropout_scale(share: float) -> float:
    """What keeps the mean: the inverse of what is left, as float32 rounds it, in arithmetic that compiles."""
    mantissa, exponent = math.frexp(1 - share)
    return 1 / (round(mantissa * 2**24) * 2.0 ** (exponent - 24))


def linears(
    x: Tensor, dtype: torch.dtype, weights_OI: Sequence[Tensor], biases_O: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    return tuple(
        functional.linear(x.to(dtype), casts.cast(weight_OI, dtype), None if bias_O is None else bias_O.to(dtype))
        for weight_OI, bias_O in zip(weights_OI, biases_O, strict=True)
    )


def apply_rope(x_BTHK: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate each pair (i, i + n) of the first 2n dimensions by its position's angle, in float32; returns x's dtype."""
    size = 2 * cosine.shape[-1]
    out = rotate_pairs(x_BTHK[..., :size].float(), torch.cat((cosine, cosine), dim=-1), sine).to(x_BTHK.dtype)
    return torch.cat((out, x_BTHK[..., size:]), dim=-1) if size < x_BTHK.shape[-1] else out


rotate = apply_rope


def rotate_pairs(wide: Tensor, cosine: Tensor, sine: Tensor, out: Tensor | None = None) -> Tensor:
    """cosine: for both halves of the dimensions; sine: for one. Written to `out` if it is given."""
    num_pairs = sine.shape[-1]
    out = wide * cosine if out is None else torch.mul(wide, cosine, out=out)
    out[..., :num_pairs].addcmul_(wide[..., num_pairs:], sine, value=-1)
    out[..., num_pairs:].addcmul_(wide[..., :num_pairs], sine)
    return out


def attention_metadata(asked: AttentionInputs) -> AttentionMetadata:
    window, documents, tokens = asked.window, asked.document_BT, asked.position_BT.shape[1]
    if asked.cache_tokens:
        mask_B1TS = cache_mask(asked.position_BT, asked.cache_tokens, window)
        if asked.device.type == "cuda":
            mask_B1TS = additive_mask(mask_B1TS, asked.dtype)
        return AttentionMetadata(mask_B1TS=mask_B1TS)
    if asked.subtree_end_BT is not None:
        mask_B1TS = tree_mask(asked.subtree_end_BT, asked.position_BT, window)
        return AttentionMetadata(mask_B1TS=additive_mask(mask_B1TS, asked.dtype) if documents is None else mask_B1TS)
    if documents is None:
        return AttentionMetadata(mask_B1TS=causal_mask(asked.position_BT, window) if 0 < window < tokens else None)
    return AttentionMetadata(mask_B1TS=document_mask(documents, window))


def attention(q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, metadata: AttentionMetadata) -> Tensor:
    return masked_attention(q_BTHK, k_BTGK.transpose(1, 2), v_BTGK.transpose(1, 2), metadata.mask_B1TS)


def masked_attention(q_BTHK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, mask_B1TS: Tensor | None) -> Tensor:
    """out_BTHK = softmax(q k^T / sqrt(K)) v. mask_B1TS: True where a query attends to a key; None: causal."""
    out_BHTK = functional.scaled_dot_product_attention(
        q_BTHK.transpose(1, 2),
        k_BGSK,
        v_BGSK,
        attn_mask=mask_B1TS,
        is_causal=mask_B1TS is None,
        enable_gqa=q_BTHK.shape[2] != k_BGSK.shape[1],
    )
    return out_BHTK.transpose(1, 2)


def cached_attention(q_BTHK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, mask_B1TS: Tensor | None) -> Tensor:
    """The same over a cache on a GPU. torch's kernels with a mask do not take grouped heads: of one token, the query
    heads that share a key head become queries of one head; of more, keys and values are repeated.

    Without cuDNN, which builds a plan for every new shape (40 ms on an H200), and nearly every prompt has a new one.
    """
    num_rows, num_tokens, num_heads, size = q_BTHK.shape
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        if num_tokens > 1:
            repeats = num_heads // k_BGSK.shape[1]
            k_BHSK, v_BHSK = (x.repeat_interleave(repeats, dim=1) for x in (k_BGSK, v_BGSK))
            return masked_attention(q_BTHK, k_BHSK, v_BHSK, mask_B1TS)
        q_BGRK = q_BTHK.view(num_rows, k_BGSK.shape[1], -1, size)
        out_BGRK = functional.scaled_dot_product_attention(q_BGRK, k_BGSK, v_BGSK, attn_mask=mask_B1TS)
        return out_BGRK.reshape(q_BTHK.shape)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return functional.silu(gate) * up


def experts(
    x_ND: Tensor,
    expert_Nk: Tensor,
    weight_Nk: Tensor,
    logit_NE: Tensor,
    matrices: tuple[Tensor, Tensor, Tensor],
    dtype: torch.dtype,
) -> Tensor:
    """All E experts on all tokens; experts that were not selected have weight 0. Also for exporters: no shape
    depends on the data. logit_NE: any tensor of that shape. matrices: gate_EFD, up_EFD, down_EDF."""
    x_1ND, (gate_EFD, up_EFD, down_EDF) = x_ND.to(dtype)[None], matrices
    inner_ENF = functional.silu(x_1ND @ gate_EFD.to(dtype).transpose(1, 2)) * (x_1ND @ up_EFD.to(dtype).transpose(1, 2))
    y_END = inner_ENF @ down_EDF.to(dtype).transpose(1, 2)
    weight_NE = torch.zeros_like(logit_NE).scatter(1, expert_Nk, weight_Nk)
    return (y_END.float() * weight_NE.T[..., None]).sum(dim=0)


def expert_swiglu(gate_up_RG: Tensor) -> Tensor:
    """silu(gate) * up of gate and up in one tensor."""
    gate_RF, up_RF = gate_up_RG.chunk(2, dim=-1)
    return functional.silu(gate_RF).mul_(up_RF)


def weighted_swiglu_backward(
    grad_inner_RF: Tensor, gate_up_RG: Tensor, weight_R: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of gate and up, concatenated as in gate_up_RG; weight * silu(gate) * up; and the weights' gradient.
    Each row has a weight; `grad_inner` is the gradient for weight 1, and is overwritten."""
    (gate_RF, up_RF), weight_R1 = gate_up_RG.chunk(2, dim=-1), weight_R[:, None].to(gate_up_RG.dtype)
    silu_RF = functional.silu(gate_RF)
    inner_RF = silu_RF * up_RF
    grad_weight_R = (grad_inner_RF * inner_RF).sum(dim=-1, dtype=weight_R.dtype)
    grad_gate_up_RG = torch.empty_like(gate_up_RG)
    grad_gate_RF, grad_up_RF = grad_gate_up_RG.chunk(2, dim=-1)
    torch.mul(grad_inner_RF.mul_(weight_R1), silu_RF, out=grad_up_RF)
    grad_gate_RF.copy_(torch.ops.aten.silu_backward(grad_inner_RF.mul_(up_RF), gate_RF))
    return grad_gate_up_RG, inner_RF.mul_(weight_R1), grad_weight_R


def combine_experts(y_RD: Tensor, row_Nk: Tensor, weight_Nk: Tensor | None) -> Tensor:
    """Sum each token's rows in a fixed order: deterministic, unlike atomic adds."""
    rounded_Nk = None if weight_Nk is None else weight_Nk.to(y_RD.dtype)
    return functional.embedding_bag(row_Nk, y_RD, mode="sum", per_sample_weights=rounded_Nk)


def global_norm(*tensors: Tensor) -> Tensor:
    """The Euclidean norm of all numbers in the tensors, in float32. On a CPU in float64, a row at a time: torch's sum
    of 2^24 squares in float32 is wrong by 1.4e-3, and depends on the number of threads."""
    if not tensors or tensors[0].device.type != "cpu":
        return torch.nn.utils.get_total_norm(tensors)
    rows = [row for tensor in tensors for row in torch.split(tensor.flatten(), 1 << 16)]
    return torch.stack([row.double().square().sum() for row in rows]).sum().sqrt().float()


def log_sum_exp(logits_NV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row of float32 logits its largest value, how many equal it, and in float64 the logarithm of the sum of
    e^(logit - largest)."""
    largest_N = logits_NV.amax(dim=-1)
    log_sum_N = logits_NV.double().sub_(largest_N[:, None]).exp_().sum(dim=-1).log_()
    return largest_N, (logits_NV == largest_N[:, None]).sum(dim=-1), log_sum_N


def nesterov_update(gradient: Tensor, mean: Tensor, out: Tensor, momentum: float) -> None:
    """mean <- the running mean of gradients; out <- Nesterov's update, between the gradient and that mean."""
    mean.lerp_(gradient, 1 - momentum)
    torch.lerp(gradient, mean, momentum, out=out)


def decayed_update(
    update_EMN: Tensor, parameters: Sequence[Tensor], decay: float, scale: float, rate: float, bad: Tensor | None = None
) -> None:
    """w <- decay w - rate scale update for each parameter, unless `bad` is 1 on the device."""
    update_EMN = update_EMN.to(parameters[0].dtype)  # in two steps: the stack in half precision is freed between them
    update_EMN = update_EMN * scale
    decay_factor: float | Tensor = decay
    if bad is not None:
        update_EMN = torch.where(bad > 0, torch.zeros_like(update_EMN), update_EMN)
        decay_factor = torch.where(bad > 0, 1.0, decay)
    for parameter, update_MN in zip(parameters, update_EMN, strict=True):
        parameter.mul_(decay_factor).sub_(update_MN, alpha=rate)
