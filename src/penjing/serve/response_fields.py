"""Response fields of both endpoints: usage, timing, finish reason, and tokens with their log-probabilities."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.infer.requests import Event, GrammarError, Token
from penjing.serve.errors import ApiError, log
from penjing.serve.metrics import Metrics

LOWEST_LOGPROB = -9999.0  # for minus infinity, which JSON does not have


@dataclass
class RequestStats:
    """Counts and times of one HTTP request."""

    context: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: list[int] = field(default_factory=list)  # tokens of each answer
    started_at: float = field(default_factory=time.perf_counter)
    first_token_at: float = 0.0  # 0 before the first token
    max_prompt_tokens: int = 0

    def add_prompt(self, tokens: int, answers: int) -> None:
        self.prompt_tokens += tokens
        self.max_prompt_tokens = max(self.max_prompt_tokens, tokens)
        self.completion_tokens += [0] * answers

    def observe(self, number: int, events: Sequence[Event]) -> None:
        """Events of answer `number`. Only its first event has `cached_tokens`; only its last may have no token."""
        self.completion_tokens[number] += len(events) - (events[-1].token is None)
        if events[0].answer == 0:
            self.cached_tokens += events[0].cached_tokens

    @property
    def usage(self) -> dict[str, Any]:
        completion_tokens = sum(self.completion_tokens)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self.prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    @property
    def timing(self) -> dict[str, Any]:
        """Our extension object in the last chunk."""
        now = time.perf_counter()
        first_token_at = self.first_token_at or now
        return {
            "time_to_first_token_s": round(first_token_at - self.started_at, 4),
            "tokens_per_second": round(max(0, sum(self.completion_tokens) - 1) / max(1e-6, now - first_token_at), 1),
            "context_used": self.max_prompt_tokens + max(self.completion_tokens, default=0),
            "context": self.context,
        }

    def record(self, metrics: Metrics) -> None:
        if self.first_token_at:
            metrics.first_token.observe(self.first_token_at - self.started_at)
        metrics.total.observe(time.perf_counter() - self.started_at)


def finish_reason_of(event: Event) -> str | None:
    """The finish reason; None while the answer runs. Raises ApiError, without internal details, if it failed."""
    if isinstance(event.error, GrammarError):
        raise ApiError(400, "the JSON schema is too complex to follow, or no more text fits it", code="schema_failed")
    if event.finish_reason == "error":
        log.error("an answer failed", exc_info=event.error)
        raise ApiError(500, "the server failed on this request", code="internal_error")
    if not event.finish_reason:
        return None
    return "length" if event.finish_reason == "length" else "stop"


class TokenTexts:
    """The tokens of one vocabulary in the API's formats."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._entries: dict[int, dict[str, Any]] = {}

    def entry(self, token: Token, top: int) -> dict[str, Any]:
        """A token with its log-probability and the `top` most likely ones, in the format of chat completions."""
        entry = self._entry(token.id, token.logp)
        entry["top_logprobs"] = [self._entry(token_id, logp) for token_id, logp in token.top_logprobs[:top]]
        return entry

    def text(self, token_id: int) -> str:
        """A token's text, or `bytes:\\xe5\\x8c` for part of a character, in the format of completions."""
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _entry(self, token_id: int, logp: float) -> dict[str, Any]:
        entry = self._entries.get(token_id)
        if entry is None:
            raw = self._tokenizer.token_bytes(token_id)
            token_bytes = None if token_id in self._tokenizer.added_ids else list(raw)  # a control token has no text
            entry = {"token": raw.decode(errors="replace"), "bytes": token_bytes, "id": token_id}
            self._entries[token_id] = entry
        return {**entry, "logprob": finite_logprob(logp)}


def finite_logprob(logp: float) -> float | None:
    """A log-probability for JSON; None for NaN, that of a prompt's first token."""
    if math.isnan(logp):
        return None
    return round(logp, 7) if logp > LOWEST_LOGPROB else LOWEST_LOGPROB
