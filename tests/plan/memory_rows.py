"""A trace for any number of rows from two: sizes are affine in the rows as long as the same things happen."""

from __future__ import annotations

from dataclasses import replace

from penjing.plan.memory.trace import Trace


def same_course(first: Trace, second: Trace) -> bool:
    """Whether the same storages are born and die in the same order in both."""
    return first.events == second.events and all(
        a.operation == b.operation for a, b in zip(first.storages, second.storages, strict=True)
    )


def at_rows(first: Trace, second: Trace, rows: tuple[int, int], wanted: int) -> Trace | None:
    """The trace of `wanted` rows from those of `rows`; None if they take another course."""
    low, high = rows
    if low == high or not same_course(first, second):
        return None
    storages = [
        replace(a, num_bytes=a.num_bytes + (b.num_bytes - a.num_bytes) * (wanted - low) // (high - low))
        for a, b in zip(first.storages, second.storages, strict=True)
    ]
    return Trace(storages, list(first.events))
