"""What both endpoints say of an answer: usage, timing, and tokens with their log-probabilities."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.infer.requests import Event, Token
from penjing.serve.errors import ApiError, log
from penjing.serve.metrics import Metrics

LOWEST_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot write


@dataclass
class Tally:
    """Counts and times of one HTTP request."""

    context: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    written: list[int] = field(default_factory=list)  # tokens of each answer
    began: float = field(default_factory=time.perf_counter)
    first: float = 0.0  # when the first token came
    longest_prompt: int = 0

    def add_prompt(self, tokens: int, answers: int) -> None:
        self.prompt_tokens += tokens
        self.longest_prompt = max(self.longest_prompt, tokens)
        self.written += [0] * answers

    def saw(self, number: int, events: Sequence[Event]) -> None:
        """Events of answer `number`."""
        self.written[number] += sum(event.token is not None for event in events)
        self.cached_tokens += sum(event.cached_tokens for event in events if event.answer == 0)

    @property
    def usage(self) -> dict[str, Any]:
        written = sum(self.written)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": written,
            "total_tokens": self.prompt_tokens + written,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    @property
    def timing(self) -> dict[str, Any]:
        """Our own object in the last chunk."""
        now = time.perf_counter()
        first = self.first or now
        return {
            "time_to_first_token_s": round(first - self.began, 4),
            "tokens_per_second": round(max(0, sum(self.written) - 1) / max(1e-6, now - first), 1),
            "context_used": self.longest_prompt + max(self.written, default=0),
            "context": self.context,
        }

    def record(self, metrics: Metrics) -> None:
        if self.first:
            metrics.first_token.observe(self.first - self.began)
        metrics.whole.observe(time.perf_counter() - self.began)


def finish_of(event: Event) -> str | None:
    """Why an answer has ended, None if it has not. Raises ApiError where it failed: of ours it says nothing more."""
    if event.finish_reason == "error":
        log.error("an answer failed", exc_info=event.error)
        raise ApiError(500, "the server failed on this request", code="internal_error")
    if not event.finish_reason:
        return None
    return "length" if event.finish_reason == "length" else "stop"


class TokenTexts:
    """Tokens of one vocabulary as the API writes them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._entries: dict[int, dict[str, Any]] = {}

    def entry(self, token: Token, top: int) -> dict[str, Any]:
        """A token with its log-probability and the `top` likeliest at its place, as chats have them."""
        found = self._one(token.id, token.logp)
        found["top_logprobs"] = [self._one(index, logp) for index, logp in token.top_logprobs[:top]]
        return found

    def raw(self, index: int) -> bytes:
        """What a token adds to a text."""
        return self._tokenizer.token_bytes(index)

    def text(self, index: int) -> str:
        """A token's text; bytes that are part of a character as `bytes:\\xe5\\x8c`, as completions have them."""
        raw = self.raw(index)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _one(self, index: int, logp: float) -> dict[str, Any]:
        known = self._entries.get(index)
        if known is None:
            raw = self.raw(index)
            written = None if index in self._tokenizer.added_ids else list(raw)  # a control token is no text
            known = {"token": raw.decode(errors="replace"), "bytes": written, "id": index}
            self._entries[index] = known
        return {**known, "logprob": number(logp)}


def number(logp: float) -> float | None:
    """A log-probability as JSON can write it; None of a first token, before which nothing stands."""
    if math.isnan(logp):
        return None
    return round(logp, 7) if logp > LOWEST_LOGPROB else LOWEST_LOGPROB
