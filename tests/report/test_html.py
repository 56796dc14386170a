"""The page: inert whatever the texts say, whole without any part, self-contained and small."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from report_synthetic import HOSTILE, PARTS, put, put_lines, write_folder

from penjing.base.errors import UserError
from penjing.report import html as page
from penjing.report.html import LARGEST_PAGE_BYTES, write_report

VOID = {"meta", "img", "br", "link", "input", "hr"}
NOT_ALLOWED = {"script", "img", "iframe", "object", "embed", "link", "form", "base", "foreignobject", "audio", "video"}


class Reader(HTMLParser):
    """Collects tags, attributes and visible text, and checks that the elements nest."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, Any]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, Any]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open[-1:]:
            self.words.append(data)


def read(folder: Path) -> tuple[str, Reader, str]:
    source = write_report(folder).read_text(encoding="utf-8")
    reader = Reader()
    reader.feed(source)
    reader.close()
    assert reader.open == []
    words = " ".join(" ".join(reader.words).split())
    assert not re.search(r"\b(NaN|nan|None|undefined|inf|Infinity)\b", words)
    assert "Undefined" not in source
    return source, reader, words


def test_hostile_texts_stay_inert(tmp_path: Path) -> None:
    source, reader, words = read(write_folder(tmp_path))
    assert not reader.tags & NOT_ALLOWED
    assert not [name for name, _ in reader.attributes if name.startswith("on") or name == "srcdoc"]
    assert "alert(1)" in words and "{{ 7*7 }}" in words and "🙂" in words and "\u202e" not in source
    assert source.count("<style>") == source.count("</style>") == 1


def test_self_contained_and_small(tmp_path: Path) -> None:
    source, reader, _ = read(write_folder(tmp_path))
    links = [value for name, value in reader.attributes if name in ("src", "href", "xlink:href", "action")]
    assert links and all(link.startswith("#") for link in links)
    assert "url(" not in source and "@import" not in source
    ids = [value for name, value in reader.attributes if name == "id"]
    assert {link[1:] for link in links} <= set(ids) and len(ids) == len(set(ids))
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in [value for _, value in reader.attributes]
    assert len(source.encode()) < 300_000


def test_says_what_was_made_and_how_well_it_answers(tmp_path: Path) -> None:
    _, _, words = read(write_folder(tmp_path, bad=""))
    assert "A language model of 5.24M parameters was trained from nothing on 16.4M tokens" in words
    assert "answers 68 % of 400 questions right (95 % interval 63 % to 72 %); guessing would get 16 %" in words
    assert "16 min 05 s 16 min 49 s +4.6 %" in words.replace("\u00a0", " ")
    assert "taken up again 2 times" in words and "the model wins with 52.6 % fewer bits" in words
    assert "penjing chat runs/quickstart" in words and "3f" * 32 in words and "答题正确率" in words


def test_long_samples_are_cut(tmp_path: Path) -> None:
    source, _, _ = read(write_folder(tmp_path))
    assert "x" * 300 in source and "x" * 700 not in source


@pytest.mark.parametrize("part", [*PARTS, "pretrain", "sft"])
def test_any_part_may_be_missing(tmp_path: Path, part: str) -> None:
    path = write_folder(tmp_path) / part
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    read(tmp_path)


@pytest.mark.parametrize("part", [name for name in PARTS if name.endswith(".json")])
def test_any_part_may_be_empty_or_null(tmp_path: Path, part: str) -> None:
    write_folder(tmp_path)
    for content in ("{}", '{"machine": null, "stages": null, "rows": null, "tokens": NaN, "seconds": -1, "state": 3}'):
        (tmp_path / part).write_text(content)
        read(tmp_path)


def test_nothing_at_all_is_said_in_sentences(tmp_path: Path) -> None:
    source, _, words = read(tmp_path)
    assert source.count('class="missing"') >= 8
    assert "No stage has finished training in this folder." in words
    with pytest.raises(UserError):
        write_report(tmp_path / "nowhere")


def test_nan_figures_never_show(tmp_path: Path) -> None:
    write_folder(tmp_path, bad="")
    bad = {"step": 5, "tokens": float("nan"), "loss_nats_per_token": float("inf"), "learning_rate": None}
    put_lines(
        tmp_path / "pretrain" / "metrics.jsonl", [bad, {"step": 6, "tokens": 9, "loss_nats_per_token": float("nan")}]
    )
    put(tmp_path / "pretrain" / "outcome.json", {"seconds": float("nan"), "tokens": 1e308, "mfu": float("inf")})
    put(tmp_path / "compression.json", {"zstd_19_bits_per_byte": 0, "model_bits_per_byte": float("nan")})
    read(tmp_path)


def test_a_failed_stage_and_problems_are_said_first(tmp_path: Path) -> None:
    put(
        tmp_path / "quickstart.json",
        {"stages": [{"name": "sft", "state": "failed", "seconds": 3, "note": "disk full"}]},
    )
    (tmp_path / "evaluation.json").write_text("{")
    _, _, words = read(tmp_path)
    assert (
        "The stage sft failed." in words
        and "disk full" in words
        and "evaluation.json is there but cannot be read" in words
    )


def test_a_huge_run_stays_below_the_limit(tmp_path: Path) -> None:
    write_folder(tmp_path)
    bad = HOSTILE * 40
    lines = [
        {"step": step, "prompt": f"{p}{bad}", "text": bad * 3, "language": "zh"}
        for p in range(30)
        for step in range(20)
    ]
    example = {"kind": bad, "language": bad, "question": bad, "answer": bad, "pretrain": bad, "sft": bad}
    rows = [
        {"stage": "sft", "kind": f"{kind}{bad}", "language": f"{language}{bad}", "asked": 9, "right": 3, "chance": 0.1}
        for kind in range(20)
        for language in range(10)
    ]
    put(tmp_path / "evaluation.json", {"rows": rows, "examples": [example] * 200})
    for stage in ("pretrain", "sft"):
        put_lines(tmp_path / stage / "samples.jsonl", lines)
    source, reader, _ = read(tmp_path)
    assert len(source.encode()) < LARGEST_PAGE_BYTES and not reader.tags & NOT_ALLOWED


def test_escaping_is_on_for_every_template() -> None:
    assert page.environment().from_string("{{ x }}").render(x="<b>") == "&lt;b&gt;"


def test_a_chart_without_points_is_left_out(tmp_path: Path) -> None:
    lines = [{"step": step, "tokens": step * 9, "loss_nats_per_token": 2.5, "learning_rate": 1e-3} for step in (1, 2)]
    made = tmp_path / "pretrain" / "metrics.jsonl"
    made.parent.mkdir()
    made.write_text("".join(json.dumps(line) + "\n" for line in lines))
    source, _, words = read(tmp_path)
    assert "no points" not in words and "验证集</figcaption>" not in source  # nothing was validated
    assert "Loss 损失" in words
