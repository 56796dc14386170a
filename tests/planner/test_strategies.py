"""The strategies that a plan for several devices compares, and the one that it recommends."""

from __future__ import annotations

import pytest
from user_errors import raises_user_error

from penjing.base import config
from penjing.plan.layout import STATE_BYTES, Layout
from penjing.planner.inputs import PlanOptions
from penjing.planner.report import make_report
from penjing.planner.strategies import StrategyPlan, recommendation
from penjing.train.config import ParallelSettings
from penjing.train.memory_trace.fit import layout_of
from penjing.workflows.train import resolve_run


def planned(*words: str, **options):
    run = resolve_run("pretrain", config.parse_overrides(["model=26m", "batch.size=48", *words]))
    return make_report("pretrain", run, PlanOptions(gpu="RTX 4090", tokens="1M", **options))


def test_several_devices_are_compared_with_one():
    page = planned(gpus=2)
    rows = {row.strategy: row for row in page.strategies}
    assert rows["ddp"].rank_bytes == page.peak_memory_bytes and rows["ddp"].fits
    assert rows["ddp"].step_seconds == page.step_seconds and 1 < rows["ddp"].speedup < 2
    assert "single" not in rows and not planned().strategies
    # Of 24 GB, 16 bytes a parameter and the buckets leave room for a model of about a billion.
    assert 5e8 < rows["ddp"].most_parameters < 2e9


def test_a_named_strategy_is_planned_alone():
    assert planned("parallel.strategy=ddp", gpus=2).strategies == []
    with raises_user_error(where="parallel.strategy", wanted="auto"):
        planned("parallel.strategy=single", gpus=2)


@pytest.mark.nightly
def test_several_machines_say_what_is_assumed_between_them():
    slow, quick = planned(gpus=16), planned(gpus=16, nodes=2, network=400.0)
    assert any("2 machines of 8" in note and "estimate" in note for note in slow.warnings)
    assert any("400 Gbit/s" in note and "estimate" not in note for note in quick.warnings)
    assert quick.step_seconds < slow.step_seconds
    with raises_user_error(where="--gpus", got=8, wanted="a multiple of 3 machines"):
        planned(gpus=8, nodes=3)


def row(strategy: str, gib: int, seconds: float, *, fits: bool = True) -> StrategyPlan:
    return StrategyPlan(
        strategy=strategy, micro_size=4, rank_bytes=gib << 30, waterfall={}, fits=fits, step_seconds=seconds,
        speedup=2 / seconds, most_parameters=7 * 10**8 if strategy == "ddp" else 10**9,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([row("ddp", 20, 1.04), row("fsdp2", 12, 1.2)], ["=ddp", "1.92 x on 2", "fsdp2 is needed above about 700M"]),
        ([row("ddp", 30, 1.0, fits=False), row("fsdp2", 12, 1.2)], ["=fsdp2", "ddp would not fit"]),
        ([row("ddp", 30, 1.0, fits=False)], ["none fits"]),
    ],
)
def test_the_fastest_that_fits_is_recommended(rows, said):
    text = recommendation(rows, 2)
    assert all(words in text for words in said), text


def test_groups_that_hold_a_model_together():
    everything = frozenset(STATE_BYTES)
    assert Layout(ranks=8).group == 1
    assert Layout(ranks=8, nodes=2, shards=everything).parts("gradients") == 8
    hybrid = Layout(ranks=8, nodes=2, shards=everything, within_node=True)
    assert hybrid.group == 4 and hybrid.parts("activations") == 1
    auto, ddp = ParallelSettings(), ParallelSettings(strategy="ddp")
    assert layout_of(auto, 2) == layout_of(ddp, 2) and layout_of(auto, 1).strategy == "single"


@pytest.mark.nightly
def test_a_model_that_no_card_holds_is_planned_in_parts():
    """As a training of it decides: 1.5 billion parameters take 24 GB of states alone, of 24."""
    shape = ["hidden_size=2048", "intermediate_size=6144", "num_attention_heads=16", "head_dim=128"]
    page = planned(*(f"model.{word}" for word in shape), "model.num_hidden_layers=32", "batch.micro_size=1", gpus=4)
    rows = {row.strategy: row for row in page.strategies}
    assert not rows["ddp"].fits and rows["fsdp2"].fits
    assert page.peak_memory_bytes == rows["fsdp2"].rank_bytes
    assert [(one.now, "ddp takes" in one.why) for one in page.decisions if one.field == "parallel.strategy"] == [
        ("fsdp2", True)
    ]
