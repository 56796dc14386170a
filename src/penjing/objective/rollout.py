"""How a policy samples the answers that it learns from."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Gt, Le

from penjing.base.config import NonNegativeInt, PositiveFloat, PositiveInt, Settings
from penjing.data.chat.render import Switch


@dataclass(frozen=True, kw_only=True)
class Rollout(Settings, section="objective.rollout"):
    """How answers are sampled."""

    num_generations: PositiveInt = 8  # answers to each prompt
    max_new_tokens: PositiveInt = 64  # longest answer; with several turns, all turns and tool results together
    temperature: PositiveFloat = 1.0  # of sampling, and of the trained policy
    # nucleus sampling; below 1, a token's loss is weighted by the probability that was kept (objective/policy.py)
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    top_k: NonNegativeInt = 0  # top-k sampling, with the same effect; 0 = all
    # optimizer steps per round of sampling, each with its own prompts
    steps_per_rollout: PositiveInt = 1
    num_epochs: PositiveInt = 1  # passes over the steps of a round
    max_concurrent: NonNegativeInt = 0  # answers sampled at once on one device; 0 = 64 on a CPU, else 256
    # Old log-probabilities: the sampler's, or recomputed by a training forward pass before the first step.
    old_logprobs: Literal["sampled", "recomputed"] = "sampled"
    # Whether answers begin inside a thought (on) or after an empty one (off); auto: the model decides.
    thinking: Switch = "auto"
    # turns of the model in one answer; after a turn with tool calls it reads their results and continues
    max_turns: PositiveInt = 1
    # Available tools, see `penjing.agent_tools`; NAME=TOOL renames one, MODULE:CLASS is your own.
    tools: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tools and self.max_turns == 1:
            wanted = "at least 2 with objective.rollout.tools"
            raise self.error("max_turns", "tools are called between turns", wanted=wanted)
        if self.max_turns > 1 and not self.tools:
            next_step = "Give objective.rollout.tools=calculator."
            raise self.error("max_turns", "without tools an answer is one turn", next_step=next_step)

    @property
    def is_truncated(self) -> bool:
        """Whether answers are sampled from a part of the softmax."""
        return self.top_p < 1 or self.top_k > 0

    @property
    def steps_per_round(self) -> int:
        """Optimizer steps per round of sampling."""
        return self.steps_per_rollout * self.num_epochs
