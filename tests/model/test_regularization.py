"""Noise in training passes: its rates, and that it depends on the row alone, however a pass is computed."""

import copy

import pytest
import torch
from small_models import small_model

from penjing.model.regularization import BranchNoise, Regularization, branch_noise
from penjing.model.score import CrossEntropy
from penjing.model.transformer import recompute_activations
from penjing.train.compile_policy import compile_model

ROWS, TOKENS = 4, 24
NOISE_B = torch.tensor([5, 2**62, 7, 1])


@pytest.fixture
def model():
    model = small_model()
    model.regularization = Regularization(dropout=0.2)
    return model


def gradients(model, rows=slice(None), noise=True):
    ids_BT = torch.randint(24, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))[rows]
    score = CrossEntropy(ids_BT.roll(-1, 1).flatten(), torch.ones(ids_BT.numel()))
    model.zero_grad()
    total = model(ids_BT, torch.zeros_like(ids_BT), score=score, noise_B=NOISE_B[rows] if noise else None)
    total.backward()
    return [total.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


def test_without_seeds_there_is_no_noise(model):
    noisy, quiet = gradients(model), gradients(model, noise=False)
    model.regularization = Regularization()
    assert all(map(torch.equal, gradients(model), quiet))
    assert not torch.equal(noisy[0], quiet[0])


@pytest.mark.parametrize("what", ["mlp", "block"])
def test_recomputed_passes_have_the_same_noise(model, what):
    kept = gradients(model)
    recompute_activations(model, what)
    assert all(map(torch.equal, gradients(model), kept))


def test_a_row_has_the_same_noise_in_any_micro_batch(model):
    parts = [gradients(model, slice(first, first + 2)) for first in (0, 2)]
    for whole, *halves in zip(gradients(model), *parts, strict=True):
        torch.testing.assert_close(sum(halves), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.nightly
def test_compiled_passes_have_the_same_noise(model):
    compiled = copy.deepcopy(model)
    compile_model(compiled, "blocks")
    for eager, one in zip(gradients(model), gradients(compiled), strict=True):
        torch.testing.assert_close(one, eager, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_has_its_rate_and_keeps_the_mean(dtype):
    noise_B = torch.arange(16)  # neighbouring seeds are independent too
    blocks = branch_noise(0.3, noise_B, 3, 32)
    dropped = torch.stack([noise.drop(torch.ones(16, 32, 64, dtype=dtype), n) for noise in blocks for n in (0, 1)])
    assert dropped.unique().tolist() == pytest.approx([0, 1 / 0.7], rel=0.01)
    kept = (dropped > 0).double()
    for axis in range(4):  # layers and branches, rows, positions, channels
        others = [other for other in range(4) if other != axis]
        spread = (0.21 / (kept.numel() / kept.shape[axis])) ** 0.5
        assert (kept.mean(others) - 0.7).abs().max() < 4.5 * spread
        first, second = kept.narrow(axis, 0, kept.shape[axis] - 1), kept.narrow(axis, 1, kept.shape[axis] - 1)
        assert abs(float((first * second).mean()) - 0.49) < 4.5 * (0.25 / first.numel()) ** 0.5


def test_no_noise_changes_nothing():
    x = torch.ones(2, 3, 4)
    assert BranchNoise().drop(x, 0) is x
