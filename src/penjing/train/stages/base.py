"""What a kind of training brings to a run: data, objective, and how it is judged. `assemble` does the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from penjing.base.errors import UserError
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.loader.batch_source import Source, place_of, samples_between
from penjing.model.transformer import Transformer
from penjing.objective.base import Objective
from penjing.parallel.base import Engine
from penjing.train.config import Run

Report = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much there is to learn from, in units of `batch.rows`."""

    unit: str  # what batch.rows counts: rows, pairs, prompts
    units_per_epoch: int
    tokens_per_unit: float  # positions that hold a token, of one unit's forward pass, on average
    row_tokens: int  # positions of the longest row
    num_keys: float  # keys a query sees on average
    padding_fraction: float  # of all positions
    extra_forwards: float = 0.0  # forward passes of other models (a reference, a teacher), beside the model's own
    probe_steps: int = 2  # steps on answers that are timed before step 1, at least
    held_out_units: int = 0  # that a validation looks at, where that is known beforehand
    round_steps: int = 1  # steps that one round of sampling serves; they are timed together


class Stage(Protocol):
    """Made by `make(run, engine, report)`; `report` says what takes long."""

    run: Run  # its settings; `batch.micro_rows` becomes smaller where memory does not suffice for a validation
    tokenizer: Tokenizer
    fingerprint: str  # SHA-256 of the data, so that a continued run can tell other data
    notes: list[str]  # lines for the user before step 1
    runs_ahead: bool  # whether batches may be made before the weights of their step are there

    def size(self) -> Size: ...

    def trained(self, model: Transformer) -> nn.Module:
        """What is trained and saved: the model, or a module that holds it as `model` beside a head of its own."""
        ...

    def begin(self, model: nn.Module, engine: Engine) -> None:
        """Called once, with the start weights in place and before a checkpoint's are: references are copied here."""
        ...

    def source(self, micro_units: int, rank: int, world: int) -> Source:
        """Batches on the CPU, in their global order."""
        ...

    def objective(self) -> Objective: ...

    def validate(self) -> dict[str, float]:
        """Figures of the model as it is now, the same for any number of ranks."""
        ...

    def describe(self) -> list[tuple[str, str]]:
        """Further lines of the plan, (name, value)."""
        ...


MakeStage = Callable[[Run, Engine, Report], Stage]


def micro_units(run: Run, engine: Engine) -> int:
    """Units (rows, pairs, prompts) of one forward pass on one device. Raises UserError if they do not divide evenly.

    Unless set, a device's whole share; but on one CPU half of it, where that is even. In bfloat16 every pass rounds its
    gradients, so only the same passes give the same bits: this way two processes learn exactly what one does.
    """
    world, cut = engine.world, run.batch.rows % 2 == 0 and engine.device.type == "cpu"
    rows = run.batch.micro_rows or max(1, run.batch.rows // max(world, 2 if cut else 1))
    if run.batch.rows % (rows * world):
        share = f"{world} devices" + (f" x {rows} batch.micro_rows" if run.batch.micro_rows else "")
        raise UserError(
            "the rows of a step do not divide evenly",
            where="batch.rows",
            got=run.batch.rows,
            wanted=f"a multiple of {share}",
        )
    return rows


def accumulation(run: Run, engine: Engine) -> int:
    """Forward passes of one step on each device."""
    return run.batch.rows // (micro_units(run, engine) * engine.world)


class OnDevice:
    """A source whose batches are moved in line."""

    def __init__(self, source: Source, device: torch.device) -> None:
        self.source, self.device = source, device

    def __next__(self) -> Any:
        return next(self.source).to(self.device)

    def state(self) -> dict[str, Any]:
        return self.source.state()

    def place(self) -> dict[str, Any]:
        return place_of(self.source)

    def restore(self, state: dict[str, Any]) -> None:
        self.source.restore(state)

    def samples(self, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
        return samples_between(self.source, before, after)
