"""What trials of pretraining came to: figures of each, medians, goals, and tables for a terminal and for a page."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from rich.table import Table

from penjing.bench.train import MEBIBYTE, OURS, spread

KINDS = ("path", "step")
Curve = Sequence[Mapping[str, float]]
OURS_ADAMW = "penjing-adamw"  # ours with the peers' optimizer, for what the step alone does
MINE = (OURS, OURS_ADAMW)
# What ours is to reach beside each: so many times its useful tokens a second and at most this share of its memory, with
# the same optimizer; and with its own recipe, at most this share of the time it takes to its last bits per byte.
GOALS: dict[str, dict[str, float]] = {
    "trainer": {"tokens_per_second": 3.0, "peak_bytes": 0.6, "time_to_equal": 0.25},
    "trainer-packed": {"tokens_per_second": 1.2, "peak_bytes": 0.6, "time_to_equal": 0.25},
    "minimind-style": {"tokens_per_second": 4.0, "peak_bytes": 0.6, "time_to_equal": 0.25},
}
CLAIM_TRIALS = 3  # of each, for what they show to be claimed
RATES = (
    "learning rates: Muon's were searched for at the 26M shape (docs/log.md, one seed), AdamW's was not; "
    "--search-rates searches both in the same way"
)
GOALS_SECONDS = 600.0  # of training that these goals are for
LIMIT_SHARE = 0.7  # and on a CPU this share of the tokens that matmuls alone, at their own rate, let through


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
        found[name]["settings"] = each[0].get("settings", {})
    return found


def equal(trials: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Of one round: bits per byte of each at the wall time that all reached, and for each peer the time that ours took
    to the peer's last bits per byte, over the peer's own; None where that is beyond the curve. Wall time has the
    start-up in it, and between two looks a straight line is drawn."""
    curves = dict(zip(names, (one["curve"] for one in trials), strict=True))
    common = min(curve[-1]["seconds"] for curve in curves.values())
    at_common = {name: _at(curve, "seconds", common, "bits_per_byte") for name, curve in curves.items()}
    ratios = {name: time_to_equal(curves[names[0]], curves[name]) for name in names[1:]}
    return {"seconds": common, "bits_per_byte": at_common, "time_to_equal": ratios}


def time_to_equal(mine: Curve, theirs: Curve) -> float | None:
    """Seconds until `mine` is at the last bits per byte of `theirs`, over all of theirs; None: it never is."""
    reached = _first_below(mine, theirs[-1]["bits_per_byte"])
    return None if reached is None else reached / theirs[-1]["seconds"]


def _at(curve: Curve, along: str, place: float, wanted: str) -> float | None:
    for one, other in pairwise(curve):
        if one[along] <= place <= other[along]:
            share = (place - one[along]) / ((other[along] - one[along]) or 1.0)
            return one[wanted] + share * (other[wanted] - one[wanted])
    return curve[-1][wanted] if curve[-1][along] == place else None


def _first_below(curve: Curve, bits: float) -> float | None:
    """Seconds until the curve first was at `bits`."""
    for one, other in pairwise(curve):
        if other["bits_per_byte"] <= bits:
            share = (one["bits_per_byte"] - bits) / (one["bits_per_byte"] - other["bits_per_byte"])
            return one["seconds"] + share * (other["seconds"] - one["seconds"])
    return None


def _limit(result: Mapping[str, Any]) -> float:
    """Useful tokens a second, were there nothing to do but matmuls; 0 where that was not measured."""
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
    ratios = ["" if name in MINE else f"{speed[OURS_ADAMW] / one:.2f} x" for name, one in speed.items()]
    rows.insert(1, [f"{OURS_ADAMW} is faster by", *ratios])  # with the optimizer that the others have
    if limit := _limit(result):
        shares = [f"{one / limit:.2f}" for one in speed.values()]
        rows.insert(2, [f"fraction of the GEMM roofline, {limit:,.0f} tokens/s", *shares])
    if kind == "path":
        rounds = result[kind]["equal"]
        label = f"bits per byte after {statistics.median(each['seconds'] for each in rounds):.0f} s in all"
        rows.append([label, *[_middle([each["bits_per_byte"][name] for each in rounds], "{:.3f}") for name in names]])
        for mine in reversed(MINE):
            shares = [_middle(_times_to_equal(result, mine, name), "{:.2f} x") for name in names if name not in MINE]
            rows.append([f"{_headed(medians, mine)} gets to its last in", "", "", *shares])
    return ["", *[_headed(medians, name) for name in names]], rows


def _headed(medians: Mapping[str, Any], name: str) -> str:
    """With the optimizer that it learns with, where the record says so."""
    options = (said for said in medians[name]["options"] if said.startswith("optim"))
    optimizer = medians[name].get("settings", {}).get("optimizer") or next(options, "").rpartition("=")[2]
    known = {"muon": "Muon", "adamw": "AdamW", "adamw_torch_fused": "AdamW"}
    return f"{name} ({known.get(optimizer, optimizer)})" if optimizer else name


def _times_to_equal(result: Mapping[str, Any], mine: str, peer: str) -> list[float | None]:
    """Of each round."""
    trials, rounds = result["path"]["trials"], len(result["path"]["equal"])
    curves = [[one["curve"] for one in trials[name][:rounds]] for name in (mine, peer)]
    return [time_to_equal(*pair) for pair in zip(*curves, strict=True)]


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
    """Which goals were reached, and what everyone was told. Speed and memory are compared with the same optimizer."""
    medians, lines = result["path"]["medians"], _notes(result)
    if (limit := _limit(result)) and result["machine"]["device"] == "cpu":
        share = medians[OURS_ADAMW]["tokens_per_second"]["median"] / limit
        words = f"at least {LIMIT_SHARE:g} of the GEMM roofline, {limit:,.0f} tokens per second"
        lines.append(f"this machine: {words}: {share:.2f}, {'reached' if share >= LIMIT_SHARE else 'missed'}")
    for peer, goals in result["goals"].items():
        if peer not in medians:
            continue
        for figure, wanted in goals.items():
            mine = OURS if figure == "time_to_equal" else OURS_ADAMW
            ratios = _times_to_equal(result, mine, peer) if mine == OURS else _ratios(result, peer, figure)
            known = [one for one in ratios if one is not None]
            got = statistics.median(known) if len(known) == len(ratios) else None
            at_least = figure == "tokens_per_second"
            reached = got is not None and (got >= wanted if at_least else got <= wanted)
            spread_out = f" ({min(known):.2f}-{max(known):.2f})" if got is not None and len(known) > 1 else ""
            words = f"{'at least' if at_least else 'at most'} {wanted:g} x its {figure.replace('_', ' ')}"
            lines.append(
                f"{_headed(medians, mine)} beside {_headed(medians, peer)}: {words}: "
                f"{'-' if got is None else f'{got:.2f} x'}{spread_out}, {'reached' if reached else 'missed'}"
            )
    for name, each in medians.items():
        lines.append(f"{name}: {', '.join(each['options'])}")
        if (step := result["step"]["medians"][name]["options"]) != each["options"]:
            lines.append(f"{name}, one step: {', '.join(step)}")
    return lines


def _ratios(result: Mapping[str, Any], peer: str, figure: str) -> list[float | None]:
    """Ours with the same optimizer over the peer, of each round on its own path."""
    trials, rounds, warmup = result["path"]["trials"], len(result["path"]["equal"]), result["asked"]["warmup"]
    mine, theirs = ([figures(one, warmup)[figure] for one in trials[it][:rounds]] for it in (OURS_ADAMW, peer))
    return [one / other for one, other in zip(mine, theirs, strict=True)]


def faster_trainer(medians: Mapping[str, Any]) -> str | None:
    """Of transformers' Trainers, the one with the more useful tokens a second."""
    trainers = [name for name in medians if name.startswith("trainer")]
    if not trainers:
        return None
    return max(trainers, key=lambda name: float(medians[name]["tokens_per_second"]["median"]))


def _notes(result: Mapping[str, Any]) -> list[str]:
    """What to know before the goals are read."""
    medians, rounds, lines = result["path"]["medians"], len(result["path"]["equal"]), list[str]()
    if result["asked"]["seconds"] < GOALS_SECONDS:
        lines.append(f"the goals are for {GOALS_SECONDS:g} seconds of each and a model of 26M; this was shorter")
    if rounds < CLAIM_TRIALS:
        lines.append(f"{rounds} trial{'s' if rounds > 1 else ''} of each: a claim needs {CLAIM_TRIALS}")
    if (faster := faster_trainer(medians)) is not None:
        ratio = statistics.median(one for one in _ratios(result, faster, "tokens_per_second") if one is not None)
        words = f"{_headed(medians, OURS_ADAMW)} makes {ratio:.2f} x its tokens per second"
        lines.append(f"the faster Trainer here is {faster}: {words}")
    searched = result["asked"].get("search")
    lines.append("learning rates: searched in the same way for each" if searched else RATES)
    for name, trials in result["path"]["trials"].items():
        if len({str(one.get("settings")) for one in trials}) > 1:
            lines.append(f"{name}: its trials had different settings, so their medians say little")
    return lines
