"""The feed-forward half of a block as a mixture of experts: each token goes through k of E small SwiGLUs, chosen by a
router, and through the shared expert where there is one.

`Experts` sorts the (token, expert) pairs by expert and takes one grouped product per matrix over the sorted rows.
`every_expert` is its plain twin: all experts on all tokens. Tests compare the two; exporters that need a graph without
data-dependent sizes use the twin.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

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
    """(token, expert) pairs sorted by expert, M = N k of them, on the rows of a block that may have gaps.

    row_M: the block row of each pair; token_M: its token; row_Nk: the same rows, by token; end_E: where each expert's
    rows end; num_rows: rows of the block; ends: the same as end_E on the host, where the host need not wait for it.
    """

    row_M: Tensor
    token_M: Tensor
    row_Nk: Tensor
    end_E: Tensor
    num_rows: int
    ends: list[int] | None

    @property
    def has_gaps(self) -> bool:
        return self.ends is None


def group(expert_Nk: Tensor, num_experts: int, *, grouped: bool) -> Groups:
    """Sort by expert. grouped: lay the rows out for a grouped product on a device, without waiting for it."""
    chosen_M = expert_Nk.flatten()
    expert_M, pair_M = chosen_M.sort(stable=True)
    count_E = torch.zeros(num_experts, dtype=torch.long, device=chosen_M.device)
    count_E.scatter_add_(0, chosen_M, torch.ones_like(chosen_M))
    row_M = torch.arange(len(chosen_M), device=chosen_M.device)
    end_E, num_rows, ends = count_E, len(chosen_M), None
    if grouped:
        padded_E = (count_E + GROUP_ROWS - 1) // GROUP_ROWS * GROUP_ROWS
        gap_E = (padded_E - count_E).cumsum(0) - (padded_E - count_E)  # empty rows before each expert's first
        row_M, num_rows = row_M + gap_E[expert_M], num_rows + num_experts * GROUP_ROWS
        end_E = padded_E.cumsum(0).to(torch.int32)
    else:
        ends = count_E.cumsum(0).tolist()
    row_Nk = torch.empty_like(chosen_M).index_copy_(0, pair_M, row_M).view(expert_Nk.shape)
    return Groups(row_M, pair_M // expert_Nk.shape[1], row_Nk, end_E, num_rows, ends)


def _rows_times(x_MK: Tensor, matrix_EKN: Tensor, groups: Groups) -> Tensor:
    """Each expert's rows times its own matrix, [M, N]."""
    if groups.ends is None:
        return functional.grouped_mm(x_MK, matrix_EKN, offs=groups.end_E)
    out_MN = x_MK.new_empty(x_MK.shape[0], matrix_EKN.shape[2])
    start = 0
    for expert, end in enumerate(groups.ends):
        if end > start:
            torch.mm(x_MK[start:end], matrix_EKN[expert], out=out_MN[start:end])
        start = end
    return out_MN


def _outer(left_MN: Tensor, right_MK: Tensor, groups: Groups) -> Tensor:
    """Sum of outer products over each expert's rows, [E, N, K]: the gradient of its matrix."""
    if groups.ends is None:
        return functional.grouped_mm(left_MN.T, right_MK, offs=groups.end_E)
    out_ENK = left_MN.new_zeros(len(groups.ends), left_MN.shape[1], right_MK.shape[1])
    start = 0
    for expert, end in enumerate(groups.ends):
        if end > start:
            torch.mm(left_MN[start:end].T, right_MK[start:end], out=out_ENK[expert])
        start = end
    return out_ENK


class _GroupedSwiGLU(torch.autograd.Function):
    """sum over a token's experts of weight * down(silu(gate x) * up x), for all tokens at once.

    One function instead of a graph of small ones: with many experts the overhead of a hundred recorded products a layer
    is a good part of the step on a CPU, and little has to be kept for the gradient. Gate and up are one product.
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
        size = gate_EFD.shape[1]
        both_EGD = gate_EFD.new_empty(gate_EFD.shape[0], 2 * size, gate_EFD.shape[2], dtype=dtype)
        both_EGD[:, :size].copy_(gate_EFD)
        both_EGD[:, size:].copy_(up_EFD)
        down = down_EDF.to(dtype)
        x_MD = _place(x_ND.to(dtype)[groups.token_M], groups)
        both_MG = _rows_times(x_MD, both_EGD.transpose(1, 2), groups)
        gate_MF, up_MF = both_MG.chunk(2, dim=-1)
        y_MD = _rows_times(functional.silu(gate_MF) * up_MF, down.transpose(1, 2), groups)
        ctx.save_for_backward(x_MD, weight_Nk, both_MG, both_EGD, down)
        ctx.groups = groups
        return _mix(y_MD, groups, weight_Nk.to(dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        x_MD, weight_Nk, both_MG, both_EGD, down = ctx.saved_tensors
        groups: Groups = ctx.groups
        learns, dtype = ctx.needs_input_grad[2], x_MD.dtype
        rise_MD = _place(upstream[0].to(dtype)[groups.token_M], groups)
        weight_M1 = weight_Nk.new_zeros(groups.num_rows).index_copy_(0, groups.row_Nk.flatten(), weight_Nk.flatten())
        weight_M1 = weight_M1.to(dtype)[:, None]
        gate_MF, up_MF = both_MG.chunk(2, dim=-1)
        silu_MF = functional.silu(gate_MF)
        inner_MF = silu_MF * up_MF
        slope_MF = _rows_times(rise_MD, down, groups)  # gradient of inner, were every weight 1
        grad_weight_Nk = (slope_MF * inner_MF).sum(dim=-1, dtype=weight_Nk.dtype)[groups.row_Nk]
        grad_down = _outer(rise_MD * weight_M1, inner_MF, groups) if learns else None
        slope_MF *= weight_M1
        grad_both_MG = torch.empty_like(both_MG)
        grad_gate_MF, grad_up_MF = grad_both_MG.chunk(2, dim=-1)
        torch.mul(slope_MF, silu_MF, out=grad_up_MF)
        slope_MF *= up_MF
        grad_gate_MF.copy_(torch.ops.aten.silu_backward(slope_MF, gate_MF))
        grads: tuple[Tensor | None, ...] = (None, None, None)
        if grad_down is not None:
            grad_gate, grad_up = _outer(grad_both_MG, x_MD, groups).chunk(2, dim=1)
            grads = (grad_gate.float(), grad_up.float(), grad_down.float())
        grad_x_MD = _rows_times(grad_both_MG, both_EGD, groups)
        return _mix(grad_x_MD, groups, None).to(upstream[0].dtype), grad_weight_Nk, *grads, None, None


def _place(x_MD: Tensor, groups: Groups) -> Tensor:
    """Sorted pairs on their rows; rows of no pair are zero."""
    if not groups.has_gaps:
        return x_MD
    return x_MD.new_zeros(groups.num_rows, x_MD.shape[1]).index_copy_(0, groups.row_M, x_MD)


def _mix(y_MD: Tensor, groups: Groups, weight_Nk: Tensor | None) -> Tensor:
    """Sum each token's pairs, in the order of its choices: the same sum every time, unlike an atomic add."""
    y_NkD = y_MD[groups.row_Nk]
    if weight_Nk is not None:
        y_NkD *= weight_Nk[..., None]
    return y_NkD[:, 0] if y_NkD.shape[1] == 1 else y_NkD.sum(dim=1)


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
            groups = group(routed.expert_Nk, self.num_experts, grouped=x_BTD.device.type == "cuda")
            out_ND = _GroupedSwiGLU.apply(  # type: ignore[no-untyped-call]
                x_ND.to(dtype), routed.weight_Nk, *matrices, groups, dtype
            )
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
