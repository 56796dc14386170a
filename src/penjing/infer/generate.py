"""Generate from prompts with a temporary engine."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from penjing import devices
from penjing.base.errors import UserError
from penjing.base.seeds import derive
from penjing.infer import cpu_forward
from penjing.infer.engine import Engine
from penjing.infer.forward import Forward, Weights, default_slots, default_tokens
from penjing.infer.requests import Completion, OnTurnEnd, Request
from penjing.infer.sample import Sampling
from penjing.infer.torch_forward import TorchForward
from penjing.model.transformer import Transformer


def make_forward(model: Transformer, *, num_slots: int, max_tokens: int, weights: Weights = "auto") -> Forward:
    """The fastest `Forward` for this model on its device."""
    reason = cpu_forward.supports(model)
    if not reason:
        return cpu_forward.CpuForward(model, num_slots=num_slots, max_tokens=max_tokens, weights=weights)
    if weights != "auto":
        raise UserError(f"only supported by the C kernels for CPUs: {reason}", where="weights", got=weights)
    return TorchForward(model, num_slots=num_slots, max_tokens=max_tokens)


def make_engine(
    model: Transformer, *, slots: int = 0, max_tokens: int = 0, weights: Weights = "auto", recover: bool = True
) -> Engine:
    """An engine for the model's current weights, on its device. Close it after use.

    slots: answers generated at once; 0 = `default_slots`. max_tokens: of prompt and answer together; 0 =
    `default_tokens`. weights: see `make_forward`. recover: see `Engine`.
    """
    max_tokens = min(max_tokens or default_tokens(model), model.config.max_position_embeddings)
    forward = make_forward(
        model, num_slots=slots or default_slots(model, max_tokens), max_tokens=max_tokens, weights=weights
    )
    return Engine(forward, prefill_chunk=devices.of(forward.device).prefill_chunk, recover=recover)


def sample_batch(
    model: Transformer,
    requests: Sequence[Request],
    *,
    max_new_tokens: int,
    stop: Collection[int],
    sampling: Sampling,
    slots: int = 0,
    score_temperature: float = 1.0,
    on_turn_end: OnTurnEnd | None = None,
    weights: Weights = "auto",
    recover: bool = False,
) -> list[list[Completion]]:
    """The answers to each request, in the order of its seeds.

    An answer ends with a stop id, after `max_new_tokens`, or when prompt and answer fill `max_position_embeddings`.
    slots: answers generated at once; 0 = 64 on a CPU, else 256. score_temperature: of `Completion.logp`.
    on_turn_end: for multi-turn answers. Injected tokens count to `max_new_tokens`; if they leave no space for one more
    token, they are dropped and the answer ends with "length". Token t of an answer uses random number t of its seed,
    in any turn. weights: see `make_forward`. recover: see `Engine`.
    Raises UserError for an empty prompt, or one that leaves no space, and any error of `on_turn_end`.
    """
    num_answers = sum(len(request.seeds) for request in requests)
    if not num_answers or max_new_tokens < 1:
        return [[Completion(finish_reason="length") for _ in request.seeds] for request in requests]
    longest_prompt = max(len(request.prompt) for request in requests if request.seeds)
    max_tokens = min(longest_prompt + max_new_tokens, model.config.max_position_embeddings)
    slots = min(slots or default_slots(model, max_tokens), num_answers)
    with make_engine(model, slots=slots, max_tokens=max_tokens, weights=weights, recover=recover) as engine:
        answers = {
            engine.submit(
                replace(
                    request, max_new_tokens=max_new_tokens, stop=stop, sampling=sampling,
                    score_temperature=score_temperature, on_turn_end=on_turn_end,
                )
            ): [Completion() for _ in request.seeds]
            for request in requests
        }  # fmt: skip
        while not engine.idle:
            for event in engine.step():
                answers[event.request_id][event.answer].add(event)
    return list(answers.values())


def sample_answers(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    *,
    max_new_tokens: int,
    stop: Collection[int],
    sampling: Sampling,
) -> list[list[int]]:
    """The ids of one answer to each prompt, with the stop id, sampled with the prompt's own seed."""
    requests = [Request(prompt=prompt, seeds=[seed]) for prompt, seed in zip(prompts, seeds, strict=True)]
    completions = sample_batch(model, requests, max_new_tokens=max_new_tokens, stop=stop, sampling=sampling)
    return [answers[0].ids for answers in completions]


def generate(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop: Collection[int],
    sampling: Sampling = Sampling(),
    seed: int = 0,
    rows: int = 0,
) -> list[list[int]]:
    """The continuation of each prompt, without the stop id.

    A text ends with a stop id, after `max_new_tokens`, or when it and its prompt fill `max_position_embeddings`. Each
    prompt has its own random numbers, derived from `seed` and its index. rows: texts generated at once.
    Raises UserError if a prompt is empty, or leaves no space in the model's longest sequence for one more token.
    """
    requests = [
        Request(prompt=prompt, seeds=(derive(seed, "generate", index),)) for index, prompt in enumerate(prompts)
    ]
    completions = sample_batch(
        model, requests, max_new_tokens=max_new_tokens, stop=stop, sampling=sampling, slots=rows, recover=True
    )
    return [one.ids[:-1] if one.finish_reason == "stop" else one.ids for (one,) in completions]
