"""The contract of an objective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from torch import Tensor

from penjing.base.config import Settings
from penjing.base.errors import UserError

if TYPE_CHECKING:
    from penjing.objective.rollout import Rollout


@dataclass(frozen=True, slots=True)
class Loss:
    """total: the sum over units, to be differentiated. parts: sums for the curves, under the names of their means."""

    total: Tensor
    parts: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class UnitLengths:
    """What one unit of a batch (row, pair, prompt) is taken to hold where there are no data to look at."""

    tokens: float  # positions of its forward pass
    keys: float  # that a query sees on average
    extra_forwards: float = 0.0  # forward passes of other models
    note: str = ""  # what was assumed


def refuse_unused(settings: Settings, names: Sequence[str], used: bool, wanted: str) -> None:
    """Raise UserError for the first of these settings that was changed, if none is used. wanted: what uses them."""
    usual = {field.name: field.default for field in fields(settings)}  # type: ignore[arg-type]  # all are dataclasses
    for name in names:
        value = getattr(settings, name)
        if value != usual[name] and not used:
            step = f"Set {wanted}, or leave it out."
            raise UserError("has no effect here", where=f"{settings.section}.{name}", got=value, next_step=step)


class ObjectiveSettings(Settings):
    """What follows from an objective's settings alone, without data. A class overrides what differs.

    Each has a field `name`, its name in a configuration. What needs data is asked of the stage (train/stages/base.py).
    """

    section: ClassVar = "objective"
    name: str
    generates_text: ClassVar = True  # whether what is trained predicts tokens in the end, and can be asked questions
    is_language_modelling: ClassVar = False  # whether its held-out loss is nats per token, for which scaling laws hold
    # How much larger the learning rate of adapters is than that of whole weights. What adapters add begins at zero and
    # is a matmul of two small matrices, so the same rate moves the model less: at a whole model's rate DPO with
    # adapters learned next to nothing (docs/log.md).
    adapter_rate_factor: ClassVar[float] = 10

    @property
    def stage(self) -> str:
        """Its line in the table of stages (train/stages/__init__.py)."""
        return self.name

    @property
    def indivisible_units(self) -> int:
        """Units that one forward pass must hold together."""
        return 1

    @property
    def varying_shapes(self) -> bool:
        """Whether each step's batches have another shape, so that no static graph serves all of them."""
        return False

    @property
    def compares_passes(self) -> bool:
        """Whether the loss compares two forward passes, which must then not differ by dropout or rounding."""
        return False

    @property
    def compares_with_start(self) -> bool:
        """Whether a resumed run needs its start weights again, beside those of its checkpoint."""
        return False

    @property
    def vocabulary_of(self) -> str:
        """A model whose vocabulary a model that is trained from nothing must have; empty: none."""
        return ""

    @property
    def sampling(self) -> Rollout | None:
        """How the model samples the answers that it learns from; None: it learns from given ones."""
        return None

    def unit_lengths(self, seq_len: int) -> UnitLengths:
        """Full rows, the most there can be."""
        return UnitLengths(tokens=seq_len, keys=(seq_len + 1) / 2)


class Objective(Protocol):
    """Sums over units (tokens, pairs, answers), never means.

    The loop adds `weight` over micro-batches and ranks and divides once, so that accumulation, ragged masks, packing
    and data parallelism are exact for every objective at the same time.
    """

    unit: str

    def weight(self, batch: Any) -> Tensor:
        """How many units the batch counts, before any forward pass."""
        ...

    def __call__(self, model: Callable[..., Tensor], batch: Any) -> Loss: ...
