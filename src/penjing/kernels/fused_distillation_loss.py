"""A student's output head with its teacher's: divergence, cross-entropy and their gradients, in blocks of positions.

Neither model's logits exist for all positions at once: with 32 rows of 512 positions and 6,400 ids they would be
420 MB each in float32, and as much again for every distribution made of them.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Divergence = Literal["forward", "reverse", "mixed", "jsd"]

# A block holds about six arrays of this many float32 values. On a CPU 128 x 2,048 of them stay in cache: a pass took
# 86 ms, and 125 ms with four times as many. On a GPU a block must keep the device busy (400 MB in all).
CHUNK_LOGITS = 1 << 18
CHUNK_LOGITS_GPU = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class DivergenceConfig:
    """The divergence between the teacher's prediction p and the student's q, both at `temperature`.

    forward: KL(p || q). reverse: KL(q || p). mixed: (1 - mixture) forward + mixture reverse.
    jsd: mixture KL(p || m) + (1 - mixture) KL(q || m), with m = mixture p + (1 - mixture) q (arXiv:2306.13649, equation
    1); as the mixture goes to 0 or 1 its gradient becomes that of forward or reverse, times a factor that vanishes.
    ce_weight: weight of the cross-entropy with the data; the divergence has weight 1 - ce_weight.
    """

    divergence: Divergence = "forward"
    mixture: float = 0.5
    temperature: float = 1.0
    ce_weight: float = 0.0


class LiveTeacher(NamedTuple):
    """The teacher's last hidden states, [N, its width], and head, [its ids, its width]; matmuls in `dtype`."""

    hidden_ND: Tensor
    weight_VD: Tensor
    dtype: torch.dtype

    @property
    def num_ids(self) -> int:
        return self.weight_VD.shape[0]


class StoredTeacher(NamedTuple):
    """The teacher's top k ids in order, [N, k], and the log-probabilities of each and of all other ids together,
    [N, k + 1], at the configured temperature. num_ids: the size of the vocabulary they are the top k of."""

    id_NK: Tensor
    logp_NJ: Tensor
    num_ids: int


Teacher = LiveTeacher | StoredTeacher


class DistillationSums(NamedTuple):
    """Weighted sums over positions, each a scalar.

    total: the loss; the only one with a gradient. nats: cross-entropy with the data. kl: KL(p || q), also if another
    divergence is minimised. divergence: the minimised one. agreement: positions where both models' top ids are equal.
    """

    total: Tensor
    nats: Tensor
    kl: Tensor
    divergence: Tensor
    agreement: Tensor


def _chunk_rows(hidden_ND: Tensor, vocabulary: int) -> int:
    return max(1, (CHUNK_LOGITS if hidden_ND.device.type == "cpu" else CHUNK_LOGITS_GPU) // vocabulary)


class Distribution(NamedTuple):
    """A distribution over J outcomes: log-probabilities and probabilities, [C, J]."""

    log_CJ: Tensor
    prob_CJ: Tensor


def softmax(logits_CJ: Tensor) -> Distribution:
    """Softmax and log-softmax with one exp."""
    log_CJ = logits_CJ - logits_CJ.amax(dim=-1, keepdim=True)
    prob_CJ = log_CJ.exp()
    sum_C1 = prob_CJ.sum(dim=-1, keepdim=True)
    return Distribution(log_CJ.sub_(sum_C1.log()), prob_CJ.div_(sum_C1))


def compare(p: Distribution, q: Distribution, measure: DivergenceConfig) -> tuple[Tensor, Tensor, Tensor]:
    """divergence_C, KL(p || q)_C and h_CJ = q dD/dq up to a multiple of q, to which a softmax's gradient is invariant.
    The gradient for logits z with q = softmax(z) is h - q sum(h)."""
    gap_CJ = p.log_CJ - q.log_CJ
    kl_C = (p.prob_CJ * gap_CJ).sum(dim=-1)
    if measure.divergence == "forward":
        return kl_C, kl_C, -p.prob_CJ
    beta = measure.mixture
    if measure.divergence == "jsd":
        # If both probabilities round to 0, so does their mixture; its logarithm must stay finite.
        m_CJ = torch.lerp(q.prob_CJ, p.prob_CJ, beta).clamp_(min=torch.finfo(torch.float32).tiny)
        logm_CJ = m_CJ.log_()
        kl_pm_C = (p.prob_CJ * (p.log_CJ - logm_CJ)).sum(dim=-1)
        h_CJ = (q.log_CJ - logm_CJ).mul_(q.prob_CJ)
        return beta * kl_pm_C + (1 - beta) * h_CJ.sum(dim=-1), kl_C, h_CJ.mul_(1 - beta)
    h_CJ = gap_CJ.neg_().mul_(q.prob_CJ)
    reverse_C = h_CJ.sum(dim=-1)
    if measure.divergence == "reverse":
        return reverse_C, kl_C, h_CJ
    return (1 - beta) * kl_C + beta * reverse_C, kl_C, h_CJ.mul_(beta).sub_(p.prob_CJ, alpha=1 - beta)


def _compare_live(teacher: LiveTeacher, part: slice, q: Distribution, measure: DivergenceConfig) -> tuple[Tensor, ...]:
    """divergence_C, kl_C, the teacher's top id_C, and the gradient for the student's logits / temperature."""
    num_ids = q.log_CJ.shape[1]
    hidden_CD, matrix_VD = teacher.hidden_ND[part].to(teacher.dtype), teacher.weight_VD[:num_ids].to(teacher.dtype)
    logits_CV = (hidden_CD @ matrix_VD.T).float()
    p = softmax(logits_CV / measure.temperature if measure.temperature != 1 else logits_CV)
    divergence_C, kl_C, h_CV = compare(p, q, measure)
    grad_CV = h_CV.addcmul_(q.prob_CJ, h_CV.sum(dim=-1, keepdim=True), value=-1)
    return divergence_C, kl_C, logits_CV.argmax(dim=-1), grad_CV


def _compare_stored(
    teacher: StoredTeacher, part: slice, q: Distribution, measure: DivergenceConfig
) -> tuple[Tensor, ...]:
    """As `_compare_live`, over k + 1 outcomes: each of the k ids, and "another one".

    Of the other ids only their total probability is compared. So the divergence is a lower bound of the full one (data
    processing inequality), and the student keeps its own ranking of them.
    """
    id_CK = teacher.id_NK[part].long()
    logq_C1 = q.log_CJ.scatter(1, id_CK, -torch.inf).logsumexp(dim=-1, keepdim=True)
    logq_CJ = torch.cat((q.log_CJ.gather(1, id_CK), logq_C1), dim=-1)
    p = softmax(teacher.logp_NJ[part].float())  # rounded when stored: normalised again
    divergence_C, kl_C, h_CJ = compare(p, Distribution(logq_CJ, logq_CJ.exp()), measure)
    # dD/dz_i = h_i - q_i sum(h), and the others divide their h in proportion to their probabilities.
    sum_C1 = h_CJ.sum(dim=-1, keepdim=True)
    grad_CV = (q.log_CJ - logq_C1).exp_().mul_(h_CJ[:, -1:]).addcmul_(q.prob_CJ, sum_C1, value=-1)
    top_CK = h_CJ[:, :-1] - logq_CJ[:, :-1].exp() * sum_C1
    return divergence_C, kl_C, id_CK[:, 0], grad_CV.scatter_(1, id_CK, top_CK)


class _FusedDistillationLoss(torch.autograd.Function):
    """The sums; gradients are taken in the forward pass, per block."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        target_N: Tensor,
        weight_N: Tensor,
        ce_weight_N: Tensor,
        dtype: torch.dtype,
        teacher: Teacher,
        measure: DivergenceConfig,
    ) -> Tensor:
        needs_hidden, needs_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        matrix_VD = weight_VD.to(dtype)
        vocabulary, temperature = weight_VD.shape[0], measure.temperature
        num_ids = min(vocabulary, teacher.num_ids)
        scale, share = (1 - measure.ce_weight) * temperature**2, measure.ce_weight
        sums_5 = torch.zeros(len(DistillationSums._fields), dtype=torch.float32, device=hidden_ND.device)
        grad_hidden_ND = torch.empty_like(hidden_ND) if needs_hidden else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if needs_weight else None
        size = _chunk_rows(hidden_ND, vocabulary)
        for start in range(0, hidden_ND.shape[0], size):
            part = slice(start, start + size)
            hidden_CD, target_C1 = hidden_ND[part].to(dtype), target_N[part, None]
            weight_C, ce_weight_C = weight_N[part].float(), ce_weight_N[part].float()
            logits_CV = (hidden_CD @ matrix_VD.T).float()
            full = softmax(logits_CV)
            nats_C = -full.log_CJ.gather(1, target_C1)[:, 0]
            is_same = temperature == 1 and num_ids == vocabulary
            q = full if is_same else softmax(logits_CV[:, :num_ids] / temperature)
            compare_fn = _compare_live if isinstance(teacher, LiveTeacher) else _compare_stored
            divergence_C, kl_C, top_id_C, grad_CV = compare_fn(teacher, part, q, measure)  # type: ignore[arg-type]
            agreement_C = (logits_CV[:, :num_ids].argmax(dim=-1) == top_id_C).float()
            nats, divergence = (nats_C * ce_weight_C).sum(), (divergence_C * weight_C).sum()
            total = scale * divergence + share * nats
            sums = (total, nats, (kl_C * weight_C).sum(), divergence, (agreement_C * weight_C).sum())
            sums_5 = sums_5 + torch.stack(sums)  # in place, torch 2.11 would compile a loss without gradients
            if grad_hidden_ND is None and grad_weight_VD is None:
                continue
            grad_CV.mul_(weight_C[:, None] * (scale / temperature))
            if share:  # d nats / d logits = softmax - one_hot, over all of the student's ids
                wide_CV = full.prob_CJ.mul_(ce_weight_C[:, None] * share)
                wide_CV.scatter_add_(1, target_C1, -share * ce_weight_C[:, None])
                wide_CV[:, :num_ids] += grad_CV
                grad_CV = wide_CV
            rounded_CV, width = grad_CV.to(dtype), grad_CV.shape[1]
            if grad_hidden_ND is not None:
                grad_hidden_ND[part] = (rounded_CV @ matrix_VD[:width]).to(grad_hidden_ND.dtype)
            if grad_weight_VD is not None:
                grad_weight_VD[:width] += (rounded_CV.T @ hidden_CD).float()
        ctx.save_for_backward(*(grad for grad in (grad_hidden_ND, grad_weight_VD) if grad is not None))
        return sums_5

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        saved, factor = list(ctx.saved_tensors), upstream[0][0]
        grad_hidden_ND = saved.pop(0) * factor if ctx.needs_input_grad[0] else None
        grad_weight_VD = saved.pop(0) * factor if ctx.needs_input_grad[1] else None
        return grad_hidden_ND, grad_weight_VD, None, None, None, None, None, None


def fused_distillation_loss(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    dtype: torch.dtype,
    target_N: Tensor,
    weight_N: Tensor,
    ce_weight_N: Tensor,
    teacher: Teacher,
    measure: DivergenceConfig,
) -> Tensor:
    """The `DistillationSums` of a student's predictions against its teacher's, as one float32 tensor, [5].

    total = sum_n w_n (1 - ce_weight) T^2 D_n + v_n ce_weight nats_n; T^2 keeps the gradient's size when the
    temperature T divides both models' logits (arXiv:1503.02531, section 2.1).
    hidden_ND, weight_VD: the student's last hidden states and head; target_N: the data's ids; weight_N, ce_weight_N:
    each position's weight w_n in the divergence and v_n in the cross-entropy (no gradient).
    If the vocabularies differ in size (padding rows at the end), both predictions are over the ids that both have; the
    cross-entropy is over all of the student's. Matmuls in `dtype`, all else in float32.
    """
    if not torch.is_grad_enabled():
        # An autograd Function sees `requires_grad` even under no_grad, and would compute gradients that nobody uses.
        hidden_ND, weight_VD = hidden_ND.detach(), weight_VD.detach()
    return _FusedDistillationLoss.apply(  # type: ignore[no-any-return,no-untyped-call]
        hidden_ND, weight_VD, target_N, weight_N, ce_weight_N, dtype, teacher, measure
    )


@torch.no_grad()
def top_k_log_probs(
    hidden_ND: Tensor, weight_VD: Tensor, dtype: torch.dtype, *, count: int, num_ids: int, temperature: float
) -> tuple[Tensor, Tensor]:
    """A teacher's predictions over its first `num_ids` ids for `StoredTeacher`: id_NK, and logp_NJ in float32."""
    assert count < num_ids
    matrix_VD, rows = weight_VD[:num_ids].to(dtype), hidden_ND.shape[0]
    id_NK = torch.empty(rows, count, dtype=torch.long, device=hidden_ND.device)
    logp_NJ = torch.empty(rows, count + 1, dtype=torch.float32, device=hidden_ND.device)
    size = _chunk_rows(hidden_ND, num_ids)
    for start in range(0, rows, size):
        part = slice(start, start + size)
        logits_CV = (hidden_ND[part].to(dtype) @ matrix_VD.T).float().div_(temperature)
        top_CK, id_NK[part] = logits_CV.topk(count, dim=-1)
        norm_C1 = logits_CV.logsumexp(dim=-1, keepdim=True)
        others_C1 = logits_CV.scatter_(1, id_NK[part], -torch.inf).logsumexp(dim=-1, keepdim=True)
        logp_NJ[part] = torch.cat((top_CK, others_C1), dim=-1) - norm_C1
    return id_NK, logp_NJ
