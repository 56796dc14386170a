"""0 up to a soft length, then down evenly to -1 at the longest answer, and -1 if cut off there.

The soft punishment of over-long answers of arXiv:2503.14476, eq. 13.
"""

from __future__ import annotations

from penjing.base.errors import UserError
from penjing.objective.policy import RewardSettings
from penjing.rl.rewards.base import Reward, RewardInput, Setting


class Length(Reward):
    def __init__(self, settings: RewardSettings, setting: Setting) -> None:
        self.longest = setting.max_tokens
        self.soft = settings.soft_length or self.longest * 3 // 4
        if self.soft >= self.longest:
            raise UserError(
                "no answer can be that long",
                where="objective.reward.soft_length",
                got=self.soft,
                wanted=f"under objective.rollout.max_new_tokens = {self.longest}",
            )

    def one(self, answer: RewardInput) -> float:
        over = (answer.num_tokens - self.soft) / (self.longest - self.soft)
        return -1.0 if answer.cut_off else -min(1.0, max(0.0, over))
