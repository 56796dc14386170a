"""Minus the share of runs of n words that were said before in the same answer: 0 for fresh text, near -1 for a loop.

Of several turns the last counts, thoughts included: they are where models loop. A Chinese character counts as a word.
The measure is 1 - (different n-grams) / (n-grams).
"""

from __future__ import annotations

import re

from penjing.rl.rewards.base import Reward, RewardInput

_WORD = re.compile(r"[\u3400-\u9fff]|[^\W\u3400-\u9fff]+")


def repeated_fraction(text: str, run: int) -> float:
    words = _WORD.findall(text.casefold())
    runs = [tuple(words[start : start + run]) for start in range(len(words) - run + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


class Repetition(Reward):
    def one(self, answer: RewardInput) -> float:
        return -repeated_fraction(answer.text, self.settings.repeated_words)
