"""Assembles a run: `prepare_run` calls the parts in order."""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from penjing import devices
from penjing.base import config
from penjing.base.errors import UserError
from penjing.base.files import write_text
from penjing.base.malloc_tuning import malloc_trim
from penjing.checkpoint.load import Checkpoint, newest
from penjing.kernels.fp8 import fp8_warnings
from penjing.model.kernel_selection import check_expert_sizes, check_kernels
from penjing.parallel.base import Strategy, become
from penjing.plan.run_estimate import RunEstimate
from penjing.track.run_dir import RunDir
from penjing.train.build_context import RunHooks, make_context
from penjing.train.build_model import BuiltRun, build_run
from penjing.train.compile_policy import Decision, compile_run, compiled_seconds
from penjing.train.config import Run
from penjing.train.loop import TrainingContext, TrainState
from penjing.train.memory_trace.fit import automatic_strategy, fit_memory, room
from penjing.train.oom_recovery import kept_micro_size
from penjing.train.precision import Precision
from penjing.train.resolve import AS_STARTED, Facts, record, resolve
from penjing.train.resume import check_same_run, run_fingerprints, saved_dtype, settings_of
from penjing.train.stages.base import DatasetSize, Report, Stage, make_stage
from penjing.train.step_probe import plan
from penjing.train.step_timing import ProbeHooks


@dataclass(frozen=True, kw_only=True)
class PreparedRun(BuiltRun):
    """An assembled run: `context` and `state` for the loop, and lines for the user."""

    context: TrainingContext
    state: TrainState
    size: DatasetSize
    folder: RunDir
    estimate: RunEstimate
    resumed_from: int | None  # step of the checkpoint that it resumes from
    resumed: int  # how often it was resumed
    notes: list[str]  # lines for the user


def num_steps(run: Run, size: DatasetSize) -> int:
    """Optimizer steps of a run."""
    return run.max_steps or max(1, math.ceil(run.epochs * size.units_per_epoch / run.batch.size))


def prepare_run(
    run: Run, strategy: Strategy, hooks: RunHooks = RunHooks(), allow_change: Sequence[str] = ()
) -> PreparedRun:
    """Build every part of a run, or restore it from its newest checkpoint; write run.toml and plan.json before step 1.

    allow_change: fields that may change when the run is resumed.
    """
    strategy.check(run)
    folder = RunDir(Path(run.out))
    checkpoint = newest(folder.checkpoints)
    facts = TrainingFacts(strategy, hooks.report, checkpoint, allow_change)
    run = resolve(run, facts)
    stage, precision = facts.stage, facts.precision
    stage.run, size = run, stage.size()
    built = build_run(stage, strategy, precision, checkpoint)
    fingerprints = run_fingerprints(stage, precision)
    changes = [] if checkpoint is None else check_same_run(run, fingerprints, checkpoint, allow_change)
    resumed = 0 if checkpoint is None else checkpoint.state()["resumed"] + 1
    context, state, checkpointer = make_context(
        built,
        size,
        folder,
        hooks,
        num_steps(run, size),
        checkpoint=checkpoint,
        fingerprints=fingerprints,
        same_optimizers=not any(change.field in ("optimizer.name", "optimizer.state_dtype") for change in changes),
        resumed=resumed,
    )
    skipped = [] if checkpoint is None else [f"damaged checkpoint skipped: {name}" for name in checkpoint.skipped]
    notes = [*skipped, *(f"allowed to change: {change}" for change in changes)]
    notes += _start_notes(run, size, checkpoint)
    notes += [context.best.stopped] * bool(context.best.stopped)
    notes += ["nothing is held out (data.validation=none): there is no held-out loss"] * (not run.data.holds_out)
    probe_hooks = ProbeHooks(
        save=lambda path: checkpointer.time_save(path, state.state(strategy)),
        sample=lambda: hooks.sample(built.model, stage.tokenizer, -1),
        start_time=hooks.start_time,
    )
    with ExitStack() as undo:
        undo.callback(context.trackers.end)
        notes += _choose_kernels(built)
        estimate, compiling = _probe(built, size, context, probe_hooks, resuming=checkpoint is not None)
        if run.compute.compile == "auto":
            run = record(run, "compute.compile", compiling.how, compiling.why)
        if compiling.how != "off":
            took = f"took {compiled_seconds():.0f} s, about {compiling.predicted_seconds:.0f} s were expected"
            notes.append(f"compiled ({compiling.how}: {compiling.why}); {took}")
        if strategy.rank == 0:
            write_text(folder.settings, config.to_toml(run, run.decisions))
        undo.pop_all()
    return PreparedRun(
        **{**vars(built), "run": run},
        context=context,
        state=state,
        size=size,
        folder=folder,
        estimate=estimate,
        resumed_from=None if checkpoint is None else checkpoint.step,
        resumed=resumed,
        notes=notes,
    )


class TrainingFacts(Facts):
    """The facts of a training run: of its checkpoint, its device, its data and the free memory.

    To answer, it decides the precision and prepares the stage.
    """

    stage: Stage[Any]
    precision: Precision

    def __init__(
        self, strategy: Strategy, report: Report, checkpoint: Checkpoint | None, allow_change: Sequence[str]
    ) -> None:
        self.strategy, self.report, self.checkpoint, self.allow_change = strategy, report, checkpoint, allow_change
        self.world = strategy.world

    def machine(self) -> Mapping[str, tuple[Any, str]]:
        device = self.strategy.device
        found = "no accelerator was found" if devices.of(device).is_host else "the accelerator of this machine"
        return {
            "compute.device": (str(device), found),
            "compute.threads": (torch.get_num_threads(), "the free cores of a process, or OMP_NUM_THREADS"),
        }

    def started(self) -> Mapping[str, tuple[Any, str]]:
        if self.checkpoint is None:
            return {}
        reasons = self.checkpoint.state().get("decisions", {})
        return {name: (value, reasons.get(name, AS_STARTED)) for name, value in settings_of(self.checkpoint).items()}

    def dtype(self, run: Run) -> tuple[str, str]:
        """Also compares the settings with the checkpoint's. Data and tokenizer are compared once they are read."""
        dtype, device = "", self.strategy.device
        if self.checkpoint is not None:
            check_same_run(run, {}, self.checkpoint, self.allow_change)
            dtype = saved_dtype(self.checkpoint, self.allow_change)
        self.precision = Precision.resolve(run.compute, device, resumed_dtype=dtype, agree=self.strategy.broadcast)
        self.precision.require(device)
        devices.set_tf32(self.precision.matmul == "tf32")
        self.strategy.scaler = self.precision.loss_scaler(device)
        return self.precision.matmul, AS_STARTED if dtype else f"the fastest on this {device.type}"

    def conversations(self, run: Run) -> tuple[int, int] | None:
        self.stage = make_stage(run, self.strategy, self.report)
        self.stage.prepare_data()
        return self.stage.conversations()

    def units_per_epoch(self, run: Run) -> int:
        self.stage.run = run
        self.stage.prepare_rows()
        return self.stage.size().units_per_epoch

    def strategy_of(self, run: Run) -> tuple[str, str]:
        target, nodes = room(self.strategy)
        name, why = automatic_strategy(run, target, self.world, nodes)
        if name != self.strategy.name:
            become(self.strategy, name)
        return name, why

    def memory_bytes(self) -> int:
        return room(self.strategy)[0].memory_bytes

    def micro_size(self, run: Run) -> tuple[int, str]:
        fitting, why = fit_memory(run, self.strategy)
        kept, message = kept_micro_size(run, self.world)
        return (kept, message) if kept and not 0 < fitting < kept else (fitting, why)


def _start_notes(run: Run, size: DatasetSize, checkpoint: Checkpoint | None) -> list[str]:
    """Lines on a start that is probably a mistake: conversations on random weights, and a learning rate that jumps."""
    if checkpoint is None:
        random = run.data.format == "chats" and not run.init_from
        return ["the model starts from random weights: give init_from=RUN to start from a pretrained one"] * random
    saved_settings = checkpoint.folder / "run.toml"
    if checkpoint.step == 0 or not saved_settings.is_file():
        return []
    try:
        saved = config.resolve(Run, config.read_toml(saved_settings))
    except UserError:  # of an older version, with a setting that no longer exists
        return []
    before = saved.schedule.factor(checkpoint.step - 1, num_steps(saved, size)) * saved.optimizer.learning_rate
    now = run.schedule.factor(checkpoint.step, num_steps(run, size)) * run.optimizer.learning_rate
    if now <= 1.5 * before or before >= saved.optimizer.learning_rate / 2:
        return []
    return [
        f"the learning rate jumps from {before:.2g} to {now:.2g}, as the run had decayed it for its earlier end: to "
        "train a finished run longer, start a new one with init_from= and a small optimizer.learning_rate"
    ]


def _choose_kernels(built: BuiltRun) -> list[str]:
    """Choose the model's kernels; return a line for each noteworthy choice."""
    model, device, dtype = built.model, built.strategy.device, built.precision.dtype
    check_expert_sizes(model, device, dtype)
    kernels = check_kernels(model, device, dtype)
    notes = [kernels] if kernels else []
    if built.precision.fp8 != "off":
        notes = fp8_warnings(device.type, sum(parameter.numel() for parameter in model.parameters())) + notes
    return notes + built.run.optimizer.warnings()


def _probe(
    built: BuiltRun, size: DatasetSize, context: TrainingContext, hooks: ProbeHooks, *, resuming: bool
) -> tuple[RunEstimate, Decision]:
    """Compile if it pays, time a few steps, and estimate the run."""
    meter, units = context.meter, context.num_steps * built.run.batch.size / built.strategy.world
    flops = units * size.tokens_per_unit * meter.flops_per_token
    compiling = compile_run(built, flops, meter.peak_flops_per_second)
    malloc_trim()
    estimate = plan(built, size, context, resuming=resuming, hooks=hooks)
    meter.expected, meter.flops_per_token_full_square = estimate, estimate.flops_per_token_full_square
    return estimate, compiling
