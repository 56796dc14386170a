"""0 up to a soft length, then linearly down to -1 at the longest answer; -1 if truncated.

The soft overlong punishment of arXiv:2503.14476, eq. 13.
"""

from __future__ import annotations

from penjing.objective.policy import RewardSettings
from penjing.rl.rewards.base import Reward, RewardInput, RewardRuntime


class Length(Reward):
    def __init__(self, settings: RewardSettings, runtime: RewardRuntime) -> None:
        self.max_tokens = runtime.max_tokens
        self.soft_length = settings.soft_length or self.max_tokens * 3 // 4
        if self.soft_length >= self.max_tokens:
            wanted = f"under objective.rollout.max_new_tokens = {self.max_tokens}"
            raise settings.error("soft_length", "no answer can be that long", wanted=wanted)

    def score(self, answer: RewardInput) -> float:
        excess = (answer.num_tokens - self.soft_length) / (self.max_tokens - self.soft_length)
        return -1.0 if answer.truncated else -min(1.0, max(0.0, excess))
