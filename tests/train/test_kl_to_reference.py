"""The divergence on a model's own answers, beside a slow twin that makes all logits, one answer at a time."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from small_models import small_model

from penjing.infer.generate import sample_answers
from penjing.infer.sample import Sampling
from penjing.model.lora import Lora, add_adapter, trainable_state_dict
from penjing.parallel.single import Single
from penjing.train.stages.preference import BaseModelView, kl_to_reference

PROMPTS = [[3 + number, 7, 9 + number % 3] for number in range(40)]  # more than a chunk
SEEDS = list(range(40))
WRITE = partial(sample_answers, max_new_tokens=6, stop=(1, 2), sampling=Sampling(temperature=1.0))


def made(seed):
    model = small_model(seed=seed, noise=0, architecture="qwen3", vocab_size=50)
    with torch.no_grad():  # far from its start, where all answers are equally likely
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.3, generator=torch.Generator().manual_seed(seed))
    return model.eval()


def twin(model, reference):
    nats = tokens = 0.0
    for prompt, said in zip(PROMPTS, WRITE(model, PROMPTS, SEEDS), strict=True):
        ids = torch.tensor([[*prompt, *said]])
        with torch.no_grad():
            logq_TV, logp_TV = (each(ids)[0].log_softmax(-1) for each in (model, reference))
        for place in range(len(prompt) - 1, len(prompt) + len(said) - 1):
            nats += float((logq_TV[place].exp() * (logq_TV[place] - logp_TV[place])).sum())
            tokens += 1
    return nats, tokens


def test_it_is_the_divergence_summed_over_what_the_model_says():
    model, reference = made(1), made(2)
    nats, tokens = twin(model, reference)
    found = kl_to_reference(model, reference, PROMPTS, SEEDS, WRITE, Single(torch.device("cpu")), 32)
    assert found["val_kl"] == pytest.approx(nats / tokens, rel=1e-4)
    assert found["val_kl_per_answer"] == pytest.approx(nats / len(PROMPTS), rel=1e-4)
    assert found["val_own_answer_tokens"] == tokens / len(PROMPTS)


def test_of_a_model_from_itself_it_is_nothing():
    model = made(1)
    found = kl_to_reference(model, copy.deepcopy(model), PROMPTS, SEEDS, WRITE, Single(torch.device("cpu")), 32)
    assert found["val_kl"] == pytest.approx(0, abs=1e-6)


def test_an_adapter_is_compared_with_the_model_beneath_it():
    base, model = made(1), made(1)
    add_adapter(model, Lora(rank=2), seed=1)
    with torch.no_grad():
        for name, value in trainable_state_dict(model).items():
            if name.endswith(".B"):
                value.normal_(0, 0.3, generator=torch.Generator().manual_seed(3))
    found = kl_to_reference(model, BaseModelView(model), PROMPTS, SEEDS, WRITE, Single(torch.device("cpu")), 32)
    nats, _ = twin(model, base)
    assert nats > 0.1
    assert found["val_kl_per_answer"] == pytest.approx(nats / len(PROMPTS), rel=1e-4)


class TwoRanks(Single):
    """One of two ranks, as far as the share of the work goes."""

    def __init__(self, rank):
        super().__init__(torch.device("cpu"))
        self.rank, self.world, self.seen = rank, 2, None

    def all_reduce(self, value):
        self.seen = value.clone()
        return value


def test_ranks_share_the_answers():
    model, reference = made(1), made(2)
    whole = twin(model, reference)
    parts = []
    for rank in (0, 1):
        strategy = TwoRanks(rank)
        kl_to_reference(model, reference, PROMPTS, SEEDS, WRITE, strategy, 32)
        parts.append(strategy.seen)
    nats, tokens, answers = (parts[0] + parts[1]).tolist()
    assert (nats, tokens, answers) == pytest.approx((*whole, len(PROMPTS)), rel=1e-4)
