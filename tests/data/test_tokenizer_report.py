"""What a tokenizer makes of texts: counts that can be checked by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penjing.cli import app
from penjing.data.clean.language import script_of
from penjing.data.clean.text_scan import scan
from penjing.data.tokenizer.report import measure
from penjing.data.tokenizer.tokenizer import Tokenizer

TEXTS = ["a cat sat", "从前有座山，山里有座庙。", "the end"]


def test_each_script_is_counted(tokenizer: Tokenizer) -> None:
    counts = measure(tokenizer, TEXTS)["compression"]
    latin, chinese = counts["Latin"], counts["Chinese"]
    assert [latin[name] for name in ("texts", "bytes", "characters", "words")] == [2, 16, 16, 5]
    assert [chinese[name] for name in ("texts", "bytes", "characters", "words")] == [1, 36, 12, 10]
    assert latin["tokens"] == len(tokenizer.encode(TEXTS[0])) + len(tokenizer.encode(TEXTS[2]))
    assert chinese["tokens_per_word"] == len(tokenizer.encode(TEXTS[1])) / 10


def test_unused_ids_are_those_that_no_text_has(tokenizer: Tokenizer) -> None:
    used = {index for text in TEXTS for index in tokenizer.encode(text)}
    unused = sorted(set(range(9, tokenizer.size)) - used)
    report = measure(tokenizer, TEXTS)
    assert report["unused_ids"] == len(unused)
    assert report["unused"] == [tokenizer.token(index) for index in unused[:12]]
    assert measure(tokenizer, [])["unused_ids"] == 0


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("Hello", "Latin"),
        ("你好 ok", "Chinese"),
        ("こんにちは世界", "Japanese"),
        ("привет", "other"),
        ("", "other"),
    ],
)
def test_scripts(text: str, script: str) -> None:
    assert script_of(scan(text)) == script


def test_the_command(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "t")
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS), encoding="utf-8")
    words = ["tokenizer", "report", str(tmp_path / "t"), str(tmp_path / "texts.txt")]
    facts = json.loads(CliRunner().invoke(app, [*words, "--json"]).output)
    assert facts["ids"] == 1200 and facts["parameters"]["512"] == {"tied": 512 * 1200, "untied": 2 * 512 * 1200}
    assert sum(part["texts"] for part in facts["compression"].values()) == 1
    assert all(row["source"] for row in facts["published"])
    shown = CliRunner().invoke(app, words).output
    assert "1,200 ids" in shown and "arXiv:2407.21783" in shown
    assert json.loads(CliRunner().invoke(app, [*words[:3], "--json"]).output)["compression"] == {}
