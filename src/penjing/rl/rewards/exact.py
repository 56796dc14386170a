"""1 if the answer is one of the reference answers, in whatever case, width and spacing; else 0."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from penjing.objective.policy import RewardSettings
from penjing.rl.rewards.base import Judged, Setting, final_answer, need_truth

_ENDS = " .。!！?？,，;；:：\"'“”‘’"


def normalised(text: str) -> str:
    """NFKC, one case, single spaces, no punctuation at either end."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split()).strip(_ENDS)


def is_match(said: str, truths: Sequence[str]) -> bool:
    return normalised(said) in {normalised(truth) for truth in truths}


class Exact:
    def __init__(self, settings: RewardSettings, setting: Setting) -> None:
        self.after = settings.answer_after

    def __call__(self, answers: Sequence[Judged]) -> list[float]:
        return [
            float(is_match(final_answer(answer, self.after), need_truth(answer, "exact")) and not answer.cut_off)
            for answer in answers
        ]
