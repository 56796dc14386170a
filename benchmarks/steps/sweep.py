"""Sweep training steps over batch, accumulation, length, precision and recomputation: measured and predicted.

The steps are those of `train/loop.py`, on full rows of random tokens, so no data are needed. Points that do not fit
get a row of the table too.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from itertools import repeat
from typing import Any

import torch

from penjing import devices
from penjing.base import config
from penjing.base.errors import is_out_of_memory
from penjing.parallel.single import Single
from penjing.plan.device_model import Machine
from penjing.plan.flops import training_flops_per_token
from penjing.plan.memory import Target
from penjing.plan.shape import shape_of
from penjing.plan.step_time import step_time
from penjing.plan.step_workload import Workload
from penjing.train.batch_geometry import batch_geometry
from penjing.train.build_model import build_run
from penjing.train.config import Run
from penjing.train.loop import TrainingContext, step
from penjing.train.oom_recovery import empty_cache
from penjing.train.precision import Precision
from penjing.train.stages.base import make_stage
from penjing.train.throughput import Meter
from steps.full_rows import FullRows, full_rows
from steps.gpu_counters import Utilisation, estimate_utilisation, measure_utilisation
from steps.timer import time_steps

WARMUP_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Values of each axis; an empty one stands for the run's value."""

    micro_size: tuple[int, ...] = ()
    accumulate: tuple[int, ...] = ()
    seq_len: tuple[int, ...] = ()
    dtypes: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()  # values of compute.activation_checkpointing

    def points(self, run: Run, device: torch.device) -> list[SweepPoint]:
        geometry = batch_geometry(run, 1, device)
        axes = (
            self.seq_len or (run.data.seq_len,),
            self.dtypes or (run.compute.dtype,),
            self.recompute or (run.compute.activation_checkpointing,),
            self.micro_size or (geometry.micro_size,),
            self.accumulate or (geometry.accumulation,),
        )
        return [
            SweepPoint(seq_len=length, dtype=dtype, recompute=recompute, micro_size=rows, accumulate=passes)
            for length, dtype, recompute, rows, passes in itertools.product(*axes)
        ]


@dataclass(frozen=True, kw_only=True)
class SweepPoint:
    """One configuration."""

    micro_size: int
    accumulate: int
    seq_len: int
    dtype: str
    recompute: str

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.micro_size * self.accumulate * self.seq_len


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A row of the table. Rates per second; None: unknown. ended: done, or out of memory."""

    point: SweepPoint
    ended: str
    steps_per_second: float | None = None
    spread: float | None = None
    tokens_per_second: float | None = None
    model_tflops_causal: float | None = None
    model_tflops_full_square: float | None = None
    mfu_causal: float | None = None
    mfu_full_square: float | None = None
    peak_memory_bytes: int | None = None
    utilisation: Utilisation = field(default_factory=Utilisation)
    predicted_steps_per_second: float | None = None
    predicted_level: str = ""
    predicted_memory_bytes: int | None = None
    predicted_to_fit: bool | None = None

    def to_dict(self) -> dict[str, Any]:
        flat: dict[str, Any] = {}
        for name, value in asdict(self).items():
            flat |= value if isinstance(value, dict) else {name: value}
        return flat


def sweep(
    run: Run,
    grid: Grid,
    machine: Machine,
    target: Target,
    *,
    steps: int = 8,
    seconds: float = 10.0,
    device: torch.device,
    predict_bytes: Callable[[Run], int | None] = lambda run: None,
    report: Callable[[Measured], None] = lambda row: None,
) -> list[Measured]:
    """Measure every point of the grid, sequentially in this process. seconds: approximate time per point.

    predict_bytes: returns the traced memory of a run's step.
    """
    rows = []
    for point in grid.points(run, device):
        point_run = settings_of(run, point)
        precision = Precision.resolve(point_run.compute, device)
        work = _workload(point_run, point, precision.name, machine)
        memory = predict_bytes(point_run)
        row = Measured(
            point=point,
            ended="out of memory",
            predicted_steps_per_second=1 / step_time(work, machine).seconds,
            predicted_level=machine.level,
            predicted_memory_bytes=memory,
            predicted_to_fit=memory <= target.memory_bytes if memory and target.memory_bytes else None,
        )
        try:
            step_seconds, peak, used = _time_point(point_run, point, precision, device, steps, seconds)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            step_seconds = []
        if step_seconds:
            median = statistics.median(step_seconds)
            row = replace(
                row,
                point=replace(point, dtype=precision.name),
                ended="done",
                spread=(max(step_seconds) - min(step_seconds)) / median,
                peak_memory_bytes=peak,
                utilisation=used or estimate_utilisation(work, machine, median),
                **_rates(point_run, point, median, machine.peak_flops.get(precision.name)),
            )
        else:
            empty_cache()  # the exception kept the tensors alive
        report(row)
        rows.append(row)
    return rows


def settings_of(run: Run, point: SweepPoint) -> Run:
    """The run with a point's settings. Raises UserError for invalid settings."""
    return config.resolve(
        Run,
        config.to_dict(run),
        {
            "batch": {"size": point.micro_size * point.accumulate, "micro_size": point.micro_size},
            "data": {"seq_len": point.seq_len},
            "compute": {"dtype": point.dtype, "activation_checkpointing": point.recompute},
        },
    )


def _workload(run: Run, point: SweepPoint, dtype: str, machine: Machine) -> Workload:
    return Workload(
        shape=shape_of(run.model),
        tokens=point.micro_size * point.seq_len,
        seq_len=point.seq_len,
        keys=(point.seq_len + 1) / 2,
        passes=point.accumulate,
        dtype=dtype,
        optimizer=run.optimizer.name,
        fused_optimizer=True,
        triton_kernels=machine.runs_triton_kernels(dtype),
        recompute=run.compute.activation_checkpointing,
    )


def _rates(run: Run, point: SweepPoint, seconds: float, peak: float | None) -> dict[str, Any]:
    """Rates of a `Measured`. seconds: of a step. peak: FLOPs per second, for MFU."""
    causal = training_flops_per_token(run.model, (point.seq_len + 1) / 2) * point.tokens / seconds
    full = training_flops_per_token(run.model, point.seq_len, window_keys=point.seq_len) * point.tokens / seconds
    return {
        "steps_per_second": 1 / seconds,
        "tokens_per_second": point.tokens / seconds,
        "model_tflops_causal": causal / 1e12,
        "model_tflops_full_square": full / 1e12,
        "mfu_causal": causal / peak if peak else None,
        "mfu_full_square": full / peak if peak else None,
    }


def _time_point(
    run: Run, point: SweepPoint, precision: Precision, device: torch.device, steps: int, seconds: float
) -> tuple[list[float], int, Utilisation | None]:
    """Seconds of each step, peak memory, and utilisation in one more step."""
    empty_cache()
    devices.of(device).reset_peak_memory(device)
    precision.require(device)
    devices.set_tf32(precision.matmul == "tf32")
    context = _context(run, point, precision, device)
    step_seconds = time_steps(
        lambda index: float(step(context, index).loss), device, steps=steps, warmup=WARMUP_STEPS, seconds=seconds
    )
    peak = devices.of(device).peak_memory_bytes(device)
    used = measure_utilisation(lambda: step(context, 0), device)
    return step_seconds, peak, used


def _context(run: Run, point: SweepPoint, precision: Precision, device: torch.device) -> TrainingContext:
    strategy = Single(device)
    strategy.scaler = precision.loss_scaler(device)
    stage = make_stage(run, strategy)
    stage.assume_data()
    built = build_run(stage, strategy, precision)
    shape, generator = (point.micro_size, point.seq_len + 1), torch.Generator().manual_seed(1)
    batch = full_rows(torch.randint(0, run.model.vocab_size, shape, generator=generator)).to(device)
    return TrainingContext(
        strategy=strategy,
        model=built.wrapped,
        objective=built.objective,
        source=FullRows(repeat(batch)),
        optimizers=built.optimizers,
        schedule=run.schedule,
        meter=Meter(0.0, None),
        num_steps=1 << 20,
        accumulate=point.accumulate,
        max_grad_norm=run.max_grad_norm,
        log_every=0,
    )
