"""The fraction of tool calls that worked: well-formed, of a known tool, with valid arguments. 0 without a call.

Each call beyond `most_calls` in one answer subtracts a fixed amount, down to -1; otherwise the model would learn to
call without end. Calls of a last turn count as failed, since nothing runs them.
"""

from __future__ import annotations

from penjing.rl.rewards.base import Reward, RewardInput


class Tools(Reward):
    def score(self, answer: RewardInput) -> float:
        max_calls = self.settings.most_calls
        calls = sum(len(turn.turn.calls) for turn in answer.turns)
        if not calls:
            return 0.0
        worked = sum(result.worked for turn in answer.turns for result in turn.results)
        return max(-1.0, worked / calls - max(0, calls - max_calls) / max_calls)
