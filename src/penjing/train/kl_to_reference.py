"""The KL divergence of a model from its start weights, on the model's own answers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from penjing.infer.sampler_factory import SampleFn
from penjing.loader.group_sampler import pack_tight
from penjing.loader.shared_prompt_batch import Answer, Group
from penjing.model.lora import adapter_scope
from penjing.model.transformer import Transformer
from penjing.objective.distill import Distill, Distillation
from penjing.parallel.base import Strategy
from penjing.train.stages.held_out import summed_over_ranks


class BaseModelView:
    """A model with its adapters switched off, with the interface of a teacher."""

    def __init__(self, model: Transformer) -> None:
        self._model = model

    def hidden(self, *args: Any, **kwargs: Any) -> Tensor:
        with adapter_scope(self._model, None):
            return self._model.hidden(*args, **kwargs)

    @property
    def head_weight_VD(self) -> Tensor:
        return self._model.head_weight_VD  # the head has no adapter

    @property
    def compute_dtype(self) -> torch.dtype | None:
        return self._model.compute_dtype


@torch.no_grad()
def kl_to_reference(
    model: Transformer,
    reference: Transformer | BaseModelView,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    write: SampleFn,
    stop: Collection[int],
    strategy: Strategy,
    size: int,
) -> dict[str, float]:
    """KL(model || reference) on one sampled answer to each prompt, in nats per token and per answer.

    The expectation over the next token is exact, that over answers is sampled: sum_t KL(model(.|y<t) ||
    reference(.|y<t)) with y sampled from the model. Its mean is the divergence of answers, it is never negative, and it
    varies less than estimates from the sampled tokens alone (k1, k3). Each rank answers its share, `size` at a time.
    """
    objective = Distillation(Distill(divergence="reverse"), reference)  # type: ignore[arg-type]  # the same interface
    nats = tokens = number = 0.0
    for first in range(strategy.rank * size, len(prompts), strategy.world * size):
        chunk = slice(first, min(first + size, len(prompts)))
        answers = write(model, prompts[chunk], seeds[chunk], stop)
        groups = [
            Group(prompt=prompt, answers=[Answer(ids=answer, values={"from_data": [0.0] * len(answer)})])
            for prompt, answer in zip(prompts[chunk], answers, strict=True)
        ]
        batch = pack_tight(groups).to(strategy.device)
        nats += float(objective(model, batch).parts["divergence"])
        tokens += float(objective.weight(batch))
        number += batch.num_answers
    nats, tokens, number = summed_over_ranks([nats, tokens, number], strategy)
    return {
        "val_kl": nats / max(1.0, tokens),
        "val_kl_per_answer": nats / max(1.0, number),
        "val_own_answer_tokens": tokens / max(1.0, number),
    }
