"""Which ways of cutting a step fit a memory, and which of them nothing beats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to take a step on each of some devices, traced and timed. Bytes and seconds."""

    micro_size: int
    passes: int
    seq_len: int
    recompute: str
    sharding: str
    peak_bytes: int
    seconds: float  # of a step
    tokens_per_second: float


def fitting(candidates: Sequence[Candidate], available_bytes: int) -> list[Candidate]:
    """Those that fit, fastest first. available_bytes: 0 = no limit."""
    fit = [each for each in candidates if not available_bytes or each.peak_bytes <= available_bytes]
    return sorted(fit, key=lambda each: -each.tokens_per_second)


def pareto(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that no other beats in memory and in speed at once, of equal row length; least memory first.

    Of two with the same figures the one found first stays.
    """
    front: list[Candidate] = []
    for one in sorted(candidates, key=lambda each: (each.seq_len, each.peak_bytes, -each.tokens_per_second)):
        if not front or front[-1].seq_len != one.seq_len or front[-1].tokens_per_second < one.tokens_per_second:
            front.append(one)
    return front
