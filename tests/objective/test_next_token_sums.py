"""An objective returns sums, so any split of a batch gives the same gradients after one division."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from small_models import small_model

from penjing.data.packing.concat import Row
from penjing.loader.batch import collate
from penjing.objective.base import Loss
from penjing.objective.next_token import NextToken

ROW_TOKENS, NUM_ROWS = 12, 6


def rows(seed=0, weighted=0.5):
    """Rows of two documents and a padded end; each row has its own number of targets, one has none."""
    generator = np.random.default_rng(seed)
    made = []
    for number in range(NUM_ROWS):
        document = np.repeat([0, 1, -1], [5, 4, 3])
        weight = (generator.random(ROW_TOKENS) < weighted * number / 3).astype(np.float32) * (document >= 0)
        ids = generator.integers(0, 50, ROW_TOKENS + 1)
        made.append(Row(ids[:-1], ids[1:], document, weight.astype(np.float32)))
    return made


@pytest.fixture
def model():
    return small_model(noise=0.1, vocab_size=50, num_hidden_layers=1)


def gradients(model, splits, mtp_weight=None):
    """Gradients of the mean loss, with the batch worked on in micro-batches of these numbers of rows."""
    objective, all_rows = NextToken(), rows()
    batches, first = [], 0
    for size in splits:
        batches.append(replace(collate(all_rows[first : first + size]), mtp_weight=mtp_weight))
        first += size
    assert first == NUM_ROWS
    units = sum(objective.weight(batch) for batch in batches)
    model.zero_grad(set_to_none=True)
    total = torch.zeros(())
    for batch in batches:
        loss = objective(model, batch)
        (loss.total / units).backward()
        total += loss.total.detach()
    return units, total, [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("mtp_weight", [None, torch.tensor(0.5)])
@pytest.mark.parametrize("splits", [(1, 1, 1, 1, 1, 1), (3, 3), (1, 5), (2, 1, 3)])
def test_any_split_into_micro_batches_gives_the_same_gradients(model, splits, mtp_weight):
    units, total, expected = gradients(model, (NUM_ROWS,), mtp_weight)
    split_units, split_total, found = gradients(model, splits, mtp_weight)
    assert units == split_units == sum(row.weight_T.sum() for row in rows())
    torch.testing.assert_close(split_total, total, rtol=1e-5, atol=0)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()


def test_the_splits_really_have_unequal_weights():
    weights = [float(row.weight_T.sum()) for row in rows()]
    assert weights[0] == 0
    assert len(set(weights)) > 3


def test_weights_scale_and_silence_targets(model):
    objective = NextToken()
    whole = rows(weighted=10)
    loss = objective(model, collate(whole))
    assert isinstance(loss, Loss)
    assert loss.total.dtype == torch.float32
    assert loss.total.requires_grad
    expected = 0.0
    for row in whole:
        with torch.no_grad():
            logits_TV = model(torch.from_numpy(row.ids_T)[None], torch.from_numpy(row.document_T)[None])[0]
        logp_T = logits_TV.log_softmax(-1)[torch.arange(ROW_TOKENS), torch.from_numpy(row.target_T)]
        expected -= float((logp_T * torch.from_numpy(row.weight_T)).sum())
    assert loss.total.item() == pytest.approx(expected, rel=1e-5)
    doubled = [Row(row.ids_T, row.target_T, row.document_T, row.weight_T * 2) for row in whole]
    assert objective(model, collate(doubled)).total.item() == pytest.approx(2 * expected, rel=1e-5)
    assert float(objective.weight(collate(doubled))) == 2 * float(objective.weight(collate(whole)))


def test_a_batch_without_targets_is_zero(model):
    batch = collate(rows()[:1])
    loss = NextToken()(model, batch)
    assert float(NextToken().weight(batch)) == 0
    assert loss.total.item() == 0
    loss.total.backward()
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.parameters())


def test_the_second_loss_is_that_of_the_token_after_the_next_one(model):
    """Against a softmax over all logits: values and gradients, also of targets that end their document."""
    batch = replace(collate(rows(weighted=10)), mtp_weight=torch.tensor(0.3))
    loss = NextToken()(model, batch)
    loss.total.backward()
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    expected, reported = torch.zeros(()), 0.0
    for row in rows(weighted=10):
        logits_TV = model(torch.from_numpy(row.ids_T)[None], torch.from_numpy(row.document_T)[None])[0]
        logp_TV = logits_TV.log_softmax(-1)
        for at in np.flatnonzero(row.weight_T):
            last = at + 1 == ROW_TOKENS or not row.weight_T[at + 1] or row.document_T[at] != row.document_T[at + 1]
            second = row.target_T[at if last else at + 1]
            expected = expected - logp_TV[at, row.target_T[at]] - 0.3 * logp_TV[at, second]
            reported -= logp_TV[at, row.target_T[at]].item()
    assert loss.total.item() == pytest.approx(expected.item(), rel=1e-5)
    assert loss.parts["loss"].item() == pytest.approx(reported, rel=1e-5)
    expected.backward()
    for one, parameter in zip(found, model.parameters(), strict=True):
        assert (one - parameter.grad).norm() <= 1e-5 * parameter.grad.norm()
