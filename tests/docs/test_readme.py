"""README.md and its Chinese twin: short, alike, with figures that are on record. Models are on docs/train.md."""

import json
import os
import re
import shlex

import pytest
from compare.pretrain import overview
from pages import ROOT, calls, literal, parts, text_of
from typer.main import get_command

from penjing.base import config
from penjing.base.accuracy import wilson
from penjing.cli import app
from penjing.model.config import ModelConfig
from penjing.model.presets import PRESETS
from penjing.plan.flops import parameters

READMES = ("README.md", "README.zh-CN.md")
START = "docs/getting_started.md"


def shell(name):
    """The words of each line in code blocks."""
    return [words for line in parts(name)[1] if (words := shlex.split(line, comments=True))]


def the_record(name):
    path = re.search(r"results/quickstart_2-cores[^)]*", text_of(name))[0]
    return json.loads((ROOT / path).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", READMES)
def test_it_is_short(name):
    assert len(text_of(name).splitlines()) < 150


def test_the_twins_show_the_same():
    one, two = map(text_of, READMES)
    assert shell(READMES[0]) == shell(READMES[1])
    assert one.count("\n## ") == two.count("\n## ") and one.count("\n|") == two.count("\n|")
    links = [set(re.findall(r"\]\(([^)]+)\)", text.replace("_zh.png", ".png"))) - set(READMES) for text in (one, two)]
    assert links[0] == links[1]


@pytest.mark.parametrize("name", [*READMES, START])
def test_make_targets_and_variables_exist(name):
    makefile = text_of("Makefile")
    for words in shell(name):
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", makefile, flags=re.MULTILINE)
            for word in words[2:]:
                assert re.search(rf"^{word.split('=')[0]} \?=", makefile, flags=re.MULTILINE)


@pytest.mark.parametrize("name", READMES)
def test_its_table_has_every_command(name):
    rows = re.findall(r"^\| (`penjing[^|]+) \| ([^|]+) \|", text_of(name), flags=re.MULTILINE)
    named = [word for cell, _ in rows for word in re.findall(r"`(?:penjing )?(\w+)`", cell)]
    commands = {name: command for name, command in get_command(app).commands.items() if not command.hidden}
    assert sorted(named) == sorted(commands)
    (plan,) = (words for cell, words in rows if "plan" in cell)
    assert {*re.findall(r"`([\w-]+)`", plan), "run"} == set(commands["plan"].commands)


@pytest.mark.parametrize("name", READMES)
def test_the_reading_path_is_in_order(name):
    listed = re.findall(r"^\d+\. `([^`]+)`", text_of(name), flags=re.MULTILINE)
    assert tuple(listed) == literal("tests/floors/test_reading_path.py", "READING_PATH")


def test_the_plan_is_what_is_printed(capsys):
    (words,) = [words for words in calls(READMES[0]) if words[:2] == ["plan", "pretrain"]]
    app(words, standalone_mode=False)
    said = " ".join(capsys.readouterr().out.replace(os.environ["PENJING_HOME"], "~/.penjing").split())
    plans = [re.findall(r"```text\n(.*?)```", text_of(name), flags=re.DOTALL) for name in READMES]
    assert plans[0] == plans[1]
    for line in plans[0][0].splitlines():
        assert " ".join(line.split()) in said


def test_shapes_have_the_sizes_stated():
    text = text_of("docs/train.md").replace("\n", " ")
    for preset in PRESETS:
        total = parameters(config.resolve(ModelConfig, {"preset": preset})).total
        assert f"`{preset}` {total / 1e6:.2f} M" in text


@pytest.mark.parametrize("name", [*READMES, START])
def test_figures_are_those_on_record(name):
    text, record = text_of(name), the_record(name)
    accuracy = record["accuracy"]
    for share in ("all", "chance", "before_sft", *(("en", "zh") if name in READMES else ())):
        assert f"{accuracy[share] * 100:.0f} %" in text
    assert str(accuracy["questions"]) in text
    minutes, seconds = divmod(round(record["wall_seconds"]), 60)
    assert re.search(rf"{minutes} (min|分) {seconds} (s|秒)", text)
    if name in READMES:
        assert f"{record['peak_resident_kibibytes'] / 2**20:.1f} GiB" in text
    else:
        assert f"{record['real_text']['bits_per_byte']:.2f}" in text
        assert f"{record['real_text']['zstd_19_bits_per_byte']:.2f}" in text
        assert f"{record['real_text']['wall_seconds']:.0f} s" in text


@pytest.mark.parametrize("name", READMES)
def test_measured_figures_are_those_on_record(name):
    def record(begin):
        (path,) = re.findall(rf"results/{begin}[^)]*", text_of(name))
        return json.loads((ROOT / path).read_text(encoding="utf-8"))

    (row,) = overview([("", "", record("bench_train"), ("path", "step"))]).rows
    figures = [row[column] for column in (3, 5, 6, 7)]
    figures.append(f"{record('speed_gpu')['cases']['26M']['tokens_per_second']['median'] / 1e6:.2f}M")
    medians = record("decode")["26m"]["medians"]
    for engine in ("penjing-bf16", "llama.cpp-f16"):
        figures += [f"{medians[engine][f'last_rate_{batch}']['median']:,.0f}" for batch in (1, 16)]
    counts = record("reliability")["files"]["kills"]["counts"]
    figures.append(str(sum(count for what, count in counts.items() if "runs killed" in what)))
    for figure in figures:
        assert figure.removesuffix(" x") in text_of(name), figure


def test_each_processor_has_the_figures_of_its_run():
    text = text_of(START)
    (record,) = re.findall(r"results/quickstart_by_processor_[-\d]+\.json", text)
    for run in json.loads((ROOT / record).read_text(encoding="utf-8"))["runs"]:
        minutes, seconds = divmod(run["wall_seconds"], 60)
        assert f"{minutes} min {seconds} s | {run['sft_steps']:,} | {run['right_percent_of_640']} %" in text


def test_kinds_of_question_stand_where_the_record_has_them():
    """Above, like or below guessing, by the 95 % interval of both languages together."""
    kinds = {}
    for row in the_record(START)["rows"]:
        right, asked, by_chance = kinds.get(row["kind"], (0, 0, 0.0))
        kinds[row["kind"]] = (right + row["right"], asked + row["asked"], by_chance + row["chance"] * row["asked"])
    cells = {1: [], 0: [], -1: []}
    for kind, (right, asked, by_chance) in kinds.items():
        low, high = wilson(right, asked)
        cells[(low > by_chance / asked) - (high < by_chance / asked)].append(f"`{kind}` {right}")
    for cell in cells.values():
        assert not cell or f"| {', '.join(cell)} |" in text_of(START)
