"""From a request's fields to what the engine is asked: the same for both endpoints."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from penjing.base.errors import UserError
from penjing.infer.requests import Request
from penjing.infer.sample import Sampling
from penjing.serve.answers import Tally, TokenTexts
from penjing.serve.errors import ApiError, from_user_error
from penjing.serve.hub import Hub
from penjing.serve.limits import MAX_ANSWERS
from penjing.serve.metrics import Metrics
from penjing.serve.models import Models, ServedModel
from penjing.serve.schema import SamplingFields

INLINE_CHARACTERS = 2000  # longer texts are encoded in a thread of their own
CHARACTERS_PER_TOKEN = 64  # no text has more, in any vocabulary worth the name
Result = TypeVar("Result")


@dataclass
class Service:
    """What every route needs. max_tokens: of an answer, where a request asks for no fewer."""

    models: Models
    hub: Hub
    max_tokens: int
    metrics: Metrics = field(default_factory=Metrics)
    texts: dict[str, TokenTexts] = field(default_factory=dict)

    def token_texts(self, served: ServedModel) -> TokenTexts:
        return self.texts.setdefault(served.name, TokenTexts(served.tokenizer))


@dataclass(frozen=True)
class Target:
    """Who is asked, by whom. adapter: as the engine has it."""

    service: Service
    served: ServedModel
    adapter: str | None
    client: str

    @classmethod
    def of(cls, service: Service, body: SamplingFields, client: str, prompts: int = 1) -> Target:
        """Raises ApiError for a model that is not served, too many answers, or a full queue."""
        served, adapter = service.models.find(body.model)
        answers = prompts * (body.n or 1)
        if answers > MAX_ANSWERS:
            raise ApiError(400, f"n: more than {MAX_ANSWERS} answers in one request", param="n")
        service.hub.check(served.name, client, answers)
        return cls(service, served, adapter, client)

    def request(
        self, body: SamplingFields, ids: Sequence[int], *, max_tokens: int | None, param: str, **more: object
    ) -> Request:
        """What the engine is asked for one prompt. param: the field that the prompt came in."""
        room = self.served.context - len(ids)
        if room < (max_tokens != 0):
            message = f"{param}: {len(ids)} tokens; this model reads fewer than {self.served.context}, answer included"
            raise ApiError(400, message, param=param, code="context_length_exceeded")
        wanted = self.service.max_tokens if max_tokens is None else min(max_tokens, self.service.max_tokens)
        return Request(
            prompt=ids,
            seeds=seeds(body),
            max_new_tokens=min(wanted, room),
            stop=self.served.tokenizer.stop,
            sampling=sampling(body),
            adapter=self.adapter,
            client=self.client,
            **more,  # type: ignore[arg-type]
        )

    def tally(self) -> Tally:
        return Tally(self.served.context)

    def too_many_characters(self, number: int, param: str) -> None:
        """Raises ApiError for a text that cannot fit, before the work of encoding it."""
        if number > CHARACTERS_PER_TOKEN * self.served.context:
            message = f"{param}: {number:,} characters; this model reads fewer than {self.served.context} tokens"
            raise ApiError(400, message, param=param, code="context_length_exceeded")


def seeds(body: SamplingFields) -> list[int]:
    """One for each answer: those after the first count on from it."""
    first = secrets.randbits(63) if body.seed is None else body.seed
    return [(first + number) % 2**64 for number in range(body.n or 1)]


def sampling(body: SamplingFields) -> Sampling:
    """How answers are drawn: as OpenAI's defaults say, where nothing is asked for."""
    given = {
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


async def prepare(work: Callable[[], Result], characters: int, param: str) -> Result:
    """Encode a prompt, without holding up the others where it is long. A refusal names the field."""
    try:
        return work() if characters <= INLINE_CHARACTERS else await asyncio.to_thread(work)
    except UserError as error:
        raise from_user_error(error, param) from None
