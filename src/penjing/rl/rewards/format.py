"""1 if the answer has the form asked for and was ended, else 0. By default <think>thoughts</think>, then an answer."""

from __future__ import annotations

from penjing.objective.policy import RewardSettings
from penjing.rl.rewards.base import END_OF_THOUGHT, THOUGHT, Reward, RewardInput, Setting
from penjing.rl.rewards.regex import compiled


def thinks_then_answers(text: str) -> bool:
    """One thought that is not empty, at the beginning, then an answer. The opening tag may stand in the prompt."""
    thought, closed, answer = text.strip().removeprefix(THOUGHT).partition(END_OF_THOUGHT)
    tags = thought.count(THOUGHT) + answer.count(THOUGHT) + answer.count(END_OF_THOUGHT)
    return bool(closed and thought.strip() and answer.strip()) and tags == 0


class Format(Reward):
    def __init__(self, settings: RewardSettings, setting: Setting) -> None:
        pattern = settings.format_pattern
        self.pattern = compiled(pattern, "objective.reward.format_pattern") if pattern else None

    def one(self, answer: RewardInput) -> float:
        text = answer.text
        fits = thinks_then_answers(text) if self.pattern is None else self.pattern.fullmatch(text.strip()) is not None
        return float(not answer.cut_off and fits)
