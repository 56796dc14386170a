"""Metrics on held-out data, the same for any number of ranks."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from penjing import devices
from penjing.objective.base import Objective
from penjing.parallel.base import Strategy


def summed_over_ranks(values: Sequence[float], strategy: Strategy) -> list[float]:
    """Each value summed over all ranks in float64."""
    totals = torch.tensor(values, dtype=torch.float64)
    on_device = devices.of(strategy.device).supports_float64  # elsewhere ranks add on the host
    totals = strategy.all_reduce(totals.to(strategy.device) if on_device else totals)
    return list(totals.tolist())


def held_out_means(
    objective: Objective,
    model: Callable[..., Any],
    batches: Iterable[Any],
    strategy: Strategy,
    names: Sequence[str] | None = None,
) -> dict[str, float]:
    """Means of an objective's parts over the batches of all ranks, named `val_...`.

    batches: each on one rank only. names: of the parts; None: all.
    """
    sums: dict[str, float] = {}
    units = 0.0
    with torch.no_grad():
        for batch, weight in strategy.lockstep(batches):
            on_device = batch.to(strategy.device)
            parts = objective(model, on_device).parts
            if weight:
                for name, value in parts.items():
                    sums[name] = sums.get(name, 0.0) + float(value)
                units += float(objective.weight(on_device))
    known: Sequence[str] = strategy.broadcast(names or sorted(sums))  # rank 0 has a batch; other ranks may have none
    units, *values = summed_over_ranks([units, *(sums.get(name, 0.0) for name in known)], strategy)
    return {f"val_{name}": value / max(1.0, units) for name, value in zip(known, values, strict=True)}
