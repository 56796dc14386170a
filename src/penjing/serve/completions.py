"""POST /v1/completions: text that goes on from a text, or from token ids."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penjing.infer.requests import Event, Token
from penjing.infer.text_stream import TextStream
from penjing.serve.answers import finish_of, number
from penjing.serve.errors import ApiError
from penjing.serve.generation import Service, Target, Work
from penjing.serve.hub import Job
from penjing.serve.schema import CompletionRequest


@dataclass
class Prompt:
    """ids: as they are read. added: how many of them at the beginning nobody sent. text: what `echo` repeats."""

    ids: list[int]
    added: int
    text: str
    scores: tuple[Token, ...] = ()  # told with its first answer


class CompletionChoice:
    """One answer to one prompt. Text and log-probabilities cover the prompt too where that is echoed."""

    def __init__(self, index: int, prompt: Prompt, body: CompletionRequest, target: Target) -> None:
        self.index, self.prompt, self.top = index, prompt, body.logprobs
        tokenizer = target.served.tokenizer
        self.stop, self.texts = tokenizer.stop, target.service.token_texts(target.served)
        self.text = TextStream(tokenizer, body.stop_texts)
        self.finish: str | None = None
        self._echo = bool(body.echo)
        self._entries = bool(body.stream)  # for the chat page: tokens as chats have them, with their ids
        for index in body.continue_ids or ():  # one by one: half a character at the end would hold back all of it
            self.text.append(index)
        self.text.take()  # the client has it
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0  # characters before the next token

    def take(self, events: Sequence[Event]) -> list[dict[str, Any]]:
        tokens = [event.token for event in events if event.token is not None]
        self.text.extend([token.id for token in tokens if token.id not in self.stop])
        for event in events:
            if event.prompt_logprobs is not None:
                self.prompt.scores = event.prompt_logprobs[self.prompt.added :]
        self.finish = finish_of(events[-1])
        text = self.text.finish() if self.finish else self.text.take()
        if self._echo:
            text, tokens, self._echo = self.prompt.text + text, [*self.prompt.scores, *tokens], False
        scores = None if self.top is None else self._scores(tokens)
        if not (text or (tokens and scores) or self.finish):
            return []
        return [{"index": self.index, "text": text, "logprobs": scores, "finish_reason": self.finish}]

    def _scores(self, tokens: Sequence[Token]) -> dict[str, Any]:
        offsets, top = [], []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(self.texts.raw(token.id)))
            top.append({self.texts.text(index): number(logp) for index, logp in token.top_logprobs[: self.top]} or None)
        entries = {"content": [self.texts.entry(token, self.top or 0) for token in tokens]} if self._entries else {}
        return {
            **entries,
            "tokens": [self.texts.text(token.id) for token in tokens],
            "token_logprobs": [number(token.logp) for token in tokens],
            "top_logprobs": top if self.top else None,
            "text_offset": offsets,
        }


async def begin(service: Service, body: CompletionRequest, job: Job) -> Work:
    """Hand a request to the engine. Raises ApiError if it is refused."""
    if body.suffix:
        raise ApiError(400, "suffix: text in the middle is not written by these models", param="suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise ApiError(400, "best_of: only as large as n", param="best_of")
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens: 0 is for echo alone", param="max_tokens")
    prompts = _prompts(body)
    if not all(prompts):
        raise ApiError(400, "prompt: is empty", param="prompt")
    if body.continue_ids and (body.echo or len(prompts) > 1):
        raise ApiError(400, "continue_ids: only with one prompt, and not with echo", param="continue_ids")
    return await _begin(Target.of(service, body, job, len(prompts)), body, prompts)


async def _begin(target: Target, body: CompletionRequest, prompts: list[str] | list[list[int]]) -> Work:
    lead = target.lead(body)
    lengths = [len(prompt) for prompt in prompts]
    encoded = await target.prepare(lambda: [_encode(target, prompt) for prompt in prompts], lengths, "prompt")
    requests = [
        target.request(
            body,
            [*prompt.ids, *lead],
            max_tokens=body.max_tokens,
            param="prompt",
            top_logprobs=body.logprobs or 0,
            prompt_logprobs=bool(body.echo) and body.logprobs is not None,
        )
        for prompt in encoded
    ]
    numbered = [prompt for prompt in encoded for _ in range(body.n or 1)]
    choices = [CompletionChoice(index, prompt, body, target) for index, prompt in enumerate(numbered)]
    return Work(target, body.model, "cmpl", requests, choices)


async def whole(work: Work) -> dict[str, Any]:
    """The answer in one piece."""
    choices = [chunks[0] for chunks in await work.whole()]
    return {**work.head("text_completion"), "choices": choices, "usage": work.tally.usage, "penjing": work.tally.timing}


def _prompts(body: CompletionRequest) -> list[str] | list[list[int]]:
    """One or several, each a text or ids."""
    if isinstance(body.prompt, str):
        return [body.prompt]
    return [body.prompt] if isinstance(body.prompt[0], int) else body.prompt  # type: ignore[return-value]


def _encode(target: Target, prompt: str | list[int]) -> Prompt:
    """A text begins a document; ids are read as they are."""
    tokenizer = target.served.tokenizer
    if isinstance(prompt, str):
        return Prompt([tokenizer.begin, *tokenizer.encode(prompt, after_control=True)], 1, prompt)
    return Prompt(prompt, 0, tokenizer.decode(prompt, hide=False))
