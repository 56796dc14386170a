"""The planner sees how the optimizer keeps its state, and how large a model fits a card with it."""

import pytest
import torch

from penjing.base.config import Layer
from penjing.model.transformer import Transformer
from penjing.plan.memory import MemoryPlan, Target
from penjing.train.config import Run
from penjing.train.memory_trace.trace import predict_memory
from penjing.workflows.train import resolve_run

CARD = Target(name="RTX 3090", capability=(8, 6), memory_bytes=24 << 30)
ONE_BILLION: Layer = {
    "model": {"preset": "tinyllama-1.1b"},
    "data": {"seq_len": 2048},
    "batch": {"size": 4, "micro_size": 1},
    "compute": {"activation_checkpointing": "block"},
}


def run_of(kind: str, state: str, **changes: Layer) -> Run:
    return resolve_run("pretrain", {**ONE_BILLION, **changes, "optimizer": {"name": kind, "state_dtype": state}})


@pytest.fixture(scope="module")
def plans() -> dict[tuple[str, str], MemoryPlan]:
    asked = [("adamw", "float32"), ("adamw", "int8"), ("muon", "int8")]
    return {(kind, state): predict_memory(run_of(kind, state), CARD) for kind, state in asked}


@pytest.mark.nightly
def test_the_optimizer_s_line_of_one_billion_parameters(plans: dict[tuple[str, str], MemoryPlan]) -> None:
    line = {pair: plan.waterfall["optimizer state"] for pair, plan in plans.items()}
    with torch.device("meta"):
        model = Transformer(run_of("adamw", "float32").model)
    whole = 8 * sum(parameter.numel() for parameter in model.parameters())
    assert line["adamw", "float32"] == pytest.approx(whole, rel=0.01)
    # A scale for every 256 codes, and float32 for the embedding, which is 6 % of this model.
    table = 8 * model.embed.weight.numel()
    assert line["adamw", "int8"] == pytest.approx((whole - table) / 4 * (1 + 4 / 256) + table, rel=0.01)
    assert line["adamw", "int8"] < 0.32 * whole
    assert line["muon", "int8"] < 0.2 * whole


@pytest.mark.nightly
def test_one_billion_parameters_on_a_24_gb_card(plans: dict[tuple[str, str], MemoryPlan]) -> None:
    """4 passes of 1 x 2048 in a step, activations of blocks made again; with the state in 8 bits on a 16 GB card."""
    assert plans["adamw", "float32"].total_bytes < 24e9
    assert plans["adamw", "int8"].total_bytes < 16e9 < plans["adamw", "float32"].total_bytes
    assert plans["muon", "int8"].total_bytes < plans["adamw", "int8"].total_bytes


def test_activations_that_are_made_again_are_not_planned_for() -> None:
    def plan(recompute: str) -> MemoryPlan:
        changes: Layer = {"model": {"preset": "26m"}, "data": {"seq_len": 512}}
        return predict_memory(
            run_of("adamw", "float32", **changes, compute={"activation_checkpointing": recompute}), CARD
        )

    whole, mlp, block = (plan(recompute).waterfall["activations"] for recompute in ("none", "mlp", "block"))
    assert block < 0.5 * whole
    assert block < mlp < whole


@pytest.mark.parametrize("state", ["bfloat16", "int8"])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_the_line_is_what_a_real_state_takes(kind: str, state: str) -> None:
    run = resolve_run(
        "pretrain",
        {
            "model": {"preset": "tiny"},
            "data": {"seq_len": 64},
            "batch": {"size": 4},
            "optimizer": {"name": kind, "state_dtype": state},
        },
    )
    planned = predict_memory(run, Target(kind="cpu", memory_bytes=8 << 30), process_bytes=0)
    model = Transformer(run.model)
    optimizers = run.optimizer.build(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for optimizer in optimizers:
        optimizer.step()
    real = sum(
        value.numel() * value.element_size()
        for optimizer in optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )
    assert planned.waterfall["optimizer state"] == pytest.approx(real, rel=0.01)
