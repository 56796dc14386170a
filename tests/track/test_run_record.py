"""A run's folder has one reader, whatever state its files are in."""

import ast
import io
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from rich.console import Console

import penjing
from penjing.base.errors import UserError
from penjing.planner.history import verify
from penjing.track.jsonl import JsonLines
from penjing.track.run_record import GrowingFigures, RunRecord, find_runs
from penjing.workflows.check_run import examine

PLAN = {"steps": 4, "predicted_seconds": 8.0, "tokens": 100, "level": "probe"}
BROKEN = ["", "{", "[]", "null", '"x"', "[" * 100_000]


def test_an_empty_folder_is_an_empty_record(tmp_path):
    record = RunRecord(tmp_path)
    assert not record.exists and not record.is_running
    assert not (record.plan or record.outcome or record.metrics or record.samples or record.checkpoints)
    assert record.last_step == 0


def test_a_folder_that_may_not_be_read_is_no_run(tmp_path, monkeypatch):
    for name in ("closed", "open"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "plan.json").write_text(json.dumps(PLAN))
    is_file = Path.is_file

    def refused(path):
        if path.parent.name == "closed":
            raise PermissionError(path)
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", refused)
    assert [run.folder.path.name for run in find_runs(tmp_path)] == ["open"]


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


class Reader:
    """Follows a file as `watch` does: what it holds must be what the file holds."""

    def __init__(self, folder):
        self.folder, self.growing = folder, GrowingFigures()

    def read(self):
        self.is_new = self.growing.read(RunRecord(self.folder))
        return self.growing.by_name


@settings(max_examples=60, deadline=None)
@given(changes=some.lists(some.tuples(some.sampled_from(["log", "rewind", "read", "cut"]), some.integers(0, 9))))
def test_following_a_file_gives_what_reading_it_gives(tmp_path_factory, changes):
    folder = tmp_path_factory.mktemp("run")
    path, reader = folder / "metrics.jsonl", Reader(folder)
    written, step = JsonLines(path, resume_step=0), 0
    for number, (what, value) in enumerate(changes):
        if what == "log":
            step += 1
            written.log(step, {"seconds": number / 7, "loss": float(value)})
        elif what == "rewind":
            step = min(step, value)
            written.rewind(step)
        elif what == "cut" and path.exists():  # a kill in the middle of a line; the run is resumed
            with open(path, "ab") as stream:
                stream.write(b'{"step": 99, "lo')
            assert reader.read() == RunRecord(folder).figures
            written = JsonLines(path, resume_step=step)
            written.rewind(step)
        else:
            reader.read()
    assert reader.read() == RunRecord(folder).figures


def test_a_line_being_written_comes_with_the_next_reading(tmp_path):
    reader, path = Reader(tmp_path), tmp_path / "metrics.jsonl"
    assert reader.read() == {} and not reader.is_new
    path.write_text('{"step": 1, "loss": 3}\n{"st')
    assert reader.read() == {"loss": {1: 3}} and reader.is_new
    assert reader.read() == {"loss": {1: 3}} and not reader.is_new
    with open(path, "a") as stream:
        stream.write('ep": 2, "loss": 2}\n')
    assert reader.read() == {"loss": {1: 3, 2: 2}} and reader.is_new
    path.unlink()
    assert reader.read() == {} and reader.is_new


def test_only_the_record_reads_what_training_logged():
    root = Path(penjing.__file__).parent
    readers = [path.relative_to(root) for path in root.rglob("*.py") if "read_lines(" in path.read_text()]
    assert sorted(map(str, readers)) == ["base/untrusted.py", "track/jsonl.py", "track/run_record.py"]
    names = ("metrics.jsonl", "samples.jsonl", "incidents.jsonl")
    naming = {path.name for path in root.rglob("*.py") for name in names if f'/ "{name}"' in path.read_text()}
    assert naming == {"run_dir.py"}
    openers = {path.name for path in root.rglob("*.py") if opens_a_run_file(path.read_text())}
    assert openers <= {"run_record.py"}


LOGGED = {"metrics", "samples", "incidents", "outcome"}  # attributes of RunDir
READERS = {"open", "open_regular", "read_text", "read_bytes", "read_json", "read_fields", "read_lines"}


def opens_a_run_file(source):
    """Whether `folder.metrics.read_text()`, `read_json(folder.outcome)` or the like is called."""
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        owners = [call.func.value] if isinstance(call.func, ast.Attribute) else []
        if name in READERS and any(getattr(part, "attr", "") in LOGGED for part in [*owners, *call.args]):
            return True
    return False


@pytest.mark.parametrize(
    "call", ["open(run.metrics)", "folder.outcome.read_text()", "files.read_json(self.dir.samples)"]
)
def test_the_reader_of_sources_sees_each_way(call):
    assert opens_a_run_file(f"def f():\n    return {call}") and not opens_a_run_file(f"print('{call}', record.metrics)")
