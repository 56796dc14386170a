"""Samplers for stages: functions with which the model being trained answers prompts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from penjing.infer.generate import sample_batch
from penjing.infer.requests import Request
from penjing.infer.sample import Sampling
from penjing.model.transformer import Transformer

# prompts, a seed for each, ids that end an answer -> what the model says after each, with the id that ended it
Write = Callable[[Transformer, Sequence[Sequence[int]], Sequence[int], Collection[int]], list[list[int]]]


def make_sampler(max_new_tokens: int, sampling: Sampling) -> Write:
    """Writes one answer to each prompt, drawn with the prompt's own seed."""

    def write(
        model: Transformer, prompts: Sequence[Sequence[int]], seeds: Sequence[int], stop: Collection[int]
    ) -> list[list[int]]:
        requests = [Request(prompt=prompt, seeds=[seed]) for prompt, seed in zip(prompts, seeds, strict=True)]
        written = sample_batch(model, requests, max_new_tokens=max_new_tokens, stop=stop, sampling=sampling)
        return [answers[0].ids for answers in written]

    return write
