"""The share of calls that worked: well-formed, of a tool that is there, with arguments that it took. 0 without a call.

Beyond `most_calls` calls in one answer each one more takes a fixed part off, down to -1: a model that is paid for calls
alone learns to call for ever. The calls of a last turn are counted as not having worked, since nobody ran them.
"""

from __future__ import annotations

from collections.abc import Sequence

from penjing.objective.policy import RewardSettings
from penjing.rl.rewards.base import RewardInput, Setting


class Tools:
    def __init__(self, settings: RewardSettings, setting: Setting) -> None:
        self.most = settings.most_calls

    def __call__(self, answers: Sequence[RewardInput]) -> list[float]:
        return [self._one(answer) for answer in answers]

    def _one(self, answer: RewardInput) -> float:
        calls = sum(len(turn.said.calls) for turn in answer.turns)
        if not calls:
            return 0.0
        worked = sum(result.worked for turn in answer.turns for result in turn.results)
        return max(-1.0, worked / calls - max(0, calls - self.most) / self.most)
