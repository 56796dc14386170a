"""Predicted memory against what others measured; the figures are theirs, and nothing is fitted to them.

`memory_twins.py` has the two programs. Sources: S. Raschka, LLMs-from-scratch, ch05/10 (torch 2.6, A100, reserved
memory in GiB at the end of the first epoch); Languini Kitchen, throughput_results.csv (2023, largest batch that
fitted).
"""

from __future__ import annotations

import memory_twins as twins
import pytest
import torch

from penjing.plan.memory import Target

GIB = 1 << 30


@pytest.mark.parametrize(
    ("kind", "dtype", "fused", "published"),
    [
        ("stored mask", torch.float32, False, 26.2617),
        ("written", torch.float32, False, 26.2422),
        ("written", torch.float32, True, 26.2422),
        ("written", torch.bfloat16, True, 13.7871),
        ("classes", torch.bfloat16, True, 11.5645),
        ("flash", torch.bfloat16, True, 5.9004),
    ],
)
def test_reserved_memory_of_gpt2_is_within_one_percent(
    kind: str, dtype: torch.dtype, fused: bool, published: float
) -> None:
    plan = twins.guide_plan(kind, dtype, 8, 50257, fused=fused)
    assert plan.peak_reserved_bytes / GIB == pytest.approx(published, rel=0.01)
    assert sum(plan.waterfall.values()) == plan.total_bytes


# One sequence or 5 %. Mini with 15.6 GiB is not among them: 53 for 56 (docs/memory.md).
# Both cards' drivers keep some 0.3 GiB of 15.90 and 11.92.
@pytest.mark.parametrize(("name", "gib", "fitted"), [("tiny", 15.6, 44), ("mini", 11.75, 42), ("tiny", 11.75, 32)])
def test_the_largest_batch_under_autocast(name: str, gib: float, fitted: int) -> None:
    target = Target(capability=(6, 0), memory_bytes=int(gib * GIB), context_bytes=0)
    found = twins.largest_batch(twins.SHAPES[name], target, is_compiled=False)
    assert abs(found - fitted) <= max(1, 0.05 * fitted)


@pytest.mark.nightly
@pytest.mark.parametrize(("card", "fitted"), [("RTX 3090", 77), ("V100-SXM2-32GB", 106)])
def test_the_largest_batch_when_compiled(card: str, fitted: int) -> None:
    found = twins.largest_batch(twins.SHAPES["tiny"], twins.card(card), is_compiled=True)
    assert abs(found - fitted) <= max(1, 0.05 * fitted)
