"""The sweep of training steps: measured, predicted and written."""

from __future__ import annotations

import csv
import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from steps import sweep as sweeping
from steps import sweep_report as tables
from steps.standalone_chart import line_chart, standalone
from steps.sweep import Grid, SweepPoint

from penjing.base import config
from penjing.base.errors import UserError
from penjing.plan.device_model import machine_from_spec
from penjing.plan.gpu_specs import find_gpu_spec
from penjing.plan.memory import Target
from penjing.plan.step_time import step_time
from penjing.planner.inputs import PlanOptions, workload_of
from penjing.report.charts import Axis, Series
from penjing.train import build_model
from penjing.workflows.train import resolve_run

TINY = ["model=tiny", "data.seq_len=64", "batch.size=8", "compute.compile=off"]
CARD = machine_from_spec(find_gpu_spec("RTX 3090"))
CPU = torch.device("cpu")
LARGE_CPU = Target(kind="cpu", name="cpu", memory_bytes=1 << 40)


def settings(*words: str):
    return config.parse_overrides([*TINY, *words])


def test_what_a_sweep_cannot_time_is_refused():
    for recipe, words in (("dpo", ()), ("pretrain", ("lora.rank=4", "init_from=x"))):
        run = replace(resolve_run("pretrain", settings()), objective=resolve_run(recipe, settings()).objective)
        run = replace(run, lora=replace(run.lora, rank=4)) if words else run
        with pytest.raises(UserError, match="next-token steps of all weights"):
            tables.run_sweep(run, Grid(), Console(quiet=True), steps=2, seconds=1.0, out=None)


def test_a_sweep_over_what_is_computed_again(monkeypatch):
    run, told = resolve_run("pretrain", settings("compute.dtype=float32", "model.num_hidden_layers=1")), []
    real = build_model.recompute_activations
    monkeypatch.setattr(build_model, "recompute_activations", lambda model, how: told.append(how) or real(model, how))
    grid = Grid(micro_size=(1,), accumulate=(1,), seq_len=(16,), recompute=("none", "mlp", "block"))
    rows = sweeping.sweep(run, grid, CARD, LARGE_CPU, steps=2, seconds=0.1, device=CPU, predict_bytes=lambda variant: 1)
    assert told == ["none", "mlp", "block"] and all(row.ended == "done" for row in rows)
    rates = [row.predicted_steps_per_second for row in rows]
    assert rates == sorted(rates, reverse=True) and len(set(rates)) == 3


def test_a_sweep_predicts_what_the_page_does(monkeypatch):
    monkeypatch.setattr(sweeping, "_time_point", lambda *given: ([], 0, None))
    run = resolve_run("pretrain", settings("compute.dtype=bfloat16", "batch.micro_size=4"))
    (row,) = sweeping.sweep(run, Grid(), CARD, LARGE_CPU, device=CPU)
    work = workload_of(run, CARD, PlanOptions(), 4)
    assert work.triton_kernels and row.predicted_steps_per_second == pytest.approx(1 / step_time(work, CARD).seconds)


def test_a_sweep_measures_and_predicts_and_is_written(tmp_path):
    run = resolve_run("pretrain", settings("compute.dtype=float32", "model.num_hidden_layers=1"))
    grid = Grid(micro_size=(1, 2), accumulate=(1, 2), seq_len=(16,))
    rows = sweeping.sweep(
        run, grid, CARD, LARGE_CPU, steps=2, seconds=0.1, device=CPU, predict_bytes=lambda variant: 1 << 30
    )
    assert [(row.point.micro_size, row.point.accumulate) for row in rows] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    for row in rows:
        tokens = row.point.micro_size * row.point.accumulate * 16
        assert row.ended == "done" and row.utilisation.counters == "estimate" and row.predicted_to_fit
        assert row.tokens_per_second == pytest.approx(row.steps_per_second * tokens)
        assert row.model_tflops_causal < row.model_tflops_full_square
        assert row.predicted_steps_per_second > 0 and row.peak_memory_bytes > 50 << 20
    tables.write(rows, tmp_path / "qwen3-0.6b", {"machine": {}})
    known = json.loads((tmp_path / "qwen3-0.6b.json").read_text())["rows"]
    assert known[3]["micro_size"] == 2 and known[3]["predicted_memory_bytes"] == 1 << 30
    assert len(list(csv.DictReader((tmp_path / "qwen3-0.6b.csv").open()))) == 4
    table = (tmp_path / "qwen3-0.6b.md").read_text().splitlines()
    assert len(table) == 6 and "predicted" in table[0]
    drawn = ElementTree.parse(tmp_path / "qwen3-0.6b.svg").getroot()
    assert drawn.tag.endswith("svg") and len(list(drawn.iter())) > 10


def test_what_does_not_fit_is_a_row(monkeypatch, tmp_path):
    steps = []

    def full(parts, index):
        steps.append(index)
        if len(steps) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(parts, index)

    real = sweeping.step
    monkeypatch.setattr(sweeping, "step", full)
    run = resolve_run("pretrain", settings("compute.dtype=float32", "model.num_hidden_layers=1"))
    rows = sweeping.sweep(run, Grid(micro_size=(1,), accumulate=(1,), seq_len=(16,)), CARD, LARGE_CPU, device=CPU)
    assert [row.ended for row in rows] == ["out of memory"]
    assert "out of memory" in tables.cells(rows[0])
    tables.write(rows, tmp_path / "sweep", {})
    assert "nothing fitted" in (tmp_path / "sweep.svg").read_text()


def test_a_grid_stands_at_the_runs_own_values():
    run = resolve_run("pretrain", settings())
    assert Grid().points(run, CPU) == [
        SweepPoint(micro_size=4, accumulate=2, seq_len=64, dtype=run.compute.dtype, recompute="none")
    ]
    with pytest.raises(UserError):
        sweeping.settings_of(run, replace(Grid().points(run, CPU)[0], dtype="float7"))


def test_a_chart_alone_brings_its_colours_title_and_room() -> None:
    assert (
        standalone(line_chart([Series("a", [(0, None)])], title="t", x=Axis("step"), y=Axis("loss")), title="t") == ""
    )
    chart = line_chart([Series("a", [(0, 1), (1, 2)], dots=True)], title="t", x=Axis("step"), y=Axis("loss"))
    drawing = ElementTree.fromstring(str(standalone(chart, title="KL < 1 & more")))
    assert drawing.tag == "{http://www.w3.org/2000/svg}svg"
    left, top, width, height = map(int, drawing.attrib["viewBox"].split())
    assert left < 0 > top
    assert (width + 2 * left, height + top + left) == (460, 250)
    texts = [element.text for element in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[0] == "KL < 1 & more"
    style = drawing.find("{http://www.w3.org/2000/svg}style")
    assert style is not None and "prefers-color-scheme: dark" in (style.text or "")
