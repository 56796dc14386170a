"""Curves of runs for the page: smoothed and thinned out here, so that long runs are drawn at once."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import Query

from penjing.report.metrics import CHARTS, HELD_OUT, SMALL_CHARTS, TOKENS, Chart, Floats, default_charts, thinned
from penjing.ui.live_runs import LiveRun

POINTS = 12_000  # of one chart, over all of its lines
MOST, LEAST = 1_000, 100  # points of one line


@dataclass(frozen=True, kw_only=True)
class View:
    """How curves are shown, as a request says. smooth: the weight of what came before. low, high: of the x axis."""

    x: Literal["step", "tokens", "time"] = "step"
    smooth: Annotated[float, Query(ge=0, lt=1)] = 0.0
    low: Annotated[float | None, Query(allow_inf_nan=False)] = None
    high: Annotated[float | None, Query(allow_inf_nan=False)] = None


def charts(runs: Sequence[LiveRun], view: View, *, small: bool) -> list[dict[str, Any]]:
    """The charts that these runs have points for. small: those that explain the others, such as the learning rate."""
    names = {name for run in runs for name in run.metrics}
    table = [*SMALL_CHARTS, *default_charts(names)] if small else CHARTS
    drawn = []
    for chart in table:
        metrics = [chart.metric, HELD_OUT + chart.metric, *(extra for extra, _ in chart.extras if len(runs) == 1)]
        lines = [(run, metric) for run in runs for metric in metrics if metric in run.metrics]
        if lines:
            most = min(MOST, max(LEAST, POINTS // len(lines)))
            series = [_series(run, metric, chart, view, most) for run, metric in lines]
            drawn.append({**asdict(chart), "series": [line for line in series if line["x"]]})
    return drawn


def _series(run: LiveRun, metric: str, chart: Chart, view: View, most: int) -> dict[str, Any]:
    steps, y = run.column(metric)
    held_out = metric.startswith(HELD_OUT)
    names = {chart.metric: chart.label, HELD_OUT + chart.metric: "held out", **dict(chart.extras)}
    x = x_axis(run, steps, view.x)
    if view.smooth and not held_out:
        y = smoothed(y, view.smooth)
    inside = np.ones(len(x), bool)
    if view.low is not None:
        inside &= x >= view.low
    if view.high is not None:
        inside &= x <= view.high
    x, y = x[inside], y[inside]
    kept = thinned(y, most)
    return {
        "run": run.name,
        "metric": metric,
        "label": names[metric],
        "held_out": held_out,
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
