"""The engine's requests, events and completions."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from penjing.base.errors import UserError
from penjing.infer.sample import Sampling

MAX_TOP_LOGPROBS = 20


class GrammarError(ValueError):
    """A grammar allows no token, or is too complex to find those that it allows."""


class TokenMask(Protocol):
    """A grammar's allowed next tokens; one object per answer."""

    finished: bool  # the text is complete: the answer ends

    def allowed(self) -> NDArray[Any] | bytes | None:
        """A bit for each id, lowest bit first; None: all ids are allowed."""

    def accept(self, token_id: int) -> None:
        """Advance by this token."""


class Turn(NamedTuple):
    """A turn that the model has ended. number: counts the answer's turns from 1. ids: with the stop id."""

    request: int  # its request_id
    answer: int
    number: int
    ids: list[int]


class InjectedTokens(NamedTuple):
    """Tokens put before the next turn. note: kept in `Completion.notes`."""

    ids: Sequence[int]
    note: Any


OnTurnEnd = Callable[[Sequence[Turn]], Sequence[InjectedTokens | None]]
"""The tokens to inject after each turn; None ends the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt, the number of answers, and the sampling settings.

    Token t of an answer uses random number t of its seed, whatever else the engine does at the same time. An answer
    ends with an id of `stop`, when `should_stop` returns true, when its grammar has finished, after `max_new_tokens`,
    or when prompt and answer fill the engine's `max_tokens`.
    """

    prompt: Sequence[int]
    seeds: Sequence[int] = (0,)  # one for each answer
    max_new_tokens: int = 256
    stop: Collection[int] = ()
    sampling: Sampling = field(default_factory=Sampling)
    adapter: str | None = None  # name; None: the one set by `lora.set_adapter`; "": the base model
    score_temperature: float = 1.0  # of the reported log-probabilities
    top_logprobs: int = 0  # most likely ids reported with each token
    prompt_logprobs: bool = False  # report the prompt's tokens too
    should_stop: Callable[[int, int], bool] | None = None  # (answer, new id) -> end the answer
    grammar: Callable[[], TokenMask] | None = None
    on_turn_end: OnTurnEnd | None = None  # for multi-turn answers; injected tokens count to max_new_tokens
    client: str = ""  # clients take turns


class Token(NamedTuple):
    """A token and its log-probabilities.

    logp, top_logprobs: under the model's own softmax at `score_temperature`, before penalties and masks.
    sampling_logp: under the distribution it was sampled from (0 for greedy). logp of a prompt's first token is NaN.
    """

    id: int
    logp: float
    sampling_logp: float = 0.0
    top_logprobs: tuple[tuple[int, float], ...] = ()


FinishReason = Literal["", "stop", "length", "cancelled", "error"]


class Event(NamedTuple):
    """News of an answer: a token, tokens injected between two turns, or its end."""

    request_id: int
    answer: int
    token: Token | None = None
    finish_reason: FinishReason = ""
    prompt_logprobs: tuple[Token, ...] | None = None  # if requested: once, with the first event of answer 0
    cached_tokens: int = 0  # with an answer's first event: prompt tokens taken from the KV cache
    injected: InjectedTokens | None = None  # put after this token, before the next turn
    error: Exception | None = None  # the reason, if finish_reason is "error"


@dataclass(slots=True, kw_only=True)
class Completion:
    """An answer. ids: with the stop id, if it ended with one. logp: of each token under the full softmax at
    `score_temperature`. sampling_logp: under the distribution it was sampled from (0 for greedy).

    In a multi-turn answer, ids includes injected tokens, with log-probabilities 0. is_sampled: whether the model
    sampled the token; None if it sampled all. notes: those of `InjectedTokens`, one per turn but the last."""

    ids: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    sampling_logp: list[float] = field(default_factory=list)
    finish_reason: FinishReason = ""
    is_sampled: list[bool] | None = None
    notes: tuple[Any, ...] = ()

    def add(self, event: Event) -> None:
        """Take the answer's next event. Raises its error."""
        if event.error is not None:
            raise event.error
        self.finish_reason = event.finish_reason
        if (token := event.token) is not None:
            self.ids.append(token.id)
            self.logp.append(token.logp)
            self.sampling_logp.append(token.sampling_logp)
            if self.is_sampled is not None:
                self.is_sampled.append(True)
        if event.injected is not None:
            none = [0.0] * len(event.injected.ids)
            self.is_sampled = [*(self.is_sampled or [True] * len(self.ids)), *[False] * len(none)]
            self.ids, self.logp = [*self.ids, *event.injected.ids], self.logp + none
            self.sampling_logp += none
            self.notes += (event.injected.note,)


class NotFiniteError(UserError):
    """A request's logits are NaN or infinite."""

    def __init__(self) -> None:
        super().__init__(
            "the logits are NaN or infinite",
            where="the model",
            next_step="Take another checkpoint if its weights are damaged, or a wider dtype, such as float32.",
        )


def bits(mask: NDArray[Any] | bytes, size: int) -> NDArray[np.bool_]:
    """A `TokenMask`'s bits as `size` booleans; ids beyond the mask are not allowed."""
    octets = np.frombuffer(mask, np.uint8) if isinstance(mask, bytes) else np.ascontiguousarray(mask).view(np.uint8)
    bools = np.unpackbits(octets.reshape(-1)[: math.ceil(size / 8)], bitorder="little")[:size]
    return np.pad(bools, (0, size - len(bools))).astype(bool)


def accept_token(grammar: TokenMask, token_id: int) -> bool:
    """Advance the grammar; returns whether the text is complete."""
    grammar.accept(token_id)
    return grammar.finished


def allowed_tokens(grammar: TokenMask, vocab_size: int) -> NDArray[np.bool_] | None:
    """Which ids the grammar allows; None: all. Raises GrammarError if it allows none."""
    allowed = grammar.allowed()
    allowed_V = None if allowed is None else bits(allowed, vocab_size)
    if allowed_V is not None and not allowed_V.any():
        raise GrammarError("the grammar allows no token")
    return allowed_V


def check_request(request: Request, max_tokens: int, vocab_size: int) -> None:
    """Raises UserError for a request that an engine of this size cannot answer."""
    tokens, limit = len(request.prompt), max_tokens + (request.max_new_tokens < 1)
    if not tokens:
        raise UserError("is empty", where="prompt", wanted="at least one token")
    if tokens >= limit:
        raise UserError("too long", where="prompt", got=f"{tokens} tokens", wanted=f"under {limit}")
    for where, ids in (("prompt", request.prompt), ("logit_bias", request.sampling.logit_bias)):
        if len(ids) and not 0 <= min(ids) <= max(ids) < vocab_size:
            bad_id = next(token_id for token_id in ids if not 0 <= token_id < vocab_size)
            raise UserError("no such token", where=where, got=bad_id, wanted=f"0..{vocab_size - 1}")
    if not 0 <= request.top_logprobs <= MAX_TOP_LOGPROBS:
        raise UserError("out of range", where="top_logprobs", got=request.top_logprobs, wanted=f"0..{MAX_TOP_LOGPROBS}")
    if min(request.seeds, default=0) < 0:
        raise UserError("out of range", where="seed", got=min(request.seeds), wanted="at least 0")
    if not request.score_temperature > 0:
        raise UserError("out of range", where="score_temperature", got=request.score_temperature, wanted="> 0")
