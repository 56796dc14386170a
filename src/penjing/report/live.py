"""Runs as they train, in the terminal: what `penjing watch` shows of each."""

import time
from pathlib import Path
from textwrap import wrap

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from penjing.base import formatting as units
from penjing.base.untrusted import text
from penjing.report.metrics import HELD_OUT, first_chart
from penjing.report.text_chart import text_chart
from penjing.track.console import describe
from penjing.track.run_record import GrowingFigures, RunRecord

COLUMN_WIDTH = 60  # of a run, at least, beside another one
MOST_SAMPLES, MOST_INCIDENTS = 3, 3


class LiveRun:
    """A run's files as they grow; `update` reads them again, of the metrics what is new."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, text(path.resolve().name)
        self._growing = GrowingFigures()
        self._new_at = time.monotonic()  # when the newest line came
        self.update()

    def update(self) -> None:
        self.record = RunRecord(self.path, problems=[])
        self.is_running = self.record.is_running
        if self._growing.read(self.record):
            self._new_at = time.monotonic()

    @property
    def figures(self) -> dict[str, dict[int, float]]:
        return self._growing.by_name

    @property
    def step(self) -> int:
        return self.record.reached(max((max(values) for values in self.figures.values() if values), default=0))

    def newest(self, name: str) -> float | None:
        values = self.figures.get(name)
        return values[max(values)] if values else None

    @property
    def state(self) -> str:
        """That of the record, and where it is."""
        steps = self.record.plan.number("steps")
        at = f"step {self.step:,}" + (f" of {steps:,.0f}" if steps else "")
        state = self.record.state(self.step)
        return f"{state}, {at}" + ("" if state in ("running", "finished") else "; the same command resumes it")

    @property
    def time_text(self) -> str:
        """What it took, or what is left, beside the plan."""
        predicted = self.record.plan.number("predicted_seconds")
        plan = f", planned {units.duration(predicted)}" if predicted else ""
        took, left = self.record.outcome.number("seconds"), self.newest("seconds_left")
        if took is not None:
            return f"{units.duration(took)}{plan}"
        if left is None or not self.is_running:
            return plan.removeprefix(", ")
        spent = self.newest("seconds") or 0.0
        left = max(0.0, left - (time.monotonic() - self._new_at))
        return f"{units.duration(left)} left, {units.duration(spent)} spent{plan}"


def runs_view(runs: list[LiveRun], width: int, height: int, *, ascii_only: bool = False) -> RenderableType:
    """The runs, side by side where there is room. width, height: of the terminal, in characters."""
    across = max(1, min(len(runs), width // COLUMN_WIDTH))
    down = -(-len(runs) // across)
    views = [run_view(run, width // across, height // down, ascii_only=ascii_only) for run in runs]
    return Columns(views, width=width // across, padding=0)


def run_view(run: LiveRun, width: int, height: int, *, ascii_only: bool = False) -> Panel:
    inner = max(1, width - 4)
    lines = [part for line in _figure_lines(run) for part in wrap(line, inner)]
    above = [Text(line, overflow="ellipsis", no_wrap=True) for line in lines]
    below = [*_sample_lines(run), *_incident_lines(run)]
    main = first_chart(run.figures)
    curves = [curve for prefix in ("", HELD_OUT) if main and (curve := run.figures.get(prefix + main.metric))]
    room = min(14, height - len(above) - len(below) - 5)
    chart = text_chart(curves, width=inner, height=max(4, room), ascii=ascii_only)
    drawn = [Text(line, style="cyan", no_wrap=True, overflow="crop") for line in chart]
    title = Text.assemble((run.name, "bold"), f"  {run.state}")
    return Panel(Group(*above, *drawn, *below), title=title, title_align="left", width=width)


def _figure_lines(run: LiveRun) -> list[str]:
    """The newest values of training and of validation as training prints them, the time, and how the run ended."""
    newest = {name: value for name in run.figures if (value := run.newest(name)) is not None}
    held_out = {name: value for name, value in newest.items() if name.startswith(HELD_OUT)}
    trained = describe({name: value for name, value in newest.items() if name not in held_out})
    if "grad_norm" in newest:
        trained += f"  gradient norm {newest['grad_norm']:.3g}"
    used, early = run.record.delivered, run.record.outcome.text("stopped_early")
    why = "" if run.is_running else run.record.ending(run.step).text("why")
    lines = (trained, describe(held_out), run.time_text, why, early, used.why if used else "")
    return [line for line in lines if line]


def _sample_lines(run: LiveRun) -> list[Text]:
    """The newest text of each prompt, one line each. Model text is never markup and has no control characters."""
    last = ((prompt, *list(texts.items())[-1]) for (prompt, _), texts in run.record.samples.items())
    lines = []
    for prompt, step, written in sorted(last, key=lambda sample: -sample[1])[:MOST_SAMPLES]:
        line = Text(f"step {step:,}: ", style="dim", no_wrap=True, overflow="ellipsis")
        lines.append(line.append(f"{' '.join(prompt.split())} ", "bold").append(" ".join(written.split()), "not dim"))
    return lines


def _incident_lines(run: LiveRun) -> list[Text]:
    """The last incidents, and how many there are."""
    incidents = run.record.incidents
    lines = [f"step {incident.raw['step']:,}: {incident.text('kind')}" for incident in incidents[-MOST_INCIDENTS:]]
    if len(incidents) > MOST_INCIDENTS:
        lines.append(f"{len(incidents)} incidents, in incidents.jsonl")
    return [Text(line, style="yellow", no_wrap=True, overflow="ellipsis") for line in lines]
