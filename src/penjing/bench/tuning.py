"""What each contestant runs with, found by short trials before the timed ones: a baseline's fastest way, and learning
rates.

A way is the dtype of matmuls, and whether torch.compile is used. Each is tried on the baseline's own path. The time of
a path begins after its first step: compiling in that step takes none of it, compiling in later ones does, and the way
that learns from the most tokens in that time is taken. For the setting `step` the cost of the first steps is not
counted, and the way with the highest rate is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penjing.base.errors import UserError

if TYPE_CHECKING:
    from penjing.bench.comparison import Options

PILOT_SECONDS = 60.0  # at most, of training
PILOT_SHARE = 0.25  # of a trial's seconds, for a pilot and for a trial of a learning rate
PILOT_STEPS = 8  # at least; compiling may take the first two or three
MOST_RATES = 7  # tried for one contestant


def tune(
    name: str,
    spec: Any,
    options: Options,
    run: Callable[[Any, str], dict[str, Any]],
    say: Callable[[str], None],
    *,
    may_pilot: bool,
) -> dict[str, Any]:
    """A baseline's fastest way (may_pilot), and with `options.search` the multiple of its learning rates that is best.

    run: takes a spec and the name of a folder.
    """
    tuned: dict[str, Any] = {}
    seconds = PILOT_SHARE * options.seconds
    if may_pilot:
        pilot = replace(spec, setting="pilot", seconds=min(PILOT_SECONDS, seconds), steps=PILOT_STEPS)

        def run_pilot(dtype: str, compiled: bool) -> dict[str, Any]:
            folder = f"pilot-{name}-{dtype}-{'compiled' if compiled else 'eager'}"
            return run(replace(pilot, dtype=dtype, compiled=compiled), folder)

        way = fastest_way(run_pilot, options.dtypes, may_compile=options.may_compile, seconds=options.seconds)
        tuned["way"] = way
        for one in way["tried"]:
            say(f"pilot {name}, {_describe(one, way)}")
    if options.search:
        path = tuned_spec(replace(spec, setting="path", seconds=seconds, evaluations=1), tuned)

        def final_bits(factor: float) -> float:
            return float(run(_times(path, factor), f"rate-{name}-{factor:g}")["curve"][-1]["bits_per_byte"])

        best, bits = best_rate(final_bits)
        tried = [{"factor": factor, "bits_per_byte": bits[factor]} for factor in sorted(bits)]
        tuned["rate"] = {"tried": tried, "factor": best}
        told = ", ".join(f"{factor:g} x {bits[factor]:.3f}" for factor in sorted(bits))
        say(f"learning rate of {name}, bits per byte: {told}")
    return tuned


def _describe(one: Mapping[str, Any], way: Mapping[str, Any]) -> str:
    how = f"{one['dtype']}, {'compiled' if one['compiled'] else 'eager'}"
    if "failed" in one:
        return f"{how}: {one['failed']}"
    first, lost = one["first_step_seconds"], one["lost_seconds"]
    paced = f"{one['tokens_per_second']:,.0f} tokens/s, first step {first:.0f} s, then {lost:.0f} s lost"
    taken = " and ".join(setting for setting in ("path", "step") if way[setting].items() <= one.items())
    return f"{how}: {paced}{f'; taken for {taken}' if taken else ''}"


def tuned_spec(spec: Any, tuned: Mapping[str, Any]) -> Any:
    if "way" in tuned:
        spec = replace(spec, **tuned["way"][spec.setting])
    return _times(spec, tuned["rate"]["factor"]) if "rate" in tuned else spec


def _times(spec: Any, factor: float) -> Any:
    return replace(spec, learning_rate=factor * spec.learning_rate, rate_factor=factor)


def pace(one: Mapping[str, Any]) -> dict[str, float]:
    """Tokens a second of the second half of a pilot's steps, the first step's seconds, and the seconds that the steps
    after the first took beyond that rate."""
    seconds, tokens = one["step_seconds"], one["step_units"]
    half = len(seconds) // 2
    rate = sum(tokens[half:]) / sum(seconds[half:])
    lost = max(0.0, sum(seconds[1:]) - sum(tokens[1:]) / rate)
    return {"tokens_per_second": rate, "first_step_seconds": seconds[0], "lost_seconds": lost}


def fastest_way(
    run: Callable[..., Mapping[str, Any]], dtypes: Sequence[str], *, may_compile: bool, seconds: float
) -> dict[str, Any]:
    """run: takes a pilot with `dtype` and `compiled`. seconds: of a path's training, after its first step.

    All ways that were tried, with their rates, and the one for each setting. A way whose pilot ends in an error is
    recorded with it and not taken. Raises UserError if none works.
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
        raise UserError("no way to run this baseline works", got=tried[0]["failed"])

    def learned(way: Mapping[str, Any]) -> float:
        return float(way["tokens_per_second"] * max(0.0, seconds - way["lost_seconds"]))

    best = {"path": max(worked, key=learned), "step": max(worked, key=lambda way: float(way["tokens_per_second"]))}
    chosen = {setting: {name: way[name] for name in ("dtype", "compiled")} for setting, way in best.items()}
    return {"tried": tried, **chosen}


def best_rate(bits: Callable[[float], float], first: float = 1.0) -> tuple[float, dict[float, float]]:
    """The learning rate, or multiple of one, of least bits per byte, and the bits of all that were tried.

    It is doubled or halved, whichever is better, until the best lies between two worse ones. NaN and Inf are worst.
    """
    tried: dict[float, float] = {}

    def at(rate: float) -> float:
        if rate not in tried:
            found = bits(rate)
            tried[rate] = found if math.isfinite(found) else math.inf
        return tried[rate]

    best, nearest = math.nan, first
    while nearest != best and len(tried) < MOST_RATES:
        best = nearest
        nearest = min((best, 2 * best, best / 2), key=at)
    return nearest, tried
