"""`report.html`: one self-contained page about one run or several, opened from disk, without network."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from penjing.base.accuracy import AccuracyLine, Score, accuracy_lines
from penjing.base.files import write_text
from penjing.base.untrusted import Fields, text
from penjing.report import charts, metrics, text_format
from penjing.report.charts import Axis, Series, figure
from penjing.report.load_runs import ReportData, ReportedRun
from penjing.report.metrics import HELD_OUT, SMALL_CHARTS, TOKENS, Chart, default_charts, main_charts, task_names
from penjing.report.quickstart_section import LONGEST, MOST_ITEMS, FactTable, View, facts, quickstart_view
from penjing.report.text_format import NONE, clip, count, kind_name, percent

FILE_NAME = "report.html"
MOST_POINTS, MOST_STEPS = 400, 4  # of a curve; samples side by side
MAX_CURVES = charts.NUM_COLOURS  # runs in one chart; tables show all

TEMPLATES = Environment(  # always escapes; an unknown name is an error
    loader=PackageLoader("penjing.report", package_path=""),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.globals.update(
    {name: Markup(getattr(charts, name.upper())) for name in ("css", "light", "dark", "script", "policy")}
)


@dataclass(frozen=True)
class Cell:
    """A table cell: a figure, a small remark below it, and whether it is marked (best, differing, total).

    bar: the ends of a bar, of its 95 % interval, and where guessing is, in per cent.
    """

    text: str
    remark: str = ""
    marked: bool = False
    bar: str = ""


@dataclass(frozen=True)
class HtmlTable:
    """`texts`: number of text columns, on the left; the others are numbers."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    texts: int = 1


RUN_FACTS: FactTable = (
    ("Parameters", "parameters", count),
    ("without the embedding", "parameters_without_embedding", count),
    ("Steps", "steps", count),
    ("Tokens per step", "tokens_per_step", count),
    ("Passes over the data", "epochs", figure),
    ("Arithmetic", "flops", lambda flops: f"{charts.power_label(flops)} FLOP"),
    ("Model FLOPs utilisation, causal (keys seen)", "mfu", percent),
    ("Model FLOPs utilisation, full square (PaLM)", "mfu_full_square", percent),
)


# --- a group of runs of one task -------------------------------------------------------------------------------------


def group_view(runs: Sequence[ReportedRun]) -> View:
    """The runs of one task, together in charts and tables."""
    title, chinese, _ = task_names(runs[0].task)
    names = {name for run in runs for name in run.figures}
    main, others = main_charts(names), default_charts(names)
    return {
        "title": title,
        "chinese": chinese,
        "runs": len(runs),
        "drawn": min(len(runs), MAX_CURVES),
        "plan": plan_table(runs),
        "notes": [text_format.plan_basis(runs[0]), text_format.time_parts(runs[0])] if len(runs) == 1 else [],
        "facts": facts(Fields({**runs[0].plan.raw, **runs[0].done.raw}), RUN_FACTS) if len(runs) == 1 else [],
        "charts": chart_views(main, runs),
        "small": chart_views(SMALL_CHARTS, runs, small=True),
        "others": chart_views(others[: 3 * MOST_ITEMS], runs, small=True),
        "figures": figures_table(runs, [*main, *SMALL_CHARTS, *others[:MOST_ITEMS]]),
        "settings": settings_table(runs),
        "questions": questions_view(runs),
        "samples": [group for run in runs for group in sample_groups(run, len(runs) > 1)],
        "incidents": incidents_table(runs),
    }


def plan_table(runs: Sequence[ReportedRun]) -> HtmlTable | None:
    """Predicted and actual: a row per figure of one run, or a row per run of several."""
    by_run = [(run, text_format.plan_rows(run)) for run in runs]
    if len(runs) == 1:
        rows = [[*map(Cell, row[:3]), Cell(text_format.signed_percent(row.error))] for row in by_run[0][1]]
        return HtmlTable(("", "predicted 预测", "actual 实测", "plan is off by 计划偏差"), rows) if rows else None
    names = list(dict.fromkeys(row.name for _, rows in by_run for row in rows))
    rows = [[Cell(run.name), *_plan_cells(found, names)] for run, found in by_run]
    return HtmlTable(("run", *names), rows) if names else None


def _plan_cells(rows: Sequence[text_format.PlanRow], names: Sequence[str]) -> list[Cell]:
    by_name = {row.name: row for row in rows}
    cells = []
    for row in map(by_name.get, names):
        error = text_format.signed_percent(row.error) if row and row.error is not None else ""
        sides = [side.replace(" ", "\u00a0") for side in (row.predicted, row.actual)] if row else [NONE]
        cells.append(Cell(" → ".join(sides), error))
    return cells


def chart_views(requested: Sequence[Chart], runs: Sequence[ReportedRun], *, small: bool = False) -> list[View]:
    """The charts that have points, with their captions."""
    points = max(16, MOST_POINTS // (1 + len(runs) // 2))
    size = (points // 2, 190) if small else (points, 250)
    drawn = ((chart, draw(chart, runs[:MAX_CURVES], *size)) for chart in requested)
    return [{"title": chart.title, "chinese": chart.chinese, "curves": curves} for chart, curves in drawn if curves]


def draw(chart: Chart, runs: Sequence[ReportedRun], limit: int, height: int) -> Markup:
    """One chart. Colours: metrics of one run, or several runs; held-out figures have dots and dashed lines."""
    by_tokens = task_names(runs[0].task)[2] and all(TOKENS in run.figures for run in runs)
    single_run, lines = len(runs) == 1, ((chart.metric, chart.label), *chart.extras)
    series = []
    for index, run in enumerate(runs):
        for line_index, (name, label) in enumerate(lines if single_run else lines[:1]):
            for held_out in (False, True):
                values, tokens = run.figures.get(HELD_OUT * held_out + name, {}), run.figures.get(TOKENS, {})
                points = [(tokens.get(step) if by_tokens else float(step), value) for step, value in values.items()]
                title = "held out" if held_out and not chart.extras else label + ", held out" * held_out
                colour = index if not single_run else line_index if chart.extras else int(held_out)
                title = title if single_run else f"{run.name}, {title}"
                series.append(Series(title, points, dots=held_out, colour=colour, dashed=held_out))
    return charts.line_chart(
        series,
        title=f"{task_names(runs[0].task)[0]}: {chart.title}",
        x=Axis("tokens trained on" if by_tokens else "optimizer steps"),
        y=Axis(chart.unit, log=chart.log, from_zero=chart.from_zero),
        height=height,
        limit=limit,
    )


def _form(chart: Chart, value: float | None) -> str:
    if value is None:
        return NONE
    return f"{value * 100:.1f}\u00a0%" if chart.percent else figure(value)


def figures_table(runs: Sequence[ReportedRun], chart_list: Sequence[Chart]) -> HtmlTable | None:
    """The figures of the charts: first, last, lowest and highest of one run; of several the last, best marked."""
    shown = [
        (chart, prefix + name, (f"{chart.title} ({metric_label})" if chart.extras else chart.title) + ending)
        for chart in chart_list
        for name, metric_label in ((chart.metric, chart.label), *chart.extras)
        for prefix, ending in ((HELD_OUT, ", held out"), ("", ""))
        if any(run.figures.get(prefix + name) for run in runs)
    ]
    if not shown:
        return None
    if len(runs) == 1:
        rows = []
        for chart, name, label in shown:
            values = list(runs[0].figures[name].values())
            figures = (values[0], values[-1], min(values), max(values))
            rows.append([Cell(label, chart.unit), *(Cell(_form(chart, value)) for value in figures)])
        return HtmlTable(("", "first 首", "last 末", "lowest 最低", "highest 最高"), rows)
    held_out = {name.removeprefix(HELD_OUT) for _, name, _ in shown if name.startswith(HELD_OUT)}
    shown = [row for row in shown if row[1] not in held_out | metrics.NOT_FINAL]
    columns = [_column(runs, chart, name) for chart, name, _ in shown]
    rows = [[Cell(run.name), *(column[index] for column in columns)] for index, run in enumerate(runs)]
    return HtmlTable(("run", *(label for _, _, label in shown)), rows)


def _column(runs: Sequence[ReportedRun], chart: Chart, name: str) -> list[Cell]:
    """The last value of a metric in each run, with the best one marked if the metric has a best."""
    last = [list(run.figures[name].values())[-1] if run.figures.get(name) else None for run in runs]
    known = [value for value in last if value is not None]
    best = (min if chart.best == "low" else max)(known) if chart.best and len(known) > 1 else math.nan
    return [Cell(_form(chart, value), marked=value == best) for value in last]


def settings_table(runs: Sequence[ReportedRun]) -> HtmlTable | None:
    """Settings that differ between the runs (first, marked), then settings that differ from the recipe's default."""
    names = list(dict.fromkeys(name for run in runs for name in run.settings))
    differing, changed = [], []
    for name in names:
        if name in ("out", "stage"):
            continue
        values = [run.settings[name] for run in runs if name in run.settings]
        if len(set(values)) > 1:
            differing.append(name)
        elif any(run.defaults and run.defaults.get(name, "") != values[0] for run in runs):
            changed.append(name)
    rows = []
    for name in (*differing, *changed)[: 6 * MOST_ITEMS]:
        defaults = dict.fromkeys(run.defaults[name] for run in runs if name in run.defaults)
        cells = [clip(run.settings.get(name, NONE), 80) or "(empty)" for run in runs]
        default = clip(" / ".join(each or "(empty)" for each in defaults), 80) or NONE
        rows.append([Cell(name, marked=name in differing), Cell(default), *map(Cell, cells)])
    heads = [run.name for run in runs] if len(runs) > 1 else ["this run 本次"]
    return HtmlTable(("setting 设置", "recipe 默认", *heads), rows, texts=2 + len(runs)) if rows else None


def sample_groups(run: ReportedRun, named: bool) -> list[View]:
    """Samples of each prompt at a few steps, in order."""
    groups = []
    for (prompt, language), texts in list(run.samples.items())[:MOST_ITEMS]:
        steps = text_format.spread(list(texts), MOST_STEPS)
        cells = [(f"step {step:,}", clip(texts[step], LONGEST)) for step in steps]
        name = run.name if named else ""
        groups.append({"run": name, "prompt": clip(prompt, 300), "language": language, "cells": cells})
    return groups


def incidents_table(runs: Sequence[ReportedRun]) -> HtmlTable | None:
    """Incidents by kind: count, first and last step, and details of the first."""
    rows = []
    for run in runs:
        by_kind: dict[str, list[Fields]] = {}
        for incident in run.incidents:
            by_kind.setdefault(incident.text("kind") or "unknown", []).append(incident)
        lines = [(kind, len(incidents), _steps(incidents), _about(incidents[0])) for kind, incidents in by_kind.items()]
        resumed = run.done.number("resumed")
        lines += [("resumed", round(resumed), "", "interrupted and taken up again")] if resumed else []
        rows += [
            [Cell(run.name), Cell(clip(kind, 60)), Cell(about), Cell(f"{times:,}"), Cell(steps)]
            for kind, times, steps, about in lines[:MOST_ITEMS]
        ]
    return HtmlTable(("run", "what 事件", "about the first", "times 次数", "steps 步"), rows, texts=3) if rows else None


def _steps(incidents: Sequence[Fields]) -> str:
    steps = [count(step) for each in incidents if (step := each.number("step")) is not None]
    return " … ".join(dict.fromkeys((steps[0], steps[-1]))) if steps else ""


def _about(incident: Fields) -> str:
    names = [name for name in incident.raw if name not in ("step", "kind")]
    facts = [(text(name).replace("_", " "), incident.number(name), incident.text(name)) for name in names]
    lines = (f"{name} {value if real is None else figure(real)}" for name, real, value in facts if value)
    return clip(", ".join(lines), 200)


# --- questions -------------------------------------------------------------------------------------------------------


def questions_view(runs: Sequence[ReportedRun]) -> View | None:
    """Right answers by kind: of one run with bars and intervals, of several side by side; None where nobody asked."""
    by_run = [accuracy_lines(run.questions) for run in runs]
    if not any(by_run):
        return None
    if len(runs) == 1:
        return {"table": accuracy_table(by_run[0]), "lost": [text_format.regression_sentence(runs[0].questions)]}
    by_kind = [{(line.kind, line.language): line for line in lines} for lines in by_run]
    every = {key: line for lines in by_kind for key, line in lines.items()}
    rows = [
        [*_kind_cells(line), Cell(percent(line.best.chance)), *(_change_cell(lines.get(key)) for lines in by_kind)]
        for key, line in list(every.items())[: 8 * MOST_ITEMS]
    ]
    lost = [f"{run.name}: {text}" for run in runs if (text := text_format.regression_sentence(run.questions))]
    columns = ("kind 题型", "language 语言", "guessing 随机", *(run.name for run in runs))
    return {"table": HtmlTable(columns, rows, texts=2), "lost": lost}


def _kind_cells(line: AccuracyLine) -> list[Cell]:
    return [Cell(kind_name(line.kind), marked=not line.kind), Cell(clip(text_format.language_name(line.language), 20))]


def _change_cell(line: AccuracyLine | None) -> Cell:
    if line is None:
        return Cell(NONE)
    sides = [percent(score.fraction) for score in (line.before, line.after) if score]
    return Cell(" → ".join(sides), "lost" if line.is_regression else "")


def _score_cell(score: Score) -> Cell:
    if not score:
        return Cell(NONE)
    low, high = score.interval
    ends = {"right": score.fraction, "low": low, "high": high, "chance": -1.0 if score.chance is None else score.chance}
    bar = "; ".join(f"--{name}: {fraction:.1%}" for name, fraction in ends.items())
    return Cell(
        percent(score.fraction), f"{score.correct:,} / {score.total:,} ({low * 100:.0f}–{percent(high)})", bar=bar
    )


def accuracy_table(lines: list[AccuracyLine]) -> HtmlTable:
    """A line per kind and language with its interval, and what that says of guessing."""
    chosen = lines if len(lines) <= 8 * MOST_ITEMS else [*lines[: 8 * MOST_ITEMS], lines[-1]]
    rows = []
    for line in chosen:
        scores = (_score_cell(line.before), _score_cell(line.after))
        rows.append([*_kind_cells(line), Cell(percent(line.best.chance)), *scores, Cell(line.verdict)])
    return HtmlTable(
        ("kind 题型", "language 语言", "guessing 随机", "before 训练前", "after 训练后", ""), rows, texts=2
    )


# --- the page --------------------------------------------------------------------------------------------------------


def title_of(record: ReportData) -> str:
    if record.quickstart:
        return clip(record.quickstart.facts.text("title"), 160) or "A small language model"
    if len(record.runs) > 1:
        return " · ".join(run.name for run in record.runs) if len(record.runs) < 5 else f"{len(record.runs)} runs"
    return clip(f"{task_names(record.runs[0].task)[0]}: {record.runs[0].name}", 120)


def context(record: ReportData) -> Mapping[str, Any]:
    """Everything the template shows, already formatted."""
    tasks = dict.fromkeys(run.task for run in record.runs)
    groups = [group_view([run for run in record.runs if run.task == task]) for task in tasks]
    quickstart = quickstart_view(record.quickstart, record.runs) if record.quickstart else None
    return {
        "has": {name for view in (*groups, quickstart or {}) for name, shown in view.items() if shown},
        "title": title_of(record),
        "created": text_format.date(record.quickstart.facts.text("created")) if record.quickstart else "",
        "headline": [clip(sentence, 500) for sentence in text_format.headline(record)],
        "problems": [clip(problem, 300) for problem in record.problems[:MOST_ITEMS]],
        "groups": groups,
        "quickstart": quickstart,
        "folder": clip(record.folder, 300),
    }


def write_report(record: ReportData, path: Path) -> Path:
    """Write the page to `path`, and return `path`. Raises `UserError` if it cannot be written."""
    write_text(path, TEMPLATES.get_template("page.html.jinja").render(context(record)))
    return path
