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
    """Those that fit, fastest first."""
    return sorted(
        (each for each in candidates if each.peak_bytes <= available_bytes), key=lambda each: -each.tokens_per_second
    )


def pareto(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that no other beats in memory and in speed at once, of equal row length; least memory first.

    Of two with the same figures the one found first stays.
    """
    front: list[Candidate] = []
    for one in candidates:
        beaten = any(_beats(other, one) for other in candidates)
        twin = any((two.peak_bytes, two.tokens_per_second, two.seq_len) == _figures(one) for two in front)
        if not beaten and not twin:
            front.append(one)
    return sorted(front, key=lambda each: (each.seq_len, each.peak_bytes))


def _figures(one: Candidate) -> tuple[int, float, int]:
    return one.peak_bytes, one.tokens_per_second, one.seq_len


def _beats(one: Candidate, other: Candidate) -> bool:
    no_worse = one.peak_bytes <= other.peak_bytes and one.tokens_per_second >= other.tokens_per_second
    better = one.peak_bytes < other.peak_bytes or one.tokens_per_second > other.tokens_per_second
    return one.seq_len == other.seq_len and no_worse and better


def divisors(number: int) -> list[int]:
    """Smallest first."""
    return [each for each in range(1, number + 1) if number % each == 0]
