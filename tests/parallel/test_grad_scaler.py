"""float16 with a scaled loss learns as float32 does; an overflow costs one step and touches nothing."""

import copy
import json
import math
from types import SimpleNamespace

import pytest
import torch
from small_models import small_model

from penjing.model.linear import set_compute_dtype
from penjing.model.score import CrossEntropy
from penjing.optim.adamw import AdamW
from penjing.parallel.grad_scaler import LossScaler
from penjing.parallel.single import Single

CPU = torch.device("cpu")


def steps(dtype, num_steps, first=2.0**16):
    """Losses of some steps, and what they were taken with."""
    model = small_model(noise=0, vocab_size=64, hidden_size=32, head_dim=16, intermediate_size=64)
    set_compute_dtype(model, dtype)
    strategy = Single(CPU)
    if dtype == torch.float16:
        strategy.scaler = LossScaler(CPU, init_scale=first)
    strategy.wrap(model)
    optimizers = AdamW(learning_rate=3e-3).build(model)
    ids_BT = torch.randint(64, (4, 64), generator=torch.Generator().manual_seed(1))
    losses = []
    score = CrossEntropy(ids_BT.roll(-1, 1).flatten(), torch.ones(256))
    for _ in range(num_steps):
        total = model(ids_BT, torch.zeros_like(ids_BT), score=score)
        strategy.backward(total / 256)
        strategy.step(optimizers, 1.0, torch.tensor(1.0))
        losses.append(float(total.detach()) / 256)
    return losses, model, strategy, optimizers


def test_float16_learns_as_float32():
    half, full = steps(torch.float16, 20)[0], steps(None, 20)[0]
    assert half[-1] < half[0] - 0.5
    assert max(abs(one - other) for one, other in zip(half, full, strict=True)) < 0.02


def test_gradients_do_not_depend_on_the_scale():
    small, large = steps(torch.float16, 1, first=2.0**8), steps(torch.float16, 1, first=2.0**12)
    for one, other in zip(small[1].parameters(), large[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_an_overflow_is_left_out_and_halves_the_scale():
    _, model, strategy, optimizers = steps(torch.float16, 2)
    before = copy.deepcopy(model.state_dict())
    strategy.scaler.restore({"scale": 2.0**20, "good_steps": 5.0})
    ids_BT = torch.zeros(1, 8, dtype=torch.long)
    total = model(ids_BT, score=CrossEntropy(ids_BT[0], torch.ones(8)))
    strategy.backward(total * 1e4)  # beyond float16
    _, bad = strategy.step(optimizers, 1.0, torch.tensor(1.0))
    assert bool(bad)
    assert strategy.scaler.state() == {"scale": 2.0**19, "good_steps": 0.0}
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_the_scale_grows_after_good_steps_and_comes_back_from_a_file():
    scaler = LossScaler(CPU, init_scale=8.0, growth_interval=3)
    for _ in range(3):
        scaler.update(torch.tensor(1.0))
    assert scaler.state() == {"scale": 16.0, "good_steps": 0.0}
    scaler.update(torch.tensor(1.0))
    other = LossScaler(CPU)
    other.restore(json.loads(json.dumps(scaler.state())))
    assert other.state() == scaler.state()
    for _ in range(10):
        other.update(torch.tensor(torch.inf))
    assert other.state()["scale"] == 1.0  # never below
    assert other.metrics() == {"loss_scale": 1.0}


def test_unscaling_divides():
    scaler, gradients = LossScaler(CPU, init_scale=4.0), [torch.full((2,), 8.0)]
    assert float(scaler.scale_loss(torch.tensor(2.0))) == 8.0
    scaler.unscale(gradients)
    assert gradients[0].tolist() == pytest.approx([2.0, 2.0])


def test_it_begins_and_moves_as_torchs_own_does():
    """Scale by scale beside torch.amp.GradScaler: the first, the doubling after 2,000 good steps, overflows."""
    theirs, ours = torch.amp.GradScaler("cpu"), LossScaler(CPU)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = SimpleNamespace(param_groups=[{"params": [weight]}], step=lambda: None)  # stands still

    def take(gradient):
        theirs.scale(weight.sum()).backward()
        weight.grad.fill_(gradient)
        theirs.unscale_(optimizer)
        ours.update(torch.tensor(gradient))
        theirs.step(optimizer)
        theirs.update()
        weight.grad = None
        return ours.state()["scale"], theirs.get_scale()

    def jump(good_steps):
        """As if so many good steps had been taken."""
        theirs.load_state_dict({**theirs.state_dict(), "_growth_tracker": good_steps})
        ours.restore({**ours.state(), "good_steps": float(good_steps)})

    assert float(ours.scale_loss(torch.tensor(1.0))) == theirs.get_scale() == 65536.0
    scales = [take(1.0) for _ in range(3)]
    jump(1997)
    scales += [take(1.0) for _ in range(4)] + [take(math.inf) for _ in range(3)]
    jump(1998)
    scales += [take(1.0) for _ in range(2)]
    assert [mine for mine, _ in scales] == [other for _, other in scales]
    assert [mine for mine, _ in scales[-9:]] == [2.0**power for power in (16, 16, 17, 17, 16, 15, 14, 14, 15)]


def test_an_overflow_begins_the_count_of_good_steps_anew():
    scaler = LossScaler(CPU, init_scale=8.0, growth_interval=3)
    for norm in (1.0, 1.0, math.inf, 1.0, 1.0):
        scaler.update(torch.tensor(norm))
    assert scaler.state() == {"scale": 4.0, "good_steps": 2.0}


def test_the_scale_stays_where_float32_can_bear_it():
    scaler = LossScaler(CPU, init_scale=2.0**24, growth_interval=1)
    scaler.update(torch.tensor(1.0))
    assert scaler.state()["scale"] == 2.0**24
    assert bool(scaler.can_halve())
    scaler.restore({"scale": 1.0, "good_steps": 0.0})
    assert not bool(scaler.can_halve())
