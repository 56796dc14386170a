"""Pretraining beside other trainers: who runs when, what came of it as data, and as a table."""

from __future__ import annotations

import importlib.util
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from penjing.base.errors import UserError
from penjing.bench.peers import NEEDS, PRETRAIN
from penjing.bench.race import RaceSpec
from penjing.bench.train import MEBIBYTE, OURS, spread, trial, versions

KINDS = ("path", "step")
Trials = dict[str, dict[str, list[dict[str, Any]]]]  # by kind and name
OURS_ADAMW = "penjing-adamw"  # ours with the peers' optimizer, for what the step alone does
# What ours is to reach beside each: so many times its useful tokens a second and at most this share of its memory, with
# the same optimizer; and with its own recipe, at most this share of the time it takes to its last bits per byte.
GOALS: dict[str, dict[str, float]] = {
    "trainer": {"tokens_per_second": 3.0, "peak_bytes": 0.6, "time_to_equal": 0.25},
    "trainer-packed": {"tokens_per_second": 1.2, "peak_bytes": 0.6, "time_to_equal": 0.25},
    "minimind-style": {"tokens_per_second": 4.0, "peak_bytes": 0.6, "time_to_equal": 0.25},
}
GOALS_SECONDS = 600.0  # of training that these goals are for
LIMIT_SHARE = 0.7  # and on a CPU this share of the tokens that matrix products alone, at their own rate, let through


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
    left_out = {}
    modules = {OURS: "penjing.bench.ours_pretrain", OURS_ADAMW: "penjing.bench.ours_pretrain adamw"}
    for peer in asked.peers:
        missing = [package for package in NEEDS[peer].split() if importlib.util.find_spec(package) is None]
        if not missing:
            modules[peer] = PRETRAIN[peer]
            continue
        left_out[peer] = f"needs {' and '.join(missing)}, which is not installed"
        console.print(f"  {peer} {left_out[peer]}: left out", highlight=False)
    result: dict[str, Any] = {
        **(about or {}),
        "method": "pretrain",
        "asked": asdict(asked),
        "spec": {key: value for key, value in asdict(spec).items() if key not in _PATHS},
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
    for number, kind, name in wanted:
        one = run_trial(modules[name], replace(spec, kind=kind), folder / f"{kind}-{name}-{number}")
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
_PATHS = ("text", "tokenizer", "run", "held_out", "rows", "out", "kind")


def figures(one: Mapping[str, Any], warmup: int) -> dict[str, float]:
    """Of one trial. tokens_per_second: of the steps after warm-up, padding never counted."""
    seconds, cpu, tokens = (one[key][warmup:] for key in ("step_seconds", "step_cpu_seconds", "step_tokens"))
    row = {
        "tokens_per_second": sum(tokens) / sum(seconds),
        "tokens_per_cpu_second": sum(tokens) / sum(cpu),
        "startup_seconds": one["startup_seconds"],
        # Beyond a usual step: compiling, and what else only the first one does.
        "first_step_seconds": max(0.0, one["first_step_seconds"] - statistics.median(seconds)),
        "peak_bytes": float(one["peak_bytes"]),
        "peak_bytes_beyond_imports": float(one["peak_bytes"] - one["peak_bytes_after_imports"]),
    }
    if one["curve"]:
        last = one["curve"][-1]
        row |= {"trained_tokens": last["tokens"], "last_bits_per_byte": last["bits_per_byte"]}
    return row


def summary(trials: Mapping[str, Sequence[Mapping[str, Any]]], warmup: int) -> dict[str, Any]:
    """Median and range of each figure over each one's trials, and what it was told."""
    found: dict[str, Any] = {}
    for name, each in trials.items():
        rows = [figures(one, warmup) for one in each]
        found[name] = {figure: spread([row[figure] for row in rows]) for figure in rows[0]}
        found[name]["options"] = each[0]["options"]
    return found


def equal(trials: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Of one round: bits per byte of each at the wall time that all reached, and for each peer the time that ours took
    to the peer's last bits per byte, over the peer's own; None where that is beyond the curve. Wall time has the
    start-up in it, and between two looks a straight line is drawn."""
    curves = dict(zip(names, (one["curve"] for one in trials), strict=True))
    common = min(curve[-1]["seconds"] for curve in curves.values())
    at_common = {name: _at(curve, "seconds", common, "bits_per_byte") for name, curve in curves.items()}
    ratios = {}
    for name in names[1:]:
        wanted, theirs = curves[name][-1]["bits_per_byte"], curves[name][-1]["seconds"]
        mine = _first_below(curves[names[0]], wanted)
        ratios[name] = None if mine is None else mine / theirs
    return {"seconds": common, "bits_per_byte": at_common, "time_to_equal": ratios}


def _at(curve: Sequence[Mapping[str, float]], along: str, place: float, wanted: str) -> float | None:
    for one, other in pairwise(curve):
        if one[along] <= place <= other[along]:
            share = (place - one[along]) / ((other[along] - one[along]) or 1.0)
            return one[wanted] + share * (other[wanted] - one[wanted])
    return curve[-1][wanted] if curve[-1][along] == place else None


def _first_below(curve: Sequence[Mapping[str, float]], bits: float) -> float | None:
    """Seconds until the curve first was at `bits`."""
    for one, other in pairwise(curve):
        if other["bits_per_byte"] <= bits:
            share = (one["bits_per_byte"] - bits) / (one["bits_per_byte"] - other["bits_per_byte"])
            return one["seconds"] + share * (other["seconds"] - one["seconds"])
    return None


def _limit(result: Mapping[str, Any]) -> float:
    """Useful tokens a second, were there nothing to do but matrix products; 0 where that was not measured."""
    return float(result.get("machine", {}).get("limit_tokens_per_second", 0.0))


SHOWN: dict[str, tuple[str, Callable[[float], str]]] = {
    "tokens_per_second": ("useful tokens/s", lambda value: f"{value:,.0f}"),
    "peak_bytes": ("peak memory, MiB", lambda value: f"{value / MEBIBYTE:,.0f}"),
    "startup_seconds": ("start-up, s", lambda value: f"{value:.1f}"),
    "first_step_seconds": ("compiling and first step, s", lambda value: f"{value:.1f}"),
    "trained_tokens": ("tokens learned from", lambda value: f"{value:,.0f}"),
    "last_bits_per_byte": ("bits per byte at the end", lambda value: f"{value:.3f}"),
}


def rows_of(result: Mapping[str, Any], kind: str) -> tuple[list[str], list[list[str]]]:
    """The table of one kind as words: a heading for each contender, then a row for each figure."""
    medians = result[kind]["medians"]
    names, rows = list(medians), []
    for figure, (label, show) in SHOWN.items():
        each = [medians[name].get(figure) for name in names]
        if None not in each:
            rows.append([label, *[_with_range(one, show) for one in each]])
    speed = {name: medians[name]["tokens_per_second"]["median"] for name in names}
    for place, ours in enumerate((OURS, OURS_ADAMW)):
        ratios = ["" if name in (OURS, OURS_ADAMW) else f"{speed[ours] / one:.2f} x" for name, one in speed.items()]
        rows.insert(1 + place, [f"{ours} is faster by", *ratios])
    if limit := _limit(result):
        shares = [f"{one / limit:.2f}" for one in speed.values()]
        rows.insert(3, [f"share of what products allow, {limit:,.0f}", *shares])
    if kind == "path":
        rounds = result[kind]["equal"]
        label = f"bits per byte after {statistics.median(each['seconds'] for each in rounds):.0f} s in all"
        rows.append([label, *[_middle([each["bits_per_byte"][name] for each in rounds], "{:.3f}") for name in names]])
        ratios = ["", *[_middle([each["time_to_equal"][name] for each in rounds], "{:.2f} x") for name in names[1:]]]
        rows.append([f"{OURS} gets to its last in", *ratios])
    return ["", *names], rows


def _with_range(one: Mapping[str, float], show: Callable[[float], str]) -> str:
    """The median; behind it the range, if there was more than one trial."""
    if one["low"] == one["high"]:
        return show(one["median"])
    return f"{show(one['median'])} ({show(one['low'])}-{show(one['high'])})"


def _middle(values: Sequence[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    return form.format(statistics.median(known)) if len(known) == len(values) else "not reached"


def table(result: Mapping[str, Any], kind: str) -> Table:
    titles = {"path": "own path from text to loss", "step": "one step on identical rows"}
    made = Table(box=None, pad_edge=False, title=f"{titles[kind]}, median (range over trials)", title_justify="left")
    headings, rows = rows_of(result, kind)
    for number, heading in enumerate(headings):
        made.add_column(heading, justify="right" if number else "left")
    for row in rows:
        made.add_row(*row)
    return made


def markdown(result: Mapping[str, Any], kind: str) -> str:
    """The same table for a page."""
    headings, rows = rows_of(result, kind)
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def verdicts(result: Mapping[str, Any]) -> list[str]:
    """Which goals were reached, speed and memory with the same optimizer, and what each was told."""
    medians, rounds, lines = result["path"]["medians"], result["path"]["equal"], list[str]()
    if result["asked"]["seconds"] < GOALS_SECONDS:
        lines.append(f"the goals are for {GOALS_SECONDS:g} seconds of each and a model of 26M; this was shorter")
    if (limit := _limit(result)) and result["machine"]["device"] == "cpu":
        share = medians[OURS_ADAMW]["tokens_per_second"]["median"] / limit
        words = f"at least {LIMIT_SHARE:g} x the {limit:,.0f} tokens per second that matrix products allow"
        lines.append(f"this machine: {words}: {share:.2f} x, {'reached' if share >= LIMIT_SHARE else 'missed'}")
    for peer, goals in result["goals"].items():
        if peer not in medians:
            continue
        for figure, wanted in goals.items():
            if figure == "time_to_equal":
                known = [each["time_to_equal"][peer] for each in rounds]
                got = None if None in known else statistics.median(known)
            else:
                got = medians[OURS_ADAMW][figure]["median"] / medians[peer][figure]["median"]
            at_least = figure == "tokens_per_second"
            reached = got is not None and (got >= wanted if at_least else got <= wanted)
            words = f"{'at least' if at_least else 'at most'} {wanted:g} x its {figure.replace('_', ' ')}"
            lines.append(
                f"{peer}: {words}: {'-' if got is None else f'{got:.2f} x'}, {'reached' if reached else 'missed'}"
            )
    return lines + [f"{name}: {', '.join(each['options'])}" for name, each in medians.items()]
