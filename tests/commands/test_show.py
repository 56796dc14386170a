"""What is shown of data before anything is trained on it."""

import io
import json
import re
from importlib.metadata import PackageNotFoundError

import torch
from rich.console import Console
from typer.testing import CliRunner
from user_errors import raises_user_error

from penjing.base.code_help import field_comments
from penjing.base.errors import UserError
from penjing.cli import app
from penjing.data.tokenizer.train import train_tokenizer
from penjing.kernels import ops
from penjing.model.lora import Lora
from penjing.recipes import RECIPES
from penjing.train.config import Run
from penjing.workflows.check_machine import check_machine
from penjing.workflows.data_look import data_look
from penjing.workflows.tokenizers import show
from penjing.workflows.train import named_run


def report(*paths, columns=(), terminal=False):
    console = Console(file=io.StringIO(), width=1000, force_terminal=terminal, color_system="256" if terminal else None)
    data_look(list(paths), console, columns=columns, tokenizer=None, as_json=False)
    return console.file.getvalue()


def cells(said, name):
    """What stands behind a name, in the order of the lines that begin with it."""
    rows = [re.split(r"  +", line.strip()) for line in said.splitlines()]
    return [row[1] for row in rows if row[0] == name and len(row) > 1]


def test_a_folder_with_data_of_every_kind_has_a_report_on_each(toy):
    said = report(toy)
    headings = [line for line in said.splitlines() if line.startswith(("documents: ", "chats: ", "pref", "prompts: "))]
    assert headings == [
        f"chats: {toy / 'sft.jsonl'}",
        f"documents: {toy / 'pretrain.jsonl'}",
        f"preferences: {toy / 'dpo.jsonl'}",
        f"prompts: {toy / 'eval.jsonl'}",
        f"prompts: {toy / 'rl.jsonl'}",
    ]
    for name, value in (
        ("documents", "400"),
        ("chats", "200"),
        ("records", "20"),
    ):
        assert cells(said, name) == [value]
    sizes = [f"{len((toy / name).read_text().splitlines())}" for name in ("eval.jsonl", "rl.jsonl")]
    assert cells(said, "prompts") == sizes
    assert {"gt 20", "must_contain 2"} <= set(", ".join(cells(said, "other fields")).split(", "))
    assert report(toy / "rl.jsonl", toy / "sft.jsonl") == report(toy / "sft.jsonl", toy / "rl.jsonl")


def test_figures_have_names_units_and_one_row_for_quantiles(toy, tmp_path):
    lengths = (1, 10, 100, 1000)
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": chr(97 + i) * size}) + "\n" for i, size in enumerate(lengths)))
    said = report(path)
    heading, row = (
        re.split(r"  +", line.strip()) for line in said.splitlines() if line.startswith(("length ", "document,"))
    )
    assert dict(zip(heading, row, strict=True)) == {
        "length": "document, bytes",
        "min": "1",
        "5 %": "1",
        "25 %": "1",
        "median": "10",
        "75 %": "100",
        "95 %": "100",
        "max": "1,000",
    }
    assert cells(said, "size") == ["1.1 kB"]
    assert cells(said, "languages, by script") == ["Latin 100.0 %"]
    assert not re.search(r"None|\bnum\b|\bp5\b|: min\b", said + report(toy))


def test_what_is_broken_is_counted_and_quoted_as_it_stands(tmp_path):
    path = tmp_path / "my[old].jsonl"
    path.write_text('{"text": "one"}\n{"text": ""}\n{"text" [/x]}\n{"text": "two"}\n')
    said = report(path)
    assert f"documents: {path}\n" in said
    assert (cells(said, "documents"), cells(said, "broken records")) == (["2"], ["1"])
    assert cells(said, "left out") == ["1: the text is empty"]
    assert "warning: 25 % of documents are left out: the text is empty." in said
    assert f"1 of 4 records are broken, too many to train on as they are; the first: {path}:3: broken JSON" in said
    assert "[/x]" in said


def test_the_mask_is_seen_with_colours_and_without(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"ask": "Who [b]?", "reply": "Mia"}\n')
    said = report(path, columns=["ask:question", "reply:answer"])
    assert "\u27e6Mia<|im_end|>\u27e7" in said and said.count("\u27e6") == 2  # with the legend
    assert "<|im_start|>user\nWho [b]?<|im_end|>" in said and "ask as question, reply as answer" in said
    coloured = report(path, columns=["ask:question", "reply:answer"], terminal=True)
    assert "\u27e6" not in coloured and "\x1b[32mMia\x1b[0m" in coloured and "\x1b[2mWho [b]?\x1b[0m" in coloured


def test_json_is_one_object(tmp_path, penjing):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "Mia \\ud83d\\ude42"}\n{"text": 3}\n')
    (tmp_path / "b.jsonl").write_text('{"riddle": 1}\n')
    done = penjing("data", "look", path, tmp_path / "b.jsonl", "--json")
    found = json.loads(done.stdout)
    assert [group["records"] for group in found["groups"]] == [{"good": 1, "bad": 1, "left_out": 0}]
    assert found["groups"][0]["problems"][0]["line"] == 2 and len(found["not_understood"]) == 1
    done = penjing("data", "look", tmp_path / "b.jsonl", "--json", check=False)
    assert done.returncode == 2 and json.loads(done.stdout)["groups"] == []


def test_a_file_of_another_kind_is_named(tmp_path):
    (tmp_path / "package.json").write_text('{"name": "x"}')
    with raises_user_error(where="package.json:1", got="the fields name"):
        report(tmp_path)


def test_a_folder_of_wandb_s_runs_is_not_its_library(tmp_path, monkeypatch):
    def version(name):
        if name == "wandb":
            raise PackageNotFoundError(name)
        return "1.2.3"

    (tmp_path / "wandb").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("importlib.metadata.version", version)
    console = Console(file=io.StringIO(), width=200)
    check_machine(console)
    said = console.file.getvalue()
    assert 'wandb                not installed; pip install "penjing[wandb]"' in said
    assert "transformers         1.2.3" in said
    assert all(each.op in said and each.backend in said for each in ops.report(torch.device("cpu"), torch.float32))


def test_half_a_character_is_no_text_to_cut(tmp_path):
    train_tokenizer(["so it is, and so it was"] * 9, 300).save(tmp_path)
    with raises_user_error(where="the text", got="a\\udce4"):
        show(tmp_path, "a\udce4", Console(file=io.StringIO()))


def test_settings_go_with_a_recipe_only(tmp_path):
    for what in ("models", str(tmp_path)):
        done = CliRunner().invoke(app, ["show", what, "model=64m"])
        assert isinstance(done.exception, UserError) and done.exception.where == what
    assert CliRunner().invoke(app, ["show", "pretrain", "model=64m"]).exit_code == 0


def test_a_recipe_is_shown_with_meanings_and_trains_as_printed(tmp_path):
    printed = tmp_path / "run.toml"
    printed.write_text(CliRunner().invoke(app, ["show", "dpo", "lora.rank=8"]).stdout)
    assert named_run(str(printed), {}) == named_run("dpo", {"lora": {"rank": 8}})
    for line, meaning in (("rank = 8", field_comments(Lora)["rank"]), ("seed = 1", field_comments(Run)["seed"])):
        assert f"{line}  # {meaning}\n" in printed.read_text()
    shown = CliRunner().invoke(app, ["show", "recipes"]).stdout.splitlines()
    assert [line.split()[0].partition(":")[0] for line in shown if not line.startswith(" ")] == list(RECIPES)
