"""POST /v1/completions: continue a text or token ids."""

import codecs
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penjing.infer.requests import Event, Token
from penjing.infer.text_stream import TextStream
from penjing.serve.errors import ApiError
from penjing.serve.generation import PendingResponse, Service, Target
from penjing.serve.hub import Job
from penjing.serve.response_fields import finish_reason_of, finite_logprob
from penjing.serve.schema import CompletionRequest


@dataclass
class Prompt:
    """ids: the tokenized prompt. num_added: special tokens added in front. text: what `echo` repeats."""

    ids: list[int]
    num_added: int
    text: str
    scores: tuple[Token, ...] = ()  # come with its first answer


class CompletionChoice:
    """One answer to one prompt. With echo, text and log-probabilities include the prompt."""

    reasoning_tokens = 0

    def __init__(self, index: int, prompt: Prompt, body: CompletionRequest, target: Target) -> None:
        self.index, self.prompt, self.num_top = index, prompt, body.logprobs
        tokenizer = target.served.tokenizer
        self.stop, self.texts = tokenizer.stop, target.service.token_texts(target.served)
        self.text = TextStream(tokenizer, body.stop_texts)
        self.finish: str | None = None
        self._echo = bool(body.echo)
        self._entries = bool(body.stream)  # for the chat page: tokens in the format of chats, with ids
        for index in body.continue_ids or ():  # one by one: together, half a character at the end would hold back all
            self.text.extend([index])
        self.text.take()  # the client has this text
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0  # characters before the next token

    def take(self, events: Sequence[Event]) -> list[dict[str, Any]]:
        tokens = [event.token for event in events if event.token is not None]
        self.text.extend([token.id for token in tokens if token.id not in self.stop])
        if events[0].prompt_logprobs is not None:
            self.prompt.scores = events[0].prompt_logprobs[self.prompt.num_added :]
        self.finish = finish_reason_of(events[-1])
        text = self.text.finish() if self.finish else self.text.take()
        num_echoed = len(self.prompt.scores) if self._echo else 0
        if self._echo:
            first = [Token(token.id, math.nan) for token in self.prompt.scores[:1]]  # as OpenAI's has none
            text, tokens, self._echo = self.prompt.text + text, [*first, *self.prompt.scores[1:], *tokens], False
        scores = None if self.num_top is None else self._scores(tokens, num_echoed)
        if not (text or (tokens and scores) or self.finish):
            return []
        return [{"index": self.index, "text": text, "logprobs": scores, "finish_reason": self.finish}]

    def _scores(self, tokens: Sequence[Token], num_echoed: int) -> dict[str, Any]:
        offsets, tops, tokenizer = [], [], self.text.tokenizer
        for number, token in enumerate(tokens):
            offsets.append(self._offset)
            # The text of an answer has no tokens that only mark starts and ends.
            if number < num_echoed or tokenizer.decode([token.id]) == tokenizer.token(token.id):
                self._offset += len(self._decoder.decode(tokenizer.token_bytes(token.id)))
            top = {self.texts.text(index): finite_logprob(logp) for index, logp in token.top_logprobs[: self.num_top]}
            top[self.texts.text(token.id)] = finite_logprob(token.logp)
            tops.append(None if math.isnan(token.logp) else top)  # none for a prompt's first token
        entries = {"content": [self.texts.entry(token, self.num_top or 0) for token in tokens]} if self._entries else {}
        return {
            **entries,
            "tokens": [self.texts.text(token.id) for token in tokens],
            "token_logprobs": [finite_logprob(token.logp) for token in tokens],
            "top_logprobs": tops,
            "text_offset": offsets,
        }


async def start(service: Service, body: CompletionRequest, job: Job) -> PendingResponse:
    """Submit a request to the engine. Raises ApiError if it is invalid."""
    if body.suffix:
        raise ApiError(400, "suffix: these models cannot fill in the middle", param="suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise ApiError(400, "best_of: must equal n", param="best_of")
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens: 0 needs echo", param="max_tokens")
    prompts = _prompts(body)
    if body.continue_ids and (body.echo or len(prompts) > 1):
        raise ApiError(400, "continue_ids: only with one prompt, and not with echo", param="continue_ids")
    target = Target.of(service, body, job, len(prompts))
    prefix_ids = target.prefix_ids(body)
    encoded = await encode(target, prompts)
    requests = [
        target.request(
            body,
            [*prompt.ids, *prefix_ids],
            max_tokens=body.max_tokens,
            param="prompt",
            top_logprobs=body.logprobs or 0,
            prompt_logprobs=bool(body.echo) and body.logprobs is not None,
        )
        for prompt in encoded
    ]
    prompt_of_choice = [prompt for prompt in encoded for _ in range(body.n or 1)]
    choices = [CompletionChoice(index, prompt, body, target) for index, prompt in enumerate(prompt_of_choice)]
    return PendingResponse(target, body, "cmpl", requests, choices)


async def encode(target: Target, prompts: list[str] | list[list[int]]) -> list[Prompt]:
    lengths = [len(prompt) for prompt in prompts]
    return await target.encode(lambda: [_encode(target, prompt) for prompt in prompts], lengths, "prompt")


async def collect(work: PendingResponse) -> dict[str, Any]:
    choices = [chunks[0] for chunks in await work.collect()]
    return {**work.meta("text_completion"), "choices": choices, "usage": work.usage, "penjing": work.stats.timing}


def _prompts(body: CompletionRequest) -> list[str] | list[list[int]]:
    """One or more prompts, each a text or ids."""
    is_one = isinstance(body.prompt, str) or isinstance(body.prompt[0], int)
    return [body.prompt] if is_one else body.prompt  # type: ignore[return-value]


def _encode(target: Target, prompt: str | list[int]) -> Prompt:
    """A text begins with the begin-of-text token; ids are used unchanged."""
    tokenizer = target.served.tokenizer
    if isinstance(prompt, str):
        return Prompt([tokenizer.begin, *tokenizer.encode(prompt, after_control=True)], 1, prompt)
    return Prompt(prompt, 0, tokenizer.decode(prompt, hide=False))
