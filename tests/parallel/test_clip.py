"""Clipping by the global norm, at values worked out by hand: 3 and 4 make 5."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from penjing.kernels import ops
from penjing.kernels.cpu import ops as cpu
from penjing.parallel.grad_scaler import LossScaler
from penjing.parallel.single import Single


def clip(model, max_norm, scaler=None):
    strategy = Single(torch.device("cpu"))
    strategy.wrap(model)
    strategy.scaler = scaler
    return strategy.clip(max_norm)


class TwoWeights(nn.Module):
    """Gradients 3 and 4 in two parameters, whose joint norm is 5."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
        self.first.grad, self.second.grad = torch.tensor([3.0]), torch.tensor([-4.0])

    def gradients(self):
        return [float(self.first.grad), float(self.second.grad)]


@pytest.mark.parametrize(
    ("largest", "left"),
    [(1.0, [0.6, -0.8]), (2.5, [1.5, -2.0]), (5.0, [3.0, -4.0]), (10.0, [3.0, -4.0]), (0.0, [3.0, -4.0])],
)
def test_the_joint_norm_is_at_most_the_largest(largest, left):
    model = TwoWeights()
    assert float(clip(model, largest)) == pytest.approx(5.0)
    assert model.gradients() == pytest.approx(left, rel=1e-5)


def test_a_scaled_loss_is_unscaled_before_it_is_clipped():
    model = TwoWeights()
    scaler = LossScaler(torch.device("cpu"), init_scale=4.0)
    assert float(clip(model, 1.0, scaler)) == pytest.approx(1.25)  # 0.75 and 1
    assert model.gradients() == pytest.approx([0.6, -0.8], rel=1e-5)


@pytest.fixture(params=["kernels", "torch"])
def either(request, monkeypatch):
    """With the C kernels, and as on a machine without a compiler."""
    if request.param == "torch":
        monkeypatch.setattr(cpu, "supports", lambda *_: "no compiler")


@pytest.mark.parametrize("count", [1, 4095, 4097, 100_003, 1 << 24])
def test_the_norm_of_many_gradients_is_exact_with_any_number_of_threads(either, count):
    generator = torch.Generator().manual_seed(count)
    gradients = [torch.randn(size, generator=generator) for size in (count, 7)]
    exact = np.sqrt(sum(np.square(gradient.numpy(), dtype=np.float64).sum() for gradient in gradients))
    found, before = [], torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(float(ops.global_norm(gradients)))
    torch.set_num_threads(before)
    assert abs(found[0] / exact - 1) < 2**-23
    assert len(set(found)) == 1


def test_a_norm_beyond_what_float32_can_square_and_what_is_no_number(either):
    assert float(ops.global_norm([torch.full((100,), 1e25)])) == pytest.approx(1e26)
    assert float(ops.global_norm([torch.full((100,), 1e-30)])) == pytest.approx(1e-29)
    assert math.isinf(ops.global_norm([torch.ones(5000), torch.tensor([math.inf])]))
    assert math.isnan(ops.global_norm([torch.tensor([math.nan]), torch.ones(5000)]))
    assert float(ops.global_norm([])) == 0
    turned = torch.randn(30, 50, generator=torch.Generator().manual_seed(0))
    assert float(ops.global_norm([turned.T])) == pytest.approx(float(turned.double().norm()), rel=1e-7)


def test_a_strategy_clips_the_model_that_it_wrapped():
    strategy, model = Single(torch.device("cpu")), TwoWeights()
    strategy.wrap(model)
    assert float(strategy.clip(1.0)) == pytest.approx(5.0)
    assert model.gradients() == pytest.approx([0.6, -0.8], rel=1e-5)
