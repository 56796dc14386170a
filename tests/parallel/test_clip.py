"""Clipping by the global norm, at values worked out by hand: 3 and 4 make 5."""

import pytest
import torch
from torch import nn

from penjing.parallel.base import clip_gradients
from penjing.parallel.grad_scaler import LossScaler
from penjing.parallel.single import Single


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
    assert float(clip_gradients(model, largest)) == pytest.approx(5.0)
    assert model.gradients() == pytest.approx(left, rel=1e-5)


def test_a_scaled_loss_is_unscaled_before_it_is_clipped():
    model = TwoWeights()
    scaler = LossScaler(torch.device("cpu"), init_scale=4.0)
    assert float(clip_gradients(model, 1.0, scaler)) == pytest.approx(1.25)  # 0.75 and 1
    assert model.gradients() == pytest.approx([0.6, -0.8], rel=1e-5)


def test_a_strategy_clips_the_model_that_it_wrapped():
    strategy, model = Single(torch.device("cpu")), TwoWeights()
    strategy.wrap(model)
    assert float(strategy.clip(1.0)) == pytest.approx(5.0)
    assert model.gradients() == pytest.approx([0.6, -0.8], rel=1e-5)
