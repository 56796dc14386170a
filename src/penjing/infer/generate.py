"""Text without further ado: an engine for as long as these prompts take."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from penjing.base.seeds import derive
from penjing.infer.engine import Engine
from penjing.infer.forward import Weights, default_slots, default_tokens, make_forward
from penjing.infer.requests import Completion, Ended, Event, Follow, Request
from penjing.infer.sample import Sampling
from penjing.model.transformer import Transformer

# Tokens of prompts read in one step: a CPU has enough to do with few.
PREFILL_CHUNK = {"cpu": 256}
PREFILL_CHUNK_ELSEWHERE = 4096


def make_engine(
    model: Transformer, *, slots: int = 0, max_tokens: int = 0, weights: Weights = "auto", recover: bool = True
) -> Engine:
    """An engine for the model as it is now, on its device. Close it when it is done.

    slots: answers written at once; 0 = as `default_slots`. max_tokens: of prompt and answer together; 0 = as
    `default_tokens`. weights: see `make_forward`. recover: see `Engine`.
    """
    max_tokens = min(max_tokens or default_tokens(model), model.config.max_position_embeddings)
    forward = make_forward(
        model, num_slots=slots or default_slots(model, max_tokens), max_tokens=max_tokens, weights=weights
    )
    chunk = PREFILL_CHUNK.get(forward.device.type, PREFILL_CHUNK_ELSEWHERE)
    return Engine(forward, prefill_chunk=chunk, recover=recover)


def sample_batch(
    model: Transformer,
    requests: Sequence[Request],
    *,
    max_new_tokens: int,
    stop: Collection[int],
    sampling: Sampling,
    slots: int = 0,
    score_temperature: float = 1.0,
    follow: Follow | None = None,
    weights: Weights = "auto",
) -> list[list[Completion]]:
    """The answers to every request, in the order of its seeds.

    An answer ends with a stop id, after `max_new_tokens`, or when prompt and answer hold `max_position_embeddings`.
    slots: how many are written at once; 0 = 64 on a CPU, else 256. score_temperature: of `Completion.logp`.
    follow: makes answers of several turns; what it gives counts to `max_new_tokens`, and where it leaves no space for
    one more token it is not read, and the answer has ended by its length. The token at place t of an answer is drawn
    with number t of its seed's, whichever turn it is in. weights: see `make_forward`.
    Raises UserError for an empty prompt, or one that leaves no space, and what `follow` raises.
    """
    asked = sum(len(request.seeds) for request in requests)
    if not asked or max_new_tokens < 1:
        empty = Completion(ids=[], logp=[], drawn_logp=[], ended="length")
        return [[empty] * len(request.seeds) for request in requests]
    longest = max(len(request.prompt) for request in requests if request.seeds)
    max_tokens = min(longest + max_new_tokens, model.config.max_position_embeddings)
    slots = min(slots or default_slots(model, max_tokens), asked)
    with make_engine(model, slots=slots, max_tokens=max_tokens, weights=weights, recover=False) as engine:
        tickets = {
            engine.submit(
                replace(
                    request, max_new_tokens=max_new_tokens, stop=stop, sampling=sampling,
                    score_temperature=score_temperature, follow=follow,
                )
            ): [_Gathered() for _ in request.seeds]
            for request in requests
        }  # fmt: skip
        while not engine.idle:
            for event in engine.step():
                tickets[event.ticket][event.answer].add(event)
    return [[one.completion() for one in gathered] for gathered in tickets.values()]


class _Gathered:
    """An answer's events."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.logp: list[float] = []
        self.drawn_logp: list[float] = []
        self.said: list[bool] = []
        self.notes: list[object] = []
        self.ended: Ended = ""

    def add(self, event: Event) -> None:
        if event.error is not None:
            raise event.error
        if event.token is not None:
            self.ids.append(event.token.id)
            self.logp.append(event.token.logp)
            self.drawn_logp.append(event.token.drawn_logp)
        if event.given is not None:
            given = len(event.given.ids)
            self.said += [True] * (len(self.ids) - len(self.said)) + [False] * given
            self.ids += event.given.ids
            self.logp += [0.0] * given
            self.drawn_logp += [0.0] * given
            self.notes.append(event.given.note)
        self.ended = event.ended

    def completion(self) -> Completion:
        assert self.ended == "stop" or self.ended == "length", self.ended
        said = [*self.said, *[True] * (len(self.ids) - len(self.said))] if self.said else None
        return Completion(
            ids=self.ids, logp=self.logp, drawn_logp=self.drawn_logp, ended=self.ended, said=said,
            notes=tuple(self.notes),
        )  # fmt: skip


def generate(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop: Collection[int],
    sampling: Sampling = Sampling(),
    seed: int = 0,
    rows: int = 0,
    adapters: Sequence[str | None] | None = None,
) -> list[list[int]]:
    """The continuation of each prompt, without the stop id.

    A text ends with a stop id, after `max_new_tokens`, and when it and its prompt hold `max_position_embeddings`. Each
    prompt draws from numbers of its own, made from `seed` and its place. rows: texts written at once. adapters: the
    name of each prompt's (None: the base alone); without it, what `lora.set_adapter` has set.
    Raises UserError if a prompt is empty, or leaves no space in the model's longest sequence for one more token.
    """
    written: list[list[int]] = [[] for _ in prompts]
    if not prompts or max_new_tokens < 1:
        return written
    max_tokens = min(max(map(len, prompts)) + max_new_tokens, model.config.max_position_embeddings)
    slots = min(rows or default_slots(model, max_tokens), len(prompts))
    with make_engine(model, slots=slots, max_tokens=max_tokens) as engine:
        for place, prompt in enumerate(prompts):
            engine.submit(
                Request(
                    prompt=prompt,
                    seeds=(derive(seed, "generate", place),),
                    max_new_tokens=max_new_tokens,
                    stop=stop,
                    sampling=sampling,
                    adapter=None if adapters is None else adapters[place] or "",
                )
            )
        while not engine.idle:
            for event in engine.step():
                if event.error is not None:
                    raise event.error
                if event.token is not None and event.ended != "stop":
                    written[event.ticket].append(event.token.id)
    return written
