"""Combines several rewards: their weighted sum, and each reward alone for the metrics."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from penjing.base.errors import UserError
from penjing.base.registry import look_up
from penjing.objective.policy import Policy
from penjing.rl.rewards import REWARDS
from penjing.rl.rewards.base import Reward, RewardContext, RewardInput, RewardRuntime


class RewardMix:
    """The rewards of a run, built once."""

    def __init__(self, settings: Policy, runtime: RewardRuntime) -> None:
        if len(set(settings.rewards)) < len(settings.rewards):
            raise UserError("named twice", where="objective.rewards", got=", ".join(settings.rewards))
        self.names = settings.rewards
        self.weights = settings.reward_weights or (1.0,) * len(settings.rewards)
        self.rewards: list[Reward] = [
            look_up(REWARDS, name, what="reward")(settings.reward, runtime) for name in settings.rewards
        ]

    def check(self, prompts: Sequence[RewardContext]) -> None:
        """Raises UserError, before sampling starts, if a reward cannot score the answers to some prompt."""
        for reward in self.rewards:
            broken: list[UserError] = []
            for prompt in prompts:
                try:
                    reward.check(prompt)
                except UserError as error:
                    broken.append(error)
            if broken:
                first = broken[0]
                got = first.got or f"none, as {len(broken):,} of {len(prompts):,} prompts"
                raise UserError(first.what, where=first.where, got=got, wanted=first.wanted)

    def __call__(self, answers: Sequence[RewardInput]) -> npt.NDArray[np.float64]:
        """reward_RN of each of R rewards and N answers."""
        if not answers:
            return np.zeros((len(self.names), 0))
        score_RN = np.array([reward(answers) for reward in self.rewards], dtype=np.float64)
        if not np.isfinite(score_RN).all():
            bad = self.names[int(np.argwhere(~np.isfinite(score_RN))[0, 0])]
            raise UserError("a reward is not a number", where=f"reward {bad}")
        return score_RN

    def total(self, score_RN: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The weighted sum, reward_N."""
        summed: npt.NDArray[np.float64] = np.asarray(self.weights) @ score_RN
        return summed
