"""From request fields to engine requests, and from events to JSON; shared by both endpoints."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from penjing import __version__
from penjing.base.errors import UserError
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.infer.requests import Event, Request
from penjing.infer.sample import Sampling
from penjing.infer.text_stream import TextStream
from penjing.serve.errors import ApiError, from_user_error
from penjing.serve.hub import Batches, Hub, Job
from penjing.serve.limits import MAX_ANSWERS
from penjing.serve.metrics import Metrics
from penjing.serve.models import Models, ServedModel
from penjing.serve.pool import FairPool
from penjing.serve.response_fields import RequestStats, TokenTexts
from penjing.serve.schema import SamplingFields
from penjing.serve.streams import DONE, dumps

INLINE_CHARACTERS = 2000  # longer texts are tokenized in another thread
HEAVY_SECONDS = 0.1  # a grammar that takes longer to compile has taken megabytes
CHARACTERS_PER_TOKEN = 64  # an upper bound for real vocabularies
Result = TypeVar("Result")


@dataclass
class Service:
    """What every route needs. max_tokens: the limit of one answer; a request may set a lower one."""

    models: Models
    hub: Hub
    max_tokens: int
    metrics: Metrics
    grammars: FairPool
    tools: FairPool
    texts: dict[str, TokenTexts] = field(default_factory=dict)

    def token_texts(self, served: ServedModel) -> TokenTexts:
        return self.texts.setdefault(served.name, TokenTexts(served.tokenizer))


@dataclass(frozen=True)
class Target:
    """The model of a request. adapter: see `Request.adapter`. job: the request's reserved places in the queue."""

    service: Service
    served: ServedModel
    adapter: str | None
    job: Job

    @classmethod
    def of(cls, service: Service, body: SamplingFields, job: Job, prompts: int = 1) -> Target:
        """The model that a request names, with queue places for all its answers; `job` already has one. Raises ApiError
        for a model that is not served, too many answers, or a full queue."""
        served, adapter = service.models.find(body.model)
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "stream_options: only with stream", param="stream_options")
        answers = prompts * (body.n or 1)
        if answers > MAX_ANSWERS:
            raise ApiError(400, f"n: more than {MAX_ANSWERS} answers in one request", param="n")
        service.hub.reserve(job, answers - 1)
        return cls(service, served, adapter, job)

    def request(
        self, body: SamplingFields, ids: Sequence[int], *, max_tokens: int | None, param: str, **more: Any
    ) -> Request:
        """The engine request for one prompt. param: the field with the prompt, for error messages."""
        free = self.served.context - len(ids)
        if free < (max_tokens != 0):
            raise self.too_long(f"{len(ids)} tokens", param)
        max_new_tokens = self.service.max_tokens if max_tokens is None else min(max_tokens, self.service.max_tokens)
        return Request(
            prompt=ids,
            seeds=seeds(body),
            max_new_tokens=min(max_new_tokens, free),
            stop=self.served.tokenizer.stop,
            sampling=sampling(body),
            adapter=self.adapter,
            client=self.job.client,
            should_stop=stop_watch(self.served.tokenizer, body),
            **more,
        )

    def prefix_ids(self, body: SamplingFields) -> list[int]:
        """The first tokens of an answer, which the client sent. Raises ApiError for an id outside the vocabulary."""
        if any(index >= self.served.loaded.model.config.vocab_size for index in body.continue_ids or ()):
            raise ApiError(400, "continue_ids: no such token", param="continue_ids")
        return list(body.continue_ids or ())

    async def encode(
        self, function: Callable[[], Result], lengths: Sequence[int], param: str, *, has_grammar: bool = False
    ) -> Result:
        """Tokenize prompts of these lengths in characters without blocking the event loop. An error names the field. An
        external chat template may take a second of CPU time even for a short prompt."""
        if max(lengths) > CHARACTERS_PER_TOKEN * self.served.context:
            raise self.too_long(f"{max(lengths)} characters", param)
        try:
            if has_grammar:
                began = time.perf_counter()
                try:
                    return await self.service.grammars.run(self.job.client, function)
                finally:
                    self.job.is_heavy = time.perf_counter() - began > HEAVY_SECONDS
            if not self.served.tokenizer.is_ours or sum(lengths) > INLINE_CHARACTERS:
                return await asyncio.to_thread(function)
            return function()
        except UserError as error:
            raise from_user_error(error, param) from None
        except (RecursionError, UnicodeEncodeError):
            raise ApiError(400, f"{param}: nested too deeply, or half a character", param=param) from None

    def too_long(self, length: str, param: str) -> ApiError:
        """The prompt leaves no space for an answer."""
        message = (
            f"This model's maximum context length is {self.served.context} tokens. However, your {param} resulted in "
            f"{length}, which leaves no space for an answer. Please reduce the length of the {param}."
        )
        return ApiError(400, message, param=param, code="context_length_exceeded")


def seeds(body: SamplingFields) -> list[int]:
    """One seed per answer, counting up from the first."""
    first = secrets.randbits(63) if body.seed is None else body.seed
    return [(first + number) % 2**64 for number in range(body.n or 1)]


def sampling(body: SamplingFields) -> Sampling:
    """The sampling settings, with OpenAI's defaults."""
    names = ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    options: dict[str, Any] = {name: getattr(body, name) for name in names}
    if body.logit_bias:
        options["logit_bias"] = {int(index): value for index, value in body.logit_bias.items()}
    temperature = 1.0 if body.temperature is None else body.temperature
    return Sampling(temperature=temperature, **{name: value for name, value in options.items() if value is not None})


def stop_watch(tokenizer: Tokenizer, body: SamplingFields) -> Callable[[int, int], bool] | None:
    """A `should_stop` that ends an answer at a stop string; called in the engine thread."""
    if not body.stop_texts:
        return None
    streams = [TextStream(tokenizer, body.stop_texts) for _ in range(body.n or 1)]
    return lambda answer, index: streams[answer].extend([index])


class Choice(Protocol):
    """One answer. finish: its finish reason; None while it runs."""

    finish: str | None

    @property
    def reasoning_tokens(self) -> int: ...

    def take(self, events: Sequence[Event]) -> list[dict[str, Any]]:
        """Events as the `choices` of stream chunks. Raises ApiError if the answer failed."""


class PendingResponse:
    """A submitted request, and its response as a stream or complete."""

    def __init__(
        self, target: Target, body: SamplingFields, prefix: str, requests: Sequence[Request], choices: Sequence[Choice]
    ) -> None:
        self.service, self.model, self.choices = target.service, body.model, choices
        self.id, self.created = f"{prefix}-{secrets.token_hex(12)}", int(time.time())
        self.stats = RequestStats(target.served.context)
        self.job = target.job
        self.job.collect_all = not body.stream
        self.service.hub.submit(self.job, target.served.name, requests)
        for request in requests:
            self.stats.add_prompt(len(request.prompt), len(request.seeds))

    def meta(self, kind: str) -> dict[str, Any]:
        answer = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**answer, "system_fingerprint": f"penjing-{__version__}"}

    @property
    def usage(self) -> dict[str, Any]:
        details = {"reasoning_tokens": sum(choice.reasoning_tokens for choice in self.choices)}
        return {**self.stats.usage, "completion_tokens_details": details}

    async def stream(self, kind: str, opening: Sequence[dict[str, Any]], *, usage: bool) -> AsyncIterator[bytes]:
        """Stream the chunks. The last one has the timing; if the usage is requested, that too, and no choices."""
        prefix = b"data: " + dumps(self.meta(kind))[:-1] + b',"choices":['
        suffix = b'],"usage":null}\n\n' if usage else b"]}\n\n"

        def chunks(choices: Sequence[dict[str, Any]]) -> bytes:
            return b"".join(prefix + dumps(choice) + suffix for choice in choices)

        yield chunks(opening)
        new: list[dict[str, Any]] = []
        async for batches in self._events():
            new = [chunk for number, events in batches for chunk in self.choices[number].take(events)]
            if self.job.num_open:
                yield chunks(new)
        last = b"" if usage else dumps(new.pop())
        final = {"usage": self.usage} if usage else {}
        yield chunks(new) + prefix + last + b"]," + dumps({**final, "penjing": self.stats.timing})[1:] + b"\n\n" + DONE

    async def collect(self) -> list[list[dict[str, Any]]]:
        """The chunks of each choice, after all have ended."""
        events_of_choice: list[list[Event]] = [[] for _ in self.choices]
        async for batches in self._events():
            for number, events in batches:
                events_of_choice[number] += events
        return [choice.take(events) for choice, events in zip(self.choices, events_of_choice, strict=True)]

    async def _events(self) -> AsyncIterator[Batches]:
        async for batches in self.service.hub.events(self.job):
            self.stats.first_token_at = self.job.first_token_at
            for number, events in batches:
                self.stats.observe(number, events)
            yield batches
        self.stats.record(self.service.metrics)
