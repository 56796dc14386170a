"""The page: its own script alone runs whatever the texts say, whole without any part, self-contained and small."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from report_synthetic import FIGURES, HOSTILE, PARTS, put, put_lines, write_folder, write_run

from penjing.base.errors import UserError
from penjing.base.lock import locked
from penjing.plan.prediction_history import compare
from penjing.report import html as page
from penjing.report.charts import SCRIPT
from penjing.report.html import write_report
from penjing.report.load_runs import ReportedRun, read_record
from penjing.report.text_format import plan_rows

VOID = {"meta", "img", "br", "link", "input", "hr"}
NOT_ALLOWED = {"img", "iframe", "object", "embed", "link", "form", "base", "foreignobject", "audio", "video"}


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
        if self.open[-1:] not in (["style"], ["script"]):
            self.words.append(data)


def read(*folders: Path) -> tuple[str, Reader, str]:
    page = write_report(read_record(folders), folders[0] / "report.html")
    source = page.read_text(encoding="utf-8")
    reader = Reader()
    reader.feed(source)
    reader.close()
    assert reader.open == []
    words = " ".join(" ".join(reader.words).split())
    assert not re.search(r"\b(NaN|nan|None|undefined|inf|Infinity)\b", words)
    assert "Undefined" not in source.replace(SCRIPT, "") and source.count("<script") == source.count(SCRIPT) == 1
    return source, reader, words


def charts_of(reader: Reader) -> list[dict[str, Any]]:
    return [json.loads(value) for name, value in reader.attributes if name == "data-chart"]


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
    digest = base64.b64encode(
        hashlib.sha256(source.split('module">')[1].split("</script>")[0].encode()).digest()
    ).decode()
    policy = f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:"
    assert policy in [value for _, value in reader.attributes]
    assert len(source.encode()) < 300_000


def test_says_what_was_made_and_how_well_it_answers(tmp_path: Path) -> None:
    _, _, words = read(write_folder(tmp_path, bad=""))
    assert "A language model of 5.24M parameters was trained from nothing on 16.4M tokens" in words
    assert "answers 68 % of 400 questions right (95 % interval 63 % to 72 %); guessing would get 16 %" in words
    assert "16 min 05 s 16 min 49 s −4.4 %" in words.replace("\u00a0", " ")
    assert "1.010 below zstd -19" in words and "taken up again" in words
    assert "penjing chat runs/quickstart" in words and "3f" * 32 in words and "答题正确率" in words


def test_scores_have_bars_with_their_interval_and_guessing(tmp_path: Path) -> None:
    """33 of 50: Wilson's interval is 52.2 % to 77.6 %."""
    source, _, _ = read(write_folder(tmp_path, bad=""))
    assert 'class="n bar" style="--right: 66.0%; --low: 52.2%; --high: 77.6%; --chance: 25.0%"' in source


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


def test_a_quickstart_that_has_only_begun(tmp_path: Path) -> None:
    put(tmp_path / "quickstart.json", {"stages": []})
    source, _, words = read(tmp_path)
    assert "No stage has finished training in this folder." in words
    assert "<table" not in source and "<figure" not in source


@pytest.mark.parametrize("found", [[], ["notes.txt"], ["data/pretrain.jsonl"], ["run.toml", "MANIFEST.json"]])
def test_a_folder_that_is_no_run_is_a_user_error(tmp_path: Path, found: list[str]) -> None:
    for name in found:
        put(tmp_path / name, {})
    with pytest.raises(UserError) as error:
        read_record([write_run(tmp_path / "run", "chats"), tmp_path])
    assert str(tmp_path) in error.value.line() and "train" in error.value.line()
    with pytest.raises(UserError):
        read_record([tmp_path / "nowhere"])


def test_nan_figures_never_show(tmp_path: Path) -> None:
    write_folder(tmp_path, bad="")
    bad = {"step": 5, "tokens": float("nan"), "loss": float("inf"), "learning_rate": None}
    put_lines(tmp_path / "pretrain" / "metrics.jsonl", [bad, {"step": 6, "tokens": 9, "loss": float("nan")}])
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
    assert "The stage sft failed." in words and "disk full" in words and "evaluation.json cannot be read" in words


def test_a_huge_run_has_no_huge_page(tmp_path: Path) -> None:
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
    assert len(source.encode()) < 500_000 and not reader.tags & NOT_ALLOWED


def test_escaping_is_on_for_every_template() -> None:
    assert page.TEMPLATES.from_string("{{ x }}").render(x="<b>") == "&lt;b&gt;"


def test_a_chart_without_points_is_left_out(tmp_path: Path) -> None:
    lines = [{"step": step, "tokens": step * 9, "loss": 2.5, "learning_rate": 1e-3} for step in (1, 2)]
    made = tmp_path / "pretrain" / "metrics.jsonl"
    made.parent.mkdir()
    made.write_text("".join(json.dumps(line) + "\n" for line in lines))
    source, _, words = read(tmp_path)
    assert "no points" not in words and "验证集</figcaption>" not in source  # nothing was validated
    assert "Loss 损失" in words


@pytest.mark.parametrize("task", FIGURES)
def test_each_kind_of_run_has_its_charts(tmp_path: Path, task: str) -> None:
    source, reader, words = read(write_run(tmp_path / "run", task))
    charts = 3 + len({name.removeprefix("val_") for name in FIGURES[task]})  # 3: rate, norm, speed
    assert source.count('<div class="plot"') == charts
    labels = [value for name, value in reader.attributes if name == "aria-label" and "lowest" in value]
    assert len(labels) == charts and all(" to " in label and "highest" in label for label in labels)
    assert {"predicted 预测", "actual 实测", "first 首", "highest 最高"} <= set(reader.words)
    assert "is finished: 20 steps" in words and "taken up again" in words
    assert len(labels) == len(set(labels))


def test_runs_are_compared_side_by_side(tmp_path: Path) -> None:
    good = write_run(tmp_path / "good", "preference")
    poor = write_run(tmp_path / "poor", "preference", scale=0.9, rate="0.003")
    source, reader, words = read(poor, good)
    accuracies = re.findall(r'<td class="n( marked)?">(\d+\.\d)\u00a0%', source)
    assert accuracies == [("", "72.0"), (" marked", "80.0")]
    assert "optimizer.learning_rate" in words and "0.003" in words  # the one setting that differs
    assert re.search(r'class=" marked">optimizer.learning_rate', source) and "objective.name" not in words
    drawn = [[(line["name"].split(",")[0], line["colour"]) for line in chart["series"]] for chart in charts_of(reader)]
    assert len(drawn) > 5 and {line for lines in drawn for line in lines} == {("poor", 0), ("good", 1)}


def test_the_lowest_loss_is_marked(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, "chats", scale=scale) for name, scale in (("a", 1.0), ("b", 0.5))]
    marked = re.findall(r'<td class="n marked">([^ ]+) <span', read(*runs)[0])
    assert "0.55" in marked and "1.1" not in marked


def test_runs_of_different_tasks_are_not_drawn_over_each_other(tmp_path: Path) -> None:
    _, reader, words = read(write_run(tmp_path / "a", "policy"), write_run(tmp_path / "b", "chats"))
    assert "Reinforcement learning" in words and "Fine-tuning" in words
    charts = charts_of(reader)
    assert {chart["x"] for chart in charts} == {"optimizer steps", "tokens trained on"}
    assert all("run" not in line["name"] for chart in charts for line in chart["series"])


def test_more_runs_than_colours(tmp_path: Path) -> None:
    source, _, words = read(*(write_run(tmp_path / f"run{index}", "chats") for index in range(11)))
    assert "&#34;run7, " in source and "&#34;run8, " not in source and "The first 8 runs are drawn" in words
    assert words.count("run10") >= 3  # named in the tables
    assert len(source.encode()) < 500_000


def test_a_run_in_progress(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", "policy", done=False)
    _, _, words = read(folder)
    assert "not finished: it stopped at step 20" in words and "Reward" in words
    with locked(folder):
        assert "is running, at step 20" in read(folder)[2]


def test_settings_beside_the_recipe(tmp_path: Path) -> None:
    record = read_record([write_run(tmp_path / "run", "chats")])
    run = record.runs[0]
    run.defaults = {**run.settings, "optimizer.learning_rate": "0.5"}
    source = write_report(record, tmp_path / "page.html").read_text()
    assert "optimizer.learning_rate" in source and ">0.5<" in source and "data.format" not in source
    run.defaults = run.settings
    assert 'id="settings"' not in write_report(record, tmp_path / "page.html").read_text()


def test_questions_before_and_after_and_what_was_lost(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", "preference")
    rows = {"before": (18, 11), "after": (2, 12)}
    put(
        folder / "questions.json",
        {
            when: {
                "rows": [
                    {"kind": kind, "language": "en", "asked": 20, "right": right, "chance": 0.5}
                    for kind, right in zip(("tool_use", "sums"), numbers, strict=True)
                ]
            }
            for when, numbers in rows.items()
        },
    )
    _, _, words = read(folder)
    assert "Lost: tool use 18 → 2 of 20." in words and "below guessing; lost" in words
    other = write_run(tmp_path / "other", "preference")
    shutil.copy(folder / "questions.json", other)
    assert "90 % → 10 % lost" in read(folder, other)[2].replace("\u00a0", " ")


def test_incidents_are_counted_by_kind(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", "chats")
    assert "resumed" in read(folder)[2]
    lines = [{"step": step, "kind": "not finite", "loss": None, "in_a_row": 1} for step in (4, 5, 9)]
    put_lines(folder / "incidents.jsonl", [*lines, {"step": 7, "kind": "out of memory", "slots": 6}])
    _, _, words = read(folder)
    assert "not finite in a row 1 3 4 … 9" in words and "out of memory slots 6 1 7" in words


@pytest.mark.parametrize("file", ["ended.json", "outcome.json"])
def test_a_run_that_ended_early_is_compared_with_its_share_of_the_plan(tmp_path: Path, file: str) -> None:
    folder = tmp_path / "run"
    plan = {"steps": 100, "predicted_seconds": 100.0, "tokens": 6400, "tokens_per_second": 64}
    plan |= {"predicted_seconds_low": 80.0, "predicted_seconds_high": 130.0, "predicted_peak_memory_bytes": 2**30}
    done = {"ended": "failed", "why": "hot", "steps_done": 50, "seconds": 60.0, "tokens": 3200, "mfu": 0.21}
    done |= {"tokens_per_second": 53.3, "peak_memory_bytes": 2**29, "training_seconds": 59.0, "resumed": 1}
    put(folder / "plan.json", plan)
    put(folder / file, done)
    verified = {term.name: term.error for term in compare(plan, done)}
    names = {"Time": "time", "Speed": "speed", "Tokens trained on": "tokens", "Peak memory": "peak memory"}
    rows = plan_rows(ReportedRun(folder, []))
    assert {row.name: row.error for row in rows} == {name: verified[old] for name, old in names.items()}
    assert rows[0][1:3] == ("50 s", "1 min 00 s")
    _, _, words = read(folder)
    assert "between 40 s and 1 min 05 s for the steps that it made, and it does" in words
    assert "59 s training" in words and "21 %" in words and "resumed" in words and "no outcome.json" not in words


def test_the_prediction_says_what_it_rests_on(tmp_path: Path) -> None:
    for level, basis in (("L1", "machine profile"), ("L2", "probe of the real step"), ("L3", "re-fit in the run")):
        put(tmp_path / level / "plan.json", {"level": level, "predicted_seconds": 9.0})
        _, _, words = read(tmp_path / level)
        assert f"The prediction rests on the {basis}." in words


def test_names_that_are_half_a_character_can_be_written(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, bad="")
    put_lines(folder / "quickstart.json", [{"tokenizer": {"\ud800": 3}}])
    put_lines(folder / "sft" / "incidents.jsonl", [{"step": 1, "kind": "spike", "\ud800": 3}])
    assert write_report(read_record([folder]), tmp_path / "page.html").is_file()
