"""Reward models: a score for each answer, higher for answers that people prefer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as functional
from torch import Tensor

from penjing.base.config import NonNegativeFloat
from penjing.loader.shared_prompt_batch import AnswerBatch
from penjing.model.value_head import last_token_indices
from penjing.objective.base import Loss, ObjectiveSettings
from penjing.objective.router import RouterSettings
from penjing.objective.run_model import run_rows

MARGIN = "margin"  # key in a batch's figures: how much better a pair's first answer is; stored for both answers


@dataclass(frozen=True, kw_only=True)
class RewardModel(ObjectiveSettings):
    """Learn to score answers from preference pairs, whose rewards are to differ by at least the pair's `margin`."""

    removed: ClassVar = {"margin": "data"}

    name: Literal["reward"] = "reward"
    generates_text: ClassVar = False
    best_metric: ClassVar = "val_ranking_loss"
    varying_shapes: ClassVar = True
    # Weight of a pair's squared sum of rewards, which centres them around zero (pairs alone do not); 0.01 is usual.
    center_rewards_coefficient: NonNegativeFloat = 0.01


def ranking_losses(settings: RewardModel, reward_P2: Tensor, margin_P: Tensor) -> Tensor:
    """loss_P = -log sigma(r_chosen - r_rejected - margin) + w (r_chosen + r_rejected)^2.

    The first part is arXiv:2203.02155 eq. 1 for two answers (Bradley-Terry), with arXiv:2307.09288's margin; the second
    is arXiv:2312.09244's centring.
    """
    gap_P = reward_P2[:, 0] - reward_P2[:, 1] - margin_P
    return -functional.logsigmoid(gap_P) + settings.center_rewards_coefficient * reward_P2.sum(dim=1).square()


class RewardObjective:
    """A sum over pairs. The reward is read at the position that predicts the answer's last token, the end of turn."""

    def __init__(self, settings: RewardModel, router: RouterSettings = RouterSettings()) -> None:
        self.settings, self.router = settings, router

    def weight(self, batch: AnswerBatch) -> Tensor:
        return torch.tensor(batch.num_answers / 2, device=batch.ids_BT.device)

    def __call__(self, model: Callable[..., Any], batch: AnswerBatch) -> Loss:
        scored = score_answers(model, batch)
        reward_A, means = scored if isinstance(scored, tuple) else (scored, None)
        reward_P2 = reward_A.view(-1, 2)
        total = ranking_losses(self.settings, reward_P2, batch.figures[MARGIN].view(-1, 2)[:, 0]).sum()
        detached_P2 = reward_P2.detach()
        gap_P = detached_P2[:, 0] - detached_P2[:, 1]
        parts = {
            "ranking_loss": total.detach(),
            "reward_accuracy": (gap_P > 0).float().sum() + 0.5 * (gap_P == 0).float().sum(),
            "reward_margin": gap_P.sum(),
            "chosen_reward": detached_P2[:, 0].sum(),
            "rejected_reward": detached_P2[:, 1].sum(),
        }
        return self.router.add_to(Loss(total, parts), means, lambda: batch.units_B(torch.full_like(reward_A, 0.5)))


def score_answers(model: Callable[..., Any], batch: AnswerBatch) -> Any:
    """reward_A of a batch, read where each answer's last token is predicted; for a mixture also router statistics."""
    return run_rows(model, batch, scalar_N=last_token_indices(batch.scored_N, batch.answer_N, batch.num_answers))
