"""Judged answers on their way into batches, and the reference that they are compared with."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from small_models import small_model

from penjing.data.chat.render import EncodedChat
from penjing.data.formats import Message
from penjing.data.preference_shards import TokenGroup
from penjing.loader.shared_prompt_batch import Answer, Group, pack
from penjing.model.lora import Lora, adapted, add_adapter
from penjing.model.value_head import ScalarHead
from penjing.objective.base import Loss
from penjing.parallel.single import Single
from penjing.train.stages import reward
from penjing.train.stages.held_out import held_out_means
from penjing.train.stages.preference import _PreferenceSplit
from penjing.train.stages.reference import base_log_probs

RUN = SimpleNamespace(seed=1, data=SimpleNamespace(seq_len=64))
ENGINE = Single(torch.device("cpu"))


def test_each_question_gets_the_answers_of_another_one_which_count_for_nothing_else():
    """KTO's estimate, arXiv:2402.01306 section 4.2. A prompt and its answer carry the same number here."""
    groups = [TokenGroup([n], (EncodedChat([100 + n, 0], [1, 1]),), (n % 2 == 0,)) for n in range(7)]
    half = _PreferenceSplit(groups, RUN, mismatched=True)
    partners = []
    for number in range(7):
        group = half.group(number)
        own, other = group.answers
        assert list(own.ids) == [100 + number, 0]
        partners.append(other.ids[0] - 100)
        assert group.figures["mismatched"] == [0.0, 1.0]
        assert group.figures["desirable"] == [float(number % 2 == 0), 0.0]
    assert sorted(partners) == list(range(7))
    assert all(partner != number for number, partner in enumerate(partners))


def test_without_mismatched_answers_a_pair_is_a_pair():
    group = TokenGroup([5], (EncodedChat([6, 0], [1, 1]), EncodedChat([7, 8, 0], [1, 0, 1])), (True, False), 0.5)
    made_of = _PreferenceSplit([group], RUN, mismatched=False).group(0)
    assert [list(answer.ids) for answer in made_of.answers] == [[6, 0], [7, 8, 0]]
    assert [list(answer.weights or ()) for answer in made_of.answers] == [[1, 1], [1, 0, 1]]
    assert made_of.figures["mismatched"] == [0.0, 0.0]


def test_the_reference_of_adapters_is_the_base():
    model, prompt, answers = small_model(), (3, 5, 7), [[7, 3, 0], [2, 0]]
    with torch.no_grad():
        wanted = []
        for ids in answers:
            logp_TV = model(torch.tensor([[*prompt, *ids]]))[0, len(prompt) - 1 : -1].log_softmax(-1)
            wanted.append(logp_TV.gather(1, torch.tensor(ids)[:, None])[:, 0])
    add_adapter(model, Lora(rank=2))
    for layer in adapted(model).values():
        layer.adapters["default"].B.data.normal_(0, 0.3, generator=torch.Generator().manual_seed(1))
    batch = pack([Group(prompt=prompt, answers=[Answer(ids=ids) for ids in answers])], 64)
    torch.testing.assert_close(base_log_probs(model, batch), torch.cat(wanted), rtol=1e-4, atol=1e-4)


def test_held_out_figures_are_means_over_units():
    class Sums:
        def __call__(self, model, batch):
            return Loss(torch.tensor(0.0), {"nats": torch.tensor(float(batch.worth))})

        def weight(self, batch):
            return torch.tensor(float(batch.units))

    batches = [SimpleNamespace(worth=6, units=2), SimpleNamespace(worth=1, units=5)]
    for batch in batches:
        batch.to = lambda device, batch=batch: batch
    assert held_out_means(Sums(), None, batches, ENGINE) == {"val_nats": pytest.approx(1.0)}


def test_a_judge_reads_where_the_end_of_the_last_answer_is_predicted(monkeypatch):
    model = small_model()
    head = ScalarHead(model)
    head.scalar.data.normal_(generator=torch.Generator().manual_seed(2))
    ids, weights = [3, 4, 5, 6, 7, 0, 9], [0, 0, 1, 1, 1, 1, 0]  # the last is a newline after the turn
    monkeypatch.setattr(reward, "render", lambda *_, **options: EncodedChat(ids, weights))
    found = reward.RewardScorer(head.eval(), None).rewards([([Message(role="user", content="?")], ())])
    with torch.no_grad():
        hidden_BTD = model.hidden(torch.tensor([ids[:5]]))
    assert found == pytest.approx([(hidden_BTD[0, -1] @ head.scalar.detach()).item()], rel=1e-5)
    assert math.isfinite(found[0])
