"""The output head: hidden states to logits, or directly to the summed loss without materialising all logits."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.autograd.function import once_differentiable

from penjing.kernels import casts
from penjing.kernels.cpu import tensor_arena as arena
from penjing.kernels.select import find_fused

# Logits of one block of positions, the unit of the matmul: 2^23 logits are 16 MB in bfloat16. On a GPU 2^27, as each
# block is a kernel launch and memory is faster.
HOST_BLOCK_LOGITS, BLOCK_LOGITS = 1 << 23, 1 << 27  # on a CPU, on other devices
# On a CPU the softmax of a block goes chunk by chunk: 4 MB in float32 stay in cache, several times 32 MB do not.
CHUNK_LOGITS = 1 << 20
ROW_MULTIPLE = 32  # on a CPU, the number of scored positions is rounded up to a multiple of this


class _FusedLinearCrossEntropy(torch.autograd.Function):
    """sum_n weight_n * -log softmax(hidden_n W^T)[target_n]; gradients are taken in the forward pass, per block."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, weight_N: Tensor, dtype: torch.dtype
    ) -> Tensor:
        needs_hidden, needs_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        matrix_VD = arena.cast(weight_VD, dtype)
        total = torch.zeros((), dtype=torch.float32, device=hidden_ND.device)
        grad_hidden_ND = arena.empty_like(hidden_ND) if needs_hidden else None
        grad_weight_VD = arena.empty(weight_VD, weight_VD.shape, torch.float32).zero_() if needs_weight else None
        for block in _blocks(hidden_ND, weight_VD.shape[0]):
            hidden_CD, target_C, weight_C = hidden_ND[block].to(dtype), target_N[block], weight_N[block].float()
            logits_CV = arena.matmul(hidden_CD, matrix_VD.T)
            kernel = find_fused("cross_entropy_inplace", logits_CV)
            if kernel is not None:
                total = total + kernel(logits_CV, target_C, weight_C, needs_hidden or needs_weight).sum()
            for part in () if kernel is not None else _chunks(logits_CV):
                loss, grad_CV = _cross_entropy(logits_CV[part], target_C[part, None], weight_C[part, None])
                total = total + loss  # in place, torch 2.11 would compile a loss without gradients
                if needs_hidden or needs_weight:
                    logits_CV[part] = grad_CV  # overwrites the logits: never more than one block
            if grad_hidden_ND is not None:
                grad_hidden_ND[block] = (logits_CV @ matrix_VD).to(grad_hidden_ND.dtype)
            if grad_weight_VD is not None:
                if (kernel := find_fused("add_matmul", logits_CV, hidden_CD, grad_weight_VD)) is not None:
                    kernel(logits_CV, hidden_CD, grad_weight_VD)
                else:
                    grad_weight_VD += arena.matmul(logits_CV.T, hidden_CD)
        ctx.save_for_backward(*(grad for grad in (grad_hidden_ND, grad_weight_VD) if grad is not None))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        saved = list(ctx.saved_tensors)
        grad_hidden_ND = saved.pop(0) * upstream[0] if ctx.needs_input_grad[0] else None
        grad_weight_VD = saved.pop(0) * upstream[0] if ctx.needs_input_grad[1] else None
        return grad_hidden_ND, grad_weight_VD, None, None, None


def _cross_entropy(logits_CV: Tensor, target_C1: Tensor, weight_C1: Tensor) -> tuple[Tensor, Tensor]:
    """The weighted sum of the losses and its gradient for the logits, (softmax - one_hot) * weight, in float32."""
    wide_CV = arena.cast(logits_CV, torch.float32)
    target_logit_C1, top_C1 = wide_CV.gather(1, target_C1), wide_CV.amax(dim=-1, keepdim=True)
    exp_CV = (wide_CV.sub_(top_C1) if wide_CV is not logits_CV else wide_CV - top_C1).exp_()
    sum_C1 = exp_CV.sum(dim=-1, keepdim=True)
    loss = ((sum_C1.log() + top_C1 - target_logit_C1) * weight_C1).sum()
    return loss, exp_CV.mul_(weight_C1 / sum_C1).scatter_add_(1, target_C1, -weight_C1)


def _padding(hidden_ND: Tensor) -> int:
    """Padding rows on a CPU, so that there are few GEMM shapes: oneDNN compiles each new one (0.4 ms)."""
    return -hidden_ND.shape[0] % ROW_MULTIPLE if hidden_ND.device.type == "cpu" and torch.is_grad_enabled() else 0


def fused_linear_cross_entropy(
    hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, weight_N: Tensor, dtype: torch.dtype
) -> Tensor:
    """Weighted sum of the next-token losses in nats, a float32 scalar.

    hidden_ND: final hidden states; weight_VD: the head; target_N: token ids; weight_N: each position's weight (no
    gradient). Never holds more than `BLOCK_LOGITS` logits, or one position's if V is larger. Matmuls are in `dtype`,
    the softmax in float32. Gradients are computed here, and only if required.

    `torch.nn.functional.linear_cross_entropy` (2.13) supports no weights; without weights it took 1.3 times as long on
    one thread, 3.6 times in its chunked form, for 4,096 positions, D 512 and V 6,400 in bfloat16.
    """
    if not torch.is_grad_enabled():
        # An autograd Function sees `requires_grad` even under no_grad, and would compute gradients that nobody uses.
        hidden_ND, weight_VD = hidden_ND.detach(), weight_VD.detach()
    padding = _padding(hidden_ND)
    if padding:
        hidden_ND = functional.pad(hidden_ND, (0, 0, 0, padding))
        target_N, weight_N = functional.pad(target_N, (0, padding)), functional.pad(weight_N, (0, padding))
    return _FusedLinearCrossEntropy.apply(hidden_ND, weight_VD, target_N, weight_N, dtype)  # type: ignore[no-any-return,no-untyped-call]


class _LogProbs(torch.autograd.Function):
    """logp_n = (hidden_n W^T)[target_n] - logsumexp(hidden_n W^T), in blocks; the backward pass recomputes logits."""

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, dtype: torch.dtype) -> Tensor:
        matrix_VD = weight_VD.to(dtype)
        logp_2N = torch.empty(2, hidden_ND.shape[0], dtype=torch.float32, device=hidden_ND.device)
        norm_N = torch.empty_like(logp_2N[0])
        for part in _blocks(hidden_ND, weight_VD.shape[0], CHUNK_LOGITS):
            logits_CV = hidden_ND[part].to(dtype) @ matrix_VD.T
            if (kernel := find_fused("log_probs", logits_CV)) is not None:
                kernel(logits_CV, target_N[part], logp_2N[0, part], logp_2N[1, part], norm_N[part])
                continue
            logits_CV = logits_CV.float()
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
        dtype, matrix_VD, grad_logp_N = ctx.dtype, weight_VD.to(ctx.dtype), upstream[0][0]
        grad_hidden_ND = torch.empty_like(hidden_ND) if ctx.needs_input_grad[0] else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for part in _blocks(hidden_ND, weight_VD.shape[0], CHUNK_LOGITS):
            hidden_CD = hidden_ND[part].to(dtype)
            # d logp / d logits = one_hot - softmax
            logits_CV = hidden_CD @ matrix_VD.T
            if (kernel := find_fused("log_softmax_backward", logits_CV)) is not None:
                rounded_CV = kernel(logits_CV, target_N[part], norm_N[part], grad_logp_N[part])
            else:
                grad_CV = logits_CV.float().sub_(norm_N[part, None]).exp_()
                grad_CV.mul_(-grad_logp_N[part, None]).scatter_add_(1, target_N[part, None], grad_logp_N[part, None])
                rounded_CV = grad_CV.to(dtype)
            if grad_hidden_ND is not None:
                grad_hidden_ND[part] = (rounded_CV @ matrix_VD).to(grad_hidden_ND.dtype)
            if grad_weight_VD is not None:
                grad_weight_VD += (rounded_CV.T @ hidden_CD).float()
        return grad_hidden_ND, grad_weight_VD, None, None


def _blocks(hidden_ND: Tensor, vocabulary: int, cpu_logits: int = HOST_BLOCK_LOGITS) -> Iterator[slice]:
    """Blocks of positions for one matmul of the head; at least one position each."""
    max_logits = cpu_logits if hidden_ND.device.type == "cpu" else BLOCK_LOGITS
    return _slices(hidden_ND.shape[0], max_logits // vocabulary)


def _chunks(logits_CV: Tensor) -> Iterator[slice]:
    """Chunks of positions for one softmax: all positions on a GPU or under a compiler, which does its own tiling."""
    rows, vocabulary = logits_CV.shape
    in_chunks = logits_CV.device.type == "cpu" and not torch.compiler.is_compiling()
    return _slices(rows, CHUNK_LOGITS // vocabulary if in_chunks else rows)


def _slices(rows: int, size: int) -> Iterator[slice]:
    size = max(1, size)
    return (slice(start, start + size) for start in range(0, rows, size))


def log_probs(hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, dtype: torch.dtype) -> Tensor:
    """logp_2N in float32: log-probability of each target (row 0), entropy of the prediction in nats (row 1). Gradients
    flow through row 0 only. Memory and dtypes as in `fused_linear_cross_entropy`."""
    if not torch.is_grad_enabled():
        hidden_ND, weight_VD = hidden_ND.detach(), weight_VD.detach()
    num_scored, padding = len(target_N), _padding(hidden_ND)
    if padding:
        hidden_ND, target_N = functional.pad(hidden_ND, (0, 0, 0, padding)), functional.pad(target_N, (0, padding))
    logp_2N: Tensor = _LogProbs.apply(hidden_ND, weight_VD, target_N, dtype)  # type: ignore[no-untyped-call]
    return logp_2N[:, :num_scored]


def logits(hidden_BTD: Tensor, weight_VD: Tensor, dtype: torch.dtype) -> Tensor:
    """logits_BTV in float32."""
    return functional.linear(hidden_BTD.to(dtype), casts.cast(weight_VD, dtype)).float()
