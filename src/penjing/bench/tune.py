"""What each contender runs with, found by short trials before the timed ones: a peer's fastest way, and learning rates.

A way is the dtype of matmuls and whether torch.compile is used. Each is tried on the peer's own path. A trial of a
path lasts so many seconds after its first step: compiling in that step takes none of them, compiling in later ones
does, and the way that learns from the most tokens in that time is taken. Where steps are compared (step), what the
first ones cost is not counted, and the way with the highest rate is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penjing.base.errors import UserError

PILOT_SECONDS = 60.0  # at most, of training
PILOT_SHARE = 0.25  # of a trial's seconds, for a pilot and for a trial of a learning rate
PILOT_STEPS = 8  # at least; compiling may take the first two or three
MOST_RATES = 7  # tried for one contender


def pace(one: Mapping[str, Any]) -> dict[str, float]:
    """Tokens a second of the second half of a pilot's steps, the first step's seconds, and the seconds that the steps
    after the first took beyond that rate."""
    seconds, tokens = one["step_seconds"], one["step_tokens"]
    half = len(seconds) // 2
    rate = sum(tokens[half:]) / sum(seconds[half:])
    lost = max(0.0, sum(seconds[1:]) - sum(tokens[1:]) / rate)
    return {"tokens_per_second": rate, "first_step_seconds": seconds[0], "lost_seconds": lost}


def fastest_way(
    run: Callable[..., Mapping[str, Any]], dtypes: Sequence[str], *, may_compile: bool, seconds: float
) -> dict[str, Any]:
    """run: takes a pilot with `dtype` and `compiled`. seconds: of a path's training, after its first step.

    All ways that were tried, with their rates, and the one for each kind of trial. A way whose pilot ends in an error
    is recorded with it and not taken. Raises UserError if none works.
    """
    if len(dtypes) == 1 and not may_compile:
        only = {"dtype": dtypes[0], "compiled": False}
        return {"tried": [], "path": only, "step": only}
    tried: list[dict[str, Any]] = []
    for compiled in (False, True) if may_compile else (False,):
        for dtype in dtypes:
            way: dict[str, Any] = {"dtype": dtype, "compiled": compiled}
            try:
                tried.append({**way, **pace(run(**way))})
            except UserError as error:
                tried.append({**way, "failed": str(error)})
    worked = [way for way in tried if "failed" not in way]
    if not worked:
        raise UserError("no way to run this peer works", got=tried[0]["failed"])

    def learned(way: Mapping[str, Any]) -> float:
        return float(way["tokens_per_second"] * max(0.0, seconds - way["lost_seconds"]))

    best = {"path": max(worked, key=learned), "step": max(worked, key=lambda way: float(way["tokens_per_second"]))}
    chosen = {kind: {name: way[name] for name in ("dtype", "compiled")} for kind, way in best.items()}
    return {"tried": tried, **chosen}


def best_rate(run: Callable[[float], Mapping[str, Any]]) -> dict[str, Any]:
    """run: takes a trial with this multiple of the learning rate; its last bits per byte count.

    The rate is doubled or halved, whichever is better, until the best lies between two worse ones.
    """
    bits: dict[float, float] = {}

    def tried(factor: float) -> float:
        if factor not in bits:
            found = float(run(factor)["curve"][-1]["bits_per_byte"])
            bits[factor] = found if math.isfinite(found) else math.inf
        return bits[factor]

    best = 1.0
    while len(bits) < MOST_RATES:
        around = (best, 2 * best, best / 2)
        nearest = min(around, key=tried)
        if nearest == best:
            break
        best = nearest
    return {"tried": [{"factor": it, "bits_per_byte": bits[it]} for it in sorted(bits)], "factor": best}
