"""What a reward is given and what it gives."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from penjing.agent_tools.numbers import lower_exponents
from penjing.base.errors import UserError
from penjing.data.formats import Message
from penjing.infer.tool_loop import ToolExchange
from penjing.objective.policy import RewardSettings

THOUGHT, END_OF_THOUGHT = "<think>", "</think>"
_FRACTION_BEHIND_DIGIT = re.compile(r"(?<=\d)(?=[¼-¾⅐-⅞↉])")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardContext:
    """What is known of a prompt. truths: the reference answers, any of which is right; record: what its line holds."""

    messages: tuple[Message, ...]
    truths: tuple[str, ...] = ()
    record: Mapping[str, Any] = field(default_factory=dict)
    where: str = ""  # file:line


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardInput(RewardContext):
    """One answer, and its prompt.

    text: what the model said, thoughts included; of several turns in the last. turns: all of them, with the results of
    the tools that each called; empty where the answer was not taken apart.
    """

    text: str
    num_tokens: int  # that the model said, in all turns
    cut_off: bool  # it was not ended by the model
    turns: tuple[ToolExchange, ...] = ()

    @property
    def text_written(self) -> str:
        """The answer without the thoughts before it; empty if the thoughts never ended."""
        if self.turns:
            return self.turns[-1].turn.content.strip()
        behind = self.text.rpartition(END_OF_THOUGHT)[2].strip()
        return "" if behind.startswith(THOUGHT) else behind


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Where answers are judged. max_tokens: the longest answer."""

    device: torch.device
    max_tokens: int


class Reward:
    """Made once for a run, raising UserError for settings it cannot work with; gives each answer a number."""

    def __init__(self, settings: RewardSettings, setting: Setting) -> None:
        self.settings = settings

    def check(self, context: RewardContext) -> None:
        """Raise UserError for a prompt whose answers this could not judge."""

    def one(self, answer: RewardInput) -> float:
        raise NotImplementedError

    def __call__(self, answers: Sequence[RewardInput]) -> list[float]:
        return [self.one(answer) for answer in answers]


def final_answer(answer: RewardInput, after: str) -> str:
    """What the answer comes to: all that was said, or what follows the last `after`; empty if there is none."""
    if not after:
        return answer.text_written
    before, found, final = answer.text_written.rpartition(after)
    return final.strip() if found else ""


def need_truth(context: RewardContext, name: str) -> tuple[str, ...]:
    """The reference answers. Raises UserError if the prompt has none."""
    if not context.truths:
        raise UserError(
            f"the reward {name} needs a reference answer",
            where=context.where or None,
            wanted='a field gt, such as "gt": ["42"]',
        )
    return context.truths


def unfolded(text: str) -> str:
    """NFKC without its false friends: 10² is 10^2 and not 102, 1½ is 1 1/2 and not 11/2."""
    text = _FRACTION_BEHIND_DIGIT.sub(" ", lower_exponents(text, "^{}"))
    return unicodedata.normalize("NFKC", text).replace("\u2044", "/")
