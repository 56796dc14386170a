"""A new benchmark is a class in one file and a line in BENCHMARKS: it is run, recorded, shown and judged."""

import json
import sys

import pytest
from compare import BENCHMARKS
from compare.run import run_comparison
from compare.table import ResultTable, spread, with_range
from compare.trial_process import alternate, run_json
from user_errors import raises_user_error

from penjing.base.errors import UserError
from penjing.base.registry import look_up

TOY = """
from compare.comparison import Benchmark, Prepared
from compare.trial_spec import TrialSpec

class Decoding(Benchmark):
    method, unit = "decoding", "tokens"
    settings = {"greedy": "greedy decoding"}
    ours = {"penjing": "toy_trial"}
    labels = {"units_per_second": ("{unit}/s", lambda value: f"{value:.0f}")}

    def prepare(self, work, request):
        spec = TrialSpec(setting="greedy", out="", threads=1, steps=request.options.steps, warmup=1)
        return Prepared(spec=spec, options=request.options, about={"model": "toy"}, lines=["decoding: a toy"])
"""
TRIAL = """
import json
from compare.trial_timer import TrialTimer
from compare.trial_spec import TrialSpec, read_spec

timer = TrialTimer(read_spec(TrialSpec))
timer.imported()
timer.ready()
while timer.step(7):
    pass
print(json.dumps(timer.result(options=["as it is"])))
"""


def test_a_new_benchmark_is_a_file_and_a_line(tmp_path, monkeypatch, quiet):
    (tmp_path / "toy_benchmark.py").write_text(TOY)
    (tmp_path / "toy_trial.py").write_text(TRIAL)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", ":".join(str(path) for path in sys.path if path))
    monkeypatch.setitem(BENCHMARKS, "decoding", "toy_benchmark:Decoding")
    words = {"run": None, "data": None, "baseline": "none", "quick": False, "settings": ()}
    record = run_comparison(quiet, method="decoding", trials=2, steps=3, **words)
    assert [len(trials) for trials in record["greedy"]["trials"].values()] == [2]
    assert [one["step_units"] for one in record["greedy"]["trials"]["penjing"]] == [[7, 7, 7]] * 2
    table = look_up(BENCHMARKS, "decoding", what="method")().table(record, "greedy")
    assert table.headings == ["", "penjing"] and [row[0] for row in table.rows] == ["tokens/s"]
    assert "as it is" in quiet.file.getvalue()
    json.dumps(record)


def test_a_process_that_fails_or_hangs_is_one_line():
    python = [sys.executable, "-c"]
    found = run_json([*python, "import os; print('x'); print('{\"a\":' + os.environ['N'] + '}')"], where="it",
                     environment={"N": "3"})  # fmt: skip
    assert found["a"] == 3 and found["process_seconds"] > 0
    with raises_user_error(where="it", got="OSError: no disk"):
        run_json([*python, "raise OSError('no disk')"], where="it")
    with pytest.raises(UserError, match="0 s"):
        run_json([*python, "import time; time.sleep(60)"], where="it", timeout=0.1)


def test_a_table_is_the_same_in_a_terminal_and_on_a_page(quiet):
    table = ResultTable(["", "a"], [["rate", with_range(spread([3.0, 1.0, 2.0]), "{:.0f}".format)]], "title")
    assert table.markdown() == "|  | a |\n| --- | ---: |\n| rate | 2 (1-3) |\n"
    table.print(quiet)
    assert "2 (1-3)" in quiet.file.getvalue() and "title" in quiet.file.getvalue()
    assert with_range(spread([2.0]), "{:.0f}".format) == "2"
    assert [list(alternate(["a", "b"], number)) for number in range(2)] == [["a", "b"], ["b", "a"]]
