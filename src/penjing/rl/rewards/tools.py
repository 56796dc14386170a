"""The share of calls that worked: well-formed, of a tool that is there, with arguments that it took. 0 without a call.

Beyond `most_calls` calls in one answer each one more takes a fixed part off, down to -1: a model that is paid for calls
alone learns to call for ever. The calls of a last turn are counted as not having worked, since nobody ran them.
"""

from __future__ import annotations

from penjing.rl.rewards.base import Reward, RewardInput


class Tools(Reward):
    def one(self, answer: RewardInput) -> float:
        most = self.settings.most_calls
        calls = sum(len(turn.turn.calls) for turn in answer.turns)
        if not calls:
            return 0.0
        worked = sum(result.worked for turn in answer.turns for result in turn.results)
        return max(-1.0, worked / calls - max(0, calls - most) / most)
