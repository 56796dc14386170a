"""1 if the last number of the answer is the reference's, to one part in a million; else 0."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence

from penjing.objective.policy import RewardSettings
from penjing.rl.rewards.base import Judged, Setting, final_answer, need_truth

_NUMBER = re.compile(
    r"(?<![A-Za-z0-9_.])-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][+-]?\d{1,3})?(?:\s*/\s*\d+(?:\.\d+)?)?\s*%?"
)


def last_number(text: str) -> float | None:
    """The last number in a text: 1,234.5, -3, 2e5, 3/4 and 12% are understood; None if there is none."""
    text = unicodedata.normalize("NFKC", text).replace("\u2212", "-").replace("\u2044", "/")
    found = _NUMBER.findall(text)
    if not found:
        return None
    written = found[-1].replace(",", "").replace(" ", "")
    scale = 0.01 if written.endswith("%") else 1.0
    above, _, below = written.rstrip("%").strip().partition("/")
    divisor = float(below) if below else 1.0
    return scale * float(above) / divisor if divisor else None


def is_number(said: str, truths: Sequence[str]) -> bool:
    number = last_number(said)
    wanted = [last_number(truth) for truth in truths]
    return number is not None and any(
        truth is not None and math.isclose(number, truth, rel_tol=1e-6, abs_tol=1e-9) for truth in wanted
    )


class Numeric:
    def __init__(self, settings: RewardSettings, setting: Setting) -> None:
        self.after = settings.answer_after

    def __call__(self, answers: Sequence[Judged]) -> list[float]:
        return [float(is_number(final_answer(answer, self.after), need_truth(answer, "numeric"))) for answer in answers]
