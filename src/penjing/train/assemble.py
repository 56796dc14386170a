"""From settings to parts: each part builds itself from its own settings, this file orders the calls."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penjing.base import config
from penjing.base.errors import UserError
from penjing.base.files import write_text
from penjing.base.seeds import derive
from penjing.checkpoint.load import Checkpoint, newest
from penjing.checkpoint.save import save
from penjing.feed.prefetch import Prefetch
from penjing.model.freeze import freeze
from penjing.model.init import initialise
from penjing.model.linear import set_compute_dtype
from penjing.model.lora import keep_base_in, own_state
from penjing.model.transformer import Transformer
from penjing.optim.balance import RouterBalance
from penjing.parallel.base import Engine
from penjing.plan import hardware
from penjing.plan.bill import Bill
from penjing.plan.flops import training_flops_per_token
from penjing.text.tokenizer import Tokenizer
from penjing.track.base import Tracker, Trackers
from penjing.track.jsonl import JsonLines
from penjing.train.adapters import build_adapted
from penjing.train.folder import RunFolder, load_start, load_weights
from penjing.train.loop import Parts, Progress
from penjing.train.meter import Meter
from penjing.train.probe import plan
from penjing.train.run import Run
from penjing.train.stage import MakeStage, OnDevice, Report, Size, Stage, accumulation, micro_units


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
    trackers: Callable[[int, int], Sequence[Tracker]],
    sample: Callable[[Transformer, Tokenizer, int], list[dict[str, Any]]],
    report: Report,
) -> Assembled:
    """Build every part of a run, or restore it from its newest checkpoint; write run.toml and plan.json before step 1.

    make_stage: what is learned, from what. trackers: makes the further trackers, given (number of steps, first step).
    sample: what the model writes now.
    """
    folder = RunFolder(Path(run.out))
    checkpoint = newest(folder.checkpoints)
    _check_same_run(run, folder, checkpoint)
    stage = make_stage(run, engine, report)
    size = stage.size()
    dtype = hardware.compute_dtype(run.compute.dtype, engine.device)
    model, base = _build_model(run, checkpoint)
    freeze(model, run.freeze)
    if run.lora.rank:
        keep_base_in(model, dtype)
    trained = stage.trained(model)
    trained.to(engine.device)
    set_compute_dtype(trained, None if dtype == torch.float32 else dtype)
    stage.begin(trained, engine)
    if checkpoint is not None:
        load_weights(trained, checkpoint)
    callable_model = engine.wrap(trained)
    optimizers: list[Any] = run.optimizer.build(trained)
    if run.model.is_mixture:
        rate = 0.0 if run.lora.rank else run.router.bias_rate  # a frozen base's routers stay as they are
        optimizers.append(RouterBalance(model, rate, engine.add))
    steps = num_steps(run, size)
    source = stage.source(micro_units(run, engine), engine.rank, engine.world)
    progress = Progress()
    about: dict[str, Any] = {"data": stage.fingerprint, "resumed": 0, "base": base}
    meter = Meter(
        _flops_per_token(run, size, trained),
        hardware.peak(engine.device, dtype).flops_per_second,
        peak_memory_bytes=lambda: hardware.peak_memory_bytes(engine.device),
    )
    if checkpoint is not None:
        saved = checkpoint.state()
        if saved["data"] != stage.fingerprint:
            raise UserError(
                "this run was begun on other data",
                where=folder.path,
                got=stage.fingerprint[:12],
                wanted=saved["data"][:12],
                next_step="Give the same files to continue, or choose another out= to start anew.",
            )
        about["resumed"] = saved["resumed"] + 1
        _restore(optimizers, checkpoint)
        source.restore(saved["source"])
        meter.restore(saved["meter"])
        progress = Progress.restore(saved["progress"], engine)
    ahead = run.data.prefetch if stage.runs_ahead else 0
    all_trackers = _trackers(engine, folder, trackers(steps, progress.step), progress.step)
    parts = Parts(
        engine=engine,
        model=callable_model,
        objective=stage.objective(),
        source=Prefetch(source, engine.device, ahead) if ahead else OnDevice(source, engine.device),
        optimizers=optimizers,
        schedule=run.schedule,
        trackers=Trackers(all_trackers),
        meter=meter,
        num_steps=steps,
        accumulate=accumulation(run, engine),
        clip_norm=run.clip_norm,
        log_every=run.track.every,
        validate_every=run.validate.every,
        sample_every=run.sample.every,
        save_every=run.save.every,
        validate=stage.validate,
        sample=lambda index: _sample(folder, engine, sample(model, stage.tokenizer, index), index),
        save=lambda state: _save(run, folder, engine, parts, {"progress": state, **about}),
    )
    bill = plan(run, stage, size, engine, trained, parts, begun=checkpoint is not None)
    if engine.rank == 0:
        write_text(folder.settings, config.to_toml(run))
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
        resumed=about["resumed"],
        notes=list(checkpoint.skipped) if checkpoint else [],
    )


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
    """Of what this run computes for one token. Frozen matrices of an adapted model get no gradient of their own."""
    adapters = sum(p.numel() for name, p in trained.named_parameters() if ".adapters." in name)
    return training_flops_per_token(
        run.model, size.num_keys, adapters=adapters, extra_forwards=size.extra_forwards, frozen=bool(run.lora.rank)
    )


# Settings that may differ when a run is continued: they do not change what is computed.
FREE_TO_CHANGE = (
    "compute",
    "track",
    "save",
    "sample",
    "validate",
    "out",
    "batch.micro_rows",
    "data.prefetch",
    "data.train",
)


def _check_same_run(run: Run, folder: RunFolder, checkpoint: Checkpoint | None) -> None:
    """A continued run must be the run that was begun; a changed setting is refused with its name."""
    if checkpoint is None or not folder.settings.is_file():
        return
    before = dict(_flat(config.read_toml(folder.settings)))
    now = dict(_flat(json.loads(json.dumps(config.to_dict(run)))))
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) == now.get(key) or any(key == free or key.startswith(free + ".") for free in FREE_TO_CHANGE):
            continue
        raise UserError(
            "this run was begun with another setting",
            where=f"{folder.path}: {key}",
            got=now.get(key),
            wanted=before.get(key),
            next_step="Put it back to continue, or choose another out= to start anew.",
        )


def _flat(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _restore(optimizers: list[torch.optim.Optimizer], checkpoint: Checkpoint) -> None:
    states, random_state = checkpoint.optimizers()
    for optimizer, state in zip(optimizers, states, strict=True):
        optimizer.load_state_dict(state)
    torch.set_rng_state(random_state)


def _trackers(engine: Engine, folder: RunFolder, further: Sequence[Tracker], start: int) -> list[Tracker]:
    if engine.rank != 0:
        return []
    return [JsonLines(folder.metrics, resume_step=start), *further]


def _save(run: Run, folder: RunFolder, engine: Engine, parts: Parts, state: dict[str, Any]) -> None:
    if engine.rank == 0:
        model = _plain(parts.model)
        kept = own_state(model) if run.lora.rank else model.state_dict()  # of adapters, not the base they sit on
        weights = {name: value.detach().cpu() for name, value in kept.items()}
        save(
            folder.checkpoints,
            state["progress"]["step"],
            weights=weights,
            optimizers=[optimizer.state_dict() for optimizer in parts.optimizers],
            state={**state, "source": parts.source.state(), "meter": parts.meter.state()},
            texts={"run.toml": config.to_toml(run)},
            keep=run.save.keep,
        )
    engine.any(False)  # the others wait until the checkpoint is whole


def _plain(model: Any) -> torch.nn.Module:
    inner = getattr(model, "module", model)
    assert isinstance(inner, torch.nn.Module)
    return inner


def _sample(folder: RunFolder, engine: Engine, written: list[dict[str, Any]], index: int) -> None:
    if engine.rank != 0 or not written:
        return
    tracker = JsonLines(folder.samples, resume_step=index - 1)
    for sample in written:
        tracker.log(index, sample)
    tracker.close()
