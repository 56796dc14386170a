"""The feed-forward half of a block as a mixture of experts: each token goes through k of E small SwiGLUs, chosen by a
router, and through the shared expert where there is one.

The (token, expert) pairs are sorted by expert; then the experts' rows take grouped products together on a GPU, and one
expert after the other on a CPU. `every_expert` is the plain twin, all experts on all tokens: tests compare with it, and
exporters that need a graph without data-dependent sizes use it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from penjing.base.errors import UserError
from penjing.kernels.cpu import ops as cpu
from penjing.kernels.cpu import tensor_arena as arena
from penjing.kernels.cpu.expert_thread_pool import side_by_side
from penjing.kernels.triton import ops as gpu
from penjing.model.config import ModelConfig
from penjing.model.linear import Linear
from penjing.model.mlp import MLP

# Grouped products on CUDA want every group to begin at a multiple of 16 bytes, which is 8 rows of bfloat16.
GROUP_ROWS = 8


class Routed(NamedTuple):
    """Where tokens go. expert_Nk: chosen experts; weight_Nk: what each counts, float32; logit_NE: what decided it."""

    expert_Nk: Tensor
    weight_Nk: Tensor
    logit_NE: Tensor


class RouterMeans(NamedTuple):
    """How unevenly routers chose, as means over the positions that hold a token; of several layers, the layers' mean.

    batch: E / k sum_e f_e p_e, with f the share of choices and p the mean probability over all rows of this forward
    pass (arXiv:2101.03961, equations 4-6); 1 when perfectly even. sequence_B: the same within each row
    (arXiv:2412.19437, section 2.1.2), which does not depend on how a step is cut into forward passes.
    z_B: logsumexp(logits)^2 (arXiv:2202.08906, equation 5), by row.
    """

    batch: Tensor
    sequence_B: Tensor
    z_B: Tensor


def mean_of_layers(layers: list[RouterMeans]) -> RouterMeans:
    return RouterMeans(*(torch.stack(values).mean(dim=0) for values in zip(*layers, strict=True)))


class Router(nn.Module):
    """x W^T in float32, then which experts and how much.

    Softmax over all experts, or, in glm4_moe, a sigmoid each: there `correction` is added for the choice alone and is
    moved, not learned, to keep the load even (arXiv:2408.15664).
    """

    correction: Tensor | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.experts, config.hidden_size))
        self.sigmoid = config.architecture == "glm4_moe"
        self.register_buffer("correction", torch.zeros(config.experts) if self.sigmoid else None)
        self.num_chosen = config.experts_per_token
        self.renormalised = config.router_weights == "renormalised"
        self.scaling = config.routed_scaling

    def forward(self, x_ND: Tensor) -> Routed:
        logit_NE = functional.linear(x_ND.float(), self.weight.float())
        score_NE = logit_NE.sigmoid() if self.sigmoid else logit_NE.softmax(dim=-1)
        if self.correction is None:
            weight_Nk, expert_Nk = score_NE.topk(self.num_chosen, dim=-1)
        else:
            expert_Nk = (score_NE.detach() + self.correction).topk(self.num_chosen, dim=-1).indices
            weight_Nk = score_NE.gather(1, expert_Nk)
        if self.renormalised:
            weight_Nk = weight_Nk / (weight_Nk.sum(dim=-1, keepdim=True) + 1e-20)
        return Routed(expert_Nk, weight_Nk * self.scaling, logit_NE)

    def means(self, routed: Routed, document_BT: Tensor | None, rows: int) -> RouterMeans:
        """What the balance and z losses are made of; positions of document -1 (padding) are left out."""
        logit_BTE = routed.logit_NE.view(rows, -1, routed.logit_NE.shape[-1])
        real_BT1 = torch.ones_like(logit_BTE[..., :1]) if document_BT is None else (document_BT >= 0)[..., None].float()
        score_BTE = logit_BTE.sigmoid() if self.sigmoid else logit_BTE.softmax(dim=-1)
        if self.sigmoid:
            score_BTE = score_BTE / (score_BTE.sum(dim=-1, keepdim=True) + 1e-20)
        chosen_BTE = torch.zeros_like(logit_BTE).scatter_(-1, routed.expert_Nk.view(rows, -1, self.num_chosen), 1.0)
        num_B1 = real_BT1.sum(dim=1)
        choices_BE = (chosen_BTE * real_BT1).sum(dim=1)
        score_BE = (score_BTE * real_BT1).sum(dim=1)
        scale = logit_BTE.shape[-1] / self.num_chosen
        z_B1 = (logit_BTE.logsumexp(dim=-1, keepdim=True).square() * real_BT1).sum(dim=1)
        return RouterMeans(
            scale * (choices_BE.sum(0) * score_BE.sum(0)).sum() / num_B1.sum().clamp(min=1).square(),
            scale * (choices_BE * score_BE).sum(-1) / num_B1[:, 0].clamp(min=1).square(),
            (z_B1 / num_B1.clamp(min=1))[:, 0],
        )


class Groups(NamedTuple):
    """(token, expert) pairs sorted by expert, each on a row of a block in which every expert has whole lots of rows.

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


def lot_rows(num_pairs: int, num_experts: int) -> int:
    """Rows of a lot on a CPU, where each size of product is compiled when it is first seen (0.4 ms).

    With another number of rows every time that took a fifth of the step; with lots, few sizes come up.
    """
    mean = num_pairs // num_experts
    return next(lot for least, lot in ((256, 32), (64, 16), (16, 8), (0, 1)) if mean >= least)


def group(expert_Nk: Tensor, num_experts: int, *, on_host: bool) -> Groups:
    """Sort by expert, in the order of tokens. on_host: find the ends on the host too."""
    chosen_M = expert_Nk.flatten()
    expert_M, pair_M = chosen_M.sort(stable=True)
    lot = lot_rows(len(chosen_M), num_experts) if on_host else GROUP_ROWS
    count_E = torch.zeros(num_experts, dtype=torch.long, device=chosen_M.device)
    count_E.scatter_add_(0, chosen_M, torch.ones_like(chosen_M))
    whole_E = (count_E + lot - 1) // lot * lot
    gap_E = (whole_E - count_E).cumsum(0) - (whole_E - count_E)  # empty rows before each expert's first
    row_M = torch.arange(len(chosen_M), device=chosen_M.device) + gap_E[expert_M]
    end_E = whole_E.cumsum(0)
    ends = end_E.tolist() if on_host else None
    token_R = chosen_M.new_zeros(ends[-1] if ends else len(chosen_M) + num_experts * lot)
    token_R.index_copy_(0, row_M, pair_M // expert_Nk.shape[1])
    row_Nk = torch.empty_like(chosen_M).index_copy_(0, pair_M, row_M).view(expert_Nk.shape)
    return Groups(token_R, row_Nk, end_E.to(torch.int32), ends)


class _ByExpert(torch.autograd.Function):
    """sum over a token's experts of weight * down(silu(gate x) * up x), on a CPU, each expert on one core.

    Each expert's rows, matrices and gradients are worked on while they are in cache: its matrices are cast where they
    are used and never kept in `dtype`, each gradient is rounded into one small block and copied from there. One
    function instead of a graph, as recording a hundred small products a layer would cost as much as they do.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weight_Nk: Tensor,
        gate_EFD: Tensor,
        up_EFD: Tensor,
        down_EDF: Tensor,
        groups: Groups,
        dtype: torch.dtype,
    ) -> Tensor:
        size, width = gate_EFD.shape[1:]
        num_rows = len(groups.token_R)
        both_RG, y_RD = (arena.empty(x_ND, (num_rows, each), x_ND.dtype) for each in (2 * size, width))
        by_kernel = cpu.serves(both_RG)

        def work(parts: Iterator[tuple[int, slice]]) -> None:
            both_GD, down_DF = x_ND.new_empty(2 * size, width), x_ND.new_empty(width, size)
            for expert, rows in parts:
                if rows.start == rows.stop:
                    continue
                both_GD[:size], both_GD[size:], down_DF[:] = gate_EFD[expert], up_EFD[expert], down_EDF[expert]
                torch.mm(x_ND.index_select(0, groups.token_R[rows]), both_GD.T, out=both_RG[rows])
                gate_RF, up_RF = both_RG[rows].chunk(2, dim=-1)
                inner_RF = cpu.gated(gate_RF, up_RF) if by_kernel else functional.silu(gate_RF).mul_(up_RF)
                torch.mm(inner_RF, down_DF.T, out=y_RD[rows])

        side_by_side(work, groups.parts())
        ctx.save_for_backward(x_ND, weight_Nk, both_RG, gate_EFD, up_EFD, down_EDF)
        ctx.groups = groups
        return _mix(y_RD, groups.row_Nk, weight_Nk)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, weight_Nk, both_RG, gate_EFD, up_EFD, down_EDF = ctx.saved_tensors
        groups: Groups = ctx.groups
        learns, (size, width) = any(ctx.needs_input_grad[2:5]), gate_EFD.shape[1:]  # autograd drops what is frozen
        rise_ND = upstream[0].to(x_ND.dtype)
        weight_R = _by_row(weight_Nk, groups.token_R, groups.row_Nk)
        grad_weight_R, grad_x_RD = torch.empty_like(weight_R), arena.empty(x_ND, (len(weight_R), width), x_ND.dtype)
        grads = [arena.empty_like(matrix) for matrix in (gate_EFD, up_EFD, down_EDF)] if learns else []
        by_kernel = cpu.serves(both_RG, rise_ND, wide=[weight_R])
        slopes = cpu.weighted_gated_slopes if by_kernel else _weighted_gated_slopes

        def work(parts: Iterator[tuple[int, slice]]) -> None:
            both_GD, down_DF = x_ND.new_empty(2 * size, width), x_ND.new_empty(width, size)
            block_GD, block_DF = torch.empty_like(both_GD), torch.empty_like(down_DF)
            for expert, rows in parts:
                if rows.start == rows.stop:
                    for gradient in grads:
                        gradient[expert].zero_()
                    continue
                both_GD[:size], both_GD[size:], down_DF[:] = gate_EFD[expert], up_EFD[expert], down_EDF[expert]
                rise_RD = rise_ND.index_select(0, groups.token_R[rows])
                slope_RF = rise_RD @ down_DF  # gradient of inner, were every weight 1
                given = slope_RF, both_RG[rows], weight_R[rows], grad_weight_R[rows]
                grad_both_RG, inner_RF = slopes(*given)
                torch.mm(grad_both_RG, both_GD, out=grad_x_RD[rows])
                if not learns:
                    continue
                x_RD = x_ND.index_select(0, groups.token_R[rows])
                gate, up, down = (gradient[expert] for gradient in grads)
                if cpu.serves_weights(rise_RD, inner_RF) and cpu.serves(wide=[gate, up, down]):
                    cpu.weight_slopes(grad_both_RG[:, :size], x_RD, gate)
                    cpu.weight_slopes(grad_both_RG[:, size:], x_RD, up)
                    cpu.weight_slopes(rise_RD, inner_RF, down)
                    continue
                torch.mm(rise_RD.T, inner_RF, out=block_DF)
                torch.mm(grad_both_RG.T, x_RD, out=block_GD)
                gate[:], up[:], down[:] = block_GD[:size], block_GD[size:], block_DF

        side_by_side(work, groups.parts())
        grad_x_ND = _mix(grad_x_RD, groups.row_Nk, None).to(upstream[0].dtype)
        return grad_x_ND, grad_weight_R[groups.row_Nk], *(grads or (None, None, None)), None, None


class _Grouped(torch.autograd.Function):
    """The same through grouped products of all experts at once, without waiting for a device to say who got what."""

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
        if gpu.serves(x_ND.device, dtype):
            inner_RF = gpu.gated(both_RG)
        else:
            gate_RF, up_RF = both_RG.chunk(2, dim=-1)
            inner_RF = functional.silu(gate_RF) * up_RF
        y_RD = functional.grouped_mm(inner_RF, down.transpose(1, 2), offs=end_E)
        ctx.save_for_backward(x_RD, weight_Nk, both_RG, both_EGD, down, token_R, row_Nk, end_E)
        return _mix(y_RD, row_Nk, weight_Nk)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        x_RD, weight_Nk, both_RG, both_EGD, down, token_R, row_Nk, end_E = ctx.saved_tensors
        rise_RD = upstream[0].to(x_RD.dtype).index_select(0, token_R)
        weight_R = _by_row(weight_Nk, token_R, row_Nk)
        slope_RF = functional.grouped_mm(rise_RD, down, offs=end_E)  # gradient of inner, were every weight 1
        if gpu.serves(x_RD.device, x_RD.dtype):
            grad_both_RG, inner_RF, grad_weight_R = gpu.gated_slopes(slope_RF, both_RG, weight_R)
        else:
            weight_R1 = weight_R[:, None].to(x_RD.dtype)
            gate_RF, up_RF = both_RG.chunk(2, dim=-1)
            silu_RF = functional.silu(gate_RF)
            inner_RF = silu_RF * up_RF
            grad_weight_R = (slope_RF * inner_RF).sum(dim=-1, dtype=weight_Nk.dtype)
            slope_RF, inner_RF = slope_RF * weight_R1, inner_RF * weight_R1
            grad_gate_RF = torch.ops.aten.silu_backward(slope_RF * up_RF, gate_RF)
            grad_both_RG = torch.cat((grad_gate_RF, slope_RF * silu_RF), dim=-1)
        grads: tuple[Tensor | None, ...] = (None, None, None)
        if any(ctx.needs_input_grad[2:5]):
            grad_both_EGD = functional.grouped_mm(grad_both_RG.T, x_RD, offs=end_E)
            grad_down = functional.grouped_mm(rise_RD.T, inner_RF, offs=end_E)
            grads = (*(part.float() for part in grad_both_EGD.chunk(2, dim=1)), grad_down.float())
        grad_x_ND = _mix(functional.grouped_mm(grad_both_RG, both_EGD, offs=end_E), row_Nk, None)
        return grad_x_ND.to(upstream[0].dtype), grad_weight_R[row_Nk], *grads, None, None, None, None


def check_widths(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Raise UserError where experts' sizes are none that products by group take: on CUDA rows of whole 16 bytes."""
    for mixture in mixtures(model) if device.type == "cuda" else ():
        lot = 16 // dtype.itemsize
        sizes = {"model.expert_size": mixture.gate_proj.shape[1], "model.hidden_size": mixture.gate_proj.shape[2]}
        for where, size in sizes.items():
            if size % lot:
                raise UserError("not on CUDA", where=where, got=size, wanted=f"a multiple of {lot} in {dtype}")


def _weighted_gated_slopes(
    slope_RF: Tensor, both_RG: Tensor, weight_R: Tensor, grad_weight_R: Tensor
) -> tuple[Tensor, Tensor]:
    """As `cpu.weighted_gated_slopes`, by torch's operations; `slope` is used up."""
    (gate_RF, up_RF), weight_R1 = both_RG.chunk(2, dim=-1), weight_R[:, None].to(both_RG.dtype)
    silu_RF = functional.silu(gate_RF)
    inner_RF = silu_RF * up_RF
    grad_weight_R[:] = (slope_RF * inner_RF).sum(dim=-1, dtype=weight_R.dtype)
    grad_both_RG = torch.empty_like(both_RG)
    grad_gate_RF, grad_up_RF = grad_both_RG.chunk(2, dim=-1)
    torch.mul(slope_RF.mul_(weight_R1), silu_RF, out=grad_up_RF)
    grad_gate_RF.copy_(torch.ops.aten.silu_backward(slope_RF.mul_(up_RF), gate_RF))
    return grad_both_RG, inner_RF.mul_(weight_R1)


def _by_row(weight_Nk: Tensor, token_R: Tensor, row_Nk: Tensor) -> Tensor:
    """Each pair's weight on the pair's row; rows of no pair get 0."""
    weight_R = weight_Nk.new_zeros(len(token_R))
    return weight_R.index_copy_(0, row_Nk.flatten(), weight_Nk.flatten())


def _mix(y_RD: Tensor, row_Nk: Tensor, weight_Nk: Tensor | None) -> Tensor:
    """Sum each token's pairs, in the order of its choices: the same sum every time, unlike an atomic add."""
    if gpu.serves(y_RD.device, y_RD.dtype):
        mixed_ND: Tensor = gpu.mixed_rows(y_RD, row_Nk, weight_Nk)
        return mixed_ND
    rounded_Nk = None if weight_Nk is None else weight_Nk.to(y_RD.dtype)
    return functional.embedding_bag(row_Nk, y_RD, mode="sum", per_sample_weights=rounded_Nk)


def every_expert(
    x_ND: Tensor, routed: Routed, gate_EFD: Tensor, up_EFD: Tensor, down_EDF: Tensor, dtype: torch.dtype
) -> Tensor:
    """The plain twin: all E experts on all tokens, those that were not chosen weighing 0."""
    x_1ND = x_ND.to(dtype)[None]
    inner_ENF = functional.silu(x_1ND @ gate_EFD.to(dtype).transpose(1, 2)) * (x_1ND @ up_EFD.to(dtype).transpose(1, 2))
    y_END = inner_ENF @ down_EDF.to(dtype).transpose(1, 2)
    weight_NE = torch.zeros_like(routed.logit_NE).scatter(1, routed.expert_Nk, routed.weight_Nk)
    return (y_END.float() * weight_NE.T[..., None]).sum(dim=0)


class Mixture(nn.Module):
    """x_BTD -> x_BTD, and what the router did.

    load_E counts, over the positions that hold a token, how often each expert was chosen in forward passes that will
    be differentiated, since whoever reads it last set it back to zero (penjing/optim/balance.py).
    """

    compute_dtype: torch.dtype | None = None
    load_E: Tensor
    plain = False  # take the plain twin

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_experts = config.experts
        self.router = Router(config)
        inner, width = config.expert_size, config.hidden_size
        self.gate_proj = nn.Parameter(torch.empty(config.experts, inner, width))
        self.up_proj = nn.Parameter(torch.empty(config.experts, inner, width))
        self.down_proj = nn.Parameter(torch.empty(config.experts, width, inner))
        self.shared = MLP(config, config.shared_expert_size) if config.shared_expert_size else None
        self.shared_gate = Linear(width, 1) if config.architecture == "qwen2_moe" else None
        self.register_buffer("load_E", torch.zeros(config.experts), persistent=False)
        for parameter in (self.router.weight, self.gate_proj, self.up_proj, self.down_proj):
            nn.init.normal_(parameter, std=0.02)

    def forward(self, x_BTD: Tensor, document_BT: Tensor | None = None) -> tuple[Tensor, RouterMeans | None]:
        """document_BT: -1 marks padding, which counts for nothing here. Means are taken only when gradients are."""
        x_ND = x_BTD.flatten(0, 1)
        routed = self.router(x_ND)
        dtype = self.compute_dtype or self.gate_proj.dtype
        matrices = (self.gate_proj, self.up_proj, self.down_proj)
        if self.plain:
            out_ND = every_expert(x_ND, routed, *matrices, dtype)
        else:
            groups = group(routed.expert_Nk, self.num_experts, on_host=x_BTD.device.type != "cuda")
            given = (x_ND.to(dtype), routed.weight_Nk, *matrices)
            if groups.ends is None:
                sorted_by = (groups.token_R, groups.row_Nk, groups.end_E)
                out_ND = _Grouped.apply(*given, *sorted_by, dtype)  # type: ignore[no-untyped-call]
            else:
                out_ND = _ByExpert.apply(*given, groups, dtype)  # type: ignore[no-untyped-call]
        out_BTD = out_ND.view(x_BTD.shape).to(dtype)
        if self.shared is not None:
            shared_BTD = self.shared(x_BTD)
            if self.shared_gate is not None:
                shared_BTD = self.shared_gate(x_BTD).sigmoid() * shared_BTD
            out_BTD = out_BTD + shared_BTD
        if not torch.is_grad_enabled():
            return out_BTD, None
        self._count(routed, document_BT)
        return out_BTD, self.router.means(routed, document_BT, x_BTD.shape[0])

    @torch.no_grad()
    def _count(self, routed: Routed, document_BT: Tensor | None) -> None:
        chosen_Nk = torch.ones_like(routed.expert_Nk, dtype=torch.float32)
        if document_BT is not None:
            chosen_Nk *= (document_BT.flatten() >= 0)[:, None]
        self.load_E.scatter_add_(0, routed.expert_Nk.flatten(), chosen_Nk.flatten())


def mixtures(model: nn.Module) -> list[Mixture]:
    """The mixture layers of a model, first to last."""
    return [module for module in model.modules() if isinstance(module, Mixture)]
