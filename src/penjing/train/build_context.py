"""Builds the loop's context from a built run: batches, meter, guard, checkpoints, and the work between steps."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penjing import devices
from penjing.base import config
from penjing.base.files import sha256_text
from penjing.checkpoint.load import Checkpoint
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.loader.batch_source import DeviceSource, Source
from penjing.loader.prefetch import Prefetch
from penjing.model.transformer import Transformer
from penjing.optim.ema import averaged
from penjing.optim.router_bias_update import RouterBalance
from penjing.parallel.base import Strategy
from penjing.plan import hardware
from penjing.plan.flops import training_flops_per_token
from penjing.track.base import Tracker, Trackers
from penjing.track.jsonl import RunFiles
from penjing.track.run_dir import RunDir
from penjing.train.best import BestLoss
from penjing.train.build_model import BuiltRun
from penjing.train.checkpointer import Checkpointer, Label, Stateful
from penjing.train.config import Run
from penjing.train.loop import TrainingContext, TrainState
from penjing.train.nonfinite_guard import NonFiniteGuard
from penjing.train.oom_recovery import ResizableBatchSource, validate_with_retry
from penjing.train.stages.base import DatasetSize, Report
from penjing.train.throughput import Meter

Sample = Callable[[Transformer, Tokenizer, int], list[dict[str, Any]]]
AskTasks = Callable[[Transformer, Tokenizer, Strategy], dict[str, float]]


@dataclass(frozen=True, kw_only=True)
class RunHooks:
    """A command's callbacks for a run; by default they do nothing."""

    report: Report = lambda text: None  # prints what takes long
    # Further trackers, from (the run with its final batch size, number of steps, first step).
    trackers: Callable[[Run, int, int], Sequence[Tracker]] = lambda run, steps, first: ()
    sample: Sample = lambda model, tokenizer, step: []  # samples from the model; step -1: a trial that is not shown
    # Further metrics of a validation, with the whole weights.
    ask_tasks: AskTasks = lambda model, tokenizer, strategy: {}
    start_time: float = 0.0  # time.perf_counter() at the start of the command; 0: unknown


def _batches(built: BuiltRun, micro_size: int) -> Source:
    """A stage's batches on the device, prefetched if the stage allows it."""
    strategy = built.strategy
    source = built.stage.source(micro_size, strategy.rank, strategy.world)
    depth = built.run.data.prefetch if built.stage.runs_ahead else 0
    return Prefetch(source, strategy.device, depth) if depth else DeviceSource(source, strategy.device)


def _meter(built: BuiltRun, size: DatasetSize) -> Meter:
    """The meter counts fewer FLOPs for frozen weights, and takes the peak of the run's dtype."""
    run, strategy = built.run, built.strategy
    return Meter(
        training_flops_per_token(run.model, size.num_keys, trainable=built.counts, extra_forwards=size.extra_forwards),
        hardware.peak(strategy.device, built.precision.dtype),
        peak_memory_bytes=lambda: devices.of(strategy.device).peak_memory_bytes(strategy.device),
        sum_ranks=lambda count: int(strategy.all_reduce(torch.tensor(count))),
    )


def _label(built: BuiltRun, fingerprints: Mapping[str, str], resumed: int) -> Label:
    run = built.run
    return Label(
        texts={"run.toml": config.to_toml(run, run.decisions)},
        about={
            **fingerprints,
            "resumed": resumed,
            "base": built.base,
            "decisions": {decision.field: decision.why for decision in run.decisions},
        },
        fingerprints={**fingerprints, "config": sha256_text(config.to_toml(run))},
    )


def make_context(
    built: BuiltRun,
    size: DatasetSize,
    folder: RunDir,
    hooks: RunHooks,
    num_steps: int,
    *,
    checkpoint: Checkpoint | None,
    fingerprints: Mapping[str, str],
    same_optimizers: bool,
    resumed: int,
) -> tuple[TrainingContext, TrainState, Checkpointer]:
    """The loop's context and progress, restored from a checkpoint, and what saves them. fingerprints: of the run.
    same_optimizers: as in the checkpoint; others start with empty state. resumed: how often the run was resumed."""
    run, stage, strategy, scaler = built.run, built.stage, built.strategy, built.strategy.scaler
    source = ResizableBatchSource(
        lambda micro_size: _batches(built, micro_size),
        built.geometry.micro_size,
        sizes=built.geometry.micro_sizes,
        exact=built.geometry.exact,
    )
    meter, state = _meter(built, size), TrainState()
    first = 0 if checkpoint is None else checkpoint.step
    files = RunFiles(folder.metrics, folder.samples, folder.incidents, resume_step=first)
    trackers = Trackers([files] if strategy.rank == 0 else [])
    stage.record = lambda incident: trackers.incident({"step": state.step + 1, **incident})
    guard = NonFiniteGuard(trackers.incident, scaler)
    best = BestLoss(run, -(-size.units_per_epoch // run.batch.size), trackers.incident)
    # Everything with state must be listed here to be saved and restored.
    stateful: dict[str, Stateful] = {"source": source, "meter": meter, "guard": guard, "best": best}
    if scaler is not None:
        stateful["scaler"] = scaler
    checkpointer = Checkpointer(
        folder.checkpoints,
        run.checkpoint,
        strategy,
        model=built.trainable,
        optimizers=built.optimizers,
        stateful=stateful,
        record=trackers.incident,
        label=_label(built, fingerprints, resumed),
        trainable_only=bool(run.lora.rank),
    )
    if checkpoint is not None:
        checkpointer.restore(checkpoint, optimizers=same_optimizers)
        state.restore(checkpoint.state()["progress"], strategy)
    trackers.rewind(state.step)  # creates the file of metrics
    if strategy.rank == 0:
        trackers.add(hooks.trackers(run, num_steps, state.step))
    extra_metrics = [optimizer.metrics for optimizer in built.optimizers if isinstance(optimizer, RouterBalance)]
    context = TrainingContext(
        strategy=strategy,
        model=built.wrapped,
        objective=built.objective,
        source=source,
        optimizers=built.optimizers,
        schedule=run.schedule,
        trackers=trackers,
        meter=meter,
        num_steps=num_steps,
        accumulate=built.geometry.accumulation,
        max_grad_norm=run.max_grad_norm,
        log_every=run.log.every,
        validate_every=run.eval.every,
        sample_every=run.sample.every,
        save_every=run.checkpoint.every,
        validate=lambda: _validate(built, hooks),
        sample=lambda step: _sample(built, hooks, trackers, step),
        save=checkpointer.save,
        roll_back=checkpointer.roll_back,
        guard=guard,
        best=best,
        extra_metrics=[*extra_metrics, *([scaler.metrics] if scaler is not None else [])],
    )
    return context, state, checkpointer


def _sample(built: BuiltRun, hooks: RunHooks, trackers: Trackers, step: int) -> None:
    with averaged(built.optimizers, built.strategy.loading), built.strategy.gathered(built.model):
        new_samples = hooks.sample(built.model, built.stage.tokenizer, step)
    if new_samples:
        trackers.sample(step, new_samples)


def _validate(built: BuiltRun, hooks: RunHooks) -> dict[str, float]:
    run, stage, strategy = built.run, built.stage, built.strategy
    with averaged(built.optimizers, strategy.loading):
        metrics = validate_with_retry(stage) if run.data.holds_out else {}
        if not run.eval.tasks:
            return metrics
        with strategy.gathered(built.model):
            return metrics | hooks.ask_tasks(built.model, stage.tokenizer, strategy)
