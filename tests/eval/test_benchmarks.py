"""Public benchmarks read from files as they are published, and their scores."""

import json

import pyarrow
import pyarrow.parquet
import pytest
import torch
from small_models import small_model
from user_errors import raises_user_error

from penjing.data.tokenizer.train import train_tokenizer
from penjing.eval.minimal_pairs import Blimp, ZhoBlimp
from penjing.eval.scorer import grade
from penjing.eval.scores import paired_change, summary
from penjing.eval.suite import Suite

TEXTS = ["A dog barks and two dogs bark at the old cat.", "两只狗在叫，一只猫坐着。"] * 20
PAIRS = [
    ("agreement", "syntax", "A dog barks.", "A dog bark."),
    ("agreement", "syntax", "Two dogs bark at the cat.", "Two dogs barks at the cat."),
    ("order", "semantics", "The old cat sat.", "Old the cat sat."),
]


def write_jsonl(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_parquet(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 300)


@pytest.fixture(scope="module")
def model(tokenizer):
    return small_model(vocab_size=tokenizer.size, max_position_embeddings=256, sharpen=3)


# --- minimal pairs ----------------------------------------------------------------------------------------------------


def blimp_rows(kind):
    return [
        {"sentence_good": good, "sentence_bad": bad, "UID": uid, "field": field, "pairID": "0"}
        for uid, field, good, bad in PAIRS
        if uid == kind
    ]


def test_blimp_in_each_published_form(tmp_path):
    """One file, a file for each paradigm as in the authors' repository, and the hub's tables."""
    rows = [{"uid": uid, "field": field, "good": good, "bad": bad} for uid, field, good, bad in PAIRS]
    write_jsonl(tmp_path / "one/blimp_some.jsonl", rows)
    for kind in ("agreement", "order"):
        write_jsonl(tmp_path / f"git/blimp/data/{kind}.jsonl", blimp_rows(kind))
        write_parquet(tmp_path / f"hub/blimp/{kind}/train-00000-of-00001.parquet", blimp_rows(kind))
    for folder in ("one", "git", "git/blimp", "hub"):
        found = [(one.kind, one.group, *one.choices, one.answer) for one in Blimp(tmp_path / folder).requests()]
        assert found == [(uid, field, f" {good}", f" {bad}", 0) for uid, field, good, bad in PAIRS], folder


def test_a_paradigm_without_a_name_has_that_of_its_file(tmp_path):
    row = {"sentence_good": "两只狗在叫。", "sentence_bad": "两狗只在叫。"}
    write_jsonl(tmp_path / "zhoblimp/classifier.jsonl", [row])
    write_parquet(tmp_path / "hub/zhoblimp/classifier/train-0.parquet", [row])
    for folder in (tmp_path, tmp_path / "hub"):
        [one] = ZhoBlimp(folder).requests()
        assert (one.kind, one.choices) == ("classifier", (row["sentence_good"], row["sentence_bad"]))


def test_the_files_that_were_looked_for_are_named(tmp_path):
    with raises_user_error(where=tmp_path, wanted="blimp/**/*.parquet"):
        Suite(names=["blimp"], data=tmp_path)
    with raises_user_error(where=tmp_path / "gone"):
        Suite(names=["blimp"], data=tmp_path / "gone")
    with raises_user_error(where="task blimp", next_step="--data DIR"):
        Suite(names=["blimp"])
    write_jsonl(tmp_path / "blimp.jsonl", [{"good": "A dog barks."}])
    with raises_user_error(where=f"{tmp_path / 'blimp.jsonl'}:1"):
        list(Blimp(tmp_path).requests())


def test_a_uniform_model_scores_chance_by_tokens_and_its_own_row_by_sums(tmp_path, tokenizer):
    """By sums a uniform model prefers the sentence of fewer tokens. That score stands in the row of every model."""
    write_jsonl(tmp_path / "blimp.jsonl", [row for kind in ("agreement", "order") for row in blimp_rows(kind)])
    task = Blimp(tmp_path)
    uniform, other = (small_model(vocab_size=tokenizer.size, max_position_embeddings=64) for _ in range(2))
    with torch.no_grad():
        uniform.embed.weight.zero_()
    row = summary("blimp", task, grade(task, task.requests(), uniform, tokenizer))
    tokens = [[len(tokenizer.encode(f" {text}")) for text in pair[2:]] for pair in PAIRS]
    wanted = sum(1.0 if good < bad else 0.5 if good == bad else 0.0 for good, bad in tokens) / 3
    assert row["acc_token"] == row["chance"] == 0.5
    assert row["score"] == row["acc"] == row["uniform"] == pytest.approx(wanted)
    assert row["ties"] == pytest.approx(sum(good == bad for good, bad in tokens) / 3)
    again = summary("blimp", task, grade(task, task.requests(), other, tokenizer))
    assert again["uniform"] == row["uniform"]
    assert [(part["name"], part["asked"]) for part in row["groups"]] == [("syntax", 2), ("semantics", 1)]
    assert [(part["name"], part["asked"]) for part in row["kinds"]] == [("agreement", 2), ("order", 1)]


def test_change_between_two_models_is_paired(tmp_path, tokenizer, model):
    write_jsonl(tmp_path / "blimp.jsonl", [row for kind in ("agreement", "order") for row in blimp_rows(kind)])
    task = Blimp(tmp_path)
    graded = grade(task, task.requests(), model, tokenizer)
    assert paired_change(graded, graded) == (0.0, 0.0)


def test_limit_spreads_over_all(tmp_path):
    rows = [{"good": f"{number} dogs bark.", "bad": "x", "uid": "one"} for number in range(10)]
    write_jsonl(tmp_path / "blimp.jsonl", rows)
    asked = [one.choices[0].split()[0] for one in Suite(names=["blimp"], data=tmp_path, limit=3).requests("blimp")]
    assert asked == ["0", "3", "6"]
