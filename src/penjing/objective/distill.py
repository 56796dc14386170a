"""Distillation: a student learns its teacher's next-token predictions."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Gt, Lt
from torch import Tensor

from penjing.base.config import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt
from penjing.kernels.fused_distillation_loss import (
    DistillationSums,
    Divergence,
    DivergenceConfig,
    LiveTeacher,
    StoredTeacher,
    Teacher,
    fused_distillation_loss,
)
from penjing.loader.batch import Batch
from penjing.loader.shared_prompt_batch import AnswerBatch
from penjing.model.transformer import Transformer
from penjing.objective.base import Loss, ObjectiveSettings, UnitLengths, reject_unused
from penjing.objective.next_token import LOSS_METRIC
from penjing.objective.rollout import Rollout
from penjing.objective.router import RouterSettings


@dataclass(frozen=True, kw_only=True)
class Distill(ObjectiveSettings):
    """Learn from another model with the same vocabulary. Formulas: `penjing.kernels.fused_distillation_loss`."""

    name: Literal["distill"] = "distill"
    is_language_modelling: ClassVar = True
    teacher: str = ""  # run, checkpoint, Hugging Face directory or hub name
    # logits: the teacher runs on every batch. top_k: it runs on the data once, and its top-k log-probabilities are
    # stored on disk. on_policy: it scores the student's own answers (arXiv:2306.13649).
    mode: Literal["logits", "top_k", "on_policy"] = "logits"
    # forward: KL(teacher || student), mode-covering. reverse: KL(student || teacher), mode-seeking. mixed: a weighted
    # sum of both. jsd: generalised Jensen-Shannon divergence from a mixture of the two, never infinite.
    divergence: Divergence = "forward"
    # mixed: the weight of reverse; jsd: the teacher's weight in the mixture
    jsd_beta: Annotated[float, Gt(0), Lt(1)] = 0.5
    temperature: PositiveFloat = 1.0  # divides both models' logits; above 1, unlikely tokens weigh more
    ce_weight: Fraction = 0.0  # weight of the data's cross-entropy (as in SFT) in the loss
    top_k: PositiveInt = 16  # mode=top_k: ids stored per position; 4 bytes each on disk
    store: str = ""  # mode=top_k: folder of the teacher's predictions, which runs may share; empty: in out
    # mode=on_policy: fraction of prompts that the student answers; the others have the data's answers
    on_policy_fraction: Fraction = 1.0
    sample_temperature: NonNegativeFloat = 1.0  # mode=on_policy: of the student's answers
    max_new_tokens: PositiveInt = 128  # mode=on_policy: longest answer of the student

    def __post_init__(self) -> None:
        super().__post_init__()
        reject_unused(self, ("top_k", "store"), self.mode == "top_k", "objective.mode=top_k")
        on_policy_settings = ("on_policy_fraction", "sample_temperature", "max_new_tokens")
        reject_unused(self, on_policy_settings, self.mode == "on_policy", "objective.mode=on_policy")
        reject_unused(self, ("jsd_beta",), self.divergence in ("mixed", "jsd"), "objective.divergence=mixed or jsd")
        if self.mode == "on_policy" and self.on_policy_fraction == 1 and self.ce_weight:
            wanted = "0, or objective.on_policy_fraction under 1"
            raise self.error("ce_weight", "must be 0 when on_policy_fraction is 1", wanted=wanted)

    @property
    def best_metric(self) -> str:
        return "" if self.mode == "on_policy" else "val_kl"

    @property
    def stage(self) -> str:
        return "distill/on_policy" if self.mode == "on_policy" else "distill"

    @property
    def takes_noise(self) -> bool:
        return self.mode != "on_policy"

    @property
    def varying_shapes(self) -> bool:
        return self.mode == "on_policy"

    @property
    def vocab_source(self) -> str:
        return self.teacher

    @property
    def sampling(self) -> Rollout | None:
        samples = self.mode == "on_policy" and self.on_policy_fraction > 0
        return Rollout(num_generations=1, max_new_tokens=self.max_new_tokens) if samples else None

    def unit_lengths(self, seq_len: int, *, tokens: float = 0.0, every_unit: bool = True) -> UnitLengths:
        note = "the teacher is assumed to be as large as the student"
        once, lengths = self.mode == "top_k", super().unit_lengths(seq_len, tokens=tokens)
        return replace(lengths, extra_forwards=float(not once), forwards_before=float(once), note=note)

    @property
    def divergence_config(self) -> DivergenceConfig:
        return DivergenceConfig(
            divergence=self.divergence, mixture=self.jsd_beta, temperature=self.temperature, ce_weight=self.ce_weight
        )


@dataclass(frozen=True, kw_only=True)
class DistillBatch(Batch):
    """Rows with the teacher's log-probabilities: id_NK, logp_NJ as in `StoredTeacher`."""

    top_id_NK: Tensor
    top_logp_NJ: Tensor


class Distillation:
    """sum_n w_n ((1 - a) T^2 D(p_n, q_n) - a log q_n(target_n)), in nats; a is `ce_weight`.

    p, q: the teacher's and the student's prediction at temperature T (1 in the second term). Forward KL with T^2 after
    arXiv:1503.02531, generalised Jensen-Shannon divergence and on-policy answers after arXiv:2306.13649. In an
    `AnswerBatch`, value `from_data` is 1 for the data's tokens; the student's own tokens have no second term.

    teacher: frozen, on the batch's device; None if batches contain its predictions (`DistillBatch`), over `num_ids`
    ids. A mixture of experts adds its router's losses.
    """

    def __init__(
        self,
        settings: Distill,
        teacher: Transformer | None,
        router: RouterSettings = RouterSettings(),
        *,
        num_ids: int = 0,
    ) -> None:
        self.settings, self.teacher, self.router, self.num_ids = settings, teacher, router, num_ids

    def weight(self, batch: Batch | AnswerBatch) -> Tensor:
        return batch.weight_N.sum()

    def __call__(self, model: Callable[..., Any], batch: Batch | AnswerBatch) -> Loss:
        ce_weight_N, branches = batch.weight_N, dict[str, Any]()
        if isinstance(batch, AnswerBatch):
            branches = {"subtree_end_BT": batch.subtree_end_BT, "position_BT": batch.position_BT}
            ce_weight_N = batch.weight_N * batch.values["from_data"]
        score = partial(
            fused_distillation_loss,
            target_N=batch.target_N,
            weight_N=batch.weight_N,
            ce_weight_N=ce_weight_N,
            teacher=self._teacher(batch, branches),
            measure=self.settings.divergence_config,
        )
        if isinstance(batch, Batch) and batch.noise_B is not None:  # for the student alone
            branches["noise_B"] = batch.noise_B
        scored = model(batch.ids_BT, batch.document_BT, scored_N=batch.scored_N, score=score, **branches)
        sums_5, means = (scored, None) if isinstance(scored, Tensor) else scored
        sums = DistillationSums(*sums_5.unbind())
        parts = {LOSS_METRIC: sums.nats.detach(), "kl": sums.kl.detach(), "agreement": sums.agreement.detach()}
        if isinstance(batch, AnswerBatch) and self.settings.on_policy_fraction > 0:
            del parts[LOSS_METRIC]  # only the data's tokens have it, but the loop divides by all units
        if self.settings.divergence != "forward":
            parts["divergence"] = sums.divergence.detach()
        units_B = batch.units_B if isinstance(batch, Batch) else lambda: batch.units_B(batch.length_A())
        return self.router.add_to(Loss(sums.total, parts), means, units_B)

    def _teacher(self, batch: Batch | AnswerBatch, branches: dict[str, Any]) -> Teacher:
        if isinstance(batch, DistillBatch):
            return StoredTeacher(batch.top_id_NK, batch.top_logp_NJ, self.num_ids)
        assert self.teacher is not None, "neither a teacher nor its predictions in the batch"
        return run_teacher(self.teacher, batch, **branches)


@torch.no_grad()
def run_teacher(teacher: Transformer, batch: Batch | AnswerBatch, **branches: Any) -> LiveTeacher:
    """A teacher's hidden states at a batch's scored positions. branches: of an `AnswerBatch`."""
    hidden_ND = teacher.hidden(batch.ids_BT, batch.document_BT, **branches).flatten(0, 1)
    if batch.scored_N is not None:
        hidden_ND = hidden_ND[batch.scored_N]
    weight_VD = teacher.head_weight_VD.detach()
    return LiveTeacher(hidden_ND, weight_VD, teacher.compute_dtype or weight_VD.dtype)
