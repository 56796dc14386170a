"""Step configurations that fit in memory, and their Pareto front of memory and speed."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One step configuration, with its traced peak memory (bytes) and its predicted time (seconds), per device."""

    micro_size: int
    passes: int
    seq_len: int
    recompute: str
    sharding: str
    peak_bytes: int
    seconds: float  # of a step
    tokens_per_second: float


def fitting_candidates(candidates: Sequence[Candidate], available_bytes: int) -> list[Candidate]:
    """The candidates that fit, fastest first. available_bytes: 0 = no limit."""
    fits = [item for item in candidates if not available_bytes or item.peak_bytes <= available_bytes]
    return sorted(fits, key=lambda item: -item.tokens_per_second)


def pareto(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates that no other of the same seq_len beats in both memory and speed; smallest memory first.

    Of two equal ones the first stays.
    """
    front: list[Candidate] = []
    for point in sorted(candidates, key=lambda item: (item.seq_len, item.peak_bytes, -item.tokens_per_second)):
        if not front or front[-1].seq_len != point.seq_len or front[-1].tokens_per_second < point.tokens_per_second:
            front.append(point)
    return front
