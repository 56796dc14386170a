"""Sampled answers for the tests of policy objectives."""

from __future__ import annotations

import numpy as np
import torch
from small_models import small_model

from penjing.loader.shared_prompt_batch import Answer, Group, pack


def make_model(**changes):
    return small_model(noise=0.15, **{"vocab_size": 40, "max_position_embeddings": 128, **changes})


def make_groups(seed=0, prompts=4, answers=3, given=False):
    """Groups with log-probabilities near those of an untrained model; some tokens are given where asked for."""
    generator = np.random.default_rng(seed)
    made = []
    for _ in range(prompts):
        own = []
        for _ in range(answers):
            length = int(generator.integers(1, 9))
            weights = (generator.random(length) < 0.7).astype(float).tolist() if given and length > 2 else None
            own.append(
                Answer(
                    ids=generator.integers(1, 40, length).tolist(),
                    weights=weights,
                    values={
                        "behaviour": generator.normal(-3.7, 0.6, length).tolist(),
                        "reference": generator.normal(-3.7, 0.6, length).tolist(),
                    },
                )
            )
        figures = {
            "advantage": generator.normal(0, 1, answers).tolist(),
            "reward": generator.random(answers).tolist(),
        }
        made.append(Group(prompt=generator.integers(1, 40, 5).tolist(), answers=own, figures=figures))
    return made


def make_batch(**changes):
    return pack(make_groups(**changes), 64)


def padded(value_N, batch):
    """[A, T] of a value of each token, and the mask of those that the model said."""
    lengths = torch.bincount(batch.answer_N, minlength=batch.num_answers)
    column_N = torch.cat([torch.arange(int(length)) for length in lengths])
    shape = (batch.num_answers, int(lengths.max()))
    value_AT = torch.zeros(shape).index_put((batch.answer_N, column_N), value_N)
    mask_AT = torch.zeros(shape).index_put((batch.answer_N, column_N), batch.weight_N)
    return value_AT, mask_AT
