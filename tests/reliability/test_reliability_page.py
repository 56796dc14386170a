"""docs/reliability.md says what results/ hold, and every promise has its tests."""

import json
import re
from pathlib import Path

import pages
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script():
    return pages.script("benchmarks/reliability.py")


def test_the_page_is_what_the_newest_results_render_to(script):
    page = script.PAGE.read_text(encoding="utf-8")
    assert script.render(page, script.newest("reliability"), script.newest("saving")) == page


def test_what_was_measured_is_told_and_what_was_not_is_said_to_be_missing(script):
    saving = {
        "date": "2026-01-02",
        "machine": {"cpu": "A processor", "cores": 2, "device": "cpu"},
        "model": "tiny",
        "saving": {
            "every": 50,
            "seconds_without": [0.2, 0.21, 0.22],
            "seconds_with": [0.201, 0.212, 0.22],
            "still_share": [0.001, 0.002, 0.004],
            "share": {"median": 0.005, "low": 0.0, "high": 0.0095},
        },
        "signal_seconds": {"SIGTERM": [1.0, 3.0, 2.0]},
    }
    told = script.table(script.newest("reliability"), saving)
    assert "0.50% of step time (0.00% to 0.95% in 3 rounds), 0.20% standing still" in told
    assert "a save every 50 steps of 210 ms; tiny on 2 cores" in told
    assert "cores, A processor, 2026-01-02" in told
    assert "SIGTERM: 2.00 s (1.00 to 3.00, 3 times); tiny on 2 cores" in told
    assert script.table(script.newest("reliability"), None).count("| not measured |") == 2


def test_every_promise_has_tests_and_every_file_of_tests_a_promise(script):
    promised = {name for _, name in script.PROMISES}
    there = {path.stem.removeprefix("test_") for path in script.TESTS.glob("test_*.py")} - {"reliability_page"}
    assert promised == there


def test_what_passed_is_recorded_at_once_and_not_run_again(script, tmp_path, monkeypatch):
    ran, broken = [], {"order"}
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(script, "commit", lambda: "abc")
    (tmp_path / "results").mkdir()

    def run_file(name, deep):
        ran.append(name)
        if name in broken:
            return None
        return {
            "passed": 1,
            "size": "deep" if deep else "usual",
            "commit": script.commit(),
            "counts": {"runs": len(ran)},
        }

    monkeypatch.setattr(script, "run_file", run_file)
    with pytest.raises(SystemExit, match="order"):
        script.run(["kills", "order", "data"], 1, True, False)
    assert ran == ["kills", "order", "data"]
    broken.clear()
    script.run(["kills", "order", "data"], 1, True, False)
    assert ran[3:] == ["order"]
    (record,) = (tmp_path / "results").iterdir()
    assert set(json.loads(record.read_text())["files"]) == {"kills", "order", "data"}
    script.run(["kills"], 1, False, False)  # the small counts do not replace the large ones
    assert len(ran) == 4
    monkeypatch.setattr(script, "commit", lambda: "def")
    script.run(["kills"], 1, True, False)
    script.run(["kills"], 1, True, True)
    assert ran[4:] == ["kills", "kills"]


def test_the_sizes_are_told_apart(script):
    files = {"kills": {"passed": 6, "size": "deep", "counts": {}}, "order": {"passed": 18, "counts": {}}}
    files["data"] = {"passed": 9, "size": "usual", "counts": {}}
    files["bench/test_mutants"] = {"passed": 2, "skipped": 1, "size": "deep", "seconds": 60, "counts": {"found": 50}}
    told = script.table({"files": files, "date": "2026-01-02", "machine": "2 cores"}, None).splitlines()
    (kills,) = (line for line in told if "/test_kills.py" in line)
    (data,) = (line for line in told if "/test_data.py" in line)
    (order,) = (line for line in told if "/test_order.py" in line)
    (mutants,) = (line for line in told if "tests/bench/test_mutants.py" in line)
    assert "| `make test-deep` |" in kills and "| `make test` |" in data and "| - |" in order
    assert "2 passed, 1 skipped | `make test-deep` | found: 50 |" in mutants


def test_counts_of_one_test_add_up(script):
    lines = [{"name": "runs", "value": 3}, {"name": "files", "value": 1}, {"name": "runs", "value": 4}]
    assert script.summed(lines) == {"files": 1, "runs": 7}


def test_counts_of_one_thing_in_several_groups_are_told_as_their_sum(script):
    counts = {"dpo: kills": 3, "sft: kills": 1_000, "dpo: runs": 2, "sft: runs": 2, "points": 7, "a: b: c": 1}
    told = script.told_counts(counts)
    assert told == "c: 1 (a: b); kills: 1,003 (dpo 3, sft 1,000); points: 7; runs: 4 (dpo, sft: 2 each)"


def test_the_newest_results_reach_the_goals(script):
    """The counts that were set out to be reached, from the last full run."""
    counts = {name: facts["counts"] for name, facts in script.newest("reliability")["files"].items()}
    assert script.newest("reliability")["files"]["kills"].get("size") != "usual"  # `make test` has fewer
    runs = sum(value for name, value in counts["kills"].items() if name.endswith("gone on with"))
    assert runs >= 200
    assert counts["corruption"]["corruptions found"] >= 600
    assert min(value for name, value in counts["order"].items() if "combinations" in name) >= 24
    assert counts["untrusted"]["malicious weights refused"] >= 30
    assert sum(value for name, value in counts["control_tokens"].items()) >= 2000
    assert all(value >= 30 for name, value in counts["data"].items() if "handcrafted" in name)
    assert all(value >= 60 for name, value in counts["data"].items() if "bad files" in name)
    saving = script.newest("saving")
    if saving is not None:
        assert not saving["quick"]
        assert max(max(taken) for taken in saving["signal_seconds"].values()) <= 5
    assert sum(value for name, value in counts["data"].items() if name.startswith("generated")) >= 2000


def test_the_settings_the_page_names_are_there(script):
    from dataclasses import fields

    from penjing.train.config import DataSettings

    page = script.PAGE.read_text(encoding="utf-8")
    assert "data.max_bad_fraction" in page and "max_bad_fraction" in {field.name for field in fields(DataSettings)}
    assert re.search(r"20 seconds.*45", page, re.DOTALL)
    from penjing.data.formats.files import LARGEST_LINE_BYTES
    from penjing.train import nonfinite_guard as guard
    from penjing.train import watchdog

    assert (watchdog.SILENT_SECONDS, watchdog.STUCK_SECONDS) == (20.0, 45.0)
    assert (guard.IN_A_ROW, guard.ROLLBACKS, guard.WINDOW) == (3, 3, 64)
    assert LARGEST_LINE_BYTES == 64 << 20
