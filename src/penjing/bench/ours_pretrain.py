"""A trial of our own pretraining: `python -m penjing.bench.ours_pretrain SPEC.json [adamw]`.

adamw: with the peers' optimizer instead of the recipe's. The parts and the step of `penjing train`, the probe before
step 1 included; compute.dtype is what the parent found, for all trials to be of one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from penjing.base import config
from penjing.bench.meter import read_spec
from penjing.bench.race import IGNORED, HeldOut, Race, RaceSpec, packed_rows
from penjing.loader.batch import Batch
from penjing.loader.batch_source import DeviceSource, Source
from penjing.model.linear import Linear
from penjing.objective.next_token import NextToken
from penjing.optim.adamw import AdamW
from penjing.parallel.base import make_strategy
from penjing.train.build import prepare_run
from penjing.train.config import Run
from penjing.train.loop import step
from penjing.train.run_dir import set_threads


class GivenRows(Source):
    """The same packed rows as everyone's, in passes of so many."""

    def __init__(self, spec: RaceSpec, micro: int) -> None:
        self._batches = self._cut(spec, micro)

    def _cut(self, spec: RaceSpec, micro: int) -> Iterator[Batch]:
        for ids_BT, document_BT in packed_rows(spec):
            for first in range(0, spec.batch, micro):
                part = slice(first, first + micro)
                yield batch_of(torch.from_numpy(ids_BT[part]), torch.from_numpy(document_BT[part]))

    def __next__(self) -> Batch:
        return next(self._batches)

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass


def batch_of(ids_BT: torch.Tensor, document_BT: torch.Tensor) -> Batch:
    """Rows of which every position says the next token."""
    inputs_BT = ids_BT[:, :-1].contiguous()
    return Batch(
        ids_BT=inputs_BT,
        document_BT=document_BT,
        scored_N=None,
        target_N=ids_BT[:, 1:].flatten(),
        weight_N=torch.ones(inputs_BT.numel()),
        num_tokens=inputs_BT.numel(),
    )


def _optimizer(run: Run, spec: RaceSpec, *, adamw: bool) -> Any:
    """The peers', or the run's own with its rates times the factor that was found for it."""
    if adamw:
        rate, (beta1, beta2), decay = spec.learning_rate, spec.betas, spec.weight_decay
        return AdamW(learning_rate=rate, beta1=beta1, beta2=beta2, weight_decay=decay)
    rates = {f.name: getattr(run.optimizer, f.name) for f in fields(run.optimizer) if f.name.endswith("learning_rate")}
    return replace(run.optimizer, **{name: rate * spec.rate_factor for name, rate in rates.items()})


def main() -> None:
    spec = read_spec(RaceSpec)
    set_threads(spec.threads, 1)
    race = Race(spec, lambda: HeldOut(spec.held_out).bits_per_byte(nats))
    race.imported()
    run = replace(config.resolve(Run, config.read_toml(Path(spec.run))), out=spec.out)
    run = replace(run, optimizer=_optimizer(run, spec, adamw="adamw" in sys.argv[2:]))
    prepared = prepare_run(run, make_strategy(spec.device))
    parts, model, objective = prepared.context, prepared.model, NextToken()
    device = parts.strategy.device

    @torch.no_grad()
    def nats(ids_BT: Any, target_BT: Any) -> float:
        target = torch.from_numpy(target_BT)
        document_BT = torch.where(target == IGNORED, -1, 0)
        scored_N = (target != IGNORED).flatten().nonzero()[:, 0]
        batch = Batch(
            ids_BT=torch.from_numpy(ids_BT),
            document_BT=document_BT,
            scored_N=scored_N,
            target_N=target.flatten()[scored_N],
            weight_N=torch.ones(len(scored_N)),
            num_tokens=len(scored_N),
        )
        return float(objective(model, batch.to(device)).total)

    if spec.kind == "step":
        parts = replace(parts, source=DeviceSource(GivenRows(spec, spec.batch // parts.accumulate), device))
    race.ready()
    number = 0
    while race.step(step(parts, number).tokens):
        number += 1
    prepared.context.source.close()
    kind, dtype = run.optimizer.kind, str(product_dtype(model)).removeprefix("torch.")
    options = [f"optimizer.kind={kind}", f"products in {dtype}", f"compute.compile={run.compute.compile}"]
    told = {
        "optimizer": kind,
        "learning_rate": max(float(group["lr"]) for each in parts.optimizers for group in each.param_groups),
        "dtype": dtype,
        "max_grad_norm": run.clip_norm,
    }
    print(json.dumps({**race.result(options=[*options, *prepared.notes]), "settings": told}))


def product_dtype(model: torch.nn.Module) -> torch.dtype:
    """What the products of its first linear layer run in."""
    layer = next(part for part in model.modules() if isinstance(part, Linear))
    return layer.compute_dtype or layer.weight.dtype


if __name__ == "__main__":
    main()
