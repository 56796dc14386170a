"""From settings to parts: each part builds itself from its own settings, this file orders the calls."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penjing.base import config
from penjing.base.errors import UserError
from penjing.base.files import DiskError, sha256_text, write_text
from penjing.base.malloc_tuning import give_back_freed_memory
from penjing.base.seeds import derive
from penjing.checkpoint.load import Checkpoint, newest
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.kernels.fp8 import doubts, require_float8
from penjing.loader.batch_source import Source
from penjing.loader.prefetch import Prefetch
from penjing.model.freeze import freeze
from penjing.model.init import initialise
from penjing.model.kernel_selection import activate_flash, check_kernels
from penjing.model.linear import set_compute_dtype, use_float8
from penjing.model.lora import keep_base_in
from penjing.model.moe import check_widths
from penjing.model.transformer import Transformer, recompute_activations
from penjing.optim.router_bias_update import RouterBalance
from penjing.parallel.base import Engine, allow_tf32
from penjing.parallel.grad_scaler import LossScaler
from penjing.plan import hardware
from penjing.plan.flops import training_flops_per_token
from penjing.plan.run_estimate import Bill
from penjing.plan.trainable import trainable_of
from penjing.track.base import Tracker, Trackers
from penjing.track.jsonl import JsonLines
from penjing.train.build_peft_model import build_adapted
from penjing.train.checkpointer import Keeper, Stateful
from penjing.train.compile_policy import EAGER_SHARE, compile_model, compile_optimizers, compiled_seconds, decide
from penjing.train.config import Run
from penjing.train.loop import Parts, Progress
from penjing.train.nonfinite_guard import Guard, Record
from penjing.train.oom_recovery import Feed, release, with_room
from penjing.train.resume import begun_dtype, check_same_run, with_known_batch
from penjing.train.run_dir import RunFolder, load_start, load_weights
from penjing.train.small_data import fit_batch, units_together
from penjing.train.stages.base import MakeStage, OnDevice, Report, Size, Stage, accumulation, micro_units
from penjing.train.step_probe import expected, plan
from penjing.train.step_timing import Trials
from penjing.train.throughput import Meter


@dataclass(frozen=True, kw_only=True)
class Assembled:
    """A run put together: `parts` and `progress` for the loop, and what to tell the user."""

    run: Run
    parts: Parts
    progress: Progress
    stage: Stage
    size: Size
    model: Transformer
    folder: RunFolder
    base: dict[str, str]  # what a run's adapter sits on, `start` and `sha256`; empty without one
    bill: Bill
    resumed_from: int | None  # step of the checkpoint it goes on from
    resumed: int  # how often it was taken up again
    notes: list[str]


def num_steps(run: Run, size: Size) -> int:
    """Optimizer steps of a run."""
    return run.steps or max(1, math.ceil(run.epochs * size.units_per_epoch / run.batch.rows))


def assemble(
    run: Run,
    engine: Engine,
    make_stage: MakeStage,
    trackers: Callable[[Run, int, int], Sequence[Tracker]],
    sample: Callable[[Transformer, Tokenizer, int], list[dict[str, Any]]],
    report: Report,
    allow_change: Sequence[str] = (),
    began: float = 0.0,
) -> Assembled:
    """Build every part of a run, or restore it from its newest checkpoint; write run.toml and plan.json before step 1.

    make_stage: what is learned, from what. trackers: makes the further trackers, given (the run with the batch that its
    data allow, number of steps, first step).
    sample: what the model writes now; asked for step -1 as a trial that nobody sees. allow_change: fields in which a
    continued run may differ from what it was. began: time.time() when the run was asked for; 0: not known.
    """
    folder = RunFolder(Path(run.out))
    checkpoint = newest(folder.checkpoints)
    if checkpoint is not None:  # before anything is built; the data and the tokenizer follow once they are read
        run = with_known_batch(run, checkpoint)
        check_same_run(run, {}, checkpoint, allow_change)
    run = settle_dtype(run, engine, "" if checkpoint is None else begun_dtype(checkpoint, allow_change))
    stage = make_stage(run, engine, report)
    run = stage.run = fit_batch(stage.run, stage.size().units_per_epoch, engine.world)
    size, size_of_micro = stage.size(), micro_units(run, engine)
    dtype = hardware.compute_dtype(run.compute.dtype, engine.device)
    allow_tf32(run.compute.dtype, engine.device)
    if dtype == torch.float16:
        engine.scaler = LossScaler(engine.device)
    model, base = _build_model(run, checkpoint)
    freeze(model, run.freeze)
    recompute_activations(model, run.compute.recompute)
    if run.lora.rank:
        keep_base_in(model, dtype)
    trained = stage.trained(model)
    trained.to(engine.device)
    set_compute_dtype(trained, None if dtype == torch.float32 else dtype)
    if run.compute.float8 != "off":
        use_float8(model)
    stage.begin(trained, engine)
    if checkpoint is not None:
        load_weights(trained, checkpoint)
    callable_model = engine.wrap(trained)
    optimizers: list[Any] = run.optimizer.build(trained, derive(run.seed, "optimizer"))
    if run.model.is_mixture:
        rate = 0.0 if run.lora.rank else run.router.bias_rate  # a frozen base's routers stay as they are
        optimizers.append(RouterBalance(model, rate, engine.add))
    steps = num_steps(run, size)
    facts = {
        "data": stage.fingerprint,
        "tokenizer": stage.tokenizer.vocabulary_hash,
        "template": sha256_text(stage.tokenizer.template),
        "precision": str(dtype).removeprefix("torch."),
    }
    notes: list[str] = []
    if checkpoint is not None:
        notes += [f"damaged checkpoint passed over: {each}" for each in checkpoint.skipped]
        notes += check_same_run(run, facts, checkpoint, allow_change)
    feed = Feed(
        lambda size: _ready(stage.source(size, engine.rank, engine.world), run, stage, engine),
        size_of_micro,
        together=units_together(run),
        exact=run.passes_are_exact,
    )
    progress = Progress()
    meter = Meter(
        _flops_per_token(run, size, trained),
        hardware.peak(engine.device, dtype).flops_per_second,
        peak_memory_bytes=lambda: hardware.peak_memory_bytes(engine.device),
        sum_ranks=lambda count: int(engine.add(torch.tensor(count))),
    )
    start = 0 if checkpoint is None else checkpoint.step
    record = _incidents(engine, folder, start)
    if hasattr(stage, "record"):  # of a stage that meets incidents of its own
        stage.record = lambda incident: record({"step": progress.step + 1, **incident})
    guard = Guard(record, getattr(engine, "scaler", None))
    # Whatever else has state of its own, such as a loss scaler, gets a line here, and is saved and restored with it.
    stateful: dict[str, Stateful] = {"source": feed, "meter": meter, "guard": guard}
    if hasattr(engine, "scaler"):
        stateful["scaler"] = engine.scaler
    resumed = 0 if checkpoint is None else checkpoint.state()["resumed"] + 1
    keeper = Keeper(
        folder.checkpoints,
        run.save,
        engine,
        model=trained,
        only_trained=bool(run.lora.rank),
        optimizers=optimizers,
        stateful=stateful,
        texts={"run.toml": config.to_toml(run)},
        about={**facts, "resumed": resumed, "base": base},
        fingerprints={**facts, "config": sha256_text(config.to_toml(run))},
        record=record,
    )
    if checkpoint is not None:
        keeper.restore(checkpoint, optimizers=not any(line.startswith(_OTHER_OPTIMIZER) for line in notes))
        progress = Progress.restore(checkpoint.state()["progress"], engine)
    parts = Parts(
        engine=engine,
        model=callable_model,
        objective=stage.objective(),
        source=feed,
        optimizers=optimizers,
        schedule=run.schedule,
        trackers=Trackers(_trackers(engine, folder, trackers(run, steps, progress.step), progress.step)),
        meter=meter,
        num_steps=steps,
        accumulate=accumulation(run, engine),
        clip_norm=run.clip_norm,
        log_every=run.track.every,
        validate_every=run.validate.every,
        sample_every=run.sample.every,
        save_every=run.save.every,
        validate=lambda: _validate(stage, engine),
        sample=lambda index: _sample(folder, engine, sample(model, stage.tokenizer, index), index),
        save=keeper.save,
        go_back=keeper.go_back,
        guard=guard,
    )
    trials = Trials(
        save=lambda place: keeper.try_in(place, progress.state(engine)),
        sample=lambda: sample(model, stage.tokenizer, -1),
        began=began,
    )
    with ExitStack() as undo:
        undo.callback(parts.trackers.close)
        eager_seconds = steps * run.batch.rows * size.tokens_per_unit * meter.flops_per_token / engine.world
        eager_seconds /= EAGER_SHARE.get(engine.device.type, 0.4) * (meter.peak_flops_per_second or math.inf)
        check_widths(model, engine.device, dtype)
        kernels = check_kernels(model, engine.device, dtype)
        flash = activate_flash(model, engine.device, dtype)
        if run.compute.float8 != "off":
            notes += doubts(engine.device.type, sum(parameter.numel() for parameter in model.parameters()))
        notes += [kernels] if kernels else []
        notes += [f"attention by {flash}"] if flash else []
        notes += run.optimizer.doubts()
        compiling = decide(
            run.compute.compile, engine.device, trained, eager_seconds, no_static_graph=run.no_static_graph
        )
        if compiling.how != "off":
            compile_model(trained, compiling.how)
            compile_optimizers(optimizers, engine.device)
        give_back_freed_memory()
        bill = plan(run, stage, size, engine, trained, parts, begun=checkpoint is not None, trials=trials)
        if compiling.how != "off":
            took = f"took {compiled_seconds():.0f} s, about {compiling.predicted_seconds:.0f} s were expected"
            notes.append(f"compiled ({compiling.how}: {compiling.why}); {took}")
        meter.expected, meter.flops_per_token_full_square = expected(bill), bill.flops_per_token_full_square
        if engine.rank == 0:
            write_text(folder.settings, config.to_toml(run))
        undo.pop_all()
    return Assembled(
        run=run,
        parts=parts,
        progress=progress,
        stage=stage,
        size=size,
        model=model,
        folder=folder,
        base=base,
        bill=bill,
        resumed_from=None if checkpoint is None else checkpoint.step,
        resumed=resumed,
        notes=notes,
    )


def settle_dtype(run: Run, engine: Engine, begun: str = "") -> Run:
    """The run with what `compute.dtype=auto` comes to: what it was begun in, else what rank 0's machine is best at.

    From here on the run says it, also in its run.toml: nothing decides again. Raises UserError where float8 cannot be.
    """
    setting: str = run.compute.dtype
    if setting == "auto":
        setting = begun or str(hardware.compute_dtype("auto", engine.device)).removeprefix("torch.")
        if setting == "tf32" and engine.device.type != "cuda":  # begun on a card that has it
            setting = "float32"
        setting = engine.broadcast(setting)
    if run.compute.float8 != "off":
        on_cuda = engine.device.type == "cuda"
        capability = torch.cuda.get_device_capability(engine.device) if on_cuda else (0, 0)
        require_float8(engine.device.type, capability, hardware.compute_dtype(setting, engine.device))
    return replace(run, compute=replace(run.compute, dtype=setting))  # type: ignore[arg-type]  # one of the names


def _build_model(run: Run, checkpoint: Checkpoint | None) -> tuple[Transformer, dict[str, str]]:
    """The weights a run begins with, those of `start` or fresh ones; with adapters, what they sit on.

    A run that goes on reads its start again only where its objective compares with it.
    """
    if run.lora.rank:
        return build_adapted(run, checkpoint, load_start)
    if run.start and (checkpoint is None or run.objective.kind != "next_token"):
        return load_start(run), {}
    model = Transformer(run.model)
    if checkpoint is None:
        initialise(model, derive(run.seed, "weights"))
    return model, {}


def _flops_per_token(run: Run, size: Size, trained: nn.Module) -> float:
    """Of what this run computes for one token: what is frozen costs less."""
    trainable = trainable_of(trained, run.model)
    return training_flops_per_token(run.model, size.num_keys, trainable=trainable, extra_forwards=size.extra_forwards)


_OTHER_OPTIMIZER = ("allowed to change: optimizer.kind ", "allowed to change: optimizer.state ")


def _ready(source: Source, run: Run, stage: Stage, engine: Engine) -> Source:
    """A source whose batches are on the device, made ready ahead where the stage allows it."""
    ahead = run.data.prefetch if stage.runs_ahead else 0
    return Prefetch(source, engine.device, ahead) if ahead else OnDevice(source, engine.device)


def _validate(stage: Stage, engine: Engine) -> dict[str, float]:
    """A stage's figures, in smaller passes where memory does not suffice; none if it never does: training goes on."""

    def make_room(said: str) -> None:
        release()
        smaller = Feed.smaller(micro_units(stage.run, engine), units_together(stage.run))
        if smaller is None or engine.world > 1:
            raise _NoRoom(said)
        stage.run = replace(stage.run, batch=replace(stage.run.batch, micro_rows=smaller))

    try:
        return with_room(stage.validate, make_room)
    except _NoRoom as error:
        if engine.world > 1:
            raise UserError(f"out of memory: {error}", where="batch.micro_rows", next_step="Halve it.") from None
        warnings.warn(f"no validation, out of memory: {error}", stacklevel=2)
        return {}


class _NoRoom(Exception):
    """Memory does not suffice for the smallest pass."""


def _incidents(engine: Engine, folder: RunFolder, start: int) -> Record:
    """Writes down what went wrong on the way, on rank 0."""
    if engine.rank != 0:
        return lambda incident: None
    lines: list[JsonLines] = []
    waiting: list[dict[str, Any]] = []

    def record(incident: dict[str, Any]) -> None:
        waiting.append(incident)
        if not lines:
            try:
                lines.append(JsonLines(folder.incidents, resume_step=start))
            except (OSError, DiskError) as error:  # what is to be noted may be that the disk refuses
                warnings.warn(f"{folder.incidents} cannot be written, its lines wait: {error}", stacklevel=2)
                return
        while waiting:
            first = waiting.pop(0)
            lines[0].log(first["step"], {name: value for name, value in first.items() if name != "step"})

    return record


def _trackers(engine: Engine, folder: RunFolder, further: Sequence[Tracker], start: int) -> list[Tracker]:
    if engine.rank != 0:
        return []
    return [JsonLines(folder.metrics, resume_step=start), *further]


def _sample(folder: RunFolder, engine: Engine, written: list[dict[str, Any]], index: int) -> None:
    if engine.rank != 0 or not written:
        return
    try:
        tracker = JsonLines(folder.samples, resume_step=index - 1)
        for sample in written:
            tracker.log(index, sample)
        tracker.close()
    except (OSError, DiskError) as error:
        warnings.warn(f"samples of step {index} are not kept: {error}", stacklevel=2)
