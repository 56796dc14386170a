"""1 if the last number of the answer is the reference's, to one part in a million; 0 if not, or if it was cut off."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence

from penjing.rl.rewards.base import Reward, RewardContext, RewardInput, final_answer, need_truth, unfolded

# Sign, digits, exponent, divisor, per cent. Digits of a word, a decimal or another's exponent (m^2) are no number.
_NUMBER = re.compile(
    r"(?<![A-Za-z0-9_.^])(?<!\^[+-])(-?)((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][+-]?\d{1,3})?)"
    r"(?:\^([+-]?\d+))?(?:\s*/\s*(\d+(?:\.\d+)?))?\s*(%?)"
)
_TIMES_TEN = re.compile(r"(?<=\d)\s*[×x*·⋅]\s*10\^(?=[+-]?\d{1,3}(?!\d))")
_MIXED = re.compile(r"(?<=\d)[¼-¾⅐-⅞↉]")


def last_number(text: str) -> float | None:
    """The last number in a text: 1,234.5, -3, 2e5, 2 × 10⁵, 10^5, 3/4, 1½ and 12% are understood; None if none is."""
    text = _MIXED.sub(lambda found: f"{unicodedata.numeric(found[0]):.12f}"[1:], text)
    text = _TIMES_TEN.sub("e", unfolded(text).replace("\u2212", "-"))
    found = _NUMBER.findall(text)
    if not found:
        return None
    sign, above, power, below, percent = found[-1]
    try:
        value: float = float(above.replace(",", "")) ** float(power or 1) / float(below or 1)
    except (OverflowError, ZeroDivisionError):
        return None
    return (-value if sign else value) * (0.01 if percent else 1.0)


def is_number(answer: str, truths: Sequence[str]) -> bool:
    number = last_number(answer)
    wanted = [last_number(truth) for truth in truths]
    return number is not None and any(
        truth is not None and math.isclose(number, truth, rel_tol=1e-6) for truth in wanted
    )


class Numeric(Reward):
    def check(self, context: RewardContext) -> None:
        need_truth(context, "numeric")

    def one(self, answer: RewardInput) -> float:
        said, truths = final_answer(answer, self.settings.answer_after), need_truth(answer, "numeric")
        return float(is_number(said, truths) and not answer.cut_off)
