"""docs/speed.md shows the newest measurement, and its bounds are those that are tested.

`python tests/docs/test_speed_page.py` writes the tables from results/.
"""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
from penjing.bench.pretrain_table import KINDS, markdown

from penjing.model.config import ModelConfig
from penjing.plan.flops import parameters

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "speed.md"
PLACE = "<!-- table {} -->\n"
END = "<!-- end -->"
HARDEST = ("packed", "avx512", "avx2")  # own path beside the hardest peer alone, ten minutes, on three processors
TABLES = (*KINDS, *HARDEST, "litgpt path", "litgpt step", "recipe", "gpu", "gpu step", "cpu kernels")


def newest(name):
    found = sorted((ROOT / "results").glob(f"{name}_*.json"))
    return json.loads(found[-1].read_text(encoding="utf-8")) if found else None


def module_at(path):
    spec = importlib.util.spec_from_file_location(f"page_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses ask for it
    spec.loader.exec_module(module)
    return module


def rendered(kind):
    """The table that belongs there, or nothing while nothing was measured."""
    if kind == "recipe":
        result = newest("recipe")
        return module_at(ROOT / "benchmarks" / "recipe.py").markdown(result) if result else ""
    if kind == "gpu":
        result = newest("speed_gpu")
        return module_at(ROOT / "benchmarks" / "speed_gpu.py").markdown(result) if result else ""
    if kind == "cpu kernels":
        result = newest("cpu_kernels")
        return module_at(ROOT / "benchmarks" / "cpu_kernels.py").markdown(result) if result else ""
    if kind == "gpu step":
        result = newest("bench_train_gpu")
        return markdown(result, "step") + "\n" if result else ""
    if kind in HARDEST:
        result = newest(f"bench_train_{kind}")
        return markdown(result, "path") + "\n" if result else ""
    if kind.startswith("litgpt "):
        result = newest("bench_train_litgpt")
        return markdown(result, kind.removeprefix("litgpt ")) + "\n" if result else ""
    result = newest("bench_train_pretrain")
    return markdown(result, kind) + "\n" if result else ""


def shown(page, kind):
    return page.split(PLACE.format(kind), 1)[1].split(END, 1)[0]


@pytest.mark.parametrize("kind", TABLES)
def test_tables_are_those_of_the_newest_result(kind):
    assert shown(PAGE.read_text(encoding="utf-8"), kind) == rendered(kind)


def test_kernels_are_held_against_the_machines_products():
    def ran(seconds, rate):
        return {"seconds": [seconds], "tokens": 1000, "flops_per_token": 1e8, "product_gigaflops_per_second": [rate]}

    markdown_of = module_at(ROOT / "benchmarks" / "cpu_kernels.py").markdown
    ways = {"kernels": [ran(1.0, 150.0), ran(1.0, 250.0)], "torch": [ran(2.0, 200.0)]}
    lines = markdown_of({"cases": {"26M, float32": ways}}).splitlines()
    assert lines[0].endswith(" | product, GFLOP/s | limit, tokens/s | torch, share of it | kernels, share of it |")
    assert lines[2].endswith(" | 2.00 x | 200 | 2,000 | 25% | 50% |")
    del ways["torch"][0]["product_gigaflops_per_second"]  # a record made before there were any
    assert "GFLOP" not in markdown_of({"cases": {"26M, float32": ways}})


def test_the_plan_of_a_gpu_beside_what_it_did():
    place, result = PLACE.format("plan gpu"), newest("plan_gpu")
    page = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    shown_there = page.split(place, 1)[1].split(END, 1)[0]
    assert shown_there == module_at(ROOT / "benchmarks" / "plan_gpu.py").markdown(result)


def test_bounds_are_those_that_are_tested():
    path = ROOT / "tests" / "model" / "test_loss_agreement.py"
    module = module_at(path)
    page = PAGE.read_text(encoding="utf-8")
    table = page.split("| switched on |", 1)[1].split("\n\n", 1)[0]
    found = {}
    for names, loss, gradient in re.findall(r"^\| ([a-z0-9; ]+) \| ([\d.]+) \| ([\d.]+) \|$", table, re.MULTILINE):
        found |= {name.strip(): (float(loss), float(gradient)) for name in names.split(";")}
    assert found == {name: (way.loss, way.gradient) for name, way in module.WAYS.items()}


def exports():
    """The table of docs/export.md, as it should be and as it is."""
    page = (ROOT / "docs" / "export.md").read_text(encoding="utf-8")
    return module_at(ROOT / "benchmarks" / "export.py").markdown(newest("export")), page


def test_sizes_of_exports_are_those_on_record():
    table, page = exports()
    assert shown(page, "export") == table


def test_a_gpu_case_is_called_by_its_size():
    """350M was the name of a shape with 317M parameters."""
    for case in module_at(ROOT / "benchmarks" / "speed_gpu.py").cases():
        said = re.match(r"(\d+)M ", case.name + " ")
        if said and "active" not in case.name:
            assert parameters(ModelConfig(**case.model)).total / 1e6 == pytest.approx(int(said[1]), abs=1), case.name


def write():
    page = PAGE.read_text(encoding="utf-8")
    for kind in TABLES:
        place = PLACE.format(kind)
        page = page.replace(place + shown(page, kind), place + rendered(kind))
    PAGE.write_text(page, encoding="utf-8")
    table, page = exports()
    place = PLACE.format("export")
    page = page.replace(place + shown(page, "export"), place + table)
    (ROOT / "docs" / "export.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    write()
