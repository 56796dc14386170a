"""The interface of a stage: an objective's data, source and validation. train/build.py assembles the run."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from penjing.base.errors import UserError
from penjing.base.seeds import derive
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.loader.batch_source import Source
from penjing.model.transformer import Transformer
from penjing.objective.base import Objective, ObjectiveSettings
from penjing.objective.router import RouterSettings
from penjing.parallel.base import Strategy
from penjing.track.run_dir import RunDir
from penjing.train.batch_geometry import batch_geometry
from penjing.train.config import Run
from penjing.train.nonfinite_guard import Record
from penjing.train.precision import Precision
from penjing.train.stages import stage_class

Report = Callable[[str], None]
S = TypeVar("S", bound=ObjectiveSettings)


@dataclass(frozen=True, kw_only=True)
class DatasetSize:
    """The size of the training data, in units of `batch.size`."""

    unit: str  # the unit of batch.size: rows, pairs, prompts
    units_per_epoch: int
    tokens_per_unit: float  # mean positions of one unit's forward pass, without padding
    seq_len: int  # positions of the longest row
    num_keys: float  # keys that a query attends to on average
    padding_fraction: float  # of all positions
    extra_forwards: float = 0.0  # forward passes of other models (a reference, a teacher), per pass of the model
    probe_steps: int = 2  # least steps on sampled answers that are timed before step 1
    held_out_units: int = 0  # units of a validation; 0 if unknown
    round_steps: int = 1  # steps per round of sampling, which are timed together


class Stage(ABC, Generic[S]):
    """Data, source, objective and validation of one kind of training.

    A run calls, in this order: the constructor, which is cheap; `prepare_data`, `conversations` and `prepare_rows`, or
    `assume_data` on the meta device; `trainable`; `setup`; then the other methods. Properties that follow from the
    settings alone are in `penjing.objective.base.ObjectiveSettings`.
    """

    runs_ahead = True  # whether batches may be prefetched; False if they depend on the current weights
    tokenizer: Tokenizer  # set by prepare_data

    def __init__(self, run: Run, strategy: Strategy, report: Report = lambda text: None) -> None:
        """report: prints what takes long."""
        self.run = run  # `batch.micro_size` is reduced if a validation runs out of memory
        self.strategy, self.report = strategy, report
        self.settings: S = run.objective  # type: ignore[assignment]  # the table of stages pairs them
        self.fingerprint = ""  # SHA-256 of the data, which a resumed run compares; empty before prepare_data
        self.notes: list[str] = []  # lines for the user before step 1
        self.record: Record = lambda incident: None  # logs an incident during training

    @property
    def folder(self) -> RunDir:
        return RunDir(Path(self.run.out))

    @property
    def micro_size(self) -> int:
        """Units (rows, pairs, prompts) of one forward pass on one device."""
        return batch_geometry(self.run, self.strategy.world, self.strategy.device).micro_size

    @property
    def precision(self) -> Precision:
        """Of the run's matmuls; the settings are resolved by now."""
        return Precision.resolve(self.run.compute, self.strategy.device)

    @property
    def noise_seed(self) -> int | None:
        """Seed of the training rows' noise (model/regularization.py); None: no noise."""
        return derive(self.run.seed, "noise") if self.run.regularization.dropout else None

    @property
    def router(self) -> RouterSettings:
        """Settings of the routers' losses of a mixture of experts."""
        return self.run.router.for_model(self.run.model)

    def need_format(self, what: str, *formats: str) -> None:
        """Raise UserError unless `data.format` is one of these."""
        data_format = self.run.data.format
        if data_format not in formats:
            raise UserError(what, where="data.format", got=data_format, wanted=" or ".join(formats))

    @abstractmethod
    def prepare_data(self) -> None:
        """Read the data: rank 0 makes missing files, the others wait."""

    def conversations(self) -> tuple[int, int] | None:
        """Tokens of all training conversations, and of the longest one; None if rows need not fit conversations."""
        return None

    def prepare_rows(self) -> None:
        """What depends on `data.seq_len`, which is decided by now."""

    def assume_data(self) -> list[str]:
        """Replaces prepare_data if no data may be read or computed; returns the assumptions."""
        return []

    @abstractmethod
    def size(self) -> DatasetSize: ...

    def initial_embedding(self) -> Tensor | None:
        """embedding_VD of a new model, by `embedding_init`; None: drawn like its other weights."""
        return None

    def trainable(self, model: Transformer) -> nn.Module:
        """The module that is trained and saved: the model, or a module with another head that contains the model."""
        return model

    def setup(self, model: nn.Module) -> None:
        """Called once with the start weights, before a checkpoint's weights are loaded: copy references here."""
        self.model: Any = model

    def frozen_models(self) -> list[nn.Module]:
        """Further models in memory: a reference, a teacher."""
        return []

    @abstractmethod
    def source(self, micro_size: int, rank: int, world: int) -> Source:
        """Batches on the CPU, in their global order."""

    def sources(self, num_units: int) -> list[dict[str, Any]]:
        """Of each source of the data: `name`, `tokens`, `share` of so many units of training, and `epochs`. Empty for
        one source."""
        return []

    @abstractmethod
    def objective(self) -> Objective: ...

    @abstractmethod
    def example_batch(self, micro_size: int, device: torch.device) -> Any:
        """The largest possible batch, without values; every position is a target."""

    def validation_size(self, micro_size: int) -> int:
        """Units of a forward pass of `validate`; 0 if it has no such pass."""
        return micro_size

    @abstractmethod
    def validate(self) -> dict[str, float]:
        """Metrics of the current model on held-out data, the same for any number of ranks."""

    def describe(self) -> list[tuple[str, str]]:
        """Further lines of the printed plan, as (name, value)."""
        return []


def make_stage(run: Run, strategy: Strategy, report: Report = lambda text: None) -> Stage[Any]:
    """The stage of a run's objective, before its data are read."""
    stage: Stage[Any] = stage_class(run.objective.stage)(run, strategy, report)
    return stage
