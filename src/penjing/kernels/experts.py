"""The routed experts of a layer: each token goes through k of E small SwiGLU experts; outputs are summed by weight.

The (token, expert) pairs are sorted by expert. Then a GPU computes all experts in grouped matmuls, and a CPU one expert
per thread at a time. `reference.experts` computes all experts on all tokens.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.autograd.function import once_differentiable

from penjing.kernels.cpu import tensor_arena as arena
from penjing.kernels.cpu.expert_thread_pool import run_in_threads
from penjing.kernels.select import find, find_fused

# Grouped matmuls on CUDA need every group to start at a multiple of 16 bytes, which is 8 rows of bfloat16.
GROUP_ALIGNMENT = 8


def experts(
    x_ND: Tensor, expert_Nk: Tensor, weight_Nk: Tensor, matrices: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype
) -> Tensor:
    """out_ND: of each token the sum over its experts e of weight_e * down_e(silu(gate_e x) * up_e x), matmuls in
    `dtype`. expert_Nk: the experts of each token. matrices: gate_EFD, up_EFD, down_EDF."""
    dispatch = dispatch_to_experts(expert_Nk, matrices[0].shape[0], on_host=x_ND.device.type != "cuda")
    inputs = (x_ND.to(dtype), weight_Nk, *matrices)
    if dispatch.ends is None:
        rows = (dispatch.token_R, dispatch.row_Nk, dispatch.end_E)
        return _GroupedExperts.apply(*inputs, *rows, dtype)  # type: ignore[no-any-return,no-untyped-call]
    return _SequentialExperts.apply(*inputs, dispatch, dtype)  # type: ignore[no-any-return,no-untyped-call]


class ExpertDispatch(NamedTuple):
    """(token, expert) pairs sorted by expert, one per row; each expert's rows are padded to full tiles.

    token_R: the token of each row; padding rows have token 0 and weight 0. row_Nk: the rows of each token's experts;
    end_E: where each expert's rows end; ends: the same on the host, None where that would wait for the device.
    """

    token_R: Tensor
    row_Nk: Tensor
    end_E: Tensor
    ends: list[int] | None

    def row_slices(self) -> list[tuple[int, slice]]:
        """Each expert and the slice of its rows, largest first; some are empty."""
        assert self.ends is not None
        slices = [(expert, slice(*ends)) for expert, ends in enumerate(pairwise([0, *self.ends]))]
        return sorted(slices, key=lambda part: part[1].start - part[1].stop)


def rows_per_tile(num_pairs: int, num_experts: int) -> int:
    """Rows of a tile on a CPU, where oneDNN compiles each new GEMM shape (0.4 ms). Without tiles nearly every shape is
    new, which took a fifth of the step."""
    mean = num_pairs // num_experts
    return next(tile for minimum, tile in ((256, 32), (64, 16), (16, 8), (0, 1)) if mean >= minimum)


def dispatch_to_experts(expert_Nk: Tensor, num_experts: int, *, on_host: bool) -> ExpertDispatch:
    """Sort by expert, in the order of tokens. on_host: copy the ends to the host too."""
    chosen_M = expert_Nk.flatten()
    expert_M, pair_M = chosen_M.sort(stable=True)
    tile = rows_per_tile(len(chosen_M), num_experts) if on_host else GROUP_ALIGNMENT
    count_E = torch.zeros(num_experts, dtype=torch.long, device=chosen_M.device)
    count_E.scatter_add_(0, chosen_M, torch.ones_like(chosen_M))
    padded_E = (count_E + tile - 1) // tile * tile
    padding_E = (padded_E - count_E).cumsum(0) - (padded_E - count_E)  # padding rows before each expert's first
    row_M = torch.arange(len(chosen_M), device=chosen_M.device) + padding_E[expert_M]
    end_E = padded_E.cumsum(0)
    ends = end_E.tolist() if on_host else None
    token_R = chosen_M.new_zeros(ends[-1] if ends else len(chosen_M) + num_experts * tile)
    token_R.index_copy_(0, row_M, pair_M // expert_Nk.shape[1])
    row_Nk = torch.empty_like(chosen_M).index_copy_(0, pair_M, row_M).view(expert_Nk.shape)
    return ExpertDispatch(token_R, row_Nk, end_E.to(torch.int32), ends)


class _SequentialExperts(torch.autograd.Function):
    """sum over a token's experts of weight * down(silu(gate x) * up x), on a CPU, one core per expert.

    Each expert's rows, matrices and gradients are used while they are in cache: its matrices are cast on use and never
    stored in `dtype`; each gradient is rounded into one small block and copied from there. It is one autograd function,
    as recording a hundred small matmuls per layer would cost as much as computing them.
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
        gate_up_RG, y_RD = (arena.empty(x_ND, (num_rows, columns), x_ND.dtype) for columns in (2 * size, width))
        swiglu = find("expert_swiglu", gate_up_RG)

        def run_experts(row_slices: Iterator[tuple[int, slice]]) -> None:
            gate_up_GD, down_DF = x_ND.new_empty(2 * size, width), x_ND.new_empty(width, size)
            for expert, rows in row_slices:
                if rows.start == rows.stop:
                    continue
                gate_up_GD[:size], gate_up_GD[size:], down_DF[:] = gate_EFD[expert], up_EFD[expert], down_EDF[expert]
                torch.mm(x_ND.index_select(0, dispatch.token_R[rows]), gate_up_GD.T, out=gate_up_RG[rows])
                torch.mm(swiglu(gate_up_RG[rows]), down_DF.T, out=y_RD[rows])

        run_in_threads(run_experts, dispatch.row_slices())
        ctx.save_for_backward(x_ND, weight_Nk, gate_up_RG, gate_EFD, up_EFD, down_EDF)
        ctx.dispatch = dispatch
        return find("combine_experts", y_RD)(y_RD, dispatch.row_Nk, weight_Nk)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, weight_Nk, gate_up_RG, gate_EFD, up_EFD, down_EDF = ctx.saved_tensors
        dispatch: ExpertDispatch = ctx.dispatch
        trains, (size, width) = any(ctx.needs_input_grad[2:5]), gate_EFD.shape[1:]  # autograd drops frozen ones
        grad_out_ND = upstream[0].to(x_ND.dtype)
        weight_R = _weight_by_row(weight_Nk, dispatch.token_R, dispatch.row_Nk)
        grad_weight_R, grad_x_RD = torch.empty_like(weight_R), arena.empty(x_ND, (len(weight_R), width), x_ND.dtype)
        grads = [arena.empty_like(matrix) for matrix in (gate_EFD, up_EFD, down_EDF)] if trains else []
        backward_kernel = find("weighted_swiglu_backward", gate_up_RG, grad_out_ND, weight_R)

        def run_experts(row_slices: Iterator[tuple[int, slice]]) -> None:
            gate_up_GD, down_DF = x_ND.new_empty(2 * size, width), x_ND.new_empty(width, size)
            block_GD, block_DF = torch.empty_like(gate_up_GD), torch.empty_like(down_DF)
            for expert, rows in row_slices:
                if rows.start == rows.stop:
                    for gradient in grads:
                        gradient[expert].zero_()
                    continue
                gate_up_GD[:size], gate_up_GD[size:], down_DF[:] = gate_EFD[expert], up_EFD[expert], down_EDF[expert]
                grad_out_RD = grad_out_ND.index_select(0, dispatch.token_R[rows])
                grad_inner_RF = grad_out_RD @ down_DF  # gradient of inner, for a weight of 1
                grad_gate_up_RG, inner_RF, grad_weight_R[rows] = backward_kernel(
                    grad_inner_RF, gate_up_RG[rows], weight_R[rows]
                )
                torch.mm(grad_gate_up_RG, gate_up_GD, out=grad_x_RD[rows])
                if not trains:
                    continue
                x_RD = x_ND.index_select(0, dispatch.token_R[rows])
                gate, up, down = (gradient[expert] for gradient in grads)
                if (write := find_fused("write_weight_grad", grad_out_RD, inner_RF, down)) is not None:
                    write(grad_gate_up_RG[:, :size], x_RD, gate)
                    write(grad_gate_up_RG[:, size:], x_RD, up)
                    write(grad_out_RD, inner_RF, down)
                    continue
                torch.mm(grad_out_RD.T, inner_RF, out=block_DF)
                torch.mm(grad_gate_up_RG.T, x_RD, out=block_GD)
                gate[:], up[:], down[:] = block_GD[:size], block_GD[size:], block_DF

        run_in_threads(run_experts, dispatch.row_slices())
        grad_x_ND = find("combine_experts", grad_x_RD)(grad_x_RD, dispatch.row_Nk, None).to(upstream[0].dtype)
        return grad_x_ND, grad_weight_R[dispatch.row_Nk], *(grads or (None, None, None)), None, None


class _GroupedExperts(torch.autograd.Function):
    """The same by grouped matmuls of all experts at once, without a device synchronisation for the rows of each
    expert."""

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
        gate_up_EGD, down = torch.cat((gate_EFD.to(dtype), up_EFD.to(dtype)), dim=1), down_EDF.to(dtype)
        x_RD = x_ND.index_select(0, token_R)
        gate_up_RG = functional.grouped_mm(x_RD, gate_up_EGD.transpose(1, 2), offs=end_E)
        inner_RF = find("expert_swiglu", gate_up_RG)(gate_up_RG)
        y_RD = functional.grouped_mm(inner_RF, down.transpose(1, 2), offs=end_E)
        ctx.save_for_backward(x_RD, weight_Nk, gate_up_RG, gate_up_EGD, down, token_R, row_Nk, end_E)
        return find("combine_experts", y_RD)(y_RD, row_Nk, weight_Nk)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        x_RD, weight_Nk, gate_up_RG, gate_up_EGD, down, token_R, row_Nk, end_E = ctx.saved_tensors
        grad_out_RD = upstream[0].to(x_RD.dtype).index_select(0, token_R)
        weight_R = _weight_by_row(weight_Nk, token_R, row_Nk)
        grad_inner_RF = functional.grouped_mm(grad_out_RD, down, offs=end_E)  # gradient of inner, for a weight of 1
        backward_kernel = find("weighted_swiglu_backward", gate_up_RG, grad_inner_RF, weight_R)
        grad_gate_up_RG, inner_RF, grad_weight_R = backward_kernel(grad_inner_RF, gate_up_RG, weight_R)
        grads: tuple[Tensor | None, ...] = (None, None, None)
        if any(ctx.needs_input_grad[2:5]):
            grad_gate_up_EGD = functional.grouped_mm(grad_gate_up_RG.T, x_RD, offs=end_E)
            grad_down = functional.grouped_mm(grad_out_RD.T, inner_RF, offs=end_E)
            grads = (*(part.float() for part in grad_gate_up_EGD.chunk(2, dim=1)), grad_down.float())
        grad_x_RD = functional.grouped_mm(grad_gate_up_RG, gate_up_EGD, offs=end_E)
        grad_x_ND = find("combine_experts", grad_x_RD)(grad_x_RD, row_Nk, None)
        return grad_x_ND.to(upstream[0].dtype), grad_weight_R[row_Nk], *grads, None, None, None, None


def _weight_by_row(weight_Nk: Tensor, token_R: Tensor, row_Nk: Tensor) -> Tensor:
    """Each pair's weight at its row; 0 for padding rows."""
    weight_R = weight_Nk.new_zeros(len(token_R))
    return weight_R.index_copy_(0, row_Nk.flatten(), weight_Nk.flatten())
