"""The interface of an objective."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from torch import Tensor

from penjing.base.config import Settings
from penjing.base.errors import UserError

if TYPE_CHECKING:
    from penjing.objective.rollout import Rollout


@dataclass(frozen=True, slots=True)
class Loss:
    """total: the sum over units, which is differentiated. parts: sums of further metrics, by metric name."""

    total: Tensor
    parts: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class UnitLengths:
    """The assumed size of one unit of a batch (row, pair, prompt), for plans."""

    tokens: float  # positions of its forward pass
    keys: float  # keys that a query attends to on average
    extra_forwards: float = 0.0  # forward passes of other models, in each step
    forwards_before: float = 0.0  # the same over all data, once before step 1
    note: str = ""  # the assumption


def reject_unused(settings: Settings, names: Sequence[str], used: bool, wanted: str) -> None:
    """If `used` is false, raise UserError for the first of these settings that was changed. wanted: what uses them."""
    defaults = {field.name: field.default for field in fields(settings)}  # type: ignore[arg-type]  # all are dataclasses
    for name in names:
        value = getattr(settings, name)
        if value != defaults[name] and not used:
            step = f"Set {wanted}, or leave it out."
            raise UserError("has no effect here", where=f"{settings.section}.{name}", got=value, next_step=step)


class ObjectiveSettings(Settings, section="objective"):
    """Properties that follow from an objective's settings alone, without data. A class overrides those that differ. The
    field `name` is its name in a configuration. The stage knows what depends on data (train/stages/base.py)."""

    name: str
    generates_text: ClassVar = True  # whether the trained model predicts tokens, so that it can answer questions
    is_language_modelling: ClassVar = False  # whether its held-out loss is nats per token, as scaling laws require
    # Learning rate of adapters over that of full fine-tuning. An adapter's update begins at zero and is a product of
    # two small matrices, so the same rate moves the model less: at the rate of full fine-tuning, DPO with adapters
    # learned next to nothing (docs/log.md).
    adapter_rate_factor: ClassVar[float] = 10
    # Learning rate of a loss (`objective.loss`) over its recipe's.
    loss_rate_factors: ClassVar[Mapping[str, float]] = {}

    @property
    def best_metric(self) -> str:
        """The held-out figure whose lowest value tells the best checkpoint (train/best.py); empty: none does."""
        return "val_loss"

    @property
    def stage(self) -> str:
        """The name of its stage (train/stages/__init__.py)."""
        return self.name

    @property
    def indivisible_units(self) -> int:
        """Units that must be in the same forward pass."""
        return 1

    @property
    def varying_shapes(self) -> bool:
        """Whether the batches' shape changes from step to step, so that no static graph fits all."""
        return False

    @property
    def compares_passes(self) -> bool:
        """Whether the loss compares two forward passes, which then must not differ by dropout or rounding."""
        return False

    @property
    def takes_noise(self) -> bool:
        """Whether its passes take the noise of `regularization.*`, which is drawn for packed rows."""
        return False

    @property
    def needs_start_weights(self) -> bool:
        """Whether a resumed run needs its start weights in addition to its checkpoint."""
        return False

    @property
    def vocab_source(self) -> str:
        """The model whose vocabulary a model trained from scratch must have; empty: none."""
        return ""

    @property
    def sampling(self) -> Rollout | None:
        """How the model samples the answers that it learns from; None: it learns from the data's answers."""
        return None

    def unit_lengths(self, seq_len: int, *, tokens: float = 0.0, every_unit: bool = True) -> UnitLengths:
        """A unit of so many tokens: the mean of the data's records, if units are records; 0: full rows, the largest
        possible size. every_unit: whether the run uses each unit at least once."""
        tokens = tokens or seq_len
        return UnitLengths(tokens=tokens, keys=(tokens + 1) / 2)


class Objective(Protocol):
    """Returns sums over units (tokens, pairs, answers), never means.

    The loop sums `weight` over micro-batches and ranks and divides once, so gradient accumulation, ragged masks,
    packing and data parallelism are exact for every objective.
    """

    def weight(self, batch: Any) -> Tensor:
        """The batch's number of units, computed without a forward pass."""
        ...

    def __call__(self, model: Callable[..., Tensor], batch: Any) -> Loss: ...
