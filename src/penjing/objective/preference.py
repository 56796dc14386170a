"""Preference tuning: make chosen answers likelier than rejected ones, and stay near the reference model.

Notation: c and r are the log-probabilities of a pair's chosen and rejected answer, c0 and r0 the reference's, and
h = beta ((c - c0) - (r - r0)); sigma is the logistic function. An answer's log-probability is a sum over its tokens,
for some losses the mean.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as functional
from annotated_types import Ge, Lt
from torch import Tensor

from penjing.base.config import NonNegativeFloat, NonNegativeInt, PositiveInt
from penjing.base.errors import UserError
from penjing.loader.shared_prompt_batch import AnswerBatch
from penjing.objective.base import Loss, ObjectiveSettings, UnitLengths, reject_unused
from penjing.objective.router import RouterSettings
from penjing.objective.run_model import run_model

Kind = Literal["dpo", "cdpo", "robust", "ipo", "hinge", "simpo", "orpo", "kto"]
WITHOUT_REFERENCE = ("simpo", "orpo")
PER_TOKEN = ("ipo", "simpo", "orpo")  # losses of means over tokens, as published or in the authors' code
DEFAULT_BETA = {"simpo": 2.0}
REFERENCE = "reference"  # key in a batch's values: the reference's log-probability of each answer token
# Rewards or log-probabilities that differ by less are tied: computed in batches of another size, the rewards of equal
# weights differed by up to 2e-7 (float32, answers of some tens of tokens).
TIE = 1e-6
DESIRABLE, MISMATCHED = "desirable", "mismatched"  # keys in a batch's figures


@dataclass(frozen=True, kw_only=True)
class Preference(ObjectiveSettings):
    """Learn from preference data: pairs (all losses), or single answers labelled good or bad (kto)."""

    name: Literal["preference"] = "preference"
    best_metric: ClassVar = ""  # the loss rises with the margins, also while more pairs are ranked rightly
    varying_shapes: ClassVar = True
    adapter_rate_factor: ClassVar[float] = 2
    # A rejected answer's weight in kto hardly falls while it becomes less likely; a pair's falls as its margin grows.
    # At the rate of the pairs its squared log-ratio was three times that of this rate (docs/methods/dpo.md).
    loss_rate_factors: ClassVar[Mapping[str, float]] = {"kto": 0.4}
    # dpo: the original. cdpo, robust: some labels are flipped. ipo: a target margin. hinge: no gradient beyond the
    # margin. simpo, orpo: no reference. kto: needs no pairs.
    loss: Kind = "dpo"
    # strength of the pull towards the reference; 0 = 0.1, for simpo 2.0
    beta: NonNegativeFloat = 0.0
    # assumed fraction of flipped pairs; cdpo and robust only, below 0.5
    label_smoothing: Annotated[float, Ge(0), Lt(0.5)] = 0.0
    simpo_gamma: float = 0.5  # simpo: target margin between the rewards (gamma)
    # An answer's log-probability as the sum over its tokens or their mean; auto: mean for ipo, simpo and orpo. `mean`
    # with dpo is length-normalised DPO, which needs a beta about ten times larger.
    length: Literal["auto", "sum", "mean"] = "auto"
    # weight of the chosen answer's nats per token, which keeps it likely; orpo includes it with weight 1
    nll_weight: NonNegativeFloat = 0.0
    desirable_weight: NonNegativeFloat = 1.0  # kto: of an answer labelled good
    # kto: of an answer labelled bad; weights inverse to the labels' counts balance them
    undesirable_weight: NonNegativeFloat = 1.0
    # kto: groups that share one estimate of the divergence. Fixed, so that the result does not depend on micro-batches.
    kl_groups: PositiveInt = 8
    # Source of c0 and r0. copy: a frozen copy computes them in every step. adapter_off: the base without its adapter
    # does. precomputed: computed once before step 1 and stored in the run's folder. auto: precomputed if every pair is
    # used at least once, else adapter_off or copy.
    reference: Literal["auto", "copy", "adapter_off", "precomputed"] = "auto"
    # Most held-out questions that the model answers in an evaluation, to measure its divergence from its start weights
    # on its own answers (train/stages/preference.py); 0 = none.
    own_answers: NonNegativeInt = 128
    own_answer_tokens: PositiveInt = 64  # longest of these answers

    def __post_init__(self) -> None:
        super().__post_init__()
        noisy = self.loss in ("cdpo", "robust")
        if noisy and not self.label_smoothing:
            raise self._error("label_smoothing", "more than 0, less than 0.5")
        reject_unused(self, ("label_smoothing",), noisy, "objective.loss=cdpo or robust")
        reject_unused(self, ("simpo_gamma",), self.loss == "simpo", "objective.loss=simpo")
        of_kto = ("desirable_weight", "undesirable_weight", "kl_groups")
        reject_unused(self, of_kto, self.loss == "kto", "objective.loss=kto")
        if self.loss == "kto" and (self.nll_weight or self.length == "mean"):
            raise self._error("nll_weight" if self.nll_weight else "length", "it left out", "kto does not use it.")
        if self.loss == "orpo" and self.length == "sum":
            raise self._error("length", "mean", "The odds of a full answer underflow to zero.")
        reject_unused(self, ("reference",), self.needs_reference, "an objective.loss other than simpo and orpo")

    def _error(self, name: str, wanted: str, next_step: str | None = None) -> UserError:
        return self.error(name, f"not with objective.loss={self.loss}", wanted=wanted, next_step=next_step)

    @property
    def indivisible_units(self) -> int:
        return self.kl_groups if self.loss == "kto" else 1

    @property
    def needs_reference(self) -> bool:
        return self.loss not in WITHOUT_REFERENCE

    @property
    def compares_passes(self) -> bool:
        return self.needs_reference

    @property
    def needs_start_weights(self) -> bool:
        return self.needs_reference

    def unit_lengths(self, seq_len: int, *, tokens: float = 0.0, every_unit: bool = True) -> UnitLengths:
        once = self.reference == "precomputed" or (self.reference == "auto" and every_unit)
        note = "" if tokens else "every pair is assumed to fill its row"
        lengths = super().unit_lengths(seq_len, tokens=tokens)
        each, before = float(self.needs_reference and not once), float(self.needs_reference and once)
        return replace(lengths, extra_forwards=each, forwards_before=before, note=note)

    @property
    def resolved_beta(self) -> float:
        """beta, with 0 resolved."""
        return self.beta or DEFAULT_BETA.get(self.loss, 0.1)

    @property
    def per_token(self) -> bool:
        """Whether an answer's log-probability is the mean over its tokens."""
        return self.length == "mean" or (self.length == "auto" and self.loss in PER_TOKEN)


def pair_losses(
    settings: Preference, logp_P2: Tensor, log_ratio_P2: Tensor, length_P2: Tensor
) -> tuple[Tensor, Tensor]:
    """loss_P of each pair, and the implicit rewards of its two answers, reward_P2 (detached).

    logp_P2: summed log-probabilities of (chosen, rejected); log_ratio_P2: those minus the reference's; losses without a
    reference ignore it.
    length_P2: tokens of each answer.

    - dpo, arXiv:2305.18290 eq. 7: -log sigma(h)
    - cdpo, the note beside it: -(1 - e) log sigma(h) - e log sigma(-h), with e the fraction of flipped pairs
    - robust, arXiv:2403.00409 eq. 10: (-(1 - e) log sigma(h) + e log sigma(-h)) / (1 - 2 e), unbiased under flips
    - ipo, arXiv:2310.12036 eq. 17: (h / beta - 1 / (2 beta))^2
    - hinge, arXiv:2305.10425: max(0, 1 - h)
    - simpo, arXiv:2405.14734 eq. 6: -log sigma(beta (c - r) - gamma), c and r means over tokens
    - orpo, arXiv:2403.07691 eq. 6 and 7: -c - beta log sigma(log odds(c) - log odds(r)), odds(c) = e^c / (1 - e^c)
    """
    beta, smoothing = settings.resolved_beta, settings.label_smoothing
    mean_P2 = logp_P2 / length_P2
    ratio_P2 = log_ratio_P2 if settings.needs_reference else logp_P2
    if settings.per_token:
        ratio_P2 = ratio_P2 / length_P2
    gap_P = ratio_P2[:, 0] - ratio_P2[:, 1]
    h_P = beta * gap_P
    match settings.loss:
        case "dpo":
            loss_P = -functional.logsigmoid(h_P)
        case "cdpo":
            loss_P = -(1 - smoothing) * functional.logsigmoid(h_P) - smoothing * functional.logsigmoid(-h_P)
        case "robust":
            loss_P = -(1 - smoothing) * functional.logsigmoid(h_P) + smoothing * functional.logsigmoid(-h_P)
            loss_P = loss_P / (1 - 2 * smoothing)
        case "ipo":
            loss_P = (gap_P - 1 / (2 * beta)).square()
        case "hinge":
            loss_P = functional.relu(1 - h_P)
        case "simpo":
            loss_P = -functional.logsigmoid(h_P - settings.simpo_gamma)
        case "orpo":
            odds_P2 = mean_P2 - _log_one_minus_exp(mean_P2)
            loss_P = -mean_P2[:, 0] - beta * functional.logsigmoid(odds_P2[:, 0] - odds_P2[:, 1])
        case other:
            raise AssertionError(f"{other} is not a loss of pairs")
    if settings.nll_weight:
        loss_P = loss_P - settings.nll_weight * mean_P2[:, 0]
    return loss_P, beta * ratio_P2.detach()


def _log_one_minus_exp(x: Tensor) -> Tensor:
    """log(1 - e^x) for x < 0, accurate at both ends; an x that rounded to 0 is replaced by -1e-7."""
    x = x.clamp(max=-1e-7)
    # Each form is used where it loses no digits; the unused form must not put a NaN into the gradient.
    near = x > -math.log(2)
    close = torch.log(-torch.expm1(torch.where(near, x, torch.full_like(x, -1.0))))
    far = torch.log1p(-torch.exp(torch.where(near, torch.full_like(x, -1.0), x)))
    return torch.where(near, close, far)


def kto_losses(settings: Preference, ratio_A: Tensor, desirable_A: Tensor, kl_A: Tensor) -> Tensor:
    """loss_A of single answers, arXiv:2402.01306 eq. 8: weight (1 - sigma(+-(beta (log-ratio - z))).

    ratio_A: log-probability minus the reference's; desirable_A: which are labelled good; kl_A: z of each, the estimate
    of the divergence from the reference, without a gradient.
    """
    sign_A = torch.where(desirable_A, 1.0, -1.0)
    weight_A = torch.where(desirable_A, settings.desirable_weight, settings.undesirable_weight)
    return weight_A * torch.sigmoid(-sign_A * settings.resolved_beta * (ratio_A - kl_A))


class PreferenceObjective:
    """A sum over pairs (for kto: answers) of one of the losses above. reference: computes the reference's logp_N of a
    batch whose values do not contain it."""

    def __init__(
        self,
        settings: Preference,
        reference: Callable[[AnswerBatch], Tensor] | None = None,
        router: RouterSettings = RouterSettings(),
    ) -> None:
        self.settings, self.reference, self.router = settings, reference, router

    def weight(self, batch: AnswerBatch) -> Tensor:
        return self._units_A(batch).sum()

    def _units_A(self, batch: AnswerBatch) -> Tensor:
        """Units of each answer: half a pair, or 1 for a single answer, or 0 if it belongs to another prompt."""
        if self.settings.loss == "kto":
            return 1 - batch.figures[MISMATCHED]
        return torch.full((batch.num_answers,), 0.5, device=batch.ids_BT.device)

    def __call__(self, model: Callable[..., Any], batch: AnswerBatch) -> Loss:
        scored = run_model(model, batch)
        logp_2N, means = scored if isinstance(scored, tuple) else (scored, None)
        reference_N = self._reference(batch, logp_2N[0])
        make = self._kto if self.settings.loss == "kto" else self._pairs
        loss = make(batch, logp_2N[0], reference_N)
        return self.router.add_to(loss, means, lambda: batch.units_B(self._units_A(batch)))

    def _reference(self, batch: AnswerBatch, logp_N: Tensor) -> Tensor:
        if not self.settings.needs_reference:
            return torch.zeros_like(logp_N)
        if REFERENCE in batch.values:
            return batch.values[REFERENCE]
        assert self.reference is not None, "the loss compares with a reference"
        with torch.no_grad():
            return self.reference(batch)

    def _pairs(self, batch: AnswerBatch, logp_N: Tensor, reference_N: Tensor) -> Loss:
        # Tokens are subtracted before they are summed: float32 rounds a sum of small numbers less.
        logp_P2, log_ratio_P2 = batch.sum_A(logp_N).view(-1, 2), batch.sum_A(logp_N - reference_N).view(-1, 2)
        length_P2 = batch.length_A().view(-1, 2).clamp(min=1)
        loss_P, reward_P2 = pair_losses(self.settings, logp_P2, log_ratio_P2, length_P2)
        total = loss_P.sum()
        compared_P2 = logp_P2.detach() / (length_P2 if self.settings.per_token else 1)
        parts = {
            "preference_loss": total.detach(),
            "reward_accuracy": _wins(reward_P2[:, 0] - reward_P2[:, 1]).sum(),
            "logp_accuracy": _wins(compared_P2[:, 0] - compared_P2[:, 1]).sum(),
            "reward_margin": (reward_P2[:, 0] - reward_P2[:, 1]).sum(),
            "chosen_reward": reward_P2[:, 0].sum(),
            "rejected_reward": reward_P2[:, 1].sum(),
            "chosen_tokens": length_P2[:, 0].sum(),
            "rejected_tokens": length_P2[:, 1].sum(),
            "chosen_nll": -(logp_P2[:, 0].detach() / length_P2[:, 0]).sum(),
        }
        if self.settings.needs_reference:
            kl_P2 = batch.sum_A(_kl_to_reference(logp_N, reference_N)).view(-1, 2) / length_P2
            parts["chosen_kl_to_reference"] = kl_P2[:, 0].sum()
        return Loss(total, parts)

    def _kto(self, batch: AnswerBatch, logp_N: Tensor, reference_N: Tensor) -> Loss:
        matched_A = batch.figures[MISMATCHED] == 0
        desirable_A = batch.figures[DESIRABLE] > 0
        ratio_A = batch.sum_A(logp_N - reference_N)
        # z: the mean log-ratio of answers to other questions, over a block of groups, clamped to at least 0.
        block_A = batch.group_A // self.settings.kl_groups
        zeros_K = ratio_A.new_zeros(int(block_A[-1]) + 1)
        mismatched_A = (~matched_A).to(ratio_A.dtype)
        sum_K = zeros_K.index_add(0, block_A, ratio_A.detach() * mismatched_A)
        count_K = zeros_K.index_add(0, block_A, mismatched_A)
        z_A = (sum_K / count_K.clamp(min=1)).clamp(min=0)[block_A]
        loss_A = torch.where(matched_A, kto_losses(self.settings, ratio_A, desirable_A, z_A), 0.0)
        total = loss_A.sum()
        reward_A = self.settings.resolved_beta * ratio_A.detach()
        signed_A = torch.where(desirable_A, 1.0, -1.0) * (reward_A - self.settings.resolved_beta * z_A) * matched_A
        correct_A = _wins(signed_A) * matched_A
        kl_A = batch.sum_A(_kl_to_reference(logp_N, reference_N)) / batch.length_A().clamp(min=1)
        parts = {
            "preference_loss": total.detach(),
            "reward_accuracy": correct_A.sum(),
            "signed_reward": signed_A.sum(),
            "kto_z": (z_A * matched_A).sum(),
            "answer_tokens": (batch.length_A() * matched_A).sum(),
            "answer_kl_to_reference": (kl_A * matched_A).sum(),
        }
        return Loss(total, parts)


def _wins(lead: Tensor) -> Tensor:
    """1 where the lead is positive, 0 where it is negative, a half where it is a tie."""
    return (lead >= TIE).float() + 0.5 * (lead.abs() < TIE).float()


def _kl_to_reference(logp_N: Tensor, reference_N: Tensor) -> Tensor:
    """(log p - log q)^2 / 2 of each token, with the model's probability p and the reference's q: the divergence to
    second order. The tokens come from the data, not from the model, so this is a distance and no estimate of the KL
    divergence. Estimators with e^(log q - log p) would be dominated by the few tokens that became unlikely."""
    return (logp_N.detach() - reference_N).square() / 2
