"""The routed experts of a layer: each token goes through k of E small SwiGLUs, and what comes out is summed by weight.

The (token, expert) pairs are sorted by expert. Then the experts' rows take grouped matmuls together on a GPU, and one
expert after the other on a CPU. `reference.experts` computes all experts on all tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.autograd.function import once_differentiable

from penjing.kernels.cpu import ops as cpu
from penjing.kernels.cpu import tensor_arena as arena
from penjing.kernels.cpu.expert_thread_pool import side_by_side
from penjing.kernels.triton import ops as gpu

# Grouped matmuls on CUDA want every group to begin at a multiple of 16 bytes, which is 8 rows of bfloat16.
GROUP_ALIGNMENT = 8


def experts(
    x_ND: Tensor, expert_Nk: Tensor, weight_Nk: Tensor, matrices: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype
) -> Tensor:
    """out_ND: of each token the sum over its experts e of weight_e * down_e(silu(gate_e x) * up_e x), matmuls in
    `dtype`.

    expert_Nk: which experts each token goes through. matrices: gate_EFD, up_EFD, down_EDF.
    """
    dispatch = dispatch_to_experts(expert_Nk, matrices[0].shape[0], on_host=x_ND.device.type != "cuda")
    given = (x_ND.to(dtype), weight_Nk, *matrices)
    if dispatch.ends is None:
        rows = (dispatch.token_R, dispatch.row_Nk, dispatch.end_E)
        return _Grouped.apply(*given, *rows, dtype)  # type: ignore[no-any-return,no-untyped-call]
    return _ExpertByExpert.apply(*given, dispatch, dtype)  # type: ignore[no-any-return,no-untyped-call]


class ExpertDispatch(NamedTuple):
    """(token, expert) pairs sorted by expert, each on a row of a block in which every expert has whole tiles of rows.

    token_R: the token on each row; rows of no pair show token 0 and weigh nothing. row_Nk: the row of each token's
    choices; end_E: where each expert's rows end; ends: the same on the host, where it need not wait to know.
    """

    token_R: Tensor
    row_Nk: Tensor
    end_E: Tensor
    ends: list[int] | None

    def parts(self) -> list[tuple[int, slice]]:
        """Each expert, and which rows are its own, those with most first; some have none."""
        assert self.ends is not None
        parts = [(expert, slice(*ends)) for expert, ends in enumerate(pairwise([0, *self.ends]))]
        return sorted(parts, key=lambda part: part[1].start - part[1].stop)


def rows_per_tile(num_pairs: int, num_experts: int) -> int:
    """Rows of a tile on a CPU, where each GEMM shape is compiled when it is first seen (0.4 ms).

    With another number of rows every time that took a fifth of the step; with tiles, few shapes come up.
    """
    mean = num_pairs // num_experts
    return next(tile for least, tile in ((256, 32), (64, 16), (16, 8), (0, 1)) if mean >= least)


def dispatch_to_experts(expert_Nk: Tensor, num_experts: int, *, on_host: bool) -> ExpertDispatch:
    """Sort by expert, in the order of tokens. on_host: find the ends on the host too."""
    chosen_M = expert_Nk.flatten()
    expert_M, pair_M = chosen_M.sort(stable=True)
    tile = rows_per_tile(len(chosen_M), num_experts) if on_host else GROUP_ALIGNMENT
    count_E = torch.zeros(num_experts, dtype=torch.long, device=chosen_M.device)
    count_E.scatter_add_(0, chosen_M, torch.ones_like(chosen_M))
    whole_E = (count_E + tile - 1) // tile * tile
    gap_E = (whole_E - count_E).cumsum(0) - (whole_E - count_E)  # empty rows before each expert's first
    row_M = torch.arange(len(chosen_M), device=chosen_M.device) + gap_E[expert_M]
    end_E = whole_E.cumsum(0)
    ends = end_E.tolist() if on_host else None
    token_R = chosen_M.new_zeros(ends[-1] if ends else len(chosen_M) + num_experts * tile)
    token_R.index_copy_(0, row_M, pair_M // expert_Nk.shape[1])
    row_Nk = torch.empty_like(chosen_M).index_copy_(0, pair_M, row_M).view(expert_Nk.shape)
    return ExpertDispatch(token_R, row_Nk, end_E.to(torch.int32), ends)


class _ExpertByExpert(torch.autograd.Function):
    """sum over a token's experts of weight * down(silu(gate x) * up x), on a CPU, each expert on one core.

    Each expert's rows, matrices and gradients are worked on while they are in cache: its matrices are cast where they
    are used and never kept in `dtype`, each gradient is rounded into one small block and copied from there. One
    function instead of a graph, as recording a hundred small matmuls a layer would cost as much as they do.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weight_Nk: Tensor,
        gate_EFD: Tensor,
        up_EFD: Tensor,
        down_EDF: Tensor,
        dispatch: ExpertDispatch,
        dtype: torch.dtype,
    ) -> Tensor:
        size, width = gate_EFD.shape[1:]
        num_rows = len(dispatch.token_R)
        both_RG, y_RD = (arena.empty(x_ND, (num_rows, each), x_ND.dtype) for each in (2 * size, width))
        in_c = cpu.supports(both_RG)

        def work(parts: Iterator[tuple[int, slice]]) -> None:
            both_GD, down_DF = x_ND.new_empty(2 * size, width), x_ND.new_empty(width, size)
            for expert, rows in parts:
                if rows.start == rows.stop:
                    continue
                both_GD[:size], both_GD[size:], down_DF[:] = gate_EFD[expert], up_EFD[expert], down_EDF[expert]
                torch.mm(x_ND.index_select(0, dispatch.token_R[rows]), both_GD.T, out=both_RG[rows])
                gate_RF, up_RF = both_RG[rows].chunk(2, dim=-1)
                inner_RF = cpu.swiglu(gate_RF, up_RF) if in_c else functional.silu(gate_RF).mul_(up_RF)
                torch.mm(inner_RF, down_DF.T, out=y_RD[rows])

        side_by_side(work, dispatch.parts())
        ctx.save_for_backward(x_ND, weight_Nk, both_RG, gate_EFD, up_EFD, down_EDF)
        ctx.dispatch = dispatch
        return _combine(y_RD, dispatch.row_Nk, weight_Nk)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, weight_Nk, both_RG, gate_EFD, up_EFD, down_EDF = ctx.saved_tensors
        dispatch: ExpertDispatch = ctx.dispatch
        trains, (size, width) = any(ctx.needs_input_grad[2:5]), gate_EFD.shape[1:]  # autograd drops what is frozen
        grad_out_ND = upstream[0].to(x_ND.dtype)
        weight_R = _weight_by_row(weight_Nk, dispatch.token_R, dispatch.row_Nk)
        grad_weight_R, grad_x_RD = torch.empty_like(weight_R), arena.empty(x_ND, (len(weight_R), width), x_ND.dtype)
        grads = [arena.empty_like(matrix) for matrix in (gate_EFD, up_EFD, down_EDF)] if trains else []
        in_c = cpu.supports(both_RG, grad_out_ND, wide=[weight_R])
        backward_kernel = cpu.weighted_swiglu_backward if in_c else _weighted_swiglu_backward

        def work(parts: Iterator[tuple[int, slice]]) -> None:
            both_GD, down_DF = x_ND.new_empty(2 * size, width), x_ND.new_empty(width, size)
            block_GD, block_DF = torch.empty_like(both_GD), torch.empty_like(down_DF)
            for expert, rows in parts:
                if rows.start == rows.stop:
                    for gradient in grads:
                        gradient[expert].zero_()
                    continue
                both_GD[:size], both_GD[size:], down_DF[:] = gate_EFD[expert], up_EFD[expert], down_EDF[expert]
                grad_out_RD = grad_out_ND.index_select(0, dispatch.token_R[rows])
                grad_inner_RF = grad_out_RD @ down_DF  # gradient of inner, were every weight 1
                given = grad_inner_RF, both_RG[rows], weight_R[rows], grad_weight_R[rows]
                grad_both_RG, inner_RF = backward_kernel(*given)
                torch.mm(grad_both_RG, both_GD, out=grad_x_RD[rows])
                if not trains:
                    continue
                x_RD = x_ND.index_select(0, dispatch.token_R[rows])
                gate, up, down = (gradient[expert] for gradient in grads)
                if cpu.supports_weight_grad(grad_out_RD, inner_RF) and cpu.supports(wide=[gate, up, down]):
                    cpu.weight_grad(grad_both_RG[:, :size], x_RD, gate)
                    cpu.weight_grad(grad_both_RG[:, size:], x_RD, up)
                    cpu.weight_grad(grad_out_RD, inner_RF, down)
                    continue
                torch.mm(grad_out_RD.T, inner_RF, out=block_DF)
                torch.mm(grad_both_RG.T, x_RD, out=block_GD)
                gate[:], up[:], down[:] = block_GD[:size], block_GD[size:], block_DF

        side_by_side(work, dispatch.parts())
        grad_x_ND = _combine(grad_x_RD, dispatch.row_Nk, None).to(upstream[0].dtype)
        return grad_x_ND, grad_weight_R[dispatch.row_Nk], *(grads or (None, None, None)), None, None


class _Grouped(torch.autograd.Function):
    """The same by grouped matmuls of all experts at once, without waiting for the device to say which expert got
    what."""

    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weight_Nk: Tensor,
        gate_EFD: Tensor,
        up_EFD: Tensor,
        down_EDF: Tensor,
        token_R: Tensor,
        row_Nk: Tensor,
        end_E: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        both_EGD, down = torch.cat((gate_EFD.to(dtype), up_EFD.to(dtype)), dim=1), down_EDF.to(dtype)
        x_RD = x_ND.index_select(0, token_R)
        both_RG = functional.grouped_mm(x_RD, both_EGD.transpose(1, 2), offs=end_E)
        if gpu.supports(x_ND.device, dtype):
            inner_RF = gpu.swiglu(both_RG)
        else:
            gate_RF, up_RF = both_RG.chunk(2, dim=-1)
            inner_RF = functional.silu(gate_RF) * up_RF
        y_RD = functional.grouped_mm(inner_RF, down.transpose(1, 2), offs=end_E)
        ctx.save_for_backward(x_RD, weight_Nk, both_RG, both_EGD, down, token_R, row_Nk, end_E)
        return _combine(y_RD, row_Nk, weight_Nk)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        x_RD, weight_Nk, both_RG, both_EGD, down, token_R, row_Nk, end_E = ctx.saved_tensors
        grad_out_RD = upstream[0].to(x_RD.dtype).index_select(0, token_R)
        weight_R = _weight_by_row(weight_Nk, token_R, row_Nk)
        grad_inner_RF = functional.grouped_mm(grad_out_RD, down, offs=end_E)  # gradient of inner, were every weight 1
        if gpu.supports(x_RD.device, x_RD.dtype):
            grad_both_RG, inner_RF, grad_weight_R = gpu.swiglu_backward(grad_inner_RF, both_RG, weight_R)
        else:
            grad_weight_R = torch.empty_like(weight_R)
            grad_both_RG, inner_RF = _weighted_swiglu_backward(grad_inner_RF, both_RG, weight_R, grad_weight_R)
        grads: tuple[Tensor | None, ...] = (None, None, None)
        if any(ctx.needs_input_grad[2:5]):
            grad_both_EGD = functional.grouped_mm(grad_both_RG.T, x_RD, offs=end_E)
            grad_down = functional.grouped_mm(grad_out_RD.T, inner_RF, offs=end_E)
            grads = (*(part.float() for part in grad_both_EGD.chunk(2, dim=1)), grad_down.float())
        grad_x_ND = _combine(functional.grouped_mm(grad_both_RG, both_EGD, offs=end_E), row_Nk, None)
        return grad_x_ND.to(upstream[0].dtype), grad_weight_R[row_Nk], *grads, None, None, None, None


def _weighted_swiglu_backward(
    grad_inner_RF: Tensor, both_RG: Tensor, weight_R: Tensor, grad_weight_R: Tensor
) -> tuple[Tensor, Tensor]:
    """As `cpu.weighted_swiglu_backward`, by torch's operations; `grad_inner` is overwritten."""
    (gate_RF, up_RF), weight_R1 = both_RG.chunk(2, dim=-1), weight_R[:, None].to(both_RG.dtype)
    silu_RF = functional.silu(gate_RF)
    inner_RF = silu_RF * up_RF
    grad_weight_R[:] = (grad_inner_RF * inner_RF).sum(dim=-1, dtype=weight_R.dtype)
    grad_both_RG = torch.empty_like(both_RG)
    grad_gate_RF, grad_up_RF = grad_both_RG.chunk(2, dim=-1)
    torch.mul(grad_inner_RF.mul_(weight_R1), silu_RF, out=grad_up_RF)
    grad_gate_RF.copy_(torch.ops.aten.silu_backward(grad_inner_RF.mul_(up_RF), gate_RF))
    return grad_both_RG, inner_RF.mul_(weight_R1)


def _weight_by_row(weight_Nk: Tensor, token_R: Tensor, row_Nk: Tensor) -> Tensor:
    """Each pair's weight on the pair's row; rows of no pair get 0."""
    weight_R = weight_Nk.new_zeros(len(token_R))
    return weight_R.index_copy_(0, row_Nk.flatten(), weight_Nk.flatten())


def _combine(y_RD: Tensor, row_Nk: Tensor, weight_Nk: Tensor | None) -> Tensor:
    """Sum each token's pairs, in the order of its choices: the same sum every time, unlike an atomic add."""
    if gpu.supports(y_RD.device, y_RD.dtype):
        out_ND: Tensor = gpu.combine_experts(y_RD, row_Nk, weight_Nk)
        return out_ND
    rounded_Nk = None if weight_Nk is None else weight_Nk.to(y_RD.dtype)
    return functional.embedding_bag(row_Nk, y_RD, mode="sum", per_sample_weights=rounded_Nk)
