"""1 if the whole answer, without thoughts, matches a pattern; else 0, and 0 if truncated."""

from __future__ import annotations

import re

from penjing.base.errors import UserError
from penjing.objective.policy import RewardSettings
from penjing.rl.rewards.base import Reward, RewardInput, RewardRuntime


def compile_pattern(pattern: str, where: str) -> re.Pattern[str]:
    """Raises UserError for an invalid pattern."""
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise UserError(f"not a regular expression: {error}", where=where, got=repr(pattern)) from None


class Regex(Reward):
    """Model output is matched, so a user's pattern with exponential backtracking can hang the run."""

    def __init__(self, settings: RewardSettings, runtime: RewardRuntime) -> None:
        if not settings.pattern:
            raise UserError("the reward regex needs a pattern", where="objective.reward.pattern")
        self.pattern = compile_pattern(settings.pattern, "objective.reward.pattern")

    def score(self, answer: RewardInput) -> float:
        return float(not answer.truncated and self.pattern.fullmatch(answer.answer_text) is not None)
