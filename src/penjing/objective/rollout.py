"""How answers are sampled that a policy learns from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from penjing.base.errors import UserError
from penjing.data.chat.render import Switch


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """How answers are sampled."""

    answers: int = 8  # to each prompt
    max_tokens: int = 64  # longest answer; of several turns all together, with what tools say between them
    temperature: float = 1.0  # of sampling, and of the policy that is trained
    top_p: float = 1.0  # below 1, answers are drawn from another distribution than the one that is trained
    top_k: int = 0  # the same; 0 = all
    updates: int = 1  # optimizer steps that one round of sampling serves, each with prompts of its own
    repeats: int = 1  # times those steps are gone through
    slots: int = 0  # answers written at once on one device; 0 = 64 on a CPU, else 256
    # Whether old log-probabilities are the sampler's own, or taken by the training pass before the first step.
    behaviour: Literal["sampled", "recomputed"] = "sampled"
    # Whether answers begin inside a thought (on) or behind an empty one (off); auto: as the model likes.
    thinking: Switch = "auto"
    max_turns: int = 1  # of the model in one answer; after a turn that calls tools it reads their results and goes on
    # On offer, see `penjing.agent_tools`; NAME=TOOL under another name, MODULE:CLASS your own.
    tools: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.tools and self.max_turns == 1:
            raise UserError(
                "tools are called between turns",
                where="objective.rollout.max_turns",
                got=1,
                wanted="at least 2 with objective.rollout.tools",
            )
        if self.max_turns > 1 and not self.tools:
            raise UserError(
                "without tools an answer is one turn",
                where="objective.rollout.max_turns",
                got=self.max_turns,
                next_step="Give objective.rollout.tools=calculator.",
            )
        for name in ("answers", "max_tokens", "updates", "repeats", "max_turns"):
            if getattr(self, name) < 1:
                raise UserError(
                    "too small", where=f"objective.rollout.{name}", got=getattr(self, name), wanted="at least 1"
                )
        if not 0 < self.temperature < math.inf:
            raise UserError(
                "out of range", where="objective.rollout.temperature", got=self.temperature, wanted="more than 0"
            )
        if not 0 < self.top_p <= 1:
            raise UserError("out of range", where="objective.rollout.top_p", got=self.top_p, wanted="0..1")
        for name in ("top_k", "slots"):
            if getattr(self, name) < 0:
                raise UserError("negative", where=f"objective.rollout.{name}", got=getattr(self, name))

    @property
    def steps_per_round(self) -> int:
        """Optimizer steps that one round of sampling serves."""
        return self.updates * self.repeats
