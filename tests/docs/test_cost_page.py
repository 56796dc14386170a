"""Every figure of docs/cost.md, computed again."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from pathlib import Path

import pytest
from pages import script

from penjing.base import config
from penjing.data.token_shards import id_dtype
from penjing.model.config import ModelConfig
from penjing.plan import compute_optimal as tokens
from penjing.plan.device_model import MARGINS, machine_from_spec
from penjing.plan.flops import parameters, training_flops_per_token
from penjing.plan.gpu_specs import GPU_SPECS
from penjing.plan.shape import shape_of
from penjing.planner.counts import model_of, step_estimate
from penjing.planner.inputs import target_of
from penjing.workflows.train import resolve_run

PAGE = Path(__file__).parents[2] / "docs/cost.md"
TEXT = PAGE.read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in line.strip("| \n").split("|")] for line in TEXT.splitlines() if line.startswith("|")]
SMALL = config.resolve(ModelConfig, {"preset": "26m"})


def row(first: str) -> list[str]:
    """The one table row that begins so."""
    found = [cells for cells in ROWS if cells[0].startswith(first)]
    assert len(found) == 1, first
    return found[0]


def number(text: str) -> float:
    """The first figure in a text."""
    return float(re.findall(r"[0-9][0-9,]*\.?[0-9]*", text)[0].replace(",", ""))


@pytest.mark.parametrize("level", ["L0", "L1", "L2", "L3"])
def test_the_intervals(level):
    assert number(row(level)[2]) == pytest.approx(100 * MARGINS[level])


@pytest.mark.parametrize(("tflops", "card", "reported"), [(75, "RTX 3090", 300), (165, "RTX 4090", 200)])
def test_hours(tflops, card, reported):
    cells = row(f"{tflops} TFLOPS ({card})")
    assert number(cells[1]) == round(6 * 26e6 * 10e9 / (tflops * 1e12) / 60)
    assert number(cells[2]) == reported
    shape, machine = shape_of(model_of(26_000_000)), machine_from_spec(GPU_SPECS[card])
    seconds, shares = step_estimate(shape, 26_000_000, 10_000_000_000, machine)
    assert number(cells[3]) == round(seconds / 60)
    assert number(cells[4]) == pytest.approx(6 * 26e6 * 10e9 / (reported * 60) / 1e12, abs=0.05)
    if card == "RTX 3090":
        assert shares["matmuls"] == pytest.approx(2 / 3, abs=0.06)
        assert GPU_SPECS[card].half == 71


def test_what_the_formula_leaves_out():
    count = parameters(SMALL)
    assert f"{count.matrices / 1e6:.1f}M here" in TEXT
    plain = training_flops_per_token(SMALL, 0.0)
    causal = training_flops_per_token(SMALL, 256.5)
    assert round(100 * (causal / plain - 1), 0) in (7.0, 8.0)
    untied = 50257 * 768
    assert round(100 * untied / 163_009_536) == 24


def test_memory():
    """By the textbook: weights, gradients and two moments in float32; and 1.3 GB for the CUDA context."""
    assert [number(cell) for cell in row("24 GB")] == [part * 6 for part in (4, 4, 8, 16)]
    states = 16 * parameters(SMALL).total
    assert f"{states / 2**30:.2f} GiB" in TEXT.replace("\n", " ")
    assert "1.60 GiB" in TEXT and (states + 1.3e9) / 2**30 == pytest.approx(1.60, abs=0.005)


def test_the_traced_memory():
    from penjing.train.memory_trace.trace import predict_memory

    run = resolve_run("pretrain", config.parse_overrides(["model=26m"]))
    plan = predict_memory(run, target_of(GPU_SPECS["RTX 3090"]), micro_size=64)
    stated = float(re.findall(r"rows of 512 tokens take ([0-9.]+) GiB", TEXT)[0])
    assert plan.total_bytes / 2**30 == pytest.approx(stated, rel=0.02)


def test_data():
    cells = row("7B")
    assert number(cells[2]) == 7 * 20
    assert number(cells[3]) == 7 * 20 * 4
    assert number(cells[4]) == 7 * 20 * id_dtype(65_536).itemsize
    assert "gives\n  20.5" in TEXT or "gives 20.5" in TEXT
    assert tokens.LAWS["corrected"].optimal_tokens(7e9) / 7e9 == pytest.approx(20.5, abs=0.05)
    assert tokens.LAWS["as printed"].optimal_tokens(7e9) / 7e9 == pytest.approx(66.8, abs=0.05)
    advice = tokens.advise(7_000_000_000, 7_000_000_000)
    assert f"{advice.low / 1e9:.0f}B to {advice.high / 1e9:.0f}B" in TEXT
    assert [f"{tokens.repeat_worth(epochs):.0%}" for epochs in (4, 16)] == ["93%", "66%"]


def test_steps():
    cells = row("16,527,707")
    examples, epochs, batch, steps = (int(number(cell)) for cell in cells)
    assert math.ceil(math.ceil(examples / batch) * epochs) == steps
    assert examples % batch == 3


def test_how_good_the_answers_are():
    import sys

    sys.path.insert(0, str(Path(__file__).parents[1] / "plan"))
    from published_rows import TABLE, WHERE
    from test_plan_published import errors_by_group, mean_of

    if not TABLE.is_file():
        pytest.skip(WHERE)
    names = {
        "llm-foundry": "mosaicml",
        "Languini, RTX 3090": "languini-kitchen, NVIDIA",
        "Languini, V100": "languini-kitchen, Tesla",
        "one teaching script": "rasbt",
    }
    found: dict[str, tuple[list[float], float]] = errors_by_group()
    total: dict[str, int] = defaultdict(int)
    for stated, group in names.items():
        errors, best = next(value for name, value in found.items() if name.startswith(group))
        cells = row(stated)
        assert number(cells[1]) == len(errors)
        assert number(cells[2]) == pytest.approx(100 * mean_of(errors), abs=0.06)
        assert number(cells[3]) == pytest.approx(100 * best, abs=0.06)
        total["rows"] += len(errors)
    assert f"Against {total['rows']} published steps" in TEXT


def test_the_ten_runs_are_as_recorded():
    plan_cpu = script("benchmarks/plan_cpu.py")
    records = plan_cpu.records()
    assert [record["threads"] for record in records] == [1, 2]
    assert all(len(record["runs"]) == 10 for record in records)
    assert plan_cpu.render(TEXT, records) == TEXT, "python benchmarks/plan_cpu.py --render"
