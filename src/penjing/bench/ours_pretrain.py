"""A trial of our own pretraining: `python -m penjing.bench.ours_pretrain SPEC.json [adamw|planned]`.

adamw: with the peers' optimizer instead of the recipe's. planned: as who has a share of the peers' seconds in all, from
the start of the process, plans a run: the recipe's schedule, over the steps that the probe says there is time for. The
others' rate is constant, for nobody of them knows how far it gets. The parts and the step of `penjing train`, the probe
before step 1 included.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from penjing.base import config
from penjing.bench.meter import read_spec
from penjing.bench.race import IGNORED, PLANNED_SHARE, HeldOut, Race, RaceSpec, packed_rows
from penjing.feed.batch import Batch
from penjing.objective.next_token import NextToken
from penjing.optim.adamw import AdamW
from penjing.optim.schedule import Constant
from penjing.parallel.base import make_engine
from penjing.train.assemble import assemble
from penjing.train.folder import set_threads
from penjing.train.loop import step
from penjing.train.run import Run
from penjing.train.tokens import NextTokenStage


class GivenRows:
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


def main() -> None:
    spec, planned = read_spec(RaceSpec), "planned" in sys.argv[2:]
    set_threads(spec.threads, 1)
    race = Race(spec, lambda: HeldOut(spec.held_out).bits_per_byte(nats))
    race.imported()
    run = replace(config.resolve(Run, config.read_toml(Path(spec.run))), out=spec.out)
    if planned:
        run = replace(run, steps=max(1, round(PLANNED_SHARE * run.steps)))
    else:
        run = replace(run, schedule=Constant())
    if "adamw" in sys.argv[2:]:
        rate, (beta1, beta2), decay = spec.learning_rate, spec.betas, spec.weight_decay
        run = replace(run, optimizer=AdamW(learning_rate=rate, beta1=beta1, beta2=beta2, weight_decay=decay))
    assembled = assemble(run, make_engine("cpu"), NextTokenStage, lambda *_: [], lambda *_: [], lambda text: None)
    parts, model, objective = assembled.parts, assembled.model, NextToken()

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
        return float(objective(model, batch).total)

    if spec.kind == "step":
        parts = replace(parts, source=GivenRows(spec, spec.batch // parts.accumulate))
    race.ready()
    if planned:
        left = PLANNED_SHARE * spec.seconds - race.age_without_looks
        parts = replace(parts, num_steps=max(1, int(left / assembled.bill.step_seconds)))
    number, going = 0, True
    while going and not (planned and number == parts.num_steps):
        going = race.step(step(parts, number).tokens)
        number += 1
    if planned and going:
        race.end()
    if hasattr(assembled.parts.source, "close"):
        assembled.parts.source.close()
    compute = [f"products in {run.compute.dtype}", f"compute.compile={run.compute.compile}"]
    learned = [f"optimizer.kind={run.optimizer.kind}", f"schedule.kind={run.schedule.kind}"]
    options = [*learned, *compute, *assembled.notes]
    print(json.dumps(race.result(options=options)))


if __name__ == "__main__":
    main()
