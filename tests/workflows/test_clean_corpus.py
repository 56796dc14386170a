"""The command `penjing data clean`, its table and its page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penjing.base.errors import UserError
from penjing.cli import app
from penjing.data.corpus import Corpus, DataSettings
from penjing.report.charts import SCRIPT


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def invoke(*words: object) -> str:
    result = CliRunner().invoke(app, ["data", "clean", *map(str, words)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_clean_and_train_on_it(tmp_path: Path) -> None:
    texts = ["One \u200bsmall text.", "<b>Markup & more</b>", "One small text.", "另一个文本。"]
    file = write(tmp_path / "a.jsonl", *({"text": text, "topic_note": 1} for text in texts))
    out = tmp_path / "out"
    shown = invoke(file, "--out", out, "--pipeline", "unicode", "--pipeline", "exact_duplicates")
    assert "4 records" in shown
    assert "3 kept" in shown
    records = list(Corpus(DataSettings(train=(str(out),))).records())
    assert [record.text for record in records] == ["One small text.", "<b>Markup & more</b>", "另一个文本。"]
    page = (out / "_cleaning" / "report.html").read_text(encoding="utf-8")
    assert page.count("<script") == page.count(SCRIPT) == 1
    assert "http" not in page.replace("http-equiv", "").replace(SCRIPT, "")
    for part in ("exact_duplicates", f"{file}:1", "[rules.unicode]", "field topic_note", "75.00%"):
        assert part in page
    assert "nothing changed" in invoke(file, "--out", out, "--pipeline", out / "_cleaning" / "pipeline.toml")


def test_a_dry_run_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = write(tmp_path / "a.jsonl", {"text": "one"}, {"text": "one"})
    assert "1 dropped" in invoke(file, "--dry-run", "--pipeline", "exact_duplicates")
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_each_kind_has_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder / "a.jsonl", {"text": "one"})
    write(folder / "b.jsonl", {"prompt": "Why?", "response": "So."}, {"prompt": "Why?", "response": "So."})
    (folder / "broken.jsonl").write_text("{\n")
    out = tmp_path / "out"
    invoke(folder, "--out", out, "--pipeline", "exact_duplicates")
    assert json.loads((out / "documents/documents-00000.jsonl").read_text()) == {"text": "one"}
    assert len((out / "chats/chats-00000.jsonl").read_text().splitlines()) == 1


def test_other_kinds_of_records_leave_nothing_of_an_earlier_run(tmp_path: Path) -> None:
    text = write(tmp_path / "a.jsonl", {"text": "one"})
    chat = write(tmp_path / "b.jsonl", {"prompt": "Why?", "response": "So."})
    out = tmp_path / "out"
    for files, wanted in (
        ([text], ["documents-00000.jsonl"]),
        ([text, chat], ["chats/chats-00000.jsonl", "documents/documents-00000.jsonl"]),
        ([chat], ["chats-00000.jsonl"]),
    ):
        invoke(*files, "--out", out, "--pipeline", "unicode")
        found = sorted(str(path.relative_to(out)) for path in out.rglob("*.jsonl") if "_cleaning" not in path.parts)
        assert found == wanted
    (out / "mine.jsonl").write_text("{}\n")
    invoke(text, chat, "--out", out, "--pipeline", "unicode")
    assert (out / "mine.jsonl").is_file(), "only what it wrote goes"


def test_columns_name_the_fields(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", {"ask": "Why?", "reply": "So.", "text": "not read"})
    out = tmp_path / "out"
    invoke(file, "--out", out, "--columns", "ask:question,reply:answer", "--workers", 1)
    turns = json.loads((out / "chats-00000.jsonl").read_text())["messages"]
    assert [turn["content"] for turn in turns] == ["Why?", "So."]
    invoke(file, "--out", out, "--columns", "reply:text", "--pipeline", "unicode")
    assert json.loads((out / "documents-00000.jsonl").read_text()) == {"text": "So."}
    assert len(list(out.glob("*.jsonl"))) == 1


def test_tokens_of_each_source_are_estimated(tmp_path: Path) -> None:
    english = write(tmp_path / "en.jsonl", *[{"text": "word " * 80}] * 2)
    chinese = write(tmp_path / "zh.jsonl", {"text": "山水" * 80})
    out = tmp_path / "out"
    shown = invoke(english, chinese, "--out", out, "--pipeline", "exact_duplicates")
    page = (out / "_cleaning" / "report.html").read_text(encoding="utf-8")
    assert re.search(r"en\.jsonl .* 200 +100\n", shown) and re.search(r"zh\.jsonl .* 100 +100\n", shown)
    assert ">200<" in page and page.count(">100<") >= 3


@pytest.mark.parametrize("options", [[], ["--out", "x", "--dry-run"]])
def test_either_a_folder_or_a_dry_run(tmp_path: Path, options: list[str]) -> None:
    file = write(tmp_path / "a.jsonl", {"text": "one"})
    with pytest.raises(UserError):
        invoke(file, *options)


def test_a_wrong_rule_is_named(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", {"text": "one"})
    with pytest.raises(UserError, match="near_duplicates"):
        invoke(file, "--dry-run", "--pipeline", "near_duplicate")
