"""What comes back from a checkpoint, and what stays as it is set now."""

import copy
import json

import pytest
import torch
from small_models import make_checkpointer

from penjing.base.errors import UserError
from penjing.checkpoint.load import newest
from penjing.checkpoint.save import save
from penjing.optim.adamw import AdamW
from penjing.optim.muon import Muon
from penjing.train.checkpointer import restore_optimizers

KINDS = [
    (AdamW(), AdamW(learning_rate=0.02, beta1=0.5, beta2=0.6, eps=1e-3, weight_decay=0.3)),
    (
        AdamW(state_dtype="bfloat16"),
        AdamW(learning_rate=0.02, beta1=0.5, beta2=0.6, eps=1e-3, weight_decay=0.3, state_dtype="bfloat16"),
    ),
    (Muon(), Muon(learning_rate=0.1, momentum=0.5, weight_decay=0.3, adamw_learning_rate=0.02, beta2=0.6)),
]
NAMES = ["adamw", "kept adamw", "muon"]


def make_model():
    torch.manual_seed(3)
    return torch.nn.Linear(64, 64)


def learn(model, optimizers, seed):
    """A step at half of the peak rates, as the loop takes it."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * 0.5
        optimizer.step()


def settings_of(optimizers):
    return [
        {name: value for name, value in group.items() if name not in ("params", "lr")}
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]


@pytest.fixture
def begun(tmp_path):
    """A model that has learned, its optimizers, and its checkpoint."""

    def begin(settings):
        model = make_model()
        optimizers = settings.build(model)
        learn(model, optimizers, 1)
        states = [optimizer.state_dict() for optimizer in optimizers]
        save(tmp_path, 1, weights=model.state_dict(), optimizers=states, state={}, texts={}, keep=1)
        return model, optimizers, newest(tmp_path)

    return begin


@pytest.mark.parametrize(("before", "after"), KINDS, ids=NAMES)
def test_settings_that_were_allowed_to_change_are_those_that_are_learned_with(begun, before, after):
    model, optimizers, checkpoint = begun(before)
    other, unchanged = copy.deepcopy(model), copy.deepcopy(model)
    restored, plain = after.build(other), before.build(unchanged)
    wanted = settings_of(restored)
    restore_optimizers(restored, checkpoint)
    restore_optimizers(plain, checkpoint)
    assert settings_of(restored) == wanted
    for optimizer, new in zip(optimizers, after.build(copy.deepcopy(model)), strict=True):  # the same, by hand
        for group, given in zip(optimizer.param_groups, new.param_groups, strict=True):
            group.update({name: value for name, value in given.items() if name not in ("params", "lr")})
    for each, its in ((model, optimizers), (other, restored), (unchanged, plain)):
        learn(each, its, 2)
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(other.bias, model.bias)
    assert not torch.equal(other.weight, unchanged.weight)


@pytest.mark.parametrize(("settings", "_"), KINDS, ids=NAMES)
def test_without_a_change_everything_is_as_it_was_saved(begun, settings, _):
    model, optimizers, checkpoint = begun(settings)
    other = copy.deepcopy(model)
    restored = settings.build(other)
    restore_optimizers(restored, checkpoint)
    for old, new in zip(optimizers, restored, strict=True):
        groups = [each.state_dict()["param_groups"] for each in (old, new)]
        assert json.dumps(groups[0], sort_keys=True) == json.dumps(groups[1], sort_keys=True)
    learn(model, optimizers, 2)
    learn(other, restored, 2)
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(other.bias, model.bias)


def test_going_back_leaves_optimizers_of_another_kind_alone(tmp_path):
    record = []

    model = make_model()
    assert make_checkpointer(tmp_path, model, AdamW().build(model), record=record.append).save({"step": 1}, True)
    other = make_checkpointer(tmp_path, model, Muon().build(model), record=record.append)
    with pytest.raises(UserError, match="does not fit"):
        other.roll_back()
    other.restore(newest(tmp_path), optimizers=False)
    weight = model.weight.detach().clone()
    learn(model, other.optimizers, 1)
    assert other.roll_back() == {"step": 1}
    assert torch.equal(model.weight, weight)
    learn(model, other.optimizers, 2)
    assert other.save({"step": 2}, True) and other.roll_back() == {"step": 2} and not record


class Later:
    """Holds the writing of a checkpoint back until it is told to."""

    def __init__(self):
        self.work = None

    def start(self, work):
        self.work = work

    def wait(self):
        pass


def test_a_checkpoint_holds_the_instant_at_which_it_was_asked_for(tmp_path):
    """However late it is written: weights, moments and random numbers are those of then, not of the write."""
    model = make_model()
    optimizers = AdamW().build(model)
    learn(model, optimizers, 1)
    keeper = make_checkpointer(tmp_path, model, optimizers)
    keeper._background = Later()
    torch.manual_seed(11)
    keeper.save({"step": 1}, False)
    weight = model.weight.detach().clone()
    moment = optimizers[0].state[model.weight]["exp_avg"].clone()
    drawn = torch.rand(5)
    learn(model, optimizers, 2)
    keeper._background.work()
    checkpoint = newest(tmp_path)
    assert torch.equal(checkpoint.weights()["weight"], weight)
    (state,), random_state = checkpoint.optimizers()
    assert any(torch.equal(values["exp_avg"], moment) for values in state["state"].values())
    torch.set_rng_state(random_state)
    assert torch.equal(torch.rand(5), drawn)


def test_random_numbers_go_on_where_the_checkpoint_was(begun):
    _, optimizers, checkpoint = begun(AdamW())
    torch.manual_seed(5)
    restore_optimizers(optimizers, checkpoint)
    torch.set_rng_state(checkpoint.optimizers()[1])
    wanted = torch.rand(3)
    torch.manual_seed(5)
    restore_optimizers(optimizers, checkpoint)
    assert torch.equal(torch.rand(3), wanted)


def test_what_has_state_comes_back_with_the_checkpoint(tmp_path):
    class Place:
        def __init__(self):
            self.place = 0

        def state(self):
            return {"place": self.place}

        def restore(self, state):
            self.place = state["place"]

    def keeper_of(place):
        model = make_model()
        return make_checkpointer(tmp_path, model, AdamW().build(model), stateful={"source": place})

    before, after = Place(), Place()
    before.place = 7
    assert keeper_of(before).save({"step": 1}, True)
    keeper_of(after).restore(newest(tmp_path), optimizers=True)
    assert after.place == 7
