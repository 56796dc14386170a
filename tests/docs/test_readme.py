"""The README's commands are real: verbs, options and settings exist, and its figures of shapes are the models'."""

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from penjing.base import config
from penjing.base.interval import wilson
from penjing.cli import app
from penjing.commands.train import resolve_run
from penjing.model.config import ModelConfig
from penjing.model.presets import PRESETS
from penjing.plan.flops import parameters

ROOT = Path(__file__).parents[2]
READMES = ("README.md", "README.zh-CN.md")
ELSEWHERE = ("init_from=", "objective.teacher=")  # settings whose files are not here


def blocks(name):
    return re.findall(r"```sh\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), flags=re.DOTALL)


def lines(name):
    for block in blocks(name):
        for line in block.splitlines():
            if words := shlex.split(line, comments=True):
                yield words


def penjing_calls(name):
    for words in lines(name):
        at = next((i for i, word in enumerate(words) if word.endswith("penjing")), None)
        if at is not None:
            yield words[at + 1 :]


@pytest.mark.parametrize("name", READMES)
def test_commands_exist(name):
    root = get_command(app)
    calls = list(penjing_calls(name))
    assert len(calls) >= 6
    for words in calls:
        command = root
        while getattr(command, "commands", None):
            if command.name == "plan" and words[0] not in command.commands:
                words = ["run", *words]  # `penjing plan STAGE`
            assert words[0] in command.commands, words
            command, words = command.commands[words[0]], words[1:]
        known = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known
        if command.name in ("train", "run"):
            settings = [word for word in words[1:] if "=" in word and not word.startswith(ELSEWHERE)]
            resolve_run(words[0], config.parse_overrides(settings))


@pytest.mark.parametrize("name", READMES)
def test_settings_named_in_tables_exist(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    known = {key for key, _ in config.settings(resolve_run("pretrain").__class__)}
    named = re.findall(r"`((?:model|data|batch|optimizer|schedule|compute|validate|save|track)\.[a-z_]+)", text)
    assert len(named) >= 15
    assert set(named) <= known


@pytest.mark.parametrize("name", READMES)
def test_make_targets_and_variables_exist(name):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for words in lines(name):
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", makefile, flags=re.MULTILINE)
            for word in words[2:]:
                assert re.search(rf"^{word.split('=')[0]} \?=", makefile, flags=re.MULTILINE)


@pytest.mark.parametrize("name", READMES)
def test_shapes_have_the_sizes_stated(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    for preset in PRESETS:
        total = parameters(config.resolve(ModelConfig, {"preset": preset})).total
        assert f"`{preset}` {total / 1e6:.2f} M" in text


def test_the_twins_show_the_same_commands():
    def bare(name):
        return list(lines(name))

    assert bare(READMES[0]) == bare(READMES[1])


@pytest.mark.parametrize("name", READMES)
def test_figures_are_those_on_record(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    record = json.loads((ROOT / re.search(r"results/quickstart[^)]*", text)[0]).read_text(encoding="utf-8"))
    accuracy = record["accuracy"]
    for share in ("all", "en", "zh", "chance", "before_sft"):
        assert f"{accuracy[share] * 100:.0f} %" in text
    assert str(accuracy["questions"]) in text
    assert f"{record['peak_resident_kibibytes'] / 2**20:.1f} GiB" in text
    minutes, seconds = divmod(round(record["wall_seconds"]), 60)
    assert re.search(rf"{minutes} (min|分) {seconds} (s|秒)", text)
    assert f"{record['real_text']['bits_per_byte']:.2f}" in text
    assert f"{record['real_text']['zstd_19_bits_per_byte']:.2f}" in text


@pytest.mark.parametrize("name", READMES)
def test_kinds_of_question_stand_where_the_record_has_them(name):
    """Above, like or below guessing, by the 95 % interval of both languages together."""
    text = (ROOT / name).read_text(encoding="utf-8")
    record = json.loads((ROOT / re.search(r"results/quickstart[^)]*", text)[0]).read_text(encoding="utf-8"))
    kinds = {}
    for row in record["rows"]:
        right, asked, by_chance = kinds.get(row["kind"], (0, 0, 0.0))
        kinds[row["kind"]] = (right + row["right"], asked + row["asked"], by_chance + row["chance"] * row["asked"])
    cells = {1: [], 0: [], -1: []}
    for kind, (right, asked, by_chance) in kinds.items():
        low, high = wilson(right, asked)
        cells[(low > by_chance / asked) - (high < by_chance / asked)].append(f"`{kind}` {right}")
    for cell in cells.values():
        assert not cell or f"| {', '.join(cell)} |" in text


@pytest.mark.parametrize("name", READMES)
def test_links_lead_somewhere(name):
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / name).read_text(encoding="utf-8")):
        if "://" not in target:
            assert (ROOT / target).exists(), target
