"""Decides whether a run's model is compiled, and compiles it: `torch.compile` pays only in long runs.

By default each block is compiled separately. The blocks of a model are alike, so they share one compiled graph. Their
shapes do not depend on the head's inputs, so nothing is recompiled after the first training and validation passes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from penjing import devices
from penjing.base.errors import UserError
from penjing.devices.device import Device
from penjing.train.build_model import BuiltRun
from penjing.train.config import Run

Setting = Literal["auto", "off", "blocks", "graphs"]
MIN_PAYOFF = 2.0  # required ratio of saved time to compile time


@dataclass(frozen=True, slots=True)
class Decision:
    """What to compile, and why."""

    how: Literal["off", "blocks", "graphs"]
    why: str
    predicted_seconds: float = 0.0  # of compiling; an estimate


def decide(run: Run, device: torch.device, eager_seconds: float, *, bfloat16: bool, sharded: bool = False) -> Decision:
    """eager_seconds: predicted duration of the run without compiling. bfloat16: whether its matmuls are in bfloat16.
    sharded: whether weights are.

    Raises UserError if the setting asks for compiling and it is impossible.
    """
    kind = devices.of(device)
    lacking = obstacle(run, kind, bfloat16=bfloat16) or kind.missing_compiler()
    if sharded:
        lacking = "the hooks that gather a block's weights are outside the graph"
    return choose(run.compute.compile, kind, lacking, eager_seconds)


def obstacle(run: Run, kind: Device, *, bfloat16: bool) -> str:
    """Why a run cannot be compiled on this kind of device, whatever is installed; empty: it can."""
    if run.model.is_mixture and not kind.compiles_experts:
        return "the data choose the experts, which a static graph cannot express"
    if run.model.is_mixture and not bfloat16:
        return "torch.compile supports grouped matmuls in bfloat16 only"
    if run.parallel.strategy == "zero3":
        return "DeepSpeed gathers the weights outside the graph"
    if run.objective.varying_shapes:
        return "the batches of answers have another shape in every step"
    if run.lora.dropout:
        return "the masks of lora.dropout are drawn outside the graph"
    return "DoRA's cached norms are read outside the graph" if run.lora.use_dora else ""


def choose(setting: Setting, kind: Device, lacking: str, eager_seconds: float) -> Decision:
    """The decision from a run's settings, for training and plans. lacking: why compiling is impossible; empty: it is
    possible. Raises UserError like `decide`."""
    if setting == "off":
        return Decision("off", "as set")
    if setting != "auto":
        if lacking:
            where, next_step = "compute.compile", "Use compute.compile=auto."
            raise UserError("cannot compile", where=where, got=lacking, next_step=next_step)
        if setting == "graphs" and not kind.has_graphs:
            where, wanted = "compute.compile", "blocks or auto"
            raise UserError("no graphs can be recorded", where=where, got=kind.type, wanted=wanted)
        return Decision(setting, "as set", kind.compile_seconds)
    if not lacking and kind.compile_gain <= 1:
        lacking = "a compiled step is not faster on this device"
    if lacking:
        return Decision("off", lacking)
    cost, saved = kind.compile_seconds, eager_seconds * (1 - 1 / kind.compile_gain)
    reason = f"would save about {saved:.0f} s of {eager_seconds:.0f} s and cost about {cost:.0f} s"
    return Decision("blocks", reason, cost) if saved > MIN_PAYOFF * cost else Decision("off", reason)


def compile_run(built: BuiltRun, flops: float, peak_flops_per_second: float | None) -> Decision:
    """Compile a run's model and optimizers if the run is long enough. flops: of the full run, on one device."""
    device = built.strategy.device
    eager_seconds = flops / (devices.of(device).eager_share * (peak_flops_per_second or math.inf))
    bfloat16, sharded = built.precision.matmul == "bfloat16", built.strategy.is_sharded
    decision = decide(built.run, device, eager_seconds, bfloat16=bfloat16, sharded=sharded)
    if decision.how != "off":
        compile_model(built.trainable, decision.how)
        compile_optimizers(built.optimizers, device)
    return decision


def compile_model(model: nn.Module, how: Literal["blocks", "graphs"]) -> None:
    """Compile in place: parameter names and the model's class stay. Compiling happens at the first call.

    Full graph: a graph break is an error. `graphs` compiles the model with its loss, and replays each pass as one
    device graph, for passes so short that kernel launches dominate.
    """
    if how == "blocks":
        for block in _decoder(model).blocks:
            block.compile(fullgraph=True, dynamic=False)
        return
    model.compile(fullgraph=True, dynamic=False, mode="reduce-overhead")


def compile_optimizers(optimizers: Sequence[Any], device: torch.device) -> None:
    """Compile Muon's orthogonalization, in a run whose model is compiled too.

    Not on a CPU: on a GPU every operation between its matmuls is a kernel launch. On a CPU nearly all of its time is in
    matmuls, which compiling does not change.
    """
    for optimizer in () if devices.of(device).is_host else optimizers:
        getattr(optimizer, "compile_update", lambda: None)()


def _decoder(model: Any) -> Any:
    return model if hasattr(model, "blocks") else _decoder(model.model)


def compiled_seconds() -> float:
    """Seconds spent on compiling in this process so far."""
    from torch._dynamo.utils import calculate_time_spent

    return float(calculate_time_spent().get("total_wall_time", 0.0))
