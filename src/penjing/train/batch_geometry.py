"""How an optimizer step is split into forward passes. One pure function for training, plans and benchmarks."""

import math
from dataclasses import dataclass

import torch

from penjing import devices
from penjing.train.config import Run


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchGeometry:
    """One optimizer step: global_size = micro_size x accumulation x world, in units (rows, pairs, prompts)."""

    global_size: int  # of one optimizer step, over all devices
    micro_size: int  # of one forward pass on one device
    accumulation: int  # forward passes of one step on each device
    world: int  # devices
    indivisible: int = 1  # units that must be in the same forward pass
    exact: bool = True  # whether gradients do not depend on the split, except for rounding

    @property
    def micro_sizes(self) -> list[int]:
        """Every possible micro-batch size, largest first."""
        return micro_sizes(self.micro_size * self.accumulation, self.indivisible)


def batch_geometry(run: Run, world: int, device: torch.device) -> BatchGeometry:
    """The step of a run on `world` devices like `device`. Raises UserError if its units do not divide evenly.

    Unless batch.micro_size is set, a pass is a device's full share; on one CPU half of it, if whole. In bfloat16 every
    pass rounds its gradients, so equal bits need equal passes: with this rule two processes on CPUs learn exactly what
    one does.
    """
    size, micro, indivisible = run.batch.size, run.batch.micro_size, run.objective.indivisible_units
    if not micro:
        passes = devices.of(device).min_passes
        passes = passes if size % (passes * indivisible) == 0 else 1
        micro = max(1, size // max(world, passes))
    if size % (micro * world):
        share = f"{world} devices" + (f" x {micro} batch.micro_size" if run.batch.micro_size else "")
        raise run.error("batch.size", "the rows of a step do not divide evenly", wanted=f"a multiple of {share}")
    if micro % indivisible:
        what = "a forward pass must contain complete blocks of groups that share an estimate"
        wanted = f"a divisor of {micro}, the groups of one forward pass (batch.micro_size)"
        raise run.objective.error("kl_groups", what, got=indivisible, wanted=wanted)
    return BatchGeometry(
        global_size=size,
        micro_size=micro,
        accumulation=size // (micro * world),
        world=world,
        indivisible=indivisible,
        exact=not run.model.is_mixture or run.router.for_model(run.model).balance != "batch",
    )


def micro_sizes(share: int, indivisible: int = 1) -> list[int]:
    """The possible micro-batch sizes of a device's `share` of a step, largest first: its divisors in whole blocks.

    All passes of a step are equal: a source's position, a compiled graph and a plan then depend on one number. A
    remainder pass would need a source that knows where a step ends, on any number of ranks.
    """
    small = [size for size in range(1, math.isqrt(share) + 1) if share % size == 0]
    return sorted({size for each in small for size in (each, share // each) if size % indivisible == 0}, reverse=True)
