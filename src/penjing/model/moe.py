"""The feed-forward half of a block as a mixture of experts (arXiv:1701.06538; arXiv:2101.03961): each token goes
through k of E small SwiGLU experts, selected by a router, and through the shared expert where there is one
(arXiv:2401.06066)."""

from typing import NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from penjing.kernels import ops, reference
from penjing.model.config import ModelConfig
from penjing.model.linear import Linear
from penjing.model.mlp import MLP


class RouterOutput(NamedTuple):
    """A router decision. expert_Nk: selected experts; weight_Nk: their weights, float32; logit_NE: router logits."""

    expert_Nk: Tensor
    weight_Nk: Tensor
    logit_NE: Tensor


class RouterStats(NamedTuple):
    """Load balance statistics, as means over the positions that hold a token; of several layers, the layers' mean.

    batch: E / k sum_e f_e p_e, with f the fraction of choices and p the mean probability over all rows of this
    forward pass (arXiv:2101.03961, equations 4-6); 1 when perfectly balanced. sequence_B: the same within each row
    (arXiv:2412.19437, section 2.1.2), which does not depend on how a step is divided into micro-batches.
    z_B: logsumexp(logits)^2 (arXiv:2202.08906, equation 5), by row.
    """

    batch: Tensor
    sequence_B: Tensor
    z_B: Tensor


def mean_of_layers(layers: list[RouterStats]) -> RouterStats:
    return RouterStats(*(torch.stack(values).mean(dim=0) for values in zip(*layers, strict=True)))


class Router(nn.Module):
    """x W^T in float32, then the top-k experts and their weights.

    Softmax over all experts, or, in glm4_moe, a sigmoid each. There `correction` is added for the selection only; it is
    not trained but updated to balance the load (arXiv:2408.15664).
    """

    correction: Tensor | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.sigmoid = config.architecture == "glm4_moe"
        self.register_buffer("correction", torch.zeros(config.num_experts) if self.sigmoid else None)
        self.top_k = config.num_experts_per_tok
        self.norm_topk_prob = config.norm_topk_prob
        self.scaling = config.routed_scaling_factor

    def forward(self, x_ND: Tensor) -> RouterOutput:
        logit_NE = functional.linear(x_ND.float(), self.weight.float())
        prob_NE = logit_NE.sigmoid() if self.sigmoid else logit_NE.softmax(dim=-1)
        if self.correction is None:
            weight_Nk, expert_Nk = prob_NE.topk(self.top_k, dim=-1)
        else:
            expert_Nk = (prob_NE.detach() + self.correction).topk(self.top_k, dim=-1).indices
            weight_Nk = prob_NE.gather(1, expert_Nk)
        if self.norm_topk_prob:
            weight_Nk = weight_Nk / (weight_Nk.sum(dim=-1, keepdim=True) + 1e-20)
        return RouterOutput(expert_Nk, weight_Nk * self.scaling, logit_NE)

    def stats(self, routed: RouterOutput, document_BT: Tensor | None, rows: int) -> RouterStats:
        """The statistics for the balance and z losses; positions of document -1 (padding) are ignored."""
        logit_BTE = routed.logit_NE.view(rows, -1, routed.logit_NE.shape[-1])
        real_BT1 = torch.ones_like(logit_BTE[..., :1]) if document_BT is None else (document_BT >= 0)[..., None].float()
        prob_BTE = logit_BTE.sigmoid() if self.sigmoid else logit_BTE.softmax(dim=-1)
        if self.sigmoid:
            prob_BTE = prob_BTE / (prob_BTE.sum(dim=-1, keepdim=True) + 1e-20)
        chosen_BTE = torch.zeros_like(logit_BTE).scatter_(-1, routed.expert_Nk.view(rows, -1, self.top_k), 1.0)
        num_B1 = real_BT1.sum(dim=1)
        choices_BE = (chosen_BTE * real_BT1).sum(dim=1)
        prob_BE = (prob_BTE * real_BT1).sum(dim=1)
        scale = logit_BTE.shape[-1] / self.top_k
        z_B1 = (logit_BTE.logsumexp(dim=-1, keepdim=True).square() * real_BT1).sum(dim=1)
        return RouterStats(
            scale * (choices_BE.sum(0) * prob_BE.sum(0)).sum() / num_B1.sum().clamp(min=1).square(),
            scale * (choices_BE * prob_BE).sum(-1) / num_B1[:, 0].clamp(min=1).square(),
            (z_B1 / num_B1.clamp(min=1))[:, 0],
        )


class MoELayer(nn.Module):
    """x_BTD -> x_BTD, and the router's statistics. load_E counts how many tokens selected each expert, in forward
    passes with gradients, since the last reader reset it to zero (optim/router_bias_update.py)."""

    compute_dtype: torch.dtype | None = None
    load_E: Tensor
    run_all_experts = False  # on all tokens, for exporters: no shape depends on the data

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_experts = config.num_experts
        self.router = Router(config)
        inner, width = config.moe_intermediate_size, config.hidden_size
        self.gate_proj = nn.Parameter(torch.empty(config.num_experts, inner, width))
        self.up_proj = nn.Parameter(torch.empty(config.num_experts, inner, width))
        self.down_proj = nn.Parameter(torch.empty(config.num_experts, width, inner))
        self.shared = (
            MLP(config, config.shared_expert_intermediate_size) if config.shared_expert_intermediate_size else None
        )
        self.shared_gate = Linear(width, 1) if config.architecture == "qwen2_moe" else None
        self.register_buffer("load_E", torch.zeros(config.num_experts), persistent=False)
        for parameter in (self.router.weight, self.gate_proj, self.up_proj, self.down_proj):
            nn.init.normal_(parameter, std=0.02)

    def forward(self, x_BTD: Tensor, document_BT: Tensor | None = None) -> tuple[Tensor, RouterStats | None]:
        """document_BT: -1 marks padding, which is not counted. Statistics are made only with gradients."""
        x_ND = x_BTD.flatten(0, 1)
        routed = self.router(x_ND)
        dtype = self.compute_dtype or self.gate_proj.dtype
        matrices = (self.gate_proj, self.up_proj, self.down_proj)
        if self.run_all_experts:
            out_ND = reference.experts(x_ND, routed.expert_Nk, routed.weight_Nk, routed.logit_NE, matrices, dtype)
        else:
            out_ND = ops.experts(x_ND, routed.expert_Nk, routed.weight_Nk, matrices, dtype)
        out_BTD = out_ND.view(x_BTD.shape).to(dtype)
        if self.shared is not None:
            shared_BTD = self.shared(x_BTD)
            if self.shared_gate is not None:
                shared_BTD = self.shared_gate(x_BTD).sigmoid() * shared_BTD
            out_BTD = out_BTD + shared_BTD
        if not torch.is_grad_enabled():
            return out_BTD, None
        self._count_load(routed, document_BT)
        return out_BTD, self.router.stats(routed, document_BT, x_BTD.shape[0])

    @torch.no_grad()
    def _count_load(self, routed: RouterOutput, document_BT: Tensor | None) -> None:
        chosen_Nk = torch.ones_like(routed.expert_Nk, dtype=torch.float32)
        if document_BT is not None:
            chosen_Nk *= (document_BT.flatten() >= 0)[:, None]
        self.load_E.scatter_add_(0, routed.expert_Nk.flatten(), chosen_Nk.flatten())


def moe_layers(model: nn.Module) -> list[MoELayer]:
    """The MoE layers of a model, in order."""
    return [module for module in model.modules() if isinstance(module, MoELayer)]
