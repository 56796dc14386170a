"""bfloat16 state: right on average, the same by chance each time, and as good to learn with."""

import copy

import pytest
import torch

from penjing.model.config import ModelConfig
from penjing.model.init import initialise
from penjing.model.score import CrossEntropy
from penjing.model.transformer import Transformer
from penjing.optim.muon import Muon
from penjing.optim.stochastic_rounding import stochastic_round

SHAPE = ModelConfig(
    vocab_size=64,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=32,
    intermediate_size=64,
)


def chance(seed):
    return torch.Generator().manual_seed(seed)


def test_it_is_right_on_average_and_only_the_two_neighbours_come_up():
    value = torch.full((200_000,), 1.0 + 0.3 * 2**-7)  # bfloat16 has steps of 2^-7 here
    rounded = stochastic_round(value, chance(1)).float()
    assert sorted(set(rounded.tolist())) == [1.0, 1.0 + 2**-7]
    assert rounded.mean().item() == pytest.approx(value[0].item(), abs=3e-5)
    negative = stochastic_round(-value, chance(1)).float()
    assert torch.equal(negative, -rounded)


def test_what_bfloat16_holds_stays_as_it_is():
    value = torch.randn(1000).bfloat16()
    assert torch.equal(stochastic_round(value.float(), chance(3)), value)


def test_a_slow_mean_does_not_stand_still():
    kept = torch.zeros(4096, dtype=torch.bfloat16)
    nearest = kept.clone()
    for step in range(400):
        kept = stochastic_round(kept.float().lerp(torch.ones(4096), 0.002), chance(step))
        nearest = nearest.float().lerp(torch.ones(4096), 0.002).bfloat16()
    exact = 1 - 0.998**400
    assert kept.float().mean().item() == pytest.approx(exact, abs=0.01)
    assert abs(nearest.float().mean().item() - exact) > 0.05


def learn(steps, model=None, before=None, **more):
    if model is None:
        model = Transformer(SHAPE)
        initialise(model, 0)
    optimizers = Muon(**more).build(model)
    if before is not None:
        for optimizer, each in zip(optimizers, before, strict=True):
            optimizer.load_state_dict(each)
    ids_BT = torch.randint(64, (4, 32), generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(steps):
        total = model(ids_BT, score=CrossEntropy(ids_BT.roll(-1, 1).flatten(), torch.ones(128))) / 128
        total.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(total.item())
    return losses, model, [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]


def test_it_learns_as_float32_does_and_keeps_half():
    whole, _, _ = learn(30)
    half, _, states = learn(30, state_dtype="bfloat16")
    assert half[-1] < half[0] - 1
    assert max(abs(one - other) for one, other in zip(whole, half, strict=True)) < 0.05
    assert {each["momentum"].dtype for each in states[0]["state"].values()} == {torch.bfloat16}


def test_it_goes_on_to_the_bit():
    _, straight, _ = learn(6, state_dtype="bfloat16")
    _, model, states = learn(3, state_dtype="bfloat16")
    learn(3, model, states, state_dtype="bfloat16")
    for one, other in zip(straight.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)
