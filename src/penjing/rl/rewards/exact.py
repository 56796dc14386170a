"""1 if the answer is one of the reference answers, in whatever case, width and spacing; else 0."""

from __future__ import annotations

import re
from collections.abc import Sequence

from penjing.rl.rewards.base import Reward, RewardContext, RewardInput, final_answer, need_truth, unfolded

_ENDS = " .。!！?？,，;；:：\"'“”‘’"
_BEGINS = re.compile(rf"(?:(?!\.\d)[{re.escape(_ENDS)}])*")  # the dot of .5 is not punctuation


def normalised(text: str) -> str:
    """NFKC, one case, single spaces, no punctuation at either end unless there is nothing else."""
    folded = " ".join(unfolded(text).casefold().split())
    return _BEGINS.sub("", folded, count=1).rstrip(_ENDS) or folded


def is_match(answer: str, truths: Sequence[str]) -> bool:
    """Whether something was said, and is one of these."""
    found = normalised(answer)
    return bool(found) and found in {normalised(truth) for truth in truths}


def is_right(answer: RewardInput, after: str) -> bool:
    """Whether the model ended the answer, and it comes to one of its references, or to what follows `after` there."""
    truths = [truth.rpartition(after)[2] if after else truth for truth in answer.truths]
    return not answer.cut_off and is_match(final_answer(answer, after), truths)


class Exact(Reward):
    def check(self, context: RewardContext) -> None:
        need_truth(context, "exact")

    def one(self, answer: RewardInput) -> float:
        self.check(answer)
        return float(is_right(answer, self.settings.answer_after))
