"""docs/speed.md shows the newest measurement, and its bounds are those that are tested.

`PYTHONPATH=benchmarks python tests/docs/test_speed_page.py` writes the tables from results/.
"""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
from compare import BENCHMARKS
from compare.pretrain import overview
from compare.table import joined
from compare.verdict import verdict

from penjing.base.registry import look_up
from penjing.model.config import ModelConfig
from penjing.plan.flops import parameters

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "speed.md"
PLACE = "<!-- table {} -->\n"
END = "<!-- end -->"
TABLES = ("trainers", "recipe", "gpu", "decode", "gpu decode", "cpu kernels")
BOTH = ("path", "step")
# The machine and record of each comparison of trainers, newest rules first, with the settings that the page shows. On
# the GPU nothing is claimed from the own path: a baseline compiled twice, and the text was read 21 times.
TRAINERS = (
    ("2 cores, AVX512-BF16", "bench_train_avx512bf16", BOTH),
    ("2 cores, AMX", "bench_train_pretrain", BOTH),
    ("2 cores, AMX", "bench_train_packed", BOTH),
    ("2 cores, AVX-512", "bench_train_avx512_", BOTH),
    ("2 cores, AVX2", "bench_train_avx2", BOTH),
    ("2 cores, bf16, C kernels off", "bench_train_litgpt", BOTH),
    ("2 cores, AMX", "bench_train_quick_20", BOTH),
    ("2 cores, AVX-512", "bench_train_quick_avx512", BOTH),
    ("H200", "bench_train_gpu_H200", ("step",)),
)


def newest(name):
    """The newest record whose name begins so, and its address from docs/."""
    path = sorted((ROOT / "results").glob(f"{name}*.json"))[-1]
    return json.loads(path.read_text(encoding="utf-8")), f"../results/{path.name}"


def module_at(path):
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # as for a script
    spec = importlib.util.spec_from_file_location(f"page_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses ask for it
    spec.loader.exec_module(module)
    return module


SCRIPTS = {"recipe": "recipe", "gpu": "speed_gpu", "gpu decode": "gpu_decode", "cpu kernels": "cpu_kernels"}


def rendered(kind):
    """The table that belongs there."""
    if kind in SCRIPTS:
        return module_at(ROOT / "benchmarks" / f"{SCRIPTS[kind]}.py").markdown(newest(SCRIPTS[kind])[0])
    if kind == "trainers":
        records = [(machine, *newest(name), settings) for machine, name, settings in TRAINERS]
        return overview([(machine, link, record, settings) for machine, record, link, settings in records]).markdown()
    record, _ = newest("decode_")
    benchmark = benchmark_of(record)
    return joined({each.upper(): benchmark.table(record, each) for each in benchmark.settings}).markdown()


def benchmark_of(record):
    return look_up(BENCHMARKS, record["method"], what="method")()


COMPARISONS = [path for name in ("bench_train", "decode") for path in sorted((ROOT / "results").glob(f"{name}_*.json"))]


@pytest.mark.parametrize("path", COMPARISONS, ids=lambda path: path.stem)
def test_every_record_of_a_comparison_is_shown_and_judged(path):
    record = json.loads(path.read_text(encoding="utf-8"))
    benchmark = benchmark_of(record)
    for setting in benchmark.settings:
        table = benchmark.table(record, setting)
        assert len(table.headings) == 1 + len(record[setting]["trials"])
        assert {len(row) for row in table.rows} == {len(table.headings)}
    lines = verdict(benchmark, record)
    for baseline in set(record["goals"]) & set(record[setting]["trials"]):
        assert sum(f" / {baseline}, " in line and "goal" in line for line in lines) == len(record["goals"][baseline])


def shown(page, kind):
    return page.split(PLACE.format(kind), 1)[1].split(END, 1)[0]


@pytest.mark.parametrize("kind", TABLES)
def test_tables_are_those_of_the_newest_result(kind):
    assert shown(PAGE.read_text(encoding="utf-8"), kind) == rendered(kind)


def test_kernels_are_compared_with_the_gemm_roofline():
    def ran(seconds, rate):
        return {"seconds": [seconds], "tokens": 1000, "flops_per_token": 1e8, "matmul_gigaflops_per_second": [rate]}

    markdown_of = module_at(ROOT / "benchmarks" / "cpu_kernels.py").markdown
    ways = {"kernels": [ran(1.0, 150.0), ran(1.0, 250.0)], "torch": [ran(2.0, 200.0)]}
    lines = markdown_of({"cases": {"26M, float32": ways}}).splitlines()
    assert len(lines[0].split("|")) == len(lines[2].split("|"))
    assert lines[2].endswith(" | 2.00 x | 200 | 2,000 | 25% | 50% |")
    del ways["torch"][0]["matmul_gigaflops_per_second"]  # a record made before there were any
    assert "GFLOP" not in markdown_of({"cases": {"26M, float32": ways}})


def test_the_plan_of_a_gpu_beside_what_it_did():
    table, page = plan_gpu()
    assert shown(page, "plan gpu") == table


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
    return module_at(ROOT / "benchmarks" / "export.py").markdown(newest("export")[0]), page


def test_sizes_of_exports_are_those_on_record():
    table, page = exports()
    assert shown(page, "export") == table


def test_a_gpu_case_is_called_by_its_size():
    """350M was the name of a shape with 317M parameters."""
    for case in module_at(ROOT / "benchmarks" / "speed_gpu.py").cases():
        said = re.match(r"(\d+)M ", case.name + " ")
        if said and "active" not in case.name:
            assert parameters(ModelConfig(**case.model)).total / 1e6 == pytest.approx(int(said[1]), abs=1), case.name


def plan_gpu():
    """The table of docs/memory.md, and the page."""
    page = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    return module_at(ROOT / "benchmarks" / "plan_gpu.py").markdown(newest("plan_gpu")[0]), page


def write():
    page = PAGE.read_text(encoding="utf-8")
    for kind in TABLES:
        place = PLACE.format(kind)
        page = page.replace(place + shown(page, kind), place + rendered(kind))
    PAGE.write_text(page, encoding="utf-8")
    for kind, name, (table, page) in (("export", "export", exports()), ("plan gpu", "memory", plan_gpu())):
        place = PLACE.format(kind)
        page = page.replace(place + shown(page, kind), place + table)
        (ROOT / "docs" / f"{name}.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    write()
