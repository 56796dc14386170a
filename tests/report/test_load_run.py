"""Reading: whatever a run left behind becomes typed records or a sentence, never a crash."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from report_synthetic import put, put_lines, write_folder

from penjing.base.errors import UserError
from penjing.base.untrusted import number, text
from penjing.report.load_runs import read_record


def test_whole_folder(tmp_path: Path) -> None:
    record = read_record([write_folder(tmp_path, bad="")])
    assert record.problems == () and [run.name for run in record.runs] == ["pretrain", "sft"]
    run = record.runs[0]
    assert run.plan.number("steps") == 1000 and run.outcome.number("mfu") == 0.31
    assert record.quickstart and record.quickstart.facts.fields("tokenizer").number("vocabulary") == 4096
    questions = record.runs[1].questions
    assert len(questions) == 16 and {when for when, _, _ in questions} == {"before", "after"}


def test_missing_folder_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        read_record([tmp_path / "nowhere"])


def test_resumed_metrics_keep_the_later_line(tmp_path: Path) -> None:
    lines = [{"step": step, "tokens": step, "loss": 5.0} for step in (10, 20, 30, 40)]
    lines += [{"step": 20, "val_bits_per_byte": 1.5, "tokens": 20}]
    lines += [{"step": step, "tokens": step, "loss": 4.0} for step in (30, 40, 50)]
    lines += [{"step": 20, "val_bits_per_byte": 1.25, "tokens": 20}]
    put_lines(tmp_path / "pretrain" / "metrics.jsonl", lines)
    run = read_record([tmp_path]).runs[0]
    assert run.figures["loss"] == {10: 5.0, 20: 5.0, 30: 4.0, 40: 4.0, 50: 4.0}
    assert run.figures["val_bits_per_byte"] == {20: 1.25}


def test_resumed_samples_keep_the_later_line(tmp_path: Path) -> None:
    base = {"prompt": "p", "language": "en"}
    put_lines(tmp_path / "sft" / "metrics.jsonl", [])
    put_lines(
        tmp_path / "sft" / "samples.jsonl", [base | {"step": 9, "text": "old"}, base | {"step": 9, "text": "p new"}]
    )
    assert read_record([tmp_path]).runs[0].samples == {("p", "en"): {9: " new"}}


def test_half_written_lines_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    put_lines(path, [{"step": 1, "tokens": 1, "loss": 2.0}])
    path.write_bytes(path.read_bytes() + b'[1]\n\n{"step": 2, "lo\xff')
    record = read_record([tmp_path])
    assert record.problems == () and record.runs[0].figures["loss"] == {1: 2.0}


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "1" * 5000, '"x"', "[" * 100_000])
@pytest.mark.parametrize("name", ["quickstart.json", "pretrain/plan.json", "pretrain/run.toml"])
def test_broken_files_become_a_sentence(tmp_path: Path, name: str, content: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    record = read_record([tmp_path])
    assert not any(run.plan or run.settings for run in record.runs)
    assert len(record.problems) == (0 if name.endswith("toml") and content == "" else 1)


def test_fields_of_another_shape(tmp_path: Path) -> None:
    put(
        tmp_path / "quickstart.json",
        {"title": ["x"], "machine": "m", "stages": {"a": 1}, "data": {"warnings": "w"}, "tokenizer": 3},
    )
    put_lines(tmp_path / "sft" / "metrics.jsonl", [{"step": 1}])
    put(tmp_path / "evaluation.json", {"rows": [1, {"stage": "sft", "asked": -3, "right": 9, "chance": 7}]})
    record = read_record([tmp_path])
    assert record.quickstart
    facts = record.quickstart.facts
    assert facts.text("title") == "" and not facts.fields("machine") and facts.items("stages") == ()
    [score] = record.runs[0].questions.values()
    assert (score.total, score.correct, score.chance) == (0, 0, None)


def test_the_last_stage_of_an_evening_answers_after_training(tmp_path: Path) -> None:
    for name in ("pretrain", "sft", "dpo"):
        put_lines(tmp_path / name / "metrics.jsonl", [{"step": 1}])
    rights = {"pretrain": 1, "sft": 2, "dpo": 3}
    rows = [{"stage": stage, "kind": "copy", "asked": 9, "right": right} for stage, right in rights.items()]
    put(tmp_path / "evaluation.json", {"rows": rows})
    questions = read_record([tmp_path]).runs[-1].questions
    assert {when: score.correct for (when, *_), score in questions.items()} == {"before": 1, "after": 3}


def test_runs_are_named_by_what_tells_them_apart(tmp_path: Path) -> None:
    for name in ("a/sft", "b/sft", "b/dpo"):
        put_lines(tmp_path / name / "metrics.jsonl", [{"step": 1, "loss": 1.0}])
    record = read_record([tmp_path / "a", tmp_path / "b", tmp_path / "b" / "dpo"])
    assert [run.name for run in record.runs] == ["a/sft", "b/sft", "b/dpo"] and record.quickstart is None


def test_numbers() -> None:
    assert [number(value) for value in (math.nan, math.inf, True, "3", None, 10**400, 1e300)] == [None] * 7
    assert number(3) == 3.0


def test_texts_lose_what_could_hide_or_break() -> None:
    assert text("a\x1b[31m\u202eb") == "a\ufffd[31m\ufffdb"
    assert text(json.loads('"\\ud800"')) == "?"
    assert text("松\n树 👩\u200d🌾") == "松\n树 👩\u200d🌾"
    assert text(None) == "" and text({"a": 1}) == ""
