"""The contract of a stage: what an objective brings to a run. train/build.py does the rest."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from penjing.base.errors import UserError
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.loader.batch_source import Source
from penjing.model.transformer import Transformer
from penjing.objective.base import Objective, ObjectiveSettings
from penjing.objective.router import RouterSettings
from penjing.parallel.base import Strategy
from penjing.train.batch_geometry import batch_geometry
from penjing.train.config import Run
from penjing.train.nonfinite_guard import Record
from penjing.train.precision import Precision
from penjing.train.run_dir import RunDir
from penjing.train.stages import stage_class

Report = Callable[[str], None]
S = TypeVar("S", bound=ObjectiveSettings)


@dataclass(frozen=True, kw_only=True)
class DatasetSize:
    """How much there is to learn from, in units of `batch.size`."""

    unit: str  # what batch.size counts: rows, pairs, prompts
    units_per_epoch: int
    tokens_per_unit: float  # positions that hold a token, of one unit's forward pass, on average
    seq_len: int  # positions of the longest row
    num_keys: float  # keys a query sees on average
    padding_fraction: float  # of all positions
    extra_forwards: float = 0.0  # forward passes of other models (a reference, a teacher), beside the model's own
    probe_steps: int = 2  # steps on answers that are timed before step 1, at least
    held_out_units: int = 0  # that a validation looks at, where that is known beforehand
    round_steps: int = 1  # steps that one round of sampling serves; they are timed together


class Stage(ABC, Generic[S]):
    """Data, source, objective and validation of one kind of training.

    A run calls, in this order: the constructor, which is light; `prepare_data`, or `assume_data` on the meta device;
    `trainable`; `setup`; then all others. A class overrides what is its own. What follows from the settings alone
    stands in them (`penjing.objective.base.ObjectiveSettings`).
    """

    runs_ahead = True  # whether batches may be made before the weights of their step are there
    tokenizer: Tokenizer  # set by prepare_data

    def __init__(self, run: Run, strategy: Strategy, report: Report = lambda text: None) -> None:
        """report: says what takes long."""
        self.run = run  # `batch.micro_size` becomes smaller where memory does not suffice for a validation
        self.strategy, self.report = strategy, report
        self.settings: S = run.objective  # type: ignore[assignment]  # the table of stages pairs them
        self.fingerprint = ""  # SHA-256 of the data, by which a resumed run tells other data; empty before prepare_data
        self.notes: list[str] = []  # lines for the user before step 1
        self.record: Record = lambda incident: None  # takes down what went wrong on the way

    @property
    def folder(self) -> RunDir:
        return RunDir(Path(self.run.out))

    @property
    def micro_size(self) -> int:
        """Units (rows, pairs, prompts) of one forward pass on one device."""
        return batch_geometry(self.run, self.strategy.world, self.strategy.device).micro_size

    @property
    def precision(self) -> Precision:
        """Of the run's matmuls; its settings say it by now."""
        return Precision.resolve(self.run.compute, self.strategy.device)

    @property
    def router(self) -> RouterSettings:
        """What a mixture of experts adds to the loss."""
        return self.run.router.for_model(self.run.model)

    def need_format(self, what: str, *formats: str) -> None:
        """Raise UserError unless `data.format` is one of these."""
        given = self.run.data.format
        if given not in formats:
            raise UserError(what, where="data.format", got=given, wanted=" or ".join(formats))

    @abstractmethod
    def prepare_data(self) -> None:
        """Read the data: rank 0 makes what is not there yet, the others wait. May fit `run` to them."""

    def assume_data(self) -> list[str]:
        """Stand in for prepare_data where nothing is read or computed; returns what was taken for granted."""
        return []

    @abstractmethod
    def size(self) -> DatasetSize: ...

    def trainable(self, model: Transformer) -> nn.Module:
        """What is trained and saved: the model, or a module that holds it as `model` beside a head of its own."""
        return model

    def setup(self, model: nn.Module) -> None:
        """Called once, with the start weights in place and before a checkpoint's are: references are copied here."""
        self.model: Any = model

    def frozen_models(self) -> list[nn.Module]:
        """Models held beside the one that is trained: a reference, a teacher."""
        return []

    @abstractmethod
    def source(self, micro_size: int, rank: int, world: int) -> Source:
        """Batches on the CPU, in their global order."""

    @abstractmethod
    def objective(self) -> Objective: ...

    @abstractmethod
    def example_batch(self, micro_size: int, device: torch.device) -> Any:
        """The largest batch that a run can meet, without values: every position is learned from."""

    def validation_size(self, micro_size: int) -> int:
        """Units of a forward pass of `validate`; 0 if it has none of a batch."""
        return micro_size

    @abstractmethod
    def validate(self) -> dict[str, float]:
        """Figures of the model as it is now, the same for any number of ranks."""

    def describe(self) -> list[tuple[str, str]]:
        """Further lines of the plan, (name, value)."""
        return []


def make_stage(run: Run, strategy: Strategy, report: Report = lambda text: None) -> Stage[Any]:
    """The stage of a run's objective. Its data are not read yet."""
    return stage_class(run.objective.stage)(run, strategy, report)
