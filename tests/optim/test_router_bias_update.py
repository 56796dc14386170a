"""The keeper of balance: it moves the biases by the sign of the load, over all ranks, and clears what it read."""

from __future__ import annotations

import pytest
import torch
from small_models import small_model

from penjing.model.freeze import freeze
from penjing.model.moe import moe_layers
from penjing.optim.router_bias_update import RouterBalance


def made(architecture):
    experts = {"num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    return small_model(noise=0, architecture=architecture, vocab_size=50, hidden_size=32, head_dim=16, **experts)


def test_a_busy_expert_is_chosen_less():
    model = made("glm4_moe")
    keeper = RouterBalance(model, 0.01, lambda value: 2 * value)  # as if another rank had seen the same
    layers = moe_layers(model)
    layers[0].load_E[:] = torch.tensor([9.0, 1.0, 4.0, 2.0])
    layers[1].load_E[:] = 4.0
    keeper.step()
    torch.testing.assert_close(layers[0].router.correction, torch.tensor([-0.01, 0.01, 0.0, 0.01]))
    assert layers[1].router.correction.abs().max() == 0
    assert keeper.metrics() == {"max_expert_load_ratio": 2.25, "mean_expert_load_ratio": 1.625}
    keeper.zero_grad()
    assert all(layer.load_E.sum() == 0 for layer in layers)


def test_routers_without_a_bias_are_only_watched():
    model = made("qwen3_moe")
    keeper = RouterBalance(model, 0.01, lambda value: value)
    model(torch.randint(0, 50, (2, 16)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    keeper.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert keeper.metrics()["max_expert_load_ratio"] >= 1


def test_frozen_routers_stay_as_they_are():
    model = made("glm4_moe")
    freeze(model, ["blocks.1.mlp.router.*"])
    keeper, layers = RouterBalance(model, 0.01, lambda value: value), moe_layers(model)
    for layer in layers:
        layer.load_E[:] = torch.tensor([9.0, 1.0, 4.0, 2.0])
    keeper.step()
    assert [layer.router.correction.abs().max().item() for layer in layers] == pytest.approx([0.01, 0.0])


def test_uneven_routing_becomes_even():
    """A router that prefers one expert by far spreads its tokens after some steps of moving biases alone."""
    torch.manual_seed(0)
    model = made("glm4_moe")
    layer = moe_layers(model)[0]
    keeper = RouterBalance(model, 0.02, lambda value: value)
    with torch.no_grad():
        layer.router.weight.normal_(0, 0.05)
        layer.router.correction[0] = 0.3
    loads = []
    for _ in range(60):
        layer(torch.randn(4, 64, 32))
        keeper.step()
        loads.append(keeper.metrics()["max_expert_load_ratio"])
        keeper.zero_grad()
    assert loads[0] > 3.9
    assert max(loads[-10:]) < 1.7


def test_a_step_that_is_found_to_be_bad_moves_nothing():
    """As torch's scalers say it: `found_inf` is a tensor that is 1."""
    model = made("glm4_moe")
    keeper = RouterBalance(model, 0.01, lambda value: value)
    bias = moe_layers(model)[0].router.correction
    for found, moved in ((1.0, [0.0] * 4), (0.0, [-0.01, 0.01, 0.01, -0.01])):
        moe_layers(model)[0].load_E[:] = torch.tensor([9.0, 1.0, 1.0, 9.0])
        keeper.found_inf = torch.tensor(found)
        keeper.step()
        keeper.zero_grad()
        torch.testing.assert_close(bias, torch.tensor(moved))


def test_the_load_is_that_of_all_ranks():
    """Here the first expert is the busy one, on all ranks together it is the idle one."""
    model = made("glm4_moe")
    keeper = RouterBalance(model, 0.01, lambda value: value + torch.tensor([0.0, 10.0, 10.0, 0.0]))
    moe_layers(model)[0].load_E[:] = torch.tensor([4.0, 0.0, 1.0, 3.0])
    keeper.step()
    torch.testing.assert_close(moe_layers(model)[0].router.correction, torch.tensor([0.01, -0.01, -0.01, 0.01]))
