"""Learning-rate schedules: pure functions from a step to a fraction of the peak rate."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from penjing.base.config import Fraction, Settings
from penjing.base.errors import UserError


def _warm_up(step: int, num_warmup: int) -> float:
    """Linear from 1 / num_warmup at the first step to 1."""
    return min(1.0, (step + 1) / num_warmup) if num_warmup else 1.0


class _Schedule(Settings, section="schedule"):
    removed: ClassVar = {"weight_decay_factors": ()}


@dataclass(frozen=True, kw_only=True)
class Cosine(_Schedule):
    """Warm up, then half a cosine down to a floor (arXiv:1608.03983)."""

    name: Literal["cosine"] = "cosine"
    warmup_ratio: Fraction = 0.02  # of all steps
    min_lr_ratio: Fraction = 0.1  # of the peak rate, at the end

    def factor(self, step: int, num_steps: int) -> float:
        num_warmup = round(self.warmup_ratio * num_steps)
        if step < num_warmup:
            return _warm_up(step, num_warmup)
        progress = (step - num_warmup) / max(1, num_steps - num_warmup)
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


@dataclass(frozen=True, kw_only=True)
class WarmupStableDecay(_Schedule):
    """Warm up, hold, then decay linearly at the end (arXiv:2404.06395, arXiv:2405.18392)."""

    name: Literal["wsd"] = "wsd"
    warmup_ratio: Fraction = 0.02  # of all steps
    decay_ratio: Fraction = 0.5  # of all steps, at the end
    min_lr_ratio: Fraction = 0.0  # of the peak rate, at the end

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warmup_ratio + self.decay_ratio > 1:
            got = f"{self.warmup_ratio} + {self.decay_ratio}"
            raise UserError("warm-up and decay overlap", where="schedule", got=got, wanted="at most 1 together")

    def factor(self, step: int, num_steps: int) -> float:
        num_warmup = round(self.warmup_ratio * num_steps)
        num_decay = round(self.decay_ratio * num_steps)
        remaining = (num_steps - step) / num_decay if num_decay else 1.0
        decayed = self.min_lr_ratio + (1 - self.min_lr_ratio) * min(1.0, max(0.0, remaining))
        return min(_warm_up(step, num_warmup), decayed)


@dataclass(frozen=True, kw_only=True)
class Constant(_Schedule):
    """Warm up, then hold."""

    name: Literal["constant"] = "constant"
    warmup_ratio: Fraction = 0.0  # of all steps

    def factor(self, step: int, num_steps: int) -> float:
        return _warm_up(step, round(self.warmup_ratio * num_steps))


Schedule = Cosine | WarmupStableDecay | Constant
