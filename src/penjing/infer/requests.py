"""What is asked of the engine, and what it answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from penjing.base.errors import UserError
from penjing.infer.sample import Sampling

MOST_TOP_LOGPROBS = 20


class TokenMask(Protocol):
    """Which tokens may come next, as a grammar says; one for each answer."""

    finished: bool  # the text is whole: the answer ends

    def allowed(self) -> NDArray[Any] | bytes | None:
        """A bit for each id, lowest first; None: all may come."""

    def accept(self, index: int) -> None:
        """This token came."""


class Turn(NamedTuple):
    """A turn that the model ended: of which request and answer, the how manyth of it from 1, its ids with the stop."""

    request: int  # its ticket
    answer: int
    number: int
    ids: list[int]


class InjectedTokens(NamedTuple):
    """What is read before the next turn. note: kept with the answer."""

    ids: Sequence[int]
    note: Any


Follow = Callable[[Sequence[Turn]], Sequence[InjectedTokens | None]]
"""What follows each of some turns; None where the answer has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt, how many answers are wanted, and how they are drawn.

    The token at place t of an answer is drawn with number t of its seed's, whoever else is answered at the same time.
    An answer ends with an id of `stop`, where `watch` says so, where its grammar has finished, after `max_new_tokens`,
    and where prompt and answer fill the engine's longest sequence.
    """

    prompt: Sequence[int]
    seeds: Sequence[int] = (0,)  # one for each answer
    max_new_tokens: int = 256
    stop: Collection[int] = ()
    sampling: Sampling = field(default_factory=Sampling)
    adapter: str | None = None  # its name; None: what `lora.set_adapter` had set; "": the base alone
    score_temperature: float = 1.0  # of the log-probabilities that are reported
    top_logprobs: int = 0  # likeliest ids reported with each token
    prompt_logprobs: bool = False  # the prompt's tokens are reported too
    watch: Callable[[int, int], bool] | None = None  # (answer, new id) -> the answer ends here
    grammar: Callable[[], TokenMask] | None = None
    follow: Follow | None = None  # makes answers of several turns; what it gives counts to max_new_tokens
    client: str = ""  # clients take turns


class Token(NamedTuple):
    """A token and its log-probabilities.

    logp, top: of the model's own softmax at `score_temperature`, before penalties and masks; drawn_logp: of what it was
    drawn from (0 for greedy text). Of a prompt's first token logp is NaN: nothing stands before it.
    """

    id: int
    logp: float
    drawn_logp: float = 0.0
    top: tuple[tuple[int, float], ...] = ()


Ended = Literal["", "stop", "length", "cancelled", "error"]


class Event(NamedTuple):
    """Something happened to an answer: a token, tokens that were given between two turns, or its end."""

    ticket: int
    answer: int
    token: Token | None = None
    ended: Ended = ""
    prompt: tuple[Token, ...] | None = None  # where asked for, once, with the first event of answer 0
    shared: int = 0  # with an answer's first event: tokens of the prompt that were not read again
    given: InjectedTokens | None = None  # read after this token, before the next turn
    error: Exception | None = None  # why it ended with "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """An answer. ids: with the stop id where it ended with one. logp: of each token under the whole softmax at the
    temperature asked for; drawn_logp: under the distribution it was drawn from (0 for greedy text).

    Of several turns, ids holds also what was given between them, with log-probabilities 0; said: whether the model said
    the token, None if it said all; notes: those of `InjectedTokens`, one for each turn but the last."""

    ids: list[int]
    logp: list[float]
    drawn_logp: list[float]
    ended: Literal["stop", "length"]
    said: list[bool] | None = None
    notes: tuple[Any, ...] = ()


def bits(mask: NDArray[Any] | bytes, size: int) -> NDArray[np.bool_]:
    """A `TokenMask`'s bits as `size` booleans; ids beyond the mask are not allowed."""
    octets = np.frombuffer(mask, np.uint8) if isinstance(mask, bytes) else np.ascontiguousarray(mask).view(np.uint8)
    given = np.unpackbits(octets.reshape(-1)[: math.ceil(size / 8)], bitorder="little")[:size]
    return np.pad(given, (0, size - len(given))).astype(bool)


def check_request(request: Request, max_tokens: int, vocab_size: int) -> None:
    """Raises UserError for a request that an engine of this size cannot answer."""
    tokens, limit = len(request.prompt), max_tokens + (request.max_new_tokens < 1)
    if not tokens:
        raise UserError("nothing to go on from", where="prompt", wanted="at least one token")
    if tokens >= limit:
        raise UserError("too long", where="prompt", got=f"{tokens} tokens", wanted=f"under {limit}")
    for where, ids in (("prompt", request.prompt), ("logit_bias", request.sampling.logit_bias)):
        if len(ids) and not 0 <= min(ids) <= max(ids) < vocab_size:
            wrong = next(index for index in ids if not 0 <= index < vocab_size)
            raise UserError("no such token", where=where, got=wrong, wanted=f"0..{vocab_size - 1}")
    if not 0 <= request.top_logprobs <= MOST_TOP_LOGPROBS:
        raise UserError(
            "out of range", where="top_logprobs", got=request.top_logprobs, wanted=f"0..{MOST_TOP_LOGPROBS}"
        )
    if not request.score_temperature > 0:
        raise UserError("out of range", where="score_temperature", got=request.score_temperature, wanted="> 0")
