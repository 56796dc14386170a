"""1 if the whole answer, without thoughts, matches a pattern, else 0, also if it was cut off."""

from __future__ import annotations

import re

from penjing.base.errors import UserError
from penjing.objective.policy import RewardSettings
from penjing.rl.rewards.base import Reward, RewardInput, Setting


def compiled(pattern: str, where: str) -> re.Pattern[str]:
    """Raises UserError for a pattern that is none."""
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise UserError(f"not a regular expression: {error}", where=where, got=repr(pattern)) from None


class Regex(Reward):
    """The pattern is the user's; the text is the model's, so a pattern that can backtrack without end is a risk."""

    def __init__(self, settings: RewardSettings, setting: Setting) -> None:
        if not settings.pattern:
            raise UserError("the reward regex needs a pattern", where="objective.reward.pattern")
        self.pattern = compiled(settings.pattern, "objective.reward.pattern")

    def one(self, answer: RewardInput) -> float:
        return float(not answer.cut_off and self.pattern.fullmatch(answer.text_written) is not None)
