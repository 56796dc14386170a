"""The contract of a task: requests with known answers, and the score of each result."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from penjing.data.formats import Message

Metric = Literal["acc", "acc_char", "acc_byte", "acc_token"]
METRICS: tuple[Metric, ...] = ("acc", "acc_char", "acc_byte", "acc_token")


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What a task asks of a model. Scores are also given by `kind` and `language`, and by `group`, of several kinds."""

    kind: str = ""
    group: str = ""
    language: str = ""
    where: str = ""  # file and line, for errors

    @property
    def is_counted(self) -> bool:
        """Whether its score is part of the task's."""
        return True


@dataclass(frozen=True, kw_only=True, slots=True)
class LogLikelihood(Request):
    """Which of `choices` follows `text` with the highest probability. answer: the index of the right one.

    texts: instead of `text`, one for each choice. begins: put the token before that begins a document; if false, only
    where the text is empty or the tokenizer always adds it (lm-evaluation-harness's rule). scored: the choice, or
    what differs between the texts with their choices (CORE's rule).
    """

    text: str
    choices: Sequence[str]
    answer: int
    texts: Sequence[str] = ()
    begins: bool = True
    scored: Literal["choice", "differing"] = "choice"

    def __post_init__(self) -> None:
        # An error unless all are texts, and can be encoded: JSON may hold half a character.
        "".join([self.text, *self.texts, *self.choices]).encode()
        if not isinstance(self.answer, int) or not 0 <= self.answer < len(self.choices):  # -1: secret
            raise ValueError(f"answer {self.answer!r} of {len(self.choices)} choices")

    @property
    def chance(self) -> float:
        return 1 / len(self.choices) if len(self.choices) > 1 else 0.0

    @property
    def wanted(self) -> str:
        return self.texts[self.answer] if self.texts else self.choices[self.answer]


@dataclass(frozen=True, kw_only=True, slots=True)
class Continuation(Request):
    """The model's continuation of `text`, greedy, up to one of the texts `until`. begins: as for LogLikelihood."""

    text: str
    answer: str
    until: Sequence[str] = ()
    begins: bool = True
    chance: float = 0.0
    max_new_tokens: int = 256

    def __post_init__(self) -> None:
        (self.text + self.answer).encode()

    @property
    def wanted(self) -> str:
        return self.answer


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
    """A model's answer. is_truncated: it reached the token limit, or the beginning of its text was cut off.

    Of each choice: logps, num_tokens, and greedy, whether each token is the most likely one (with k equal, 1/k).
    """

    text: str
    is_truncated: bool = False
    logps: Sequence[float] = ()
    num_tokens: Sequence[int] = ()
    greedy: Sequence[float] = ()


def normalised(request: LogLikelihood, result: Result, metric: Metric) -> list[float]:
    """Log p of each choice; for acc_char, acc_byte and acc_token divided by its length without the space before it."""
    texts = [choice.removeprefix(" ") for choice in request.choices]
    lengths = {
        "acc": [1] * len(texts),
        "acc_char": list(map(len, texts)),
        "acc_byte": [len(text.encode()) for text in texts],
        "acc_token": list(result.num_tokens),
    }[metric]
    return [logp / max(1, length) for logp, length in zip(result.logps, lengths, strict=True)]


def best(values: Sequence[float]) -> list[bool]:
    """Which of the values are the highest one. Those that differ by the rounding of a division are equal."""
    highest = max(values)
    return [math.isclose(value, highest, rel_tol=1e-12) for value in values]


def share_of_best(values: Sequence[float], answer: int) -> float:
    """1 if the answer has the highest value; of k choices that tie for it each counts 1/k."""
    return best(values)[answer] / sum(best(values))


def perplexity(nats: float) -> float:
    """Of the mean nats. Beyond 400, of a model that has diverged, it stays the same: e^710 is no float."""
    return math.exp(min(nats, 400.0))


class Task:
    """A task yields requests and scores each result from 0 to 1. The chance level is that of its requests."""

    metric: ClassVar[Metric] = "acc"  # how choices are compared; those of METRICS are shown beside it
    limit_by: ClassVar[str] = ""  # a field of the requests: `limit` counts for each of its values
    shots: int = 0  # solved examples before each request
    option: ClassVar[Literal["data", "questions"]] = "data"  # of `penjing eval`, which names its file or folder
    shows_answers: ClassVar[bool] = True  # scores are shown by kind, with some of the wrong answers
    chance: ClassVar[str] = ""  # in %, for --list

    def __init__(self, data: Path | None = None, *, shots: int | None = None) -> None:
        """data: its file or folder, if it needs one. shots: solved examples, if it shows any; None: as usual."""

    def requests(self) -> Iterable[LogLikelihood | Continuation | Generate]:
        raise NotImplementedError

    def score(self, request: Any, result: Result) -> float:
        """The answer is right or wrong; of k choices that tie for the highest probability each counts 1/k."""
        if isinstance(request, LogLikelihood):
            return share_of_best(normalised(request, result, self.metric), request.answer)
        return bool(result.text == request.answer)

    def figures(self, graded: Sequence[Any]) -> dict[str, float]:
        """Further figures of the whole task, by name."""
        return {}

    def notes(self) -> Iterable[str]:
        """What belongs beside the score, such as what is missing."""
        return ()
