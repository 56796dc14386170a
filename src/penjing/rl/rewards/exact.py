"""1 if the answer equals a reference answer, ignoring case, width and spacing; else 0."""

from __future__ import annotations

import re
from collections.abc import Sequence

from penjing.rl.rewards.base import Reward, RewardContext, RewardInput, final_answer, nfkc_normalise, require_truth

_PUNCTUATION = " .。!！?？,，;；:：\"'“”‘’"
_LEADING_PUNCTUATION = re.compile(rf"(?:(?!\.\d)[{re.escape(_PUNCTUATION)}])*")  # the dot of .5 is not punctuation


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
    def check(self, context: RewardContext) -> None:
        require_truth(context, "exact")

    def score(self, answer: RewardInput) -> float:
        self.check(answer)
        return float(is_correct(answer, self.settings.answer_after))
