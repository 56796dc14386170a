"""Adapters learn at a rate of their own unless one is named."""

import pytest

from penjing.base.config import parse_overrides
from penjing.train.resolve import LARGEST_RATE
from penjing.workflows.train import resolve_run


def rate(recipe, *words, file=None):
    layers = [file] if file else []
    return resolve_run(recipe, *layers, parse_overrides(words)).optimizer.learning_rate


@pytest.mark.parametrize("recipe", ["sft", "grpo", "ppo"])
def test_with_adapters_it_is_ten_times_that_of_the_whole_model(recipe):
    assert rate(recipe, "lora.rank=8") == pytest.approx(10 * rate(recipe))
    assert rate(recipe, "lora.rank=0") == rate(recipe)


def test_preferences_move_a_model_little():
    """Rates at which the quickstart's model kept what it could do (docs/methods/dpo.md)."""
    assert rate("dpo") == 5e-5
    assert rate("dpo", "lora.rank=8") == 2 * rate("dpo") == 1e-4
    assert rate("dpo", "lora.rank=8", "objective.loss=simpo") == 1e-4


def test_a_rate_or_optimizer_that_is_named_stays():
    assert rate("dpo", "lora.rank=8", "optimizer.learning_rate=1e-4") == 1e-4
    assert rate("dpo", "lora.rank=8", file={"optimizer": {"learning_rate": 1e-4}}) == 1e-4
    assert rate("grpo", "lora.rank=8", "optimizer.weight_decay=0.1") == pytest.approx(10 * rate("grpo"))
    assert rate("sft", "lora.rank=8", "optimizer=muon") == rate("sft", "optimizer=muon")
    assert rate("sft", "lora.rank=8", "optimizer.name=muon") == rate("sft", "optimizer=muon")


def test_a_rate_that_is_high_already_is_raised_to_a_limit():
    assert rate("reward", "lora.rank=8") == LARGEST_RATE < 10 * rate("reward")


def test_a_recipe_of_adapters_knows_its_own():
    assert rate("lora") == rate("lora", "lora.rank=4") == 1e-3


def test_adapters_that_a_file_asks_for_count_too():
    assert rate("grpo", file={"lora": {"rank": 8}}) == pytest.approx(10 * rate("grpo"))
    assert rate("grpo", "lora.rank=0", file={"lora": {"rank": 8}}) == rate("grpo")


def test_kto_has_a_rate_of_its_own_and_its_kin_do_not():
    kto = rate("dpo", "objective.loss=kto")
    assert kto < rate("dpo") / 2
    for loss in ("ipo", "hinge", "simpo", "orpo"):
        assert rate("dpo", f"objective.loss={loss}") == rate("dpo")
    assert rate("dpo", "objective.loss=kto", "lora.rank=8") == 2 * kto
    assert rate("dpo", "objective.loss=kto", "optimizer.learning_rate=5e-5") == 5e-5
