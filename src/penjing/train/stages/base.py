"""What a kind of training brings to a run: data, objective, and how it is judged. `prepare_run` does the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.loader.batch_source import Source
from penjing.model.transformer import Transformer
from penjing.objective.base import Objective
from penjing.parallel.base import Strategy
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
    probe_steps: int = 5  # steps timed before step 1
    round_steps: int = 1  # steps that one round of sampling serves; they are timed together


class Stage(Protocol):
    """Made by `make(run, strategy, report)`; `report` says what takes long."""

    run: Run  # its settings; `batch.micro_rows` becomes smaller where memory does not suffice for a validation
    tokenizer: Tokenizer
    fingerprint: str  # SHA-256 of the data, so that a continued run can tell other data
    notes: list[str]  # lines for the user before step 1
    runs_ahead: bool  # whether batches may be made before the weights of their step are there

    def size(self) -> Size: ...

    def trained(self, model: Transformer) -> nn.Module:
        """What is trained and saved: the model, or a module that holds it as `model` beside a head of its own."""
        ...

    def begin(self, model: nn.Module, strategy: Strategy) -> None:
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


MakeStage = Callable[[Run, Strategy, Report], Stage]
