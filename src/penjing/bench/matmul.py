"""The classic test of a device: square matmuls, by size and dtype. penjing bench matmul"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from penjing.bench.record import facts
from penjing.plan.gpu_specs import card_called
from penjing.plan.microbenchmarks import SIZES, dtypes_of, key_of, squares


def matmul(
    device: torch.device,
    *,
    sizes: Sequence[int] = (),
    dtypes: Sequence[str] = (),
    budget_seconds: float = 60.0,
    report: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Median rate and spread for each size and dtype, and its share of the stated peak where there is one."""
    chosen = list(dtypes) or dtypes_of(device)
    found = squares(device, sizes=sizes or SIZES, dtypes=chosen, budget_seconds=budget_seconds, report=report)
    card = card_called(key_of(device).device) if device.type == "cuda" else None
    for one in found:
        one["share_of_peak"] = one["flops_per_second"] / card.peak_flops(one["dtype"]) if card else None
    return {**facts(device, torch.float32), "rows": found}
