"""POST /v1/completions: text that goes on from a text, or from token ids."""

from __future__ import annotations

import asyncio
import codecs
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penjing.infer.requests import Event, Token
from penjing.infer.text_stream import TextStream
from penjing.serve.answers import Tally, TokenTexts, fault, number
from penjing.serve.errors import ApiError
from penjing.serve.generation import Service, Target, prepare
from penjing.serve.schema import CompletionRequest
from penjing.serve.streams import EventStream, dumps, line, unless_left


@dataclass(frozen=True)
class Prompt:
    """ids: as they are read. added: how many of them at the beginning nobody sent. text: what `echo` repeats."""

    ids: list[int]
    added: int
    text: str


def prompts_of(body: CompletionRequest) -> list[str] | list[list[int]]:
    """One or several prompts, each a text or ids."""
    if isinstance(body.prompt, str):
        return [body.prompt]
    if isinstance(body.prompt[0], int):
        return [body.prompt]  # type: ignore[list-item]
    return body.prompt  # type: ignore[return-value]


def encode(target: Target, prompt: str | list[int]) -> Prompt:
    """A text begins a document; ids are read as they are."""
    tokenizer = target.served.tokenizer
    if isinstance(prompt, str):
        return Prompt([tokenizer.begin, *tokenizer.encode(prompt, after_control=True)], 1, prompt)
    return Prompt(prompt, 0, tokenizer.decode(prompt, hide=False))


class Choice:
    """One answer to one prompt. Its log-probabilities cover the prompt too where that is echoed."""

    def __init__(self, index: int, prompt: Prompt, body: CompletionRequest, target: Target) -> None:
        self.index, self.prompt, self.echo, self.top = index, prompt, bool(body.echo), body.logprobs
        tokenizer = target.served.tokenizer
        self.stop, self.texts = tokenizer.stop, target.service.token_texts(target.served)
        self.text = TextStream(tokenizer, body.stop_texts)
        self.finish: str | None = None
        self._tokens: list[Token] = []
        self._begun = False
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def take(self, events: Sequence[Event]) -> str:
        """The text that events add."""
        text, ids = "", []
        for event in events:
            if not self._begun:
                self._begun = True
                text = self.prompt.text if self.echo else ""
                self._tokens += (event.prompt or ())[self.prompt.added :]
            if event.token is not None:
                self._tokens.append(event.token)
                if event.token.id not in self.stop:
                    ids.append(event.token.id)
            if event.ended == "error":
                raise fault(event)
            if event.ended:
                self.finish = "length" if event.ended == "length" else "stop"
        text += "".join(map(self.text.add, ids))
        return text + self.text.finish() if self.finish else text

    def logprobs(self) -> dict[str, Any] | None:
        """Of the tokens since the last time; None where nobody asked."""
        if self.top is None:
            return None
        tokens, self._tokens = self._tokens, []
        tops, offsets = [], []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(self.texts.raw(token.id)))
            tops.append({self.texts.text(index): number(logp) for index, logp in token.top} if token.top else None)
        return {
            "tokens": [self.texts.text(token.id) for token in tokens],
            "token_logprobs": [number(token.logp) for token in tokens],
            "top_logprobs": tops if self.top else None,
            "text_offset": offsets,
        }


class Work:
    """One request: its prompts are answered side by side, and its choices are numbered through."""

    def __init__(self, target: Target, body: CompletionRequest, prompts: Sequence[Prompt]) -> None:
        self.target, self.body, self.tally = target, body, target.tally()
        self.id, self.created = f"cmpl-{secrets.token_hex(12)}", int(time.time())
        n = body.n or 1
        self.choices = [Choice(index, prompts[index // n], body, target) for index in range(n * len(prompts))]
        requests = [self._request(prompt) for prompt in prompts]
        hub, model = target.service.hub, target.served.name
        self.jobs: list[Job] = []
        try:
            for prompt, request in zip(prompts, requests, strict=True):
                self.jobs.append(hub.submit(model, request))
                self.tally.add_prompt(len(prompt.ids) - prompt.added, n)
        except ApiError:
            self.cancel()
            raise

    def _request(self, prompt: Prompt) -> Request:
        body = self.body
        return self.target.request(
            body,
            prompt.ids,
            max_tokens=body.max_tokens,
            param="prompt",
            top_logprobs=body.logprobs or 0,
            prompt_logprobs=bool(body.echo) and body.logprobs is not None,
            watch=stop_watch(self.target.served.tokenizer, body),
        )

    def cancel(self) -> None:
        for job in self.jobs:
            self.target.service.hub.cancel(job)

    async def events(self, *, whole: bool = False) -> AsyncIterator[tuple[Choice, list[Event]]]:
        """What is new of each choice. whole: only when all of a prompt's have ended."""
        n = self.body.n or 1
        async for number, events in self.target.service.hub.events(self.jobs, whole=whole):
            for answer in sorted({event.answer for event in events}):
                mine = [event for event in events if event.answer == answer]
                choice = self.choices[number * n + answer]
                for event in mine:
                    self.tally.saw(choice.index, event)
                yield choice, mine

    def choice(self, choice: Choice, text: str) -> dict[str, Any]:
        return {"index": choice.index, "text": text, "logprobs": choice.logprobs(), "finish_reason": choice.finish}

    def wrap(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        head = {"id": self.id, "object": "text_completion", "created": self.created, "model": self.body.model}
        return {**head, "choices": choices, **more}

    async def stream(self) -> AsyncIterator[bytes]:
        async for choice, events in self.events():
            text = choice.take(events)
            if text or choice.finish or choice.has_logprobs:
                yield line(self.wrap([self.choice(choice, text)]))
        usage = {"usage": self.tally.usage} if self.body.wants_usage else {}
        yield line(self.wrap([], penjing=self.tally.timing, **usage))
        self.tally.record(self.target.service.metrics)

    async def whole(self) -> bytes:
        texts = [""] * len(self.choices)
        async for choice, events in self.events(whole=True):
            texts[choice.index] += choice.take(events)
        self.tally.record(self.target.service.metrics)
        choices = [self.choice(choice, text) for choice, text in zip(self.choices, texts, strict=True)]
        return dumps(self.wrap(choices, usage=self.tally.usage, penjing=self.tally.timing))
