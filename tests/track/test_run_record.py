"""A run's folder has one reader, whatever state its files are in."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

import penjing
from penjing.base.errors import UserError
from penjing.planner.history import verify
from penjing.track.run_record import RunRecord
from penjing.workflows.check_run import examine

PLAN = {"steps": 4, "predicted_seconds": 8.0, "tokens": 100, "level": "probe"}
BROKEN = ["", "{", "[]", "null", '"x"', "[" * 100_000]


def test_an_empty_folder_is_an_empty_record(tmp_path):
    record = RunRecord(tmp_path)
    assert not record.exists and not record.is_running
    assert not (record.plan or record.outcome or record.metrics or record.samples or record.checkpoints)
    assert record.last_step == 0


@pytest.mark.parametrize("content", BROKEN)
def test_a_broken_file_is_named(tmp_path, content):
    (tmp_path / "plan.json").write_text(content)
    with pytest.raises(UserError) as error:
        _ = RunRecord(tmp_path).plan
    assert "plan.json" in error.value.line()
    assert not RunRecord(tmp_path, problems := []).plan and problems == [tmp_path / "plan.json"]
    assert [line for line in examine(tmp_path).errors if line.startswith("plan.json")]
    with pytest.raises(UserError, match=r"plan\.json"):
        verify(tmp_path, Console(file=io.StringIO()))


def test_a_folder_in_place_of_a_file_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(UserError, match=r"metrics\.jsonl"):
        _ = RunRecord(tmp_path).metrics
    assert [line for line in examine(tmp_path).errors if line.startswith("metrics.jsonl")]


@pytest.mark.parametrize("field", [*PLAN, None])
@pytest.mark.parametrize("value", [None, "x", -1, [1], {"a": 2}, 1e308])
def test_verify_shows_what_both_files_know(tmp_path, field, value):
    (tmp_path / "plan.json").write_text(json.dumps({**PLAN, field: value} if field else PLAN))
    (tmp_path / "outcome.json").write_text(json.dumps({"seconds": 10.0, "tokens": 100 if field else value}))
    terms = {term.name: term for term in verify(tmp_path, Console(file=io.StringIO()))}
    assert terms["time"].predicted == (8.0 if field != "predicted_seconds" else value if value == -1 else 0.0)


def test_only_the_record_reads_what_training_logged():
    root = Path(penjing.__file__).parent
    readers = [path.relative_to(root) for path in root.rglob("*.py") if "read_lines(" in path.read_text()]
    assert sorted(map(str, readers)) == ["base/untrusted.py", "track/jsonl.py", "track/run_record.py"]
    names = ("metrics.jsonl", "samples.jsonl", "incidents.jsonl")
    naming = {path.name for path in root.rglob("*.py") for name in names if f'/ "{name}"' in path.read_text()}
    assert naming == {"run_dir.py"}
