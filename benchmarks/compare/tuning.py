"""Tuning by short trials before the timed ones: each baseline's fastest configuration, and learning rates.

A configuration is the matmul dtype, and whether torch.compile is used. Each is tried on the baseline's own path. A
path's time begins after its first step: compiling in that step is free, compiling in later steps is not. For `path` the
configuration that trains on the most tokens in that time wins. For `step` the cost of the first steps does not count,
and the configuration with the highest rate wins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penjing.base.errors import UserError

if TYPE_CHECKING:
    from compare.comparison import Options

PILOT_SECONDS = 60.0  # maximum training time
PILOT_SHARE = 0.25  # of a trial's seconds, for a pilot and for a learning-rate trial
PILOT_STEPS = 8  # minimum; compiling may take the first two or three
MAX_RATES = 7  # per contestant


def tune(
    name: str,
    spec: Any,
    options: Options,
    run: Callable[[Any, str], dict[str, Any]],
    say: Callable[[str], None],
    *,
    may_pilot: bool,
) -> dict[str, Any]:
    """A baseline's fastest configuration (may_pilot) and, with `options.search`, the best factor on its learning rates.

    run: takes a spec and a folder name.
    """
    tuned: dict[str, Any] = {}
    seconds = PILOT_SHARE * options.seconds
    if may_pilot:
        pilot = replace(spec, setting="pilot", seconds=min(PILOT_SECONDS, seconds), steps=PILOT_STEPS)

        def run_pilot(dtype: str, compiled: bool) -> dict[str, Any]:
            folder = f"pilot-{name}-{dtype}-{'compiled' if compiled else 'eager'}"
            return run(replace(pilot, dtype=dtype, compiled=compiled), folder)

        chosen = fastest_config(run_pilot, options.dtypes, may_compile=options.may_compile, seconds=options.seconds)
        tuned["way"] = chosen
        for result in chosen["tried"]:
            say(f"pilot {name}, {_describe(result, chosen)}")
    if options.search:
        path = tuned_spec(replace(spec, setting="path", seconds=seconds, evaluations=1), tuned)

        def final_bits(factor: float) -> float:
            return float(run(_scale_rates(path, factor), f"rate-{name}-{factor:g}")["curve"][-1]["bits_per_byte"])

        best, bits = best_rate(final_bits)
        tried = [{"factor": factor, "bits_per_byte": bits[factor]} for factor in sorted(bits)]
        tuned["rate"] = {"tried": tried, "factor": best}
        results = ", ".join(f"{factor:g} x {bits[factor]:.3f}" for factor in sorted(bits))
        say(f"learning rate of {name}, bits per byte: {results}")
    return tuned


def _describe(result: Mapping[str, Any], chosen: Mapping[str, Any]) -> str:
    configuration = f"{result['dtype']}, {'compiled' if result['compiled'] else 'eager'}"
    if "failed" in result:
        return f"{configuration}: {result['failed']}"
    first, lost = result["first_step_seconds"], result["lost_seconds"]
    speed = f"{result['tokens_per_second']:,.0f} tokens/s, first step {first:.0f} s, then {lost:.0f} s lost"
    chosen_for = " and ".join(setting for setting in ("path", "step") if chosen[setting].items() <= result.items())
    return f"{configuration}: {speed}{f'; chosen for {chosen_for}' if chosen_for else ''}"


def tuned_spec(spec: Any, tuned: Mapping[str, Any]) -> Any:
    if "way" in tuned:
        spec = replace(spec, **tuned["way"][spec.setting])
    return _scale_rates(spec, tuned["rate"]["factor"]) if "rate" in tuned else spec


def _scale_rates(spec: Any, factor: float) -> Any:
    return replace(spec, learning_rate=factor * spec.learning_rate, rate_factor=factor)


def pilot_rates(trial: Mapping[str, Any]) -> dict[str, float]:
    """Tokens per second in the second half of a pilot's steps, seconds of the first step, and seconds that later steps
    took in excess of that rate."""
    seconds, tokens = trial["step_seconds"], trial["step_units"]
    half = len(seconds) // 2
    rate = sum(tokens[half:]) / sum(seconds[half:])
    lost = max(0.0, sum(seconds[1:]) - sum(tokens[1:]) / rate)
    return {"tokens_per_second": rate, "first_step_seconds": seconds[0], "lost_seconds": lost}


def fastest_config(
    run: Callable[..., Mapping[str, Any]], dtypes: Sequence[str], *, may_compile: bool, seconds: float
) -> dict[str, Any]:
    """All tried configurations with their rates, and the one chosen for each setting.

    run: runs a pilot with `dtype` and `compiled`. seconds: of a path's training, after its first step. A configuration
    whose pilot fails is recorded with its error and not chosen. Raises UserError if none works.
    """
    if len(dtypes) == 1 and not may_compile:
        only = {"dtype": dtypes[0], "compiled": False}
        return {"tried": [], "path": only, "step": only}
    tried: list[dict[str, Any]] = []
    for compiled in (False, True) if may_compile else (False,):
        for dtype in dtypes:
            config: dict[str, Any] = {"dtype": dtype, "compiled": compiled}
            try:
                tried.append({**config, **pilot_rates(run(**config))})
            except UserError as error:
                tried.append({**config, "failed": str(error)})
    valid = [config for config in tried if "failed" not in config]
    if not valid:
        raise UserError("this baseline fails in every configuration", got=tried[0]["failed"])

    def tokens(config: Mapping[str, Any]) -> float:
        return float(config["tokens_per_second"] * max(0.0, seconds - config["lost_seconds"]))

    best = {"path": max(valid, key=tokens), "step": max(valid, key=lambda config: float(config["tokens_per_second"]))}
    chosen = {setting: {name: config[name] for name in ("dtype", "compiled")} for setting, config in best.items()}
    return {"tried": tried, **chosen}


def best_rate(bits: Callable[[float], float], first: float = 1.0) -> tuple[float, dict[float, float]]:
    """The learning rate (or factor) with the fewest bits per byte, and the bits of all that were tried.

    Doubles or halves the rate, whichever is better, until the best lies between two worse ones. NaN and Inf are worst.
    """
    tried: dict[float, float] = {}

    def evaluate(rate: float) -> float:
        if rate not in tried:
            found = bits(rate)
            tried[rate] = found if math.isfinite(found) else math.inf
        return tried[rate]

    best, nearest = math.nan, first
    while nearest != best and len(tried) < MAX_RATES:
        best = nearest
        nearest = min((best, 2 * best, best / 2), key=evaluate)
    return nearest, tried
