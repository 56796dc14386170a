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
from penjing.plan.flops import parameters, training_flops_per_token
from penjing.plan.run_estimate import ProbeTimings, RunEstimate
from penjing.plan.time_interval import time_interval
from penjing.plan.trainable import Trainable
from penjing.track.run_record import RunRecord
from penjing.train.build_model import BuiltRun
from penjing.train.config import Run
from penjing.train.load_model import starts
from penjing.train.loop import TrainingContext
from penjing.train.stages.base import DatasetSize
from penjing.train.step_timing import ProbeHooks, probe

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
    errors = history.log_errors(history.read_history(), machine)
    estimate = estimate_run(run, size, built.counts, context.num_steps, timings, machine=machine, errors=errors)
    sources = built.stage.sources(estimate.steps * estimate.rows_per_step)
    # To a model that saw only texts the chat template's tokens are new: its first loss is high, and that is no mistake.
    formats = {start.data.format if start else "unknown" for _, start in starts(Path(run.out), run)}
    can_judge = run.init_from and (run.data.format == "documents" or formats != {"documents"})
    estimate = replace(
        estimate,
        sources=sources,
        warnings=[
            *data_warnings(estimate.steps, estimate.rows_per_step, size.units_per_epoch, size.unit),
            *source_warnings(sources),
            *(start_warnings(timings.start_loss, run.model.vocab_size) if can_judge and not resuming else []),
        ],
    )
    if strategy.rank == 0:
        write_json(record.folder.plan, {**asdict(estimate), **predicted_loss(record.folder.path / FORECAST, estimate)})
    return estimate


def estimate_run(
    run: Run,
    size: DatasetSize,
    counts: Trainable,
    steps: int,
    timings: ProbeTimings,
    *,
    machine: str = "",
    errors: Sequence[float] = (),
) -> RunEstimate:
    """An L2 estimate. errors: log(actual / predicted) of the time of earlier runs on this machine."""
    count, rows = parameters(run.model), run.batch.size
    step_tokens = timings.sampled_tokens or rows * size.tokens_per_unit
    tokens_per_step = round(step_tokens)
    options: dict[str, Any] = {"trainable": counts, "extra_forwards": size.extra_forwards}
    flops_per_token = training_flops_per_token(run.model, size.num_keys, **options)
    intermediate = max(0, _times(run.checkpoint.every, steps) - 1)
    parts = {
        "training": steps * timings.step_seconds,
        "validation": run.eval.validations(steps) * timings.validation_seconds,
        "checkpoint": intermediate * timings.checkpoint_seconds + timings.last_checkpoint_seconds,
        "sample": _times(run.sample.every, steps) * timings.sample_seconds,
    }
    seconds = sum(parts.values())
    low, high = time_interval(seconds, timings.noise, errors)
    line, wait = timings.line, timings.wait_seconds
    return RunEstimate(
        parameters=count.total,
        parameters_without_embedding=count.without_embedding,
        trainable_parameters=counts.num_trainable,
        rows_per_epoch=size.units_per_epoch,
        tokens_per_epoch=round(size.units_per_epoch * step_tokens / rows),
        epochs=steps * rows / size.units_per_epoch,
        steps=steps,
        rows_per_step=rows,
        tokens_per_step=tokens_per_step,
        tokens=steps * tokens_per_step,
        flops_per_token=flops_per_token,
        flops_per_token_full_square=training_flops_per_token(
            run.model, size.seq_len, window_keys=size.seq_len, **options
        ),
        flops=flops_per_token * steps * tokens_per_step,
        predicted_seconds=seconds,
        predicted_seconds_low=low,
        predicted_seconds_high=high,
        parts_seconds=parts,
        step_seconds=timings.step_seconds,
        step_parts_seconds={"compute": timings.step_seconds - wait, timings.waits_for: wait},
        startup_seconds=timings.startup_seconds,
        predicted_peak_memory_bytes=timings.peak_memory_bytes,
        memory_source="measured in the probe",
        tokens_per_second=tokens_per_step / timings.step_seconds,
        level="L2",
        machine=machine,
        probe={
            **asdict(timings.noise),
            "deviation": timings.noise.deviation,
            "fixed_seconds": line.fixed if line else None,
            "pass_seconds": line.slope if line else None,
        },
        versions={"penjing": __version__, "torch": torch.__version__},
    )


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
        number = "1 optimizer step" if steps == 1 else f"{steps} optimizer steps"
        lines.append(f"only {number}: too few to learn much; use more epochs or a smaller batch.size")
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


def _machine(strategy: Strategy) -> str:
    kind = devices.of(strategy.device)
    threads = f", {torch.get_num_threads()} threads" if kind.is_host else ""
    return f"{strategy.world} x {kind.name(strategy.device)}{threads}"


def _times(every: int, steps: int) -> int:
    return math.ceil(steps / every) if every else 0
