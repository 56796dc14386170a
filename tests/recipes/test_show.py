"""What is shown of data before anything is trained on it."""

import io
from importlib.metadata import PackageNotFoundError

import pytest
from rich.console import Console

from penjing.base.errors import UserError
from penjing.recipes.show import corpus_report, doctor, tokens
from penjing.text.tokenizer import train_tokenizer


def report(*paths):
    console = Console(file=io.StringIO(), width=1000)
    corpus_report(list(paths), console)
    return console.file.getvalue()


def test_a_folder_with_data_of_every_kind_has_a_report_on_each(toy):
    said = report(toy)
    headings = [line for line in said.splitlines() if line.startswith(("documents: ", "chats: ", "pref", "prompts: "))]
    assert headings == [
        f"chats: {toy / 'sft.jsonl'}",
        f"documents: {toy / 'pretrain.jsonl'}",
        f"preferences: {toy / 'dpo.jsonl'}",
        f"prompts: {toy / 'eval.jsonl'}, {toy / 'rl.jsonl'}",
    ]
    for figure in (
        "num documents: 400",
        "num chats: 200",
        "num pairs: 20",
        "fields: gt: 20",
        "fields: must_contain: 2",
    ):
        assert figure + "\n" in said
    assert report(toy / "rl.jsonl", toy / "sft.jsonl") == report(toy / "sft.jsonl", toy / "rl.jsonl")


def test_what_is_broken_is_counted_and_quoted_as_it_stands(tmp_path):
    path = tmp_path / "my[old].jsonl"
    path.write_text('{"text": "one"}\n{"text": ""}\n{"text" [/x]}\n{"text": "two"}\n')
    said = report(path)
    assert f"documents: {path}\n" in said
    assert "num documents: 2\nnum broken: 1\nleft out: the text is empty: 1\n" in said
    assert "warning: 25 % of documents are left out: the text is empty." in said
    assert f"1 of 4 records are broken, too many to train on as they are; the first: {path}:3: broken JSON" in said
    assert "[/x]" in said


def test_a_file_of_another_kind_is_named(tmp_path):
    (tmp_path / "package.json").write_text('{"name": "x"}')
    with pytest.raises(UserError, match=r"package\.json:1: not a known kind of record"):
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
    doctor(console)
    said = console.file.getvalue()
    assert 'wandb                not installed; pip install "penjing[wandb]"' in said
    assert "transformers         1.2.3" in said


def test_half_a_character_is_no_text_to_cut(tmp_path):
    train_tokenizer(["so it is, and so it was"] * 9, 300).save(tmp_path)
    with pytest.raises(UserError, match="not valid UTF-8"):
        tokens(tmp_path, "a\udce4", Console(file=io.StringIO()))
