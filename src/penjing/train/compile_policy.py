"""Decides whether a run's model is compiled, and compiles it: `torch.compile` pays only in long runs.

By default each block is compiled separately. The blocks of a model are alike, so they share one compiled graph. Their
shapes do not depend on the head's inputs, so nothing is recompiled after the first training and validation passes.
"""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from penjing.base.errors import UserError
from penjing.kernels.cpu import library
from penjing.train.build_model import BuiltRun
from penjing.train.config import Run

Setting = Literal["auto", "off", "blocks", "whole", "graphs"]
# Speedup of a compiled step, and cost of compiling. CPU without our C kernels (kernels/cpu/ops.py): one thread of a
# Zen 4 core, the 26M shape on packed rows, 0.70 against 0.65 of the matmuls' rate and 25 s of CPU time. With our C
# kernels a compiled step takes 1.3 times as long as an eager one. CUDA: an H200, 26M, 1.19 x and 17 s; larger models
# spend more of their time in matmuls, which compiling does not speed up.
GAIN = {"cpu": 1.06, "cuda": 1.19}
COST_SECONDS = {"cpu": 30.0, "cuda": 20.0}
# Fraction of the device's peak that an eager step reaches, to predict a run's duration.
EAGER_SHARE = {"cpu": 0.65, "cuda": 0.29}
MIN_PAYOFF = 2.0  # required ratio of saved time to compile time


@dataclass(frozen=True, slots=True)
class Decision:
    """What to compile, and why."""

    how: Literal["off", "blocks", "whole", "graphs"]
    why: str
    predicted_seconds: float = 0.0  # of compiling; an estimate


def missing_compiler(device: torch.device) -> str:
    """What this machine lacks to compile for `device`; empty: nothing."""
    if device.type == "cpu":
        compiler, folder = os.environ.get("CXX", "g++"), str(Path(torch.__file__).parent)
        if " " in folder:  # its linker gets the path without quotes
            return f"torch cannot compile from a folder with a space in its name ({folder})"
        return "" if shutil.which(compiler) or shutil.which("clang++") else f"no C++ compiler ({compiler})"
    if device.type == "cuda":
        return "" if importlib.util.find_spec("triton") else "no triton"
    return f"torch.compile is not used on {device.type}"


def decide(run: Run, device: torch.device, eager_seconds: float, *, bfloat16: bool) -> Decision:
    """eager_seconds: predicted duration of the run without compiling. bfloat16: whether its matmuls are in bfloat16.

    Raises UserError if the setting asks for compiling and it is impossible.
    """
    lacking = obstacle(run, device.type, bfloat16=bfloat16) or missing_compiler(device)
    return choose(run.compute.compile, device.type, lacking, eager_seconds)


def obstacle(run: Run, kind: str, *, bfloat16: bool) -> str:
    """Why a run cannot be compiled on this kind of device, whatever is installed; empty: it can."""
    if run.model.is_mixture and kind != "cuda":
        return "the data choose the experts, which a static graph cannot express"
    if run.model.is_mixture and not bfloat16:
        return "torch.compile supports grouped matmuls in bfloat16 only"
    if run.objective.varying_shapes:
        return "the batches of answers have another shape in every step"
    if run.lora.dropout:
        return "the masks of lora.dropout are drawn outside the graph"
    return "DoRA's cached norms are read outside the graph" if run.lora.use_dora else ""


def choose(setting: Setting, kind: str, lacking: str, eager_seconds: float) -> Decision:
    """The decision from a run's settings, for training and plans. lacking: why compiling is impossible; empty: it is
    possible. Raises UserError like `decide`."""
    if setting == "off":
        return Decision("off", "as set")
    if setting != "auto":
        if lacking:
            where, next_step = "compute.compile", "Use compute.compile=auto."
            raise UserError("cannot compile", where=where, got=lacking, next_step=next_step)
        if setting == "graphs" and kind != "cuda":
            raise UserError("CUDA graphs need CUDA", where="compute.compile", got=kind, wanted="blocks or whole")
        return Decision(setting, "as set", COST_SECONDS[kind])
    if not lacking and kind == "cpu" and not library.unavailable_reason():
        lacking = "our C kernels are faster on a CPU than compiled ones"
    if lacking:
        return Decision("off", lacking)
    cost, saved = COST_SECONDS[kind], eager_seconds * (1 - 1 / GAIN[kind])
    reason = f"would save about {saved:.0f} s of {eager_seconds:.0f} s and cost about {cost:.0f} s"
    return Decision("blocks", reason, cost) if saved > MIN_PAYOFF * cost else Decision("off", reason)


def compile_run(built: BuiltRun, flops: float, peak_flops_per_second: float | None) -> Decision:
    """Compile a run's model and optimizers if the run is long enough. flops: of the full run, on one device."""
    device = built.strategy.device
    eager_seconds = flops / (EAGER_SHARE.get(device.type, 0.4) * (peak_flops_per_second or math.inf))
    decision = decide(built.run, device, eager_seconds, bfloat16=built.precision.matmul == "bfloat16")
    if decision.how != "off":
        compile_model(built.trainable, decision.how)
        compile_optimizers(built.optimizers, device)
    return decision


def compile_model(model: nn.Module, how: Literal["blocks", "whole", "graphs"]) -> None:
    """Compile in place: parameter names and the model's class stay. Compiling happens at the first call.

    Full graph: a graph break is an error. `whole` includes the loss; `graphs` also replays each pass as one CUDA graph,
    for passes so short that kernel launches dominate.
    """
    if how == "blocks":
        for block in _decoder(model).blocks:
            block.compile(fullgraph=True, dynamic=False)
        return
    kwargs: dict[str, Any] = {"mode": "reduce-overhead"} if how == "graphs" else {}
    model.compile(fullgraph=True, dynamic=False, **kwargs)


def compile_optimizers(optimizers: Sequence[Any], device: torch.device) -> None:
    """Compile Muon's orthogonalization, in a run whose model is compiled too.

    On CUDA only, where every operation between its matmuls is a kernel launch. On a CPU nearly all of its time is in
    matmuls, which compiling does not change.
    """
    for optimizer in optimizers if device.type == "cuda" else ():
        getattr(optimizer, "compile_update", lambda: None)()


def _decoder(model: Any) -> Any:
    return model if hasattr(model, "blocks") else _decoder(model.model)


def compiled_seconds() -> float:
    """Seconds spent on compiling in this process so far."""
    from torch._dynamo.utils import calculate_time_spent

    return float(calculate_time_spent().get("total_wall_time", 0.0))
