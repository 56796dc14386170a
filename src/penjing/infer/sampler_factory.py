"""Samplers for stages: functions that answer prompts with the model being trained."""

from collections.abc import Callable, Collection, Sequence

from penjing.infer.generate import sample_batch
from penjing.infer.requests import Request
from penjing.infer.sample import Sampling
from penjing.model.transformer import Transformer

# (model, prompts, a seed per prompt, stop ids) -> the generated ids of each prompt, with the stop id
SampleFn = Callable[[Transformer, Sequence[Sequence[int]], Sequence[int], Collection[int]], list[list[int]]]


def make_sampler(max_new_tokens: int, sampling: Sampling) -> SampleFn:
    """Samples one answer per prompt, with the prompt's own seed."""

    def sample(
        model: Transformer, prompts: Sequence[Sequence[int]], seeds: Sequence[int], stop: Collection[int]
    ) -> list[list[int]]:
        requests = [Request(prompt=prompt, seeds=[seed]) for prompt, seed in zip(prompts, seeds, strict=True)]
        completions = sample_batch(model, requests, max_new_tokens=max_new_tokens, stop=stop, sampling=sampling)
        return [answers[0].ids for answers in completions]

    return sample
