"""The sweep in the terminal, and as Markdown, CSV, JSON and a plot."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from compare.table import markdown_table
from rich.console import Console

from penjing import devices
from penjing.base import formatting as units
from penjing.base.errors import UserError
from penjing.base.files import write_json, write_text
from penjing.base.markup import escape_markup, print_table
from penjing.devices.choose import local_device
from penjing.plan.hardware import environment
from penjing.planner.inputs import PlanOptions, find_machine
from penjing.report.charts import Axis, Series
from penjing.train.config import Run
from penjing.train.load_model import set_threads
from steps.standalone_chart import line_chart, standalone
from steps.sweep import Grid, Measured, sweep


def _rate(number: float) -> str:
    return units.count(float(f"{number:.3g}"))


# Field, heading, formatter.
COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("micro_size", "rows", str),
    ("accumulate", "passes", str),
    ("seq_len", "T", str),
    ("dtype", "dtype", str),
    ("recompute", "recomputed", str),
    ("steps_per_second", "it/s", _rate),
    ("predicted_steps_per_second", "predicted", _rate),
    ("tokens_per_second", "tokens/s", _rate),
    ("model_tflops_causal", "TFLOPS causal", _rate),
    ("model_tflops_full_square", "full square", _rate),
    ("mfu_causal", "MFU causal", "{:.0%}".format),
    ("mfu_full_square", "full square", "{:.0%}".format),
    ("peak_memory_bytes", "memory", units.gibibytes),
    ("predicted_memory_bytes", "predicted", units.gibibytes),
    ("dram", "DRAM %", "{:.0%}".format),
    ("tensor", "tensor %", "{:.0%}".format),
    ("fp32", "FP32 %", "{:.0%}".format),
    ("counters", "by", str),
)
HEADINGS = [heading for _, heading, _ in COLUMNS]
EMPTY_PLOT = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="640" height="60"><text x="10" y="30">nothing fitted</text></svg>'
)


def run_sweep(
    run: Run, grid: Grid, console: Console, *, steps: int, seconds: float, out: Path | None
) -> list[Measured]:
    """Sweep on this machine, print the table, and write it: OUT.json, .csv, .md and .svg."""
    from penjing.train.memory_trace.trace import predict_memory

    if run.lora.rank or run.objective.name != "next_token":
        got = f"lora.rank={run.lora.rank}, {run.objective.name}"
        raise UserError("only next-token steps of all weights can be timed", where=run.stage, got=got)
    set_threads(run.compute.threads, 1)
    device = local_device(run.compute.device)
    machine, target, notes = find_machine(PlanOptions(), run)

    def predict_bytes(variant: Run) -> int | None:
        try:
            return predict_memory(variant, target).total_bytes
        except UserError:
            return None

    rows = sweep(
        run,
        grid,
        machine,
        target,
        steps=steps,
        seconds=seconds,
        device=device,
        predict_bytes=predict_bytes,
        report=lambda row: console.print(f"  {_short(row)}", highlight=False),
    )
    first, *others = HEADINGS
    title = f"{machine.name}, predicted at {machine.level}"
    print_table(console, [first, *(f"{heading}>" for heading in others)], map(cells, rows), title=title)
    for note in notes:
        console.print(escape_markup("note", note))
    if out is not None:
        out = out.with_suffix("") if out.suffix in (".json", ".csv", ".md", ".svg") else out
        dtype = devices.of(device).compute_dtype(run.compute.dtype, device)
        write(rows, out, {**environment(device, dtype, level=machine.level), "model": run.model.preset, "steps": steps})
        console.print(f"{out}.json, .csv, .md, .svg: the same as data, table and plot", highlight=False)
    return rows


def _short(row: Measured) -> str:
    point = row.point
    where = f"{point.micro_size} x {point.accumulate} x {point.seq_len} {point.dtype}"
    return f"{where}: {row.ended if row.steps_per_second is None else f'{row.steps_per_second:.3g} it/s'}"


def cells(row: Measured) -> list[str]:
    """A row of the table as text; if it did not fit, with the reason."""
    figures = row.to_dict()
    shown = {name: "" if figures[name] is None else show(figures[name]) for name, _, show in COLUMNS}
    shown["steps_per_second"] = shown["steps_per_second"] or row.ended
    return list(shown.values())


def write(rows: Sequence[Measured], out: Path, environment: dict[str, Any]) -> None:
    """OUT.json with everything, OUT.csv and OUT.md with the table, OUT.svg with the plot."""

    def path(suffix: str) -> Path:
        return out.with_name(out.name + suffix)

    flat = [row.to_dict() for row in rows]
    write_json(path(".json"), {**environment, "rows": flat})
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(flat[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    write_text(path(".csv"), text.getvalue())
    write_text(path(".md"), markdown_table(HEADINGS, map(cells, rows)))
    write_text(path(".svg"), plot(rows))


def plot(rows: Sequence[Measured]) -> str:
    """Tokens per second over tokens of a step, measured and predicted, as a standalone SVG."""

    done = sorted((row for row in rows if row.tokens_per_second), key=lambda row: row.point.tokens)
    measured = [(float(row.point.tokens), row.tokens_per_second) for row in done]
    predicted = [(float(row.point.tokens), row.point.tokens * (row.predicted_steps_per_second or 0.0)) for row in done]
    title = "Tokens per second"
    chart = line_chart(
        [Series("measured", measured, dots=True), Series("predicted", predicted, dots=True)],
        title=title,
        x=Axis("tokens of a step", log=len({tokens for tokens, _ in measured}) > 1),
        y=Axis("tokens/s", from_zero=True),
        width=640,
        height=360,
    )
    return f"{standalone(chart, title=title) or EMPTY_PLOT}\n"
