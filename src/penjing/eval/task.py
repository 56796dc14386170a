"""The contract of a task: requests with known answers, and the score of each result."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penjing.data.formats import Message


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What a task asks of a model. Scores are also given by `kind` and `language`."""

    kind: str = ""
    language: str = ""
    where: str = ""  # file and line, for errors

    @property
    def is_counted(self) -> bool:
        """Whether its score is part of the task's."""
        return True


@dataclass(frozen=True, kw_only=True, slots=True)
class LogLikelihood(Request):
    """Which of `choices` follows `text` in a document with the highest probability. answer: the index of the right
    one."""

    text: str
    choices: Sequence[str]
    answer: int

    @property
    def chance(self) -> float:
        return 1 / len(self.choices)

    @property
    def wanted(self) -> str:
        return self.choices[self.answer]


@dataclass(frozen=True, kw_only=True, slots=True)
class Generate(Request):
    """The model's answer to a conversation, sampled greedily. tools: the functions on offer, each with a `name`."""

    messages: Sequence[Message]
    answer: str
    tools: Sequence[dict[str, Any]] = ()
    chance: float = 0.0
    max_new_tokens: int = 64  # without its thought

    @property
    def text(self) -> str:
        return self.messages[-1].content

    @property
    def wanted(self) -> str:
        return self.answer


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """A model's answer. is_truncated: it reached the token limit. logps: of each choice."""

    text: str
    is_truncated: bool = False
    logps: Sequence[float] = ()

    @property
    def num_best(self) -> int:
        """How many choices share the highest probability: 1 without a tie."""
        return self.logps.count(max(self.logps)) if self.logps else 1


class Task:
    """A task yields requests and scores each result from 0 to 1. The chance level is that of its requests."""

    def __init__(self, data: Path | None = None) -> None:
        """data: the task's file or folder, if it needs one."""

    def requests(self) -> Iterable[LogLikelihood | Generate]:
        raise NotImplementedError

    def score(self, request: Any, result: Result) -> float:
        """The answer is right or wrong; of k choices that tie for the highest probability each counts 1/k."""
        if isinstance(request, LogLikelihood):
            return float(result.logps[request.answer] == max(result.logps)) / result.num_best
        return bool(result.text == request.answer)
