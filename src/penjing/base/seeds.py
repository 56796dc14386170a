"""Randomness as a pure function of (seed, purpose, indices): no result depends on how many workers there are."""

import hashlib


def derive(seed: int, *parts: object) -> int:
    """A 63-bit seed for one purpose, e.g. `derive(run.seed, "order", epoch)`. The same on every platform."""
    text = "/".join([str(seed), *map(str, parts)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def fraction(seed: int, *parts: object) -> float:
    """A number in [0, 1) from a hash of the arguments. A split by it stays the same when data is added."""
    return derive(seed, *parts) / 2**63
