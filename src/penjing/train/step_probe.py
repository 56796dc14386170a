"""The plan of a run before step 1, from a few timed micro-batches of the run itself (level L2)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from penjing import __version__, devices
from penjing.base.files import write_json
from penjing.base.untrusted import read_fields
from penjing.parallel.base import Strategy
from penjing.plan import prediction_history as history
from penjing.plan.flops import training_flops_per_token
from penjing.plan.run_estimate import RunEstimate, RunSize, estimate_run
from penjing.track.run_record import RunRecord
from penjing.train.build_model import BuiltRun
from penjing.train.loop import TrainingContext
from penjing.train.stages.base import DatasetSize
from penjing.train.step_timing import ProbeHooks, probe
from penjing.train.throughput import Expected

FORECAST = "scale.json"  # in the run's folder: the loss that `penjing plan forecast` predicted
FEW_STEPS = 50  # a run with fewer steps gives a warning
MANY_EPOCHS = 4  # of a source; up to then a repeated token is worth almost as much as a new one
FORECAST_TOLERANCE = 0.05  # of the tokens: the forecast assumes full rows, and rows have some padding


def plan(
    built: BuiltRun, size: DatasetSize, context: TrainingContext, *, resuming: bool, hooks: ProbeHooks
) -> RunEstimate:
    """Read a resumed run's plan if its steps and rows are the same, else estimate the run from a probe and write it."""
    run, strategy, record = built.run, built.strategy, RunRecord(Path(built.run.out))
    if resuming and record.plan:
        saved = RunEstimate.from_dict(record.plan.raw)
        sizes = saved.steps, saved.rows_per_step, saved.rows_per_epoch
        if sizes == (context.num_steps, run.batch.size, size.units_per_epoch):
            return saved
    timings = probe(built.stage, size, built.trainable, context, hooks)
    machine = _machine(strategy)
    estimate = estimate_run(
        run.model,
        trainable=built.counts.num_trainable,
        flops_per_token=context.meter.flops_per_token,
        flops_per_token_full_square=training_flops_per_token(
            run.model,
            size.seq_len,
            window_keys=size.seq_len,
            trainable=built.counts,
            extra_forwards=size.extra_forwards,
        ),
        size=RunSize(
            units_per_epoch=size.units_per_epoch,
            tokens_per_unit=size.tokens_per_unit,
            units_per_step=run.batch.size,
            steps=context.num_steps,
            validations=_times(run.eval.every, context.num_steps),
            checkpoints=_times(run.checkpoint.every, context.num_steps),
            samples=_times(run.sample.every, context.num_steps),
        ),
        timings=timings,
        machine=machine,
        errors=history.log_errors(history.read_history(), machine),
        versions={"penjing": __version__, "torch": torch.__version__},
    )
    sources = built.stage.sources(estimate.steps * estimate.rows_per_step)
    estimate = replace(
        estimate,
        sources=sources,
        warnings=[
            *data_warnings(estimate.steps, estimate.rows_per_step, size.units_per_epoch, size.unit),
            *source_warnings(sources),
            *(start_warnings(timings.start_loss, run.model.vocab_size) if run.init_from and not resuming else []),
        ],
    )
    if strategy.rank == 0:
        write_json(record.folder.plan, {**asdict(estimate), **predicted_loss(record.folder.path / FORECAST, estimate)})
    return estimate


def predicted_loss(file: Path, estimate: RunEstimate) -> dict[str, float]:
    """The loss that `penjing plan forecast` predicted, if for the same parameters and about the same tokens."""
    forecast = read_fields(file)
    tokens, planned = forecast.number("tokens") or 0, estimate.tokens
    if forecast.number("parameters") != estimate.parameters or abs(tokens - planned) > FORECAST_TOLERANCE * planned:
        return {}
    return {name: value for name, value in forecast.raw.items() if name.startswith("predicted_loss")}


def data_warnings(steps: int, rows: int, units_per_epoch: float, unit: str) -> list[str]:
    """Warnings about a run that will learn little, one line each. units_per_epoch: infinite if unknown."""
    lines = []
    if steps < FEW_STEPS:
        lines.append(f"only {steps} optimizer steps, which teach little: use more epochs or a smaller batch.size")
    if rows > units_per_epoch:
        lines.append(
            f"a batch of {rows} {unit} is larger than an epoch of {units_per_epoch:.0f}: each step repeats the same "
            f"{unit}; use a smaller batch.size"
        )
    return lines


def source_warnings(sources: Sequence[Mapping[str, Any]]) -> list[str]:
    """A warning for each source that repeats so often that it teaches little new (arXiv:2305.16264)."""
    total = sum(one["tokens"] for one in sources)
    return [
        f"{one['name']} repeats {one['epochs']:.1f} times, and more than {MANY_EPOCHS} teach less than new text: lower "
        "its weight"
        for one in sources
        if one["epochs"] > MANY_EPOCHS and one["share"] > one["tokens"] / total
    ]


def start_warnings(loss: float | None, vocab_size: int) -> list[str]:
    """A warning if the start model is worse than guessing. loss: nats per token of held-out rows before step 1."""
    uniform = math.log(vocab_size)
    if loss is None or loss <= uniform:
        return []
    return [
        f"held-out loss starts at {loss:.2f} nats per token, above {uniform:.2f} of guessing among {vocab_size:,} "
        "ids: tokenizer, template or language of the data may not fit the model"
    ]


def expected(estimate: RunEstimate) -> Expected:
    """The plan's figures that the meter compares the run with."""
    wait = sum(seconds for name, seconds in estimate.step_parts_seconds.items() if name != "compute")
    return Expected(
        steps=estimate.steps,
        step_seconds=estimate.step_seconds,
        wait_seconds=wait,
        other_seconds=estimate.predicted_seconds - estimate.parts_seconds.get("training", estimate.predicted_seconds),
    )


def _machine(strategy: Strategy) -> str:
    kind = devices.of(strategy.device)
    threads = f", {torch.get_num_threads()} threads" if kind.is_host else ""
    return f"{strategy.world} x {kind.name(strategy.device)}{threads}"


def _times(every: int, steps: int) -> int:
    return math.ceil(steps / every) if every else 0
