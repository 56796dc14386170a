"""Every op in plain torch: what a backend must compute, and the fallback for tensors that no backend supports."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


def rms_norm(x: Tensor, gain: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
    """x / sqrt(mean(x^2) + epsilon) * gain over the last dimension, in float32; returned in `dtype`."""
    return functional.rms_norm(x.float(), gain.shape, gain, epsilon).to(dtype)


def apply_rope(x_BTHK: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate each pair (i, i + n) of the first 2n dimensions by its position's angle, in float32; returns x's dtype."""
    size = 2 * cosine.shape[-1]
    out = rotate_pairs(x_BTHK[..., :size].float(), torch.cat((cosine, cosine), dim=-1), sine).to(x_BTHK.dtype)
    return torch.cat((out, x_BTHK[..., size:]), dim=-1) if size < x_BTHK.shape[-1] else out


def rotate_pairs(wide: Tensor, cosine: Tensor, sine: Tensor, out: Tensor | None = None) -> Tensor:
    """cosine: for both halves of the dimensions; sine: for one. Written to `out` if it is given."""
    num_pairs = sine.shape[-1]
    out = wide * cosine if out is None else torch.mul(wide, cosine, out=out)
    out[..., :num_pairs].addcmul_(wide[..., num_pairs:], sine, value=-1)
    out[..., num_pairs:].addcmul_(wide[..., :num_pairs], sine)
    return out


def attention(q_BTHK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, mask_B1TS: Tensor | None) -> Tensor:
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
    """`attention` over a cache on a GPU. torch's kernels with a mask do not take grouped heads: of one token, the query
    heads that share a key head become queries of one head; of more, keys and values are repeated.

    Without cuDNN, which builds a plan for every new shape (40 ms on an H200), and nearly every prompt has a new one.
    """
    num_rows, num_tokens, num_heads, size = q_BTHK.shape
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        if num_tokens > 1:
            repeats = num_heads // k_BGSK.shape[1]
            k_BHSK, v_BHSK = (x.repeat_interleave(repeats, dim=1) for x in (k_BGSK, v_BGSK))
            return attention(q_BTHK, k_BHSK, v_BHSK, mask_B1TS)
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


def global_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The Euclidean norm of all numbers in the tensors, in float32.

    On a CPU in float64, a row at a time: torch's sum of 2^24 squares in float32 is wrong by 1.4e-3, and depends on the
    number of threads.
    """
    if not tensors or tensors[0].device.type != "cpu":
        return torch.nn.utils.get_total_norm(tensors)
    rows = [row for tensor in tensors for row in torch.split(tensor.flatten(), 1 << 16)]
    return torch.stack([row.double().square().sum() for row in rows]).sum().sqrt().float()


def nesterov_update(gradient: Tensor, mean: Tensor, out: Tensor, momentum: float) -> None:
    """mean <- the running mean of gradients; out <- Nesterov's update, between the gradient and that mean."""
    mean.lerp_(gradient, 1 - momentum)
    torch.lerp(gradient, mean, momentum, out=out)
