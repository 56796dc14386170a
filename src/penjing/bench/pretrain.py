"""Pretraining beside other trainers: who runs when, and what came of it as data (bench/pretrain_table.py shows it)."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from penjing.base.errors import UserError
from penjing.bench.peers import NEEDS, PRETRAIN
from penjing.bench.pretrain_table import (
    GOALS,
    GOALS_SECONDS,
    KINDS,
    OURS_ADAMW,
    equal,
    figures,
    summary,
    table,
    verdicts,
)
from penjing.bench.race import RaceSpec
from penjing.bench.train import MEBIBYTE, OURS, trial, versions
from penjing.bench.tune import PILOT_SECONDS, PILOT_SHARE, PILOT_STEPS, best_rate, fastest_way

Trials = dict[str, dict[str, list[dict[str, Any]]]]  # by kind and name


@dataclass(frozen=True, kw_only=True)
class Asked:
    """How the comparison is made."""

    peers: tuple[str, ...] = tuple(PRETRAIN)  # those that are not installed are left out, and said
    trials: int = 3  # processes of each, in turn
    seconds: float = GOALS_SECONDS  # path: training after the first step
    looks: int = 10  # path: at held-out text
    steps: int = 12  # step: of each trial, warm-up included
    warmup: int = 2  # steps that no rate counts
    threads: int = 0  # of the CPU; 0 = physical cores
    dtypes: tuple[str, ...] = ("float32",)  # that a peer's pilots try
    may_compile: bool = True  # whether they try torch.compile
    search: bool = False  # whether everyone's learning rate is searched for, in the same way

    def __post_init__(self) -> None:
        for peer in self.peers:
            if peer not in PRETRAIN:
                raise UserError("no such peer", where="--peer", got=peer, wanted=", ".join(["none", *PRETRAIN]))
        if self.trials < 1 or self.threads < 0 or self.seconds <= 0 or self.looks < 1:
            raise UserError("too small", where="--trials, --threads, --seconds", got=self.trials)
        if not 0 <= self.warmup < self.steps:
            raise UserError("no step is left to count", where="--steps", got=self.steps, wanted=f"over {self.warmup}")


def compare(
    asked: Asked,
    spec: RaceSpec,
    folder: Path,
    console: Console,
    run_trial: Callable[..., dict[str, Any]] = trial,
    save: Callable[[dict[str, Any]], None] = lambda result: None,
    about: Mapping[str, Any] | None = None,
    earlier: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """All trials of both kinds, in turn; prints the tables and returns them as data.

    save: called before the first trial and after each with what there is, for hours of them not to be lost by the last.
    about: what else the result is to say. earlier: such a result whose trials count; raises UserError if it is not of
    the same comparison.
    """
    modules, left_out = _contenders(asked, console)
    result: dict[str, Any] = {
        **(about or {}),
        "method": "pretrain",
        "asked": asdict(asked),
        "spec": {key: value for key, value in asdict(spec).items() if key not in _PER_TRIAL},
        "versions": versions(),
        "left_out": left_out,
        "goals": GOALS,
    }
    trials: Trials = {kind: {name: [] for name in modules} for kind in KINDS}
    if earlier is not None:
        _take_over(trials, result, earlier)
    wanted = [
        (number, kind, name)
        for number in range(asked.trials)
        for kind in KINDS
        for name in (list(modules) if number % 2 == 0 else list(modules)[::-1])
        if number >= len(trials[kind][name])
    ]
    if earlier is not None:
        there = sum(len(done) for each in trials.values() for done in each.values())
        console.print(f"  {there} trials are there, {len(wanted)} are left", highlight=False)
    save({**_summed(result, trials), "finished": False})  # a place that cannot be written to is found out now
    found = (earlier or {}).get("tuned", {})
    tuned = {name: found[name] for name in modules if any(trials[kind][name] for kind in KINDS)}
    result["tuned"] = tuned
    for name, module in modules.items():
        if name not in tuned and any(name == each for _, _, each in wanted):
            tuned[name] = _tune(name, module, asked, spec, folder, console, run_trial)
    for number, kind, name in wanted:
        given = _tuned_spec(replace(spec, kind=kind), tuned[name])
        one = run_trial(modules[name], given, folder / f"{kind}-{name}-{number}")
        trials[kind][name].append(one)
        row = figures(one, asked.warmup)
        console.print(
            f"  {kind} {number + 1} {name}: {row['tokens_per_second']:,.0f} tokens/s, "
            f"{row['peak_bytes'] / MEBIBYTE:.0f} MiB, {one['process_seconds']:.0f} s from start to end",
            highlight=False,
        )
        save({**_summed(result, trials), "finished": False})
    result = _summed(result, trials)
    for kind in KINDS:
        console.print(table(result, kind))
    for line in verdicts(result):
        console.print(f"  {line}", highlight=False)
    return {**result, "finished": True}


def _contenders(asked: Asked, console: Console) -> tuple[dict[str, str], dict[str, str]]:
    """Module and its words by name, and why others are left out, which is printed."""
    left_out = {}
    modules = {OURS: "penjing.bench.ours_pretrain", OURS_ADAMW: "penjing.bench.ours_pretrain adamw"}
    for peer in asked.peers:
        missing = [package for package in NEEDS[peer].split() if importlib.util.find_spec(package) is None]
        if not missing:
            modules[peer] = PRETRAIN[peer]
            continue
        left_out[peer] = f"needs {' and '.join(missing)}, which is not installed"
        console.print(f"  {peer} {left_out[peer]}: left out", highlight=False)
    return modules, left_out


def _tune(
    name: str,
    module: str,
    asked: Asked,
    spec: RaceSpec,
    folder: Path,
    console: Console,
    run_trial: Callable[..., dict[str, Any]],
) -> dict[str, Any]:
    """A peer's fastest way, and with `asked.search` the multiple of its learning rates that learns best."""
    tuned: dict[str, Any] = {}
    seconds = PILOT_SHARE * asked.seconds
    if name not in (OURS, OURS_ADAMW):
        pilot = replace(spec, kind="pilot", seconds=min(PILOT_SECONDS, seconds), steps=PILOT_STEPS)

        def run_pilot(dtype: str, compiled: bool) -> dict[str, Any]:
            place = folder / f"pilot-{name}-{dtype}-{'compiled' if compiled else 'eager'}"
            return run_trial(module, replace(pilot, dtype=dtype, compiled=compiled), place)

        way = fastest_way(run_pilot, asked.dtypes, may_compile=asked.may_compile, seconds=asked.seconds)
        tuned["way"] = way
        for one in way["tried"]:
            how = f"{one['dtype']}, {'compiled' if one['compiled'] else 'eager'}"
            first, lost = one.get("first_step_seconds", 0), one.get("lost_seconds", 0)
            paced = f"{one.get('tokens_per_second', 0):,.0f} tokens/s, first step {first:.0f} s, then {lost:.0f} s lost"
            taken = " and ".join(kind for kind in KINDS if way[kind].items() <= one.items())
            console.print(
                f"  pilot {name}, {how}: {one.get('failed', paced)}{f'; taken for {taken}' if taken else ''}",
                highlight=False,
            )
    if asked.search:
        path = _tuned_spec(replace(spec, kind="path", seconds=seconds, looks=1), tuned)

        def run_rate(factor: float) -> dict[str, Any]:
            return run_trial(module, _times(path, factor), folder / f"rate-{name}-{factor:g}")

        tuned["rate"] = best_rate(run_rate)
        said = ", ".join(f"{each['factor']:g} x {each['bits_per_byte']:.3f}" for each in tuned["rate"]["tried"])
        console.print(f"  learning rate of {name}, bits per byte: {said}", highlight=False)
    return tuned


def _tuned_spec(spec: RaceSpec, tuned: Mapping[str, Any]) -> RaceSpec:
    if "way" in tuned:
        spec = replace(spec, **tuned["way"][spec.kind])
    return _times(spec, tuned["rate"]["factor"]) if "rate" in tuned else spec


def _times(spec: RaceSpec, factor: float) -> RaceSpec:
    return replace(spec, learning_rate=factor * spec.learning_rate, rate_factor=factor)


def _take_over(trials: Trials, result: Mapping[str, Any], earlier: Mapping[str, Any]) -> None:
    """The trials of `earlier`; raises UserError naming what it was that is not so in `result`.

    Peers may be added; those that have trials are not dropped, since the file would lose them.
    """
    now = json.loads(json.dumps(result))  # as what was read is
    for key, value in now.items():
        then = earlier.get(key)
        pairs = [(key, then, value)]
        if isinstance(value, dict) and isinstance(then, dict):
            pairs = [(f"{key}.{name}", then.get(name), one) for name, one in value.items()]
            pairs += [(f"{key}.{name}", one, None) for name, one in then.items() if name not in value]
        for where, before, here in pairs:
            is_new = before is None and key == "versions"  # a package that came since, for a peer to be added
            if before != here and not is_new and where not in _MAY_DIFFER and key not in _MAY_DIFFER:
                said = f"the trials there are of another comparison: {where}"
                raise UserError(said, where="--resume", got=here, wanted=before, next_step="Name another --out.")
    for name in _MEASURED:
        if name in result.get("machine", {}):
            result["machine"][name] = max(result["machine"][name], earlier["machine"].get(name, 0.0))
    for kind, each in trials.items():
        there = earlier.get(kind, {}).get("trials", {})
        if gone := [name for name, done in there.items() if done and name not in each]:
            named = ",".join(sorted({*gone, *each} - {OURS, OURS_ADAMW}))
            raise UserError(f"would lose the trials of {', '.join(gone)}", where="--resume", wanted=f"--peer {named}")
        for name, done in each.items():
            done += there.get(name, [])


def _summed(result: Mapping[str, Any], trials: Trials) -> dict[str, Any]:
    """With the trials so far, and medians over as many as everyone has."""
    found = dict(result)
    for kind, each in trials.items():
        if any(each.values()):
            found[kind] = {"trials": each}
        if rounds := min(map(len, each.values())):
            whole = {name: done[:rounds] for name, done in each.items()}
            found[kind]["medians"] = summary(whole, result["asked"]["warmup"])
            if kind == "path":
                found[kind]["equal"] = [equal(one, list(whole)) for one in zip(*whole.values(), strict=True)]
    return found


# What is measured anew each time that trials are added: the highest is kept, for shares not to be of a slow moment.
_MEASURED = ("product_flops_per_second", "limit_tokens_per_second")
# What may be another then: how many are wanted, of whom, who is left out, and what is measured.
_MAY_DIFFER = ("asked.trials", "asked.peers", "left_out", *(f"machine.{name}" for name in _MEASURED))
# Of a spec, what each trial has of its own, and where its files lie.
_PER_TRIAL = ("text", "tokenizer", "run", "held_out", "rows", "out", "kind", "compiled", "rate_factor")
