"""From a request's fields to what the engine is asked, and back to JSON: the same for both endpoints."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Protocol, TypeVar

from penjing.base.errors import UserError
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.infer.requests import Event, Request
from penjing.infer.sample import Sampling
from penjing.infer.text_stream import TextStream
from penjing.serve.answers import Tally, TokenTexts
from penjing.serve.errors import ApiError, from_user_error
from penjing.serve.hub import Hub, Job
from penjing.serve.limits import MAX_ANSWERS
from penjing.serve.metrics import Metrics
from penjing.serve.models import Models, ServedModel
from penjing.serve.schema import SamplingFields
from penjing.serve.streams import DONE, dumps

INLINE_CHARACTERS = 2000  # longer texts are encoded in a thread of their own
CHARACTERS_PER_TOKEN = 64  # no text has more, in any vocabulary worth the name
Result = TypeVar("Result")


@dataclass
class Service:
    """What every route needs. max_tokens: of an answer; requests may ask for fewer."""

    models: Models
    hub: Hub
    max_tokens: int
    metrics: Metrics
    texts: dict[str, TokenTexts] = field(default_factory=dict)
    _turns: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def turn(self) -> None:
        """Wait for a turn of the loop in which no other answer is begun: whoever comes meanwhile is heard first."""
        async with self._turns:
            await asyncio.sleep(0)

    def token_texts(self, served: ServedModel) -> TokenTexts:
        """The tokens of a model's vocabulary; written once."""
        return self.texts.setdefault(served.name, TokenTexts(served.tokenizer))


@dataclass(frozen=True)
class Target:
    """Who is asked. adapter: as the engine has it. job: the places in the queue that the request has."""

    service: Service
    served: ServedModel
    adapter: str | None
    job: Job

    @classmethod
    def of(cls, service: Service, body: SamplingFields, job: Job, prompts: int = 1) -> Target:
        """The model that a request names, with places for all its answers; `job` has one.

        Raises ApiError for a model that is not served, too many answers, or a full queue.
        """
        served, adapter = service.models.find(body.model)
        answers = prompts * (body.n or 1)
        if answers > MAX_ANSWERS:
            raise ApiError(400, f"n: more than {MAX_ANSWERS} answers in one request", param="n")
        service.hub.enlarge(job, answers - 1)
        return cls(service, served, adapter, job)

    def request(
        self, body: SamplingFields, ids: Sequence[int], *, max_tokens: int | None, param: str, **more: Any
    ) -> Request:
        """What the engine is asked for one prompt. param: the field that the prompt came in."""
        left = self.served.context - len(ids)
        if left < (max_tokens != 0):
            raise self.too_long(f"{len(ids):,} tokens", param)
        wanted = self.service.max_tokens if max_tokens is None else min(max_tokens, self.service.max_tokens)
        return Request(
            prompt=ids,
            seeds=seeds(body),
            max_new_tokens=min(wanted, left),
            stop=self.served.tokenizer.stop,
            sampling=sampling(body),
            adapter=self.adapter,
            client=self.job.client,
            should_stop=stop_watch(self.served.tokenizer, body),
            **more,
        )

    @property
    def answers(self) -> bool:
        """Whether the model, or the adapter that is asked, learned from conversations."""
        return self.served.answers_with(self.adapter)

    def lead(self, body: SamplingFields) -> list[int]:
        """The first tokens of an answer, which the client has already. Raises ApiError for what is no token."""
        if any(index >= self.served.loaded.model.config.vocab_size for index in body.continue_ids or ()):
            raise ApiError(400, "continue_ids: no such token", param="continue_ids")
        return list(body.continue_ids or ())

    async def prepare(self, work: Callable[[], Result], lengths: Sequence[int], param: str) -> Result:
        """Encode prompts of so many characters each, without holding up others. A refusal names the field.

        A stranger's template may take a second of processor time, however short the prompt.
        """
        if max(lengths) > CHARACTERS_PER_TOKEN * self.served.context:
            raise self.too_long(f"{max(lengths):,} characters", param)
        try:
            if not self.served.tokenizer.is_ours or sum(lengths) > INLINE_CHARACTERS:
                return await asyncio.to_thread(work)
            return work()
        except UserError as error:
            raise from_user_error(error, param) from None

    def too_long(self, length: str, param: str) -> ApiError:
        """The prompt leaves no space for an answer."""
        message = f"{param}: {length}; this model reads {self.served.context:,} tokens, its answer included"
        return ApiError(400, message, param=param, code="context_length_exceeded")


def seeds(body: SamplingFields) -> list[int]:
    """One for each answer: those after the first count on from it."""
    first = secrets.randbits(63) if body.seed is None else body.seed
    return [(first + number) % 2**64 for number in range(body.n or 1)]


def sampling(body: SamplingFields) -> Sampling:
    """How answers are drawn: as OpenAI's defaults say, where nothing is asked for."""
    given: dict[str, Any] = {
        "top_p": body.top_p,
        "top_k": body.top_k,
        "min_p": body.min_p,
        "repetition_penalty": body.repetition_penalty,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "logit_bias": {int(index): value for index, value in body.logit_bias.items()} if body.logit_bias else None,
    }
    temperature = 1.0 if body.temperature is None else body.temperature
    return Sampling(temperature=temperature, **{name: value for name, value in given.items() if value is not None})


def stop_watch(tokenizer: Tokenizer, body: SamplingFields) -> Callable[[int, int], bool] | None:
    """Ends each answer where it says a stop string; called in the engine's thread."""
    if not body.stop_texts:
        return None
    streams = [TextStream(tokenizer, body.stop_texts) for _ in range(body.n or 1)]
    return lambda answer, index: streams[answer].append(index)


class Choice(Protocol):
    """One answer. finish: why it has ended; None before."""

    finish: str | None

    def take(self, events: Sequence[Event]) -> list[dict[str, Any]]:
        """What events add, as the `choices` of chunks. Raises ApiError if the answer failed."""


class Work:
    """A request under way. object: its name in the answer; a stream's chunks may be called otherwise."""

    def __init__(
        self, target: Target, model: str, prefix: str, requests: Sequence[Request], choices: Sequence[Choice]
    ) -> None:
        self.service, self.model, self.choices = target.service, model, choices
        self.id, self.created = f"{prefix}-{secrets.token_hex(12)}", int(time.time())
        self.tally = Tally(target.served.context)
        self.job = target.job
        self.service.hub.submit(self.job, target.served.name, requests)
        for request in requests:
            self.tally.add_prompt(len(request.prompt), len(request.seeds))

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        self.service.hub.cancel(self.job)

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    async def stream(self, kind: str, opening: Sequence[dict[str, Any]], *, usage: bool) -> AsyncIterator[bytes]:
        """Chunks as they come. The last has no choices, but how fast it was, and usage where asked for."""
        before = b"data: " + dumps(self.head(kind))[:-1] + b',"choices":['

        def chunks(choices: Sequence[dict[str, Any]]) -> bytes:
            return b"".join(before + dumps(choice) + b"]}\n\n" for choice in choices)

        yield chunks(opening)
        said = b""
        async for lots in self._events():
            said = b"".join(chunks(self.choices[number].take(events)) for number, events in lots)
            if self.job.open:
                yield said
        last = {"usage": self.tally.usage} if usage else {}
        yield said + before + b"]," + dumps({**last, "penjing": self.tally.timing})[1:] + b"\n\n" + DONE

    async def whole(self) -> list[list[dict[str, Any]]]:
        """All that each choice has to say, once all have ended."""
        self.job.whole = True
        found: list[list[dict[str, Any]]] = [[] for _ in self.choices]
        async for lots in self._events():
            for number, events in lots:
                found[number] += self.choices[number].take(events)
        return found

    async def _events(self) -> AsyncIterator[list[tuple[int, list[Event]]]]:
        """What comes at one time, by the number of its answer."""
        async for numbered in self.service.hub.events(self.job):
            self.tally.first = self.job.first
            numbered.sort(key=lambda pair: pair[0])
            groups = groupby(numbered, key=lambda pair: pair[0])
            lots = [(number, [event for _, event in pairs]) for number, pairs in groups]
            for lot in lots:
                self.tally.saw(*lot)
            yield lots
        self.tally.record(self.service.metrics)
