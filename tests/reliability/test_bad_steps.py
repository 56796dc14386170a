"""A loss or gradient that is no number costs one step and nothing else; many in a row send the run back."""

import json
import math
import random
from dataclasses import replace

import pytest
import torch
from reliability_batches import Batches

from penjing.base.errors import UserError
from penjing.model.config import ModelConfig
from penjing.model.init import initialise
from penjing.model.transformer import Transformer
from penjing.objective.base import Loss
from penjing.objective.next_token import NextToken
from penjing.optim.adamw import AdamW
from penjing.optim.muon import Muon
from penjing.optim.schedule import Cosine
from penjing.parallel.base import guarded_step, takes_flag
from penjing.parallel.grad_scaler import LossScaler
from penjing.parallel.single import Single
from penjing.track.base import Tracker, Trackers
from penjing.train import nonfinite_guard as guard_module
from penjing.train.loop import TrainingContext, TrainState, train
from penjing.train.nonfinite_guard import NonFiniteGuard, is_spike
from penjing.train.throughput import Meter

SHAPE = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
STEPS = 12
OPTIMIZERS = {"adamw": AdamW(learning_rate=1e-2), "muon": Muon(learning_rate=1e-2, adamw_learning_rate=1e-2)}


class Spoiled:
    """Next token, spoiled at some calls: `how` is applied to the sum, or to one element of one gradient."""

    def __init__(self, calls, how):
        self.plain, self.calls, self.how, self.count = NextToken(), set(calls), how, -1

    def weight(self, batch):
        return self.plain.weight(batch)

    def __call__(self, model, batch):
        self.count += 1
        loss = self.plain(model, batch)
        if self.count not in self.calls:
            return loss
        if self.how == "element":  # a finite loss, one gradient of one weight that is not
            first = next(model.parameters())
            wild = torch.zeros_like(first)
            wild.view(-1)[3] = math.inf
            return Loss(total=loss.total + Wild.apply(first, wild), parts=loss.parts)
        if self.how == "detached":  # a loss that is no number, and of which the gradients tell nothing
            return Loss(
                total=torch.where(torch.tensor(True), loss.total.detach() * math.nan, loss.total), parts=loss.parts
            )
        return Loss(total=loss.total * self.how, parts=loss.parts)


class Wild(torch.autograd.Function):
    """0, whose gradient is what is given."""

    @staticmethod
    def forward(ctx, value, gradient):
        ctx.save_for_backward(gradient)
        return value.new_zeros(())

    @staticmethod
    def backward(ctx, above):
        return ctx.saved_tensors[0] * above, None


def make(optimizer="adamw", *, objective=None, accumulate=1, steps=STEPS, batches=None, **more):
    model = Transformer(ModelConfig(**SHAPE))
    initialise(model, 0)
    strategy = Single(torch.device("cpu"))
    incidents = []
    parts = TrainingContext(
        strategy=strategy,
        model=strategy.wrap(model),
        objective=objective or NextToken(),
        source=batches or Batches(),
        optimizers=OPTIMIZERS[optimizer].build(model),
        schedule=Cosine(warmup_ratio=0.3),
        meter=Meter(1.0, None),
        num_steps=steps,
        accumulate=accumulate,
        max_grad_norm=1.0,
        guard=NonFiniteGuard(incidents.append),
        **more,
    )
    return parts, model, incidents


def everything(model, parts):
    """Weights and optimizer states, as one list of tensors."""
    states = [
        value
        for optimizer in parts.optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    return [*model.parameters(), *states]


def same(one, other):
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


class Dropping:
    """Optimizers that leave one step out by hand: the run that dropped that batch."""

    def __init__(self, optimizer, left_out):
        self.optimizer, self.left_out, self.count = optimizer, left_out, -1
        self.param_groups = optimizer.param_groups

    def step(self):
        self.count += 1
        if self.count != self.left_out:
            self.optimizer.step()

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)


@pytest.mark.parametrize("at", [0, 2, 7], ids=["first step", "warm-up", "later"])
@pytest.mark.parametrize("how", [math.nan, math.inf, "element", "detached"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_bad_step_is_the_run_that_dropped_its_batch(optimizer, how, at, count):
    parts, model, incidents = make(optimizer, objective=Spoiled([at], how))
    train(parts, progress := TrainState())
    reference, expected, _ = make(optimizer)
    plain = reference.optimizers
    train(replace(reference, optimizers=[Dropping(each, at) for each in plain]), TrainState())
    reference = replace(reference, optimizers=plain)
    assert same(everything(model, parts), everything(expected, reference))
    assert all(torch.isfinite(value).all() for value in everything(model, parts))
    assert progress.step == STEPS
    assert parts.guard.num_bad == 1
    (incident,) = incidents
    assert incident["kind"] == "not finite"
    assert incident["step"] == at + 1
    assert incident["places"] == {"next": [at, at + 1]}
    count("bad steps that cost one step", 1)


def test_one_bad_micro_batch_of_several_costs_the_whole_step_once():
    parts, model, incidents = make(objective=Spoiled([4], math.nan), accumulate=3, steps=4)
    train(parts, TrainState())
    assert [incident["step"] for incident in incidents] == [2]
    assert incidents[0]["places"] == {"next": [3, 6]}
    assert all(torch.isfinite(value).all() for value in everything(model, parts))


def test_figures_leave_a_bad_step_out():
    seen = []

    class Memory(Tracker):
        def log(self, step, figures):
            seen.append((step, dict(figures)))

    parts, _, _ = make(objective=Spoiled([2], math.nan))
    train(replace(parts, trackers=Trackers([Memory()]), log_every=4), TrainState())
    assert all(math.isfinite(figures["loss"]) for _, figures in seen)
    assert [figures.get("skipped_steps") for _, figures in seen] == [1, 1, 1]


def test_overflows_of_a_loss_scaler_that_looks_for_its_scale_are_excused():
    scaler = LossScaler(torch.device("cpu"), init_scale=2.0**6)
    incidents, guard = [], NonFiniteGuard(scaler=scaler)
    guard.record = incidents.append
    for step in range(12):
        norm = torch.tensor(math.inf)
        scaler.update(norm)
        verdict = guard.observe(step, torch.tensor(1.0), torch.tensor(2.0), norm, dict)
        # From 64 it takes six halvings to 1; what overflows then is the model's own trouble.
        assert len(incidents) == max(0, step - 4)
        assert verdict == ("roll back" if len(incidents) >= guard_module.IN_A_ROW else "go on")
    guard.observe(20, torch.tensor(1.0), torch.tensor(math.nan), torch.tensor(1.0), dict)
    assert incidents[-1]["step"] == 20


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_masked_update_leaves_everything_as_it_was(optimizer):
    """What a GPU does, where the host does not look: torch's fused optimizers take the flag."""
    parts, model, _ = make(optimizer)
    train(replace(parts, num_steps=3), TrainState())
    assert all(takes_flag(each) for each in parts.optimizers)
    before = [value.clone() for value in everything(model, parts)]
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, math.nan)
    for each in parts.optimizers:
        each.found_inf, each.grad_scale = torch.tensor(1.0), None
        each.step()
    assert same(before, everything(model, parts))


def test_update_says_whether_the_step_was_bad():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for norm, loss, bad in ((1.0, 2.0, 0.0), (math.nan, 2.0, 1.0), (math.inf, 2.0, 1.0), (1.0, math.nan, 1.0)):
        before = model.weight.clone()
        model.weight.grad = torch.ones(2, 2)
        assert float(guarded_step([optimizer], torch.tensor(norm), torch.tensor(loss))) == bad
        assert torch.equal(before, model.weight) == bool(bad)
        assert model.weight.grad is None


# --- many in a row ---------------------------------------------------------------------------------------------------


def saved_every(number):
    """Checkpoints in memory: (save, roll_back, times gone back)."""
    kept, returns = {}, []

    def attach(parts, model):
        def save(state, wait):
            states = [optimizer.state_dict() for optimizer in parts.optimizers]
            kept["last"] = json.loads(json.dumps(state)), {k: v.clone() for k, v in model.state_dict().items()}, states
            kept["states"] = [
                {**each, "state": {i: {k: v.clone() for k, v in values.items()} for i, values in each["state"].items()}}
                for each in states
            ]
            return True

        def roll_back():
            if "last" not in kept:
                return None
            state, weights, _ = kept["last"]
            model.load_state_dict(weights)
            for optimizer, own in zip(parts.optimizers, kept["states"], strict=True):
                optimizer.load_state_dict(own)
            returns.append(state["step"])
            return state

        return replace(parts, save=save, roll_back=roll_back, save_every=number)

    return attach, returns


def test_three_bad_steps_in_a_row_go_back_and_skip_the_window():
    batches = Batches(spoiled=range(5, 8))
    parts, model, incidents = make(batches=batches, steps=10)
    attach, returns = saved_every(2)
    parts = attach(parts, model)
    train(parts, progress := TrainState())
    # Steps 6, 7 and 8 were bad; back to the checkpoint of step 4, and on with batch 8: 4 to 7 are never learned from.
    assert returns == [4]
    assert progress.step == 10
    assert batches.state() == {"next": 14}
    assert [each["kind"] for each in incidents] == ["not finite"] * 3 + ["rolled back"]
    skipping = Batches(skip=range(4, 8))
    reference, expected, _ = make(batches=skipping, steps=10)
    train(reference, TrainState())
    assert same(everything(model, parts), everything(expected, reference))


def test_no_checkpoint_is_made_of_a_run_in_trouble():
    saved = []
    parts, _, _ = make(batches=Batches(spoiled=[3, 4]), steps=8)
    parts = replace(parts, save_every=2, save=lambda state, wait: saved.append(state["step"]) is None)
    train(parts, TrainState())
    assert saved == [2, 6, 8]  # the one of step 4 was put off, past 5, to the first good step


def test_going_back_is_bounded_and_ends_with_the_reason():
    parts, model, incidents = make(batches=Batches(spoiled=range(4, 1000)), steps=10)
    attach, returns = saved_every(2)
    with pytest.raises(UserError, match=r"not finite in 3 steps in a row.*after 3 rollbacks.*learning_rate"):
        train(attach(parts, model), TrainState())
    assert returns[: guard_module.ROLLBACKS] == [4] * guard_module.ROLLBACKS
    assert sum(each["kind"] == "rolled back" for each in incidents) == guard_module.ROLLBACKS


# --- spikes ----------------------------------------------------------------------------------------------------------


def test_a_spike_is_seen_at_its_step_and_a_clean_run_has_none(count):
    """A falling, noisy curve of 20,000 steps: at most two false alarms; and every tenfold loss is seen at once."""
    rng = random.Random(0)
    incidents = []
    guard = NonFiniteGuard(incidents.append)
    zero, one = torch.tensor(0.0), torch.tensor(1.0)
    caught = 0
    for step in range(20_000):
        loss = 2 + 6 * math.exp(-step / 800) + rng.gauss(0, 0.15)
        spiked = step % 2000 == 1999
        before = len(incidents)
        guard.observe(step, zero, torch.tensor(10 * loss if spiked else loss), one, lambda step=step: {"rows": [step]})
        if spiked:
            assert incidents[-1]["rows"] == [step]
            caught += len(incidents) == before + 1
    assert caught == 10
    assert len(incidents) - caught <= 2
    count("spikes caught", caught)
    count("false alarms in 20,000 steps", len(incidents) - caught)


def test_a_spike_needs_a_past_and_a_number():
    assert not is_spike(50.0, [5.0] * 3)
    assert not is_spike(math.nan, [5.0] * 30)
    assert is_spike(50.0, [5.0] * 30)
    assert not is_spike(6.0, [5.0 + 0.1 * (i % 5) for i in range(30)])


def test_a_guard_s_state_comes_back():
    guard = NonFiniteGuard()
    for step in range(30):
        bad = torch.tensor(float(step == 29))
        guard.observe(step, bad, torch.tensor(5.0 + step / 100), torch.tensor(1.0), dict)
    other = NonFiniteGuard()
    other.restore(json.loads(json.dumps(guard.state())))
    assert other.state() == guard.state()
    assert not other.last_step_finite
