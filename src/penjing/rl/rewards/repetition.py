"""Minus the fraction of n-grams that repeat an earlier one of the answer: 0 without repetition, near -1 for a loop.

The fraction is 1 - (distinct n-grams) / (n-grams). With several turns the last one counts, thoughts included, because
models loop there. A Chinese character counts as a word.
"""

from __future__ import annotations

import re

from penjing.rl.rewards.base import Reward, RewardInput

_WORD = re.compile(r"[\u3400-\u9fff]|[^\W\u3400-\u9fff]+")


def repeated_fraction(text: str, n: int) -> float:
    words = _WORD.findall(text.casefold())
    ngrams = [tuple(words[start : start + n]) for start in range(len(words) - n + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


class Repetition(Reward):
    def score(self, answer: RewardInput) -> float:
        return -repeated_fraction(answer.text, self.settings.repeated_words)
