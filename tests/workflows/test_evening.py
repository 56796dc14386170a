"""The evening's plan, what it refuses, and rehearsals of it from outside."""

import io
import json
import shutil
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from user_errors import raises_user_error

from penjing.base.files import read_json
from penjing.plan import little_data
from penjing.track.run_record import RunRecord
from penjing.workflows import evening_plan
from penjing.workflows import quickstart as stages
from penjing.workflows.evening import EveningOptions, evening

HOUR = 3600


def planned(tmp_path, **options):
    console = Console(file=io.StringIO(), width=200)
    plan = evening(EveningOptions(out=tmp_path / "out", **options), console)
    return plan, console.file.getvalue()


def small(toy, *kinds):
    """Options of a rehearsal that takes seconds."""
    settings = ("data.seq_len=64", "eval.sequences=4", "sft.data.seq_len=512", "sft.eval.sequences=4")
    return {"data": ",".join(str(toy / f"{kind}.jsonl") for kind in kinds), "size": "tiny", "settings": settings}


def test_a_card_not_here_is_planned_and_nothing_is_written(tmp_path):
    plan, said = planned(tmp_path, gpu="RTX 4090", hours="3")
    assert [stage.name for stage in plan.stages] == ["data", "pretrain", "sft", "dpo", "evaluate", "export"]
    assert 0.5 * 3 * HOUR < plan.total("seconds") < 3 * HOUR
    assert all(stage.files and stage.num_bytes for stage in plan.stages)
    assert "CNY" in said and not (tmp_path / "out").exists()


def test_a_price_buys_time_and_more_time_a_larger_model(tmp_path):
    plans = [planned(tmp_path, gpu="RTX 3060", price=f"{price}CNY", hourly="1CNY")[0] for price in (0.5, 2, 10)]
    assert all(plan.total("seconds") <= price * HOUR for plan, price in zip(plans, (0.5, 2, 10), strict=True))
    assert plans[0].parameters < plans[2].parameters
    assert planned(tmp_path, gpu="RTX 3060", size="26m")[0].size == "26m"


@pytest.mark.parametrize(("hours", "size"), [(1.5, "1b"), (1, "64m")])
def test_a_short_time_is_kept(tmp_path, hours, size):
    plan, _ = planned(tmp_path, gpu="RTX 4090", hours=str(hours), size=size)
    assert 0.9 * hours * HOUR < plan.total("seconds") <= hours * HOUR


def test_every_stage_is_planned_with_the_shape_of_the_pretraining(tmp_path):
    options = {"gpu": "RTX 4090", "hours": "1", "size": "26m"}
    plans = [planned(tmp_path, **options, settings=settings)[0] for settings in ((), ("model.num_hidden_layers=2",))]
    for whole, small in zip(plans[0].stages[1:4], plans[1].stages[1:4], strict=True):
        assert small.memory_bytes < 0.5 * whole.memory_bytes


def test_the_toy_world_is_planned_for_another_card(tmp_path, monkeypatch):
    monkeypatch.setattr(stages, "TOYWORLD_SIZES", {name: size // 10 for name, size in stages.TOYWORLD_SIZES.items()})
    monkeypatch.setattr(stages, "QUESTIONS_PER_KIND", 10)
    plan, _ = planned(tmp_path, gpu="RTX 4090", data="toyworld")
    assert [stage.name for stage in plan.stages[1:4]] == ["pretrain", "sft", "dpo"] and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("settings", "chosen"),
    [((), {"momentum": 0.9}), (("optimizer=adamw", "optimizer.learning_rate=1e-3"), None), (("batch.size=1",), None)],
)
def test_a_short_pretraining_has_a_lower_momentum(tmp_path, settings, chosen):
    (tmp_path / "novel.txt").write_text("\n\n".join(f"Chapter {n}: {n * n} words of {n % 97}." for n in range(20_000)))
    plan, _ = planned(tmp_path, gpu="RTX 4090", data=str(tmp_path / "novel.txt"), hours="10min", settings=settings)
    pretraining = plan.stages[1].settings
    assert pretraining.get("optimizer") == chosen
    assert (pretraining["max_steps"] > little_data.SHORT_RUN_STEPS) == ("batch.size=1" in settings)


@pytest.mark.parametrize(("hourly", "hours", "total"), [("1500KRW", 2, "KRW"), ("0KRW", 8, "0.00 KRW")])
def test_an_hour_may_cost_thousands_or_nothing(tmp_path, hourly, hours, total):
    plan, said = planned(tmp_path, gpu="RTX 3060", size="26m", price="3000KRW", hourly=hourly)
    assert 0.5 * hours * HOUR < plan.total("seconds") < hours * HOUR and total in said


def test_more_time_for_little_text_is_no_larger_model(tmp_path):
    text = tmp_path / "novel.txt"
    text.write_text("\n\n".join(f"Chapter {n}: {n * n} words of {n % 97}." for n in range(20_000)))
    plans = [planned(tmp_path, gpu="RTX 4090", data=str(text), hours=hours)[0] for hours in ("10min", "8")]
    assert all(plan.parameters <= 3 * text.stat().st_size for plan in plans)


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"gpu": "RTX 3060", "size": "1b"}, {"where": "--size 1b"}),
        ({"gpu": "RTX 3060", "hours": "1min"}, {"where": "--hours"}),
        ({"gpu": "RTX 3060", "settings": ("model=26m",)}, {"where": "model", "wanted": "--size 26m"}),
        ({"gpu": "RTX 3060", "hours": "1", "settings": ("max_steps=100000",)}, {"where": "--hours", "got": "1 h 00"}),
        ({"gpu": "RTX 3060", "hours": "20GB"}, {"where": "--hours"}),
        ({"gpu": "RTX 3060", "price": "5EUR"}, {"where": "--price"}),
        ({"gpu": "RTX 3060", "data": "minimind-sft-mini"}, {"where": "minimind-sft-mini"}),
    ],
)
def test_what_cannot_be_is_one_line(tmp_path, options, facts):
    with raises_user_error(**facts):
        planned(tmp_path, **options)


def test_prompts_that_the_rewards_cannot_score_are_no_plan(tmp_path, toy, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    prompts = tmp_path / "rlaif.jsonl"
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "空"}]
    prompts.write_text(json.dumps({"conversations": turns}))
    options = small(toy, "pretrain")
    options = {**options, "data": f"{options['data']},{prompts}", "hours": "4"}
    with raises_user_error(where="rlaif.jsonl:1", wanted="gt"):
        planned(tmp_path, **options)
    plan, _ = planned(tmp_path, **{**options, "settings": (*options["settings"], "grpo.objective.rewards=length")})
    assert [stage.name for stage in plan.stages[1:3]] == ["pretrain", "grpo"]


def test_nothing_starts_without_yes_or_on_a_small_disk(tmp_path, toy, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    _, said = planned(tmp_path, **small(toy, "pretrain", "sft"))
    assert "--yes" in said and not (tmp_path / "out/pretrain").exists()
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1, 1, 1))
    with raises_user_error(where=str(tmp_path / "out")):
        planned(tmp_path, yes=True, **small(toy, "pretrain", "sft"))


@pytest.mark.slow
def test_a_rehearsal_that_is_stopped_goes_on_and_comes_true(tmp_path, toy, monkeypatch):
    train, options = stages._train, {"rehearse": True, **small(toy, "pretrain", "sft")}

    def stop(options, run, console):
        if run.stage == "sft":
            raise KeyboardInterrupt
        return train(options, run, console)

    monkeypatch.setattr(stages, "_train", stop)
    with pytest.raises(KeyboardInterrupt):
        planned(tmp_path, **options)
    monkeypatch.setattr(stages, "_train", train)
    plan, said = planned(tmp_path, **options)
    assert "bits per byte (from before)" in said and "predicted" in said
    check(plan, tmp_path / "out")


@pytest.mark.nightly
def test_the_whole_rehearsal_comes_true(tmp_path):
    """In place of the downloads the toy world, with SFT and DPO, for a card that is not here."""
    plan, _ = planned(tmp_path, rehearse=True, size="1m", gpu="RTX 3060", hours="12min")
    assert [stage.name for stage in plan.stages[1:4]] == ["pretrain", "sft", "dpo"]
    check(plan, tmp_path / "out")


def check(plan, out: Path):
    errors = evening_plan.errors_of(plan, read_json(out / "quickstart.json")["actual"])
    assert {name: error for name, error in errors.items() if name != "seconds" and abs(error) > 0.02} == {}
    last = [stage.name for stage in plan.stages][-3]
    assert RunRecord(out / last).outcome.number("tokens") and (out / "export/model.safetensors").is_file()


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ({"val_bits_per_byte": 1.5, "val_loss": 3.0}, "held-out 1.500 bits per byte"),
        ({"val_loss": 3.0}, "held-out loss 3.000 nats per token"),
        ({"val_reward_accuracy": 0.75}, "75% of held-out pairs in their order"),
        ({"val_reward": 0.5}, "mean reward of held-out prompts 0.500"),
    ],
)
def test_a_stage_says_the_figure_it_has(monkeypatch, figures, said):
    outcome = {"tokens": 1000, "tokens_per_second": 10.0, **figures}
    monkeypatch.setattr(stages, "train_in", lambda *asked: outcome)
    assert stages._train(SimpleNamespace(launch=None), None, None).endswith(said)
