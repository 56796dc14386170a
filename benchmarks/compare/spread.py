"""The median of several measurements, and their range."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

Show = Callable[[float], str]
MEBIBYTE = 2**20


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def with_range(stats: Mapping[str, float], show: Show) -> str:
    """The median, followed by the range if there is one."""
    if stats["low"] == stats["high"]:
        return show(stats["median"])
    return f"{show(stats['median'])} ({show(stats['low'])}-{show(stats['high'])})"
