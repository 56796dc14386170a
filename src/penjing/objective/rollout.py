"""How answers are sampled that a policy learns from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Gt, Le

from penjing.base.config import NonNegativeInt, PositiveFloat, PositiveInt, Settings
from penjing.base.errors import UserError
from penjing.data.chat.render import Switch


@dataclass(frozen=True, kw_only=True)
class Rollout(Settings):
    """How answers are sampled."""

    section: ClassVar = "objective.rollout"

    num_generations: PositiveInt = 8  # to each prompt
    max_new_tokens: PositiveInt = 64  # longest answer; of several turns all together, with what tools say between them
    temperature: PositiveFloat = 1.0  # of sampling, and of the policy that is trained
    # below 1, answers are drawn from another distribution than the one that is trained
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    top_k: NonNegativeInt = 0  # the same; 0 = all
    # optimizer steps that one round of sampling serves, each with prompts of its own
    steps_per_rollout: PositiveInt = 1
    num_epochs: PositiveInt = 1  # times those steps are gone through
    max_concurrent: NonNegativeInt = 0  # answers written at once on one device; 0 = 64 on a CPU, else 256
    # Whether old log-probabilities are the sampler's own, or taken by the training pass before the first step.
    old_logprobs: Literal["sampled", "recomputed"] = "sampled"
    # Whether answers begin inside a thought (on) or behind an empty one (off); auto: as the model likes.
    thinking: Switch = "auto"
    # of the model in one answer; after a turn that calls tools it reads their results and goes on
    max_turns: PositiveInt = 1
    # On offer, see `penjing.agent_tools`; NAME=TOOL under another name, MODULE:CLASS your own.
    tools: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
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

    @property
    def steps_per_round(self) -> int:
        """Optimizer steps that one round of sampling serves."""
        return self.steps_per_rollout * self.num_epochs
