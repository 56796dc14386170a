"""1 if the answer is complete and has the required format, else 0. Default: <think>thoughts</think>, then an answer."""

from __future__ import annotations

from penjing.objective.policy import RewardSettings
from penjing.rl.rewards.base import THINK_END, THINK_START, Reward, RewardInput, RewardRuntime
from penjing.rl.rewards.regex import compile_pattern


def has_think_format(text: str) -> bool:
    """One thought that is not empty, then an answer. The opening tag may be in the prompt."""
    thought, closed, answer = text.strip().removeprefix(THINK_START).partition(THINK_END)
    tags = thought.count(THINK_START) + answer.count(THINK_START) + answer.count(THINK_END)
    return bool(closed and thought.strip() and answer.strip()) and tags == 0


class Format(Reward):
    def __init__(self, settings: RewardSettings, runtime: RewardRuntime) -> None:
        pattern = settings.format_pattern
        self.pattern = compile_pattern(pattern, "objective.reward.format_pattern") if pattern else None

    def score(self, answer: RewardInput) -> float:
        text = answer.text
        matches = has_think_format(text) if self.pattern is None else self.pattern.fullmatch(text.strip()) is not None
        return float(not answer.truncated and matches)
