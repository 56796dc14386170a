"""Whether a run's model is compiled, and the compiling: `torch.compile` pays only in runs that are long enough.

By default each block is compiled by itself: all of one model are alike, so one is compiled and all use it, the shapes
are static whatever the head is given, and nothing is compiled again after the first training and validation passes.
"""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from penjing.base.errors import UserError
from penjing.kernels.cpu import library
from penjing.train.build_model import BuiltRun
from penjing.train.config import Run

Setting = Literal["auto", "off", "blocks", "whole", "graphs"]
# What a compiled step gains and what compiling costs, for the rule. CPU, where kernels of our own (kernels/cpu/ops.py)
# are
# missing: one thread of a Zen 4 core, the 26M shape on packed rows, 0.70 against 0.65 of the matmuls' rate and
# 25 s of CPU time. Where they are there a compiled step takes 1.3 times as long as an eager one. CUDA: an H200, 26M,
# 1.19 x and 17 s; larger models spend more of their time in matmuls, which no compiler makes faster.
GAIN = {"cpu": 1.06, "cuda": 1.19}
COST_SECONDS = {"cpu": 30.0, "cuda": 20.0}
# Of the device's peak that an eager step reaches, to say how long a run would be.
EAGER_SHARE = {"cpu": 0.65, "cuda": 0.29}
WORTH = 2.0  # a run must save so many times the cost


@dataclass(frozen=True, slots=True)
class Decision:
    """What is compiled, and why."""

    how: Literal["off", "blocks", "whole", "graphs"]
    why: str
    predicted_seconds: float = 0.0  # of compiling; an estimate


def missing_compiler(device: torch.device) -> str:
    """What this machine lacks to compile for `device`; empty: nothing."""
    if device.type == "cpu":
        wanted = os.environ.get("CXX", "g++")
        return "" if shutil.which(wanted) or shutil.which("clang++") else f"no C++ compiler ({wanted})"
    if device.type == "cuda":
        return "" if importlib.util.find_spec("triton") else "no triton"
    return f"torch.compile is not used on {device.type}"


def decide(run: Run, device: torch.device, eager_seconds: float, *, bfloat16: bool) -> Decision:
    """eager_seconds: of the whole run without compiling, predicted. bfloat16: whether its matmuls are in that.

    Raises UserError where what was asked for cannot be done.
    """
    lacking = obstacle(run, device.type, bfloat16=bfloat16) or missing_compiler(device)
    return choose(run.compute.compile, device.type, lacking, eager_seconds)


def obstacle(run: Run, kind: str, *, bfloat16: bool) -> str:
    """Why a run cannot be compiled on such a device, whatever is installed; empty: nothing is in the way."""
    if run.model.is_mixture and kind != "cuda":
        return "experts are chosen by the data, which no static graph holds"
    if run.model.is_mixture and not bfloat16:
        return "torch describes grouped matmuls of bfloat16 only"
    if run.objective.varying_shapes:
        return "answers make batches of another shape in every step"
    if run.lora.dropout:
        return "the masks of lora.dropout are drawn outside of any graph"
    return "norms that DoRA keeps are looked up outside of any graph" if run.lora.use_dora else ""


def choose(setting: Setting, kind: str, lacking: str, eager_seconds: float) -> Decision:
    """By a run's settings alone, for training and plans. lacking: what is in the way. Raises UserError as `decide`."""
    if setting == "off":
        return Decision("off", "as asked")
    if setting != "auto":
        if lacking:
            where, next_step = "compute.compile", "Use compute.compile=auto."
            raise UserError("cannot compile", where=where, got=lacking, next_step=next_step)
        if setting == "graphs" and kind != "cuda":
            raise UserError("CUDA graphs need CUDA", where="compute.compile", got=kind, wanted="blocks or whole")
        return Decision(setting, "as asked", COST_SECONDS[kind])
    if not lacking and kind == "cpu" and not library.unavailable_reason():
        lacking = "kernels of our own are faster on a CPU than what a compiler makes"
    if lacking:
        return Decision("off", lacking)
    cost, saved = COST_SECONDS[kind], eager_seconds * (1 - 1 / GAIN[kind])
    reason = f"would save about {saved:.0f} s of {eager_seconds:.0f} s and cost about {cost:.0f} s"
    return Decision("blocks", reason, cost) if saved > WORTH * cost else Decision("off", reason)


def compile_run(built: BuiltRun, flops: float, peak_flops_per_second: float | None) -> Decision:
    """Compile a run's model and optimizers, if it is long enough. flops: of all of it, on one device."""
    device = built.strategy.device
    eager_seconds = flops / (EAGER_SHARE.get(device.type, 0.4) * (peak_flops_per_second or math.inf))
    decision = decide(built.run, device, eager_seconds, bfloat16=built.precision.matmul == "bfloat16")
    if decision.how != "off":
        compile_model(built.trainable, decision.how)
        compile_optimizers(built.optimizers, device)
    return decision


def compile_model(model: nn.Module, how: Literal["blocks", "whole", "graphs"]) -> None:
    """Compile in place: names of parameters and the model's class stay. Compiling happens at the first call.

    Full graph: a construct that would break it is an error. `whole` takes the loss in too; `graphs` also replays each
    pass as one CUDA graph, for passes so short that launching kernels is what takes time.
    """
    if how == "blocks":
        for block in _decoder(model).blocks:
            block.compile(fullgraph=True, dynamic=False)
        return
    more: dict[str, Any] = {"mode": "reduce-overhead"} if how == "graphs" else {}
    model.compile(fullgraph=True, dynamic=False, **more)


def compile_optimizers(optimizers: Sequence[Any], device: torch.device) -> None:
    """Compile what optimizers have to compile (Muon's orthogonalization), in a run whose model is compiled too.

    On CUDA only, where the steps between its matmuls are launches of their own; on a CPU nearly all of its time is in
    the matmuls, which are the matrix library's either way.
    """
    for optimizer in optimizers if device.type == "cuda" else ():
        getattr(optimizer, "compile_update", lambda: None)()


def _decoder(model: Any) -> Any:
    return model if hasattr(model, "blocks") else _decoder(model.model)


def compiled_seconds() -> float:
    """What compiling took in this process so far."""
    from torch._dynamo.utils import calculate_time_spent

    return float(calculate_time_spent().get("total_wall_time", 0.0))
