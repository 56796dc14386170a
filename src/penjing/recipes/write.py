"""What stages use to have the model they train write: they stand below `infer` and beside it, and are handed this."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from penjing.infer.rollout import Request, rollout
from penjing.infer.sample import Sampling
from penjing.model.transformer import Transformer
from penjing.train.drift import Write


def writer(max_new_tokens: int, sampling: Sampling) -> Write:
    """Writes one answer to each prompt, drawn with the prompt's own seed."""

    def write(
        model: Transformer, prompts: Sequence[Sequence[int]], seeds: Sequence[int], stop: Collection[int]
    ) -> list[list[int]]:
        requests = [Request(prompt=prompt, seeds=[seed]) for prompt, seed in zip(prompts, seeds, strict=True)]
        written = rollout(model, requests, max_new_tokens=max_new_tokens, stop=stop, sampling=sampling)
        return [answers[0].ids for answers in written]

    return write
