"""The plan of a run before step 1, from a few timed steps of the real thing."""

from __future__ import annotations

import copy
import math
import time
from dataclasses import replace
from pathlib import Path

from torch import nn

from penjing.base.files import read_json, write_json
from penjing.model.lora import own_state
from penjing.parallel.base import Engine
from penjing.plan.bill import Bill, Pace, make_bill
from penjing.train.folder import RunFolder
from penjing.train.loop import Parts, step
from penjing.train.run import Run
from penjing.train.stage import OnDevice, Size, Stage, micro_units


def plan(run: Run, stage: Stage, size: Size, engine: Engine, model: nn.Module, parts: Parts, *, begun: bool) -> Bill:
    """Read back if the run was begun before, else made from a probe and written."""
    folder = RunFolder(Path(run.out))
    if begun and folder.plan.is_file():
        known = read_json(folder.plan)
        return Bill(**{name: known[name] for name in Bill.__dataclass_fields__})
    pace = probe(run, stage, size, engine, model, parts)
    bill = make_bill(
        run.model,
        trainable=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        flops_per_token=parts.meter.flops_per_token,
        units_per_epoch=size.units_per_epoch,
        tokens_per_unit=size.tokens_per_unit,
        units_per_step=run.batch.rows,
        micro_tokens=round(micro_units(run, engine) * size.tokens_per_unit / (1 - size.padding_fraction)),
        steps=parts.num_steps,
        pace=pace,
        validations=_times(run.validate.every, parts.num_steps),
        checkpoints=_times(run.save.every, parts.num_steps),
        optimizer_bytes_per_parameter=8 if run.optimizer.kind == "adamw" else 4,
    )
    if engine.rank == 0:
        write_json(folder.plan, bill.to_dict())
    return bill


def _times(every: int, steps: int) -> int:
    return math.ceil(steps / every) if every else 0


def probe(run: Run, stage: Stage, size: Size, engine: Engine, model: nn.Module, parts: Parts) -> Pace:
    """Time the real step on this machine, leaving model, optimizer and data exactly as they were."""
    weights = copy.deepcopy(own_state(model))
    states = [copy.deepcopy(optimizer.state_dict()) for optimizer in parts.optimizers]
    source = stage.source(micro_units(run, engine), engine.rank, engine.world)
    trial = replace(parts, source=OnDevice(source, engine.device))
    seconds = []
    warm = min(2, size.probe_steps - 1)
    for index in range(size.probe_steps + warm):
        start = time.perf_counter()
        float(step(trial, 0).sums["loss"])  # waits for the device
        if index >= warm:
            seconds.append(time.perf_counter() - start)
    start = time.perf_counter()
    stage.validate()
    validation = time.perf_counter() - start
    model.load_state_dict(weights, strict=False)
    for optimizer, state in zip(parts.optimizers, states, strict=True):
        optimizer.load_state_dict(state)
    seconds.sort()
    median = seconds[len(seconds) // 2]
    saved_bytes = 12 * sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return Pace(median, validation, 0.02 + saved_bytes / 300e6, (seconds[-1] - seconds[0]) / median)
