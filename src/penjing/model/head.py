"""The output head: hidden states to logits, or straight to the summed loss without ever holding all logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.autograd.function import once_differentiable

# Logits are made, scored and turned into gradients a block at a time. On a CPU 512 x 2,048 float32 logits (4 MB)
# stay in cache; all of a batch at once (64 MB and more, several times over) do not.
CHUNK_LOGITS = 1 << 20
ROW_LOT = 32  # on a CPU, scored positions are rounded up to this many


class _SummedNats(torch.autograd.Function):
    """sum_n weight_n * -log softmax(hidden_n W^T)[target_n]; gradients are taken in the forward pass, per chunk."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, weight_N: Tensor, dtype: torch.dtype
    ) -> Tensor:
        needs_hidden, needs_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        matrix_VD = weight_VD.to(dtype)
        total = torch.zeros((), dtype=torch.float32, device=hidden_ND.device)
        grad_hidden_ND = torch.empty_like(hidden_ND) if needs_hidden else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if needs_weight else None
        for part in _chunks(hidden_ND.shape[0], weight_VD.shape[0]):
            hidden_CD, target_C1, weight_C = hidden_ND[part].to(dtype), target_N[part, None], weight_N[part].float()
            logits_CV = (hidden_CD @ matrix_VD.T).float()
            said_C1, top_C1 = logits_CV.gather(1, target_C1), logits_CV.amax(dim=-1, keepdim=True)
            odds_CV = logits_CV.sub_(top_C1).exp_()  # in place of the logits: one pass of exp for loss and gradient
            sum_C1 = odds_CV.sum(dim=-1, keepdim=True)
            total += ((sum_C1.log() + top_C1 - said_C1)[:, 0] * weight_C).sum()
            if grad_hidden_ND is None and grad_weight_VD is None:
                continue
            # d nats / d logits = softmax - one_hot
            wide_CV = odds_CV.mul_(weight_C[:, None] / sum_C1)
            slope_CV = wide_CV.scatter_add_(1, target_C1, -weight_C[:, None]).to(dtype)
            if grad_hidden_ND is not None:
                grad_hidden_ND[part] = (slope_CV @ matrix_VD).to(grad_hidden_ND.dtype)
            if grad_weight_VD is not None:
                grad_weight_VD += (slope_CV.T @ hidden_CD).float()
        ctx.save_for_backward(*(grad for grad in (grad_hidden_ND, grad_weight_VD) if grad is not None))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        saved = list(ctx.saved_tensors)
        grad_hidden_ND = saved.pop(0) * upstream[0] if ctx.needs_input_grad[0] else None
        grad_weight_VD = saved.pop(0) * upstream[0] if ctx.needs_input_grad[1] else None
        return grad_hidden_ND, grad_weight_VD, None, None, None


def _missing(hidden_ND: Tensor) -> int:
    """Rows to add on a CPU so that few sizes of product come up: each is compiled when it is first seen (0.4 ms)."""
    return -hidden_ND.shape[0] % ROW_LOT if hidden_ND.device.type == "cpu" and torch.is_grad_enabled() else 0


def summed_nats(hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, weight_N: Tensor, dtype: torch.dtype) -> Tensor:
    """Weighted sum of the next-token losses in nats, a float32 scalar.

    hidden_ND: final hidden states; weight_VD: the head; target_N: token ids; weight_N: what each position counts (no
    gradient flows to it). Never holds more than `CHUNK_LOGITS` logits, or one position's where V is larger. Matrix
    products in `dtype`, the softmax in float32. Gradients are made here, and only where one is asked for.
    """
    if not torch.is_grad_enabled():
        # A Function is told of `requires_grad` even under no_grad, and would make the head's gradient for nothing.
        hidden_ND, weight_VD = hidden_ND.detach(), weight_VD.detach()
    missing = _missing(hidden_ND)
    if missing:
        hidden_ND = functional.pad(hidden_ND, (0, 0, 0, missing))
        target_N, weight_N = functional.pad(target_N, (0, missing)), functional.pad(weight_N, (0, missing))
    return _SummedNats.apply(hidden_ND, weight_VD, target_N, weight_N, dtype)  # type: ignore[no-any-return,no-untyped-call]


class _LogProbs(torch.autograd.Function):
    """logp_n = (hidden_n W^T)[target_n] - logsumexp(hidden_n W^T), in blocks; logits are made twice, never kept."""

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, dtype: torch.dtype) -> Tensor:
        matrix_VD = weight_VD.to(dtype)
        logp_2N = torch.empty(2, hidden_ND.shape[0], dtype=torch.float32, device=hidden_ND.device)
        norm_N = torch.empty_like(logp_2N[0])
        for part in _chunks(hidden_ND.shape[0], weight_VD.shape[0]):
            logits_CV = (hidden_ND[part].to(dtype) @ matrix_VD.T).float()
            norm_N[part] = logits_CV.logsumexp(dim=-1)
            logp_2N[0, part] = logits_CV.gather(1, target_N[part, None])[:, 0] - norm_N[part]
            # H = logsumexp - sum_v p_v logit_v
            logp_2N[1, part] = norm_N[part] - ((logits_CV - norm_N[part, None]).exp() * logits_CV).sum(dim=-1)
        ctx.save_for_backward(hidden_ND, weight_VD, target_N, norm_N)
        ctx.dtype = dtype
        return logp_2N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, target_N, norm_N = ctx.saved_tensors
        dtype, matrix_VD, slope_N = ctx.dtype, weight_VD.to(ctx.dtype), upstream[0][0]
        grad_hidden_ND = torch.empty_like(hidden_ND) if ctx.needs_input_grad[0] else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for part in _chunks(hidden_ND.shape[0], weight_VD.shape[0]):
            hidden_CD = hidden_ND[part].to(dtype)
            # d logp / d logits = one_hot - softmax
            slope_CV = (hidden_CD @ matrix_VD.T).float().sub_(norm_N[part, None]).exp_()
            slope_CV.mul_(-slope_N[part, None]).scatter_add_(1, target_N[part, None], slope_N[part, None])
            rounded_CV = slope_CV.to(dtype)
            if grad_hidden_ND is not None:
                grad_hidden_ND[part] = (rounded_CV @ matrix_VD).to(grad_hidden_ND.dtype)
            if grad_weight_VD is not None:
                grad_weight_VD += (rounded_CV.T @ hidden_CD).float()
        return grad_hidden_ND, grad_weight_VD, None, None


def _chunks(num_rows: int, vocabulary: int) -> Iterator[slice]:
    size = max(1, CHUNK_LOGITS // vocabulary)
    return (slice(start, start + size) for start in range(0, num_rows, size))


def log_probs(hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, dtype: torch.dtype) -> Tensor:
    """logp_2N in float32: log-probability of each target (row 0), entropy of the prediction in nats (row 1).

    Gradients flow through row 0 only. Memory and dtypes as in `summed_nats`.
    """
    if not torch.is_grad_enabled():
        hidden_ND, weight_VD = hidden_ND.detach(), weight_VD.detach()
    num_scored, missing = len(target_N), _missing(hidden_ND)
    if missing:
        hidden_ND, target_N = functional.pad(hidden_ND, (0, 0, 0, missing)), functional.pad(target_N, (0, missing))
    logp_2N: Tensor = _LogProbs.apply(hidden_ND, weight_VD, target_N, dtype)  # type: ignore[no-untyped-call]
    return logp_2N[:, :num_scored]


def logits(hidden_BTD: Tensor, weight_VD: Tensor, dtype: torch.dtype) -> Tensor:
    """logits_BTV in float32."""
    return functional.linear(hidden_BTD.to(dtype), weight_VD.to(dtype)).float()
