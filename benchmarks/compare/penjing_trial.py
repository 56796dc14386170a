"""A trial of penjing itself: `python -m compare.penjing_trial SPEC.json pretrain [adamw] | alignment`.

It builds the run and steps as `penjing train` does. adamw: use the baselines' optimizer instead of the recipe's. The
probe before step 1 counts in the process's time, not in the steps. As for the baselines, validation and checkpoints
are off.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from steps.full_rows import FullRows, full_rows

from compare.held_out import IGNORED, bits_per_byte, packed_rows
from compare.trial_spec import AlignmentSpec, PretrainSpec, TrainingSpec, read_spec
from compare.trial_timer import TrialTimer
from penjing.base import config
from penjing.loader.batch import Batch
from penjing.loader.batch_source import DeviceSource
from penjing.model.linear import Linear
from penjing.objective.next_token import NextToken
from penjing.optim.adamw import AdamW
from penjing.parallel.base import make_strategy
from penjing.track.base import Tracker
from penjing.train.build import PreparedRun, prepare_run
from penjing.train.build_context import RunHooks
from penjing.train.config import Run
from penjing.train.load_model import set_threads
from penjing.train.loop import step, train

# Figures of each step: name common to all contestants -> name in penjing's log.
FIGURES = {
    "dpo": {"loss": "preference_loss", "accuracy": "reward_accuracy", "margin": "reward_margin"},
    "grpo": {"reward": "reward", "answer_tokens": "answer_tokens", "sampling_seconds": "rollout_seconds"},
}


class StepTracker(Tracker):
    """Ends a timed step: the loop logs after each step."""

    def __init__(self, timer: TrialTimer, units: int, names: Mapping[str, str]) -> None:
        self.timer, self.units, self.names = timer, units, names

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self.timer.step(self.units, **{name: figures[logged_name] for name, logged_name in self.names.items()})


def alignment(spec: AlignmentSpec) -> dict[str, Any]:
    timer = TrialTimer(spec)
    timer.imported()
    run = _run_of(spec)
    tracker = StepTracker(timer, spec.batch, FIGURES[spec.method])
    prepared = prepare_run(run, make_strategy("cpu"), RunHooks(trackers=lambda *_: [tracker]))
    timer.ready()
    train(replace(prepared.context, validate_every=0, save_every=0, sample_every=0, log_every=1), prepared.state)
    prepared.context.source.close()
    options = [f"batch.micro_size={run.batch.micro_size}", f"compute.dtype={run.compute.dtype}"]
    if spec.method == "dpo":
        options.append(f"objective.reference={spec.reference}")
    return timer.result(options=options)


def pretrain(spec: PretrainSpec, *, adamw: bool) -> dict[str, Any]:
    timer = TrialTimer(spec, lambda: bits_per_byte(spec.held_out, lambda *rows: _nats(prepared, *rows)))
    timer.imported()
    run = _run_of(spec)
    run = replace(run, optimizer=_optimizer(run, spec, adamw=adamw))
    prepared = prepare_run(run, make_strategy(spec.device))
    context = prepared.context
    if spec.setting == "step":
        rows = _rows(spec, spec.batch // context.accumulate)
        context = replace(context, source=DeviceSource(FullRows(rows), context.strategy.device))
    timer.ready()
    number = 0
    while timer.step(step(context, number).tokens):
        number += 1
    prepared.context.source.close()
    kind, dtype = run.optimizer.name, str(_matmul_dtype(prepared.model)).removeprefix("torch.")
    options = [f"optimizer.name={kind}", f"matmuls in {dtype}", f"compute.compile={run.compute.compile}"]
    settings = {
        "optimizer": kind,
        "learning_rate": max(float(group["lr"]) for optim in context.optimizers for group in optim.param_groups),
        "dtype": dtype,
        "max_grad_norm": run.max_grad_norm,
    }
    return timer.result(options=[*options, *prepared.notes], settings=settings)


def _run_of(spec: TrainingSpec) -> Run:
    set_threads(spec.threads, 1)
    return replace(config.resolve(Run, config.read_toml(Path(spec.run))), out=spec.out)


def _rows(spec: PretrainSpec, micro: int) -> Iterator[Batch]:
    """The packed rows that all contestants get, in micro-batches."""
    for ids_BT, document_BT in packed_rows(spec):
        for first in range(0, spec.batch, micro):
            part = slice(first, first + micro)
            yield full_rows(torch.from_numpy(ids_BT[part]), torch.from_numpy(document_BT[part]))


def _optimizer(run: Run, spec: PretrainSpec, *, adamw: bool) -> Any:
    """The baselines' optimizer, or the run's with its learning rates multiplied by the tuned factor."""
    if adamw:
        rate, (beta1, beta2), decay = spec.learning_rate, spec.betas, spec.weight_decay
        return AdamW(learning_rate=rate, beta1=beta1, beta2=beta2, weight_decay=decay)
    rates = {f.name: getattr(run.optimizer, f.name) for f in fields(run.optimizer) if f.name.endswith("learning_rate")}
    return replace(run.optimizer, **{name: rate * spec.rate_factor for name, rate in rates.items()})


@torch.no_grad()
def _nats(prepared: PreparedRun, ids_BT: Any, target_BT: Any) -> float:
    target = torch.from_numpy(target_BT)
    scored_N = (target != IGNORED).flatten().nonzero()[:, 0]
    batch = Batch(
        ids_BT=torch.from_numpy(ids_BT),
        document_BT=torch.where(target == IGNORED, -1, 0),
        scored_N=scored_N,
        target_N=target.flatten()[scored_N],
        weight_N=torch.ones(len(scored_N)),
        num_tokens=len(scored_N),
    )
    return float(NextToken()(prepared.model, batch.to(prepared.context.strategy.device)).total)


def _matmul_dtype(model: torch.nn.Module) -> torch.dtype:
    """The compute dtype of the first linear layer."""
    layer = next(part for part in model.modules() if isinstance(part, Linear))
    return layer.compute_dtype or layer.weight.dtype


def main() -> None:
    if "alignment" in sys.argv[2:]:
        result = alignment(read_spec(AlignmentSpec))
    else:
        result = pretrain(read_spec(PretrainSpec), adamw="adamw" in sys.argv[2:])
    print(json.dumps(result))


if __name__ == "__main__":
    main()
