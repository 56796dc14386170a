"""Prompts with branches: each answer is scored as if it stood alone after its prompt."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_models import small_model
from user_errors import raises_user_error

from penjing.loader.shared_prompt_batch import Answer, Group, pack
from penjing.objective.run_model import run_model


def groups(seed=0):
    generator = np.random.default_rng(seed)

    def ids(low, high):
        return generator.integers(1, 40, generator.integers(low, high)).tolist()

    return [
        Group(
            prompt=ids(3, 12),
            answers=[Answer(ids=ids(1, 9), values={"mark": [0.0]}) for _ in range(generator.integers(1, 4))],
        )
        for _ in range(7)
    ]


def with_marks(made):
    return [
        Group(
            prompt=group.prompt,
            answers=[
                Answer(ids=answer.ids, values={"mark": [float(token) for token in answer.ids]})
                for answer in group.answers
            ],
            figures={"label": [float(len(answer.ids)) for answer in group.answers]},
        )
        for group in made
    ]


@pytest.fixture(params=[{}, {"architecture": "qwen2", "sliding_window": 6}], ids=["full", "window"])
def model(request):
    return small_model(noise=0.15, vocab_size=40, max_position_embeddings=128, **request.param)


def test_each_answer_is_scored_as_if_alone(model):
    made = with_marks(groups())
    batch = pack(made, 48)
    assert batch.ids_BT.shape[0] < len(made)
    logp_2N = run_model(model, batch)
    alone, entropy = [], []
    for group in made:
        for answer in group.answers:
            ids_BT = torch.tensor([[*group.prompt, *answer.ids]])
            logp_TV = model(ids_BT)[0].log_softmax(-1)
            place_T = torch.arange(len(group.prompt) - 1, ids_BT.shape[1] - 1)
            alone.append(logp_TV[place_T, ids_BT[0, place_T + 1]])
            entropy.append(-(logp_TV[place_T].exp() * logp_TV[place_T]).sum(-1))
    torch.testing.assert_close(logp_2N[0], torch.cat(alone), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logp_2N[1], torch.cat(entropy), rtol=1e-4, atol=1e-5)


def test_gradients_are_those_of_the_answers_alone(model):
    made = with_marks(groups(1))
    batch = pack(made, 48)
    scale_A = torch.linspace(-1, 1, batch.num_answers)
    (batch.sum_A(run_model(model, batch)[0]) * scale_A).sum().backward()
    packed = {name: value.grad.clone() for name, value in model.named_parameters()}
    model.zero_grad()
    scales = iter(scale_A)
    for group in made:
        for answer in group.answers:
            ids_BT = torch.tensor([[*group.prompt, *answer.ids]])
            logp_TV = model(ids_BT)[0].log_softmax(-1)
            place_T = torch.arange(len(group.prompt) - 1, ids_BT.shape[1] - 1)
            (logp_TV[place_T, ids_BT[0, place_T + 1]].sum() * next(scales)).backward()
    for name, value in model.named_parameters():
        torch.testing.assert_close(packed[name], value.grad, rtol=1e-3, atol=1e-5, msg=name)


def test_order_values_and_lengths():
    made = with_marks(groups(2))
    batch = pack(made, 64)
    answers = [answer for group in made for answer in group.answers]
    assert batch.target_N.tolist() == [token for answer in answers for token in answer.ids]
    assert batch.values["mark"].tolist() == batch.target_N.tolist()
    assert batch.figures["label"].tolist() == batch.length_A().tolist() == [len(answer.ids) for answer in answers]
    assert batch.group_A.tolist() == [index for index, group in enumerate(made) for _ in group.answers]
    assert batch.num_tokens == sum(group.num_tokens for group in made) == int((batch.document_BT >= 0).sum())
    row_A = batch.row_A()
    assert all((batch.document_BT[row] == group).any() for row, group in zip(row_A, batch.group_A, strict=True))


def test_given_tokens_do_not_count():
    group = Group(prompt=[1, 2], answers=[Answer(ids=[3, 4, 5], weights=[1.0, 0.0, 1.0])])
    batch = pack([group], 32)
    assert batch.length_A().tolist() == [2.0]
    assert batch.sum_A(torch.tensor([1.0, 10.0, 100.0])).tolist() == [101.0]


def test_a_group_longer_than_a_row_is_refused():
    with raises_user_error(where="data.seq_len", got=8):
        pack([Group(prompt=[1] * 9, answers=[Answer(ids=[2, 2, 2])])], 8)


def test_rows_are_well_filled():
    sizes = np.random.default_rng(0).integers(20, 120, 400).tolist()
    batch = pack([Group(prompt=[1] * size, answers=[Answer(ids=[2])]) for size in sizes], 256)
    numbers, lengths = np.unique(batch.document_BT, return_counts=True)
    assert numbers.tolist() == list(range(-1, 400))
    assert lengths[1:].tolist() == sizes
    assert sum(sizes) / (256 * len(batch.ids_BT)) > 0.97
