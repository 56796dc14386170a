"""Rewards that compare an answer with the reference answers: as texts, or as numbers."""

import math
import re
import unicodedata
from collections.abc import Sequence

from penjing.rl.rewards.base import Reward, RewardContext, RewardInput, final_answer, nfkc_normalise, require_truth

_PUNCTUATION = " .。!！?？,，;；:：\"'“”‘’"
_LEADING_PUNCTUATION = re.compile(rf"(?:(?!\.\d)[{re.escape(_PUNCTUATION)}])*")  # the dot of .5 is not punctuation
# Sign, digits, exponent, divisor, per cent. Digits inside a word, a decimal or an exponent (m^2) are not a number.
_NUMBER = re.compile(
    r"(?<![A-Za-z0-9_.^])(?<!\^[+-])(-?)((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][+-]?\d{1,3})?)"
    r"(?:\^([+-]?\d+))?(?:\s*/\s*(\d+(?:\.\d+)?))?\s*(%?)"
)
_TIMES_TEN = re.compile(r"(?<=\d)\s*[×x*·⋅]\s*10\^(?=[+-]?\d{1,3}(?!\d))")
_MIXED = re.compile(r"(?<=\d)[¼-¾⅐-⅞↉]")


def normalise(text: str) -> str:
    """NFKC, one case, single spaces, no punctuation at either end unless there is nothing else."""
    folded = " ".join(nfkc_normalise(text).casefold().split())
    return _LEADING_PUNCTUATION.sub("", folded, count=1).rstrip(_PUNCTUATION) or folded


def is_match(answer: str, truths: Sequence[str]) -> bool:
    """Whether the answer is not empty and equals one of these."""
    normal = normalise(answer)
    return bool(normal) and normal in {normalise(truth) for truth in truths}


def is_correct(answer: RewardInput, after: str) -> bool:
    """Whether the answer is complete, and its final answer equals that of a reference (see `final_answer`)."""
    truths = [truth.rpartition(after)[2] if after else truth for truth in answer.truths]
    return not answer.truncated and is_match(final_answer(answer, after), truths)


class Exact(Reward):
    """1 if the answer equals a reference answer, ignoring case, width and spacing; else 0."""

    def check(self, context: RewardContext) -> None:
        require_truth(context, "exact")

    def score(self, answer: RewardInput) -> float:
        self.check(answer)
        return float(is_correct(answer, self.settings.answer_after))


def last_number(text: str) -> float | None:
    """The last number in a text, such as 1,234.5, -3, 2e5, 2 × 10⁵, 10^5, 3/4, 1½ or 12%; None if there is none."""
    text = _MIXED.sub(lambda match: f"{unicodedata.numeric(match[0]):.12f}"[1:], text)
    text = _TIMES_TEN.sub("e", nfkc_normalise(text).replace("\u2212", "-"))
    matches = _NUMBER.findall(text)
    if not matches:
        return None
    sign, numerator, exponent, denominator, percent = matches[-1]
    try:
        value: float = float(numerator.replace(",", "")) ** float(exponent or 1) / float(denominator or 1)
    except (OverflowError, ZeroDivisionError):
        return None
    return (-value if sign else value) * (0.01 if percent else 1.0)


def is_same_number(answer: str, truths: Sequence[str]) -> bool:
    number = last_number(answer)
    expected = [last_number(truth) for truth in truths]
    return number is not None and any(
        truth is not None and math.isclose(number, truth, rel_tol=1e-6) for truth in expected
    )


class Numeric(Reward):
    """1 if the last number of the answer is the reference's, to one part in a million; else 0, and 0 if truncated."""

    def check(self, context: RewardContext) -> None:
        require_truth(context, "numeric")

    def score(self, answer: RewardInput) -> float:
        final, truths = final_answer(answer, self.settings.answer_after), require_truth(answer, "numeric")
        return float(is_same_number(final, truths) and not answer.truncated)
