"""Curves of runs for the page: smoothed and thinned out here, so that long runs are drawn at once."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import Query

from penjing.report.metrics import HELD_OUT, SMALL_CHARTS, TOKENS, Floats, default_charts, main_charts, thinned
from penjing.ui.live_runs import LiveRun

POINTS = 12_000  # of one chart, over all of its lines
MOST, LEAST = 1_000, 100  # points of one line


@dataclass(frozen=True, kw_only=True)
class View:
    """How curves are shown, as a request says. smooth: the weight of what came before. low, high: of the x axis."""

    x: Literal["step", "tokens", "time"] = "step"
    smooth: Annotated[float, Query(ge=0, lt=1)] = 0.0
    low: Annotated[float, Query(allow_inf_nan=False)] = -math.inf
    high: Annotated[float, Query(allow_inf_nan=False)] = math.inf


def charts(runs: Sequence[LiveRun], view: View, *, small: bool) -> list[dict[str, Any]]:
    """The charts that these runs have points for. small: those that explain the others, such as the learning rate."""
    names = {name for run in runs for name in run.metrics}
    table = [*SMALL_CHARTS, *default_charts(names)] if small else main_charts(names)
    drawn = []
    for chart in table:
        own = [(chart.metric, chart.label), *(chart.extras if len(runs) == 1 else ())]
        lines = [
            (run, prefix + metric, {"label": label, "place": place, "held_out": bool(prefix)})
            for run in runs
            for place, (metric, label) in enumerate(own)
            for prefix in ("", HELD_OUT)
            if prefix + metric in run.metrics
        ]
        if lines:
            most = min(MOST, max(LEAST, POINTS // len(lines)))
            series = [{**about, **_series(run, metric, view, most)} for run, metric, about in lines]
            drawn.append({**asdict(chart), "series": [line for line in series if line["x"]]})
    return drawn


def _series(run: LiveRun, metric: str, view: View, most: int) -> dict[str, Any]:
    steps, y = run.column(metric)
    x = x_axis(run, steps, view.x)
    if view.smooth and not metric.startswith(HELD_OUT):
        y = smoothed(y, view.smooth)
    inside = (view.low <= x) & (x <= view.high)
    x, y = x[inside], y[inside]
    kept = thinned(y, most)
    return {
        "run": run.name,
        "metric": metric,
        "x": [round(value, 3) for value in x[kept].tolist()],
        "y": [float(f"{value:.6g}") for value in y[kept].tolist()],
    }


def x_axis(run: LiveRun, steps: Floats, kind: str) -> Floats:
    """Steps as tokens or seconds of training; between two lines of the log on a straight line."""
    if kind == "step":
        return steps
    known_steps, known = run.column(TOKENS if kind == "tokens" else "seconds")
    return np.interp(steps, known_steps, known) if len(known) else steps


def smoothed(y: Floats, weight: float) -> Floats:
    """An exponential moving average that starts without a bias: each mean is divided by the sum of its weights."""
    means, mean, total = [], 0.0, 0.0
    for value in y.tolist():
        mean, total = weight * mean + (1 - weight) * value, weight * total + (1 - weight)
        means.append(mean / total)
    return np.array(means)
