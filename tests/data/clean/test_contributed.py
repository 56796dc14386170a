"""CONTRIBUTING.md's cleaning rule is one file and one line, and it acts on all that reads a run's data."""

import json
from collections import Counter

import contributing
import pytest
from typer.testing import CliRunner

import penjing.data.clean
from penjing.base.errors import UserError
from penjing.cli import app
from penjing.data.clean.pipeline import Pipeline
from penjing.data.corpus import Corpus, DataSettings
from penjing.data.formats import Document

TEXT = "this one is said quietly, and it is long enough to be learned"


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def train(recipe, *words):
    return CliRunner().invoke(app, ["train", recipe, *words])


def settings(small_run, data):
    return [word for word in small_run if not word.startswith("data.train")] + [f"data.train={data}"]


def test_its_row_leaves_out_records_of_a_run_by_its_name(tmp_path, small_run, monkeypatch):
    quiet = [{"text": f"{TEXT} {number} times"} for number in range(300)]
    loud = [{"text": f"NOBODY HEARS {number} OF THESE"} for number in range(30)]
    mixed = jsonl(
        tmp_path / "mixed.jsonl", [row for pair in zip(quiet, loud, strict=False) for row in pair] + quiet[30:]
    )
    name = contributing.add("Add a cleaning rule", penjing.data.clean, penjing.data.clean.RULES, tmp_path, monkeypatch)
    words = ["max_steps=2", f"out={tmp_path / 'run'}", f"data.clean={name}"]
    done = train("pretrain", *settings(small_run, mixed), *words)
    assert done.exit_code == 0, done.output
    assert f"30 left out ({name}: in capital letters: 30)" in " ".join(done.output.split())
    listed = [json.loads(line) for line in (tmp_path / "run/bad_records.jsonl").read_text().splitlines()]
    assert [entry["line"] for entry in listed] == list(range(2, 61, 2)) and listed[0]["kind"] == "left out"
    other = jsonl(tmp_path / "quiet.jsonl", quiet)
    done = train("pretrain", *settings(small_run, other), "max_steps=2", f"out={tmp_path / 'other'}")
    assert done.exit_code == 0, done.output
    for file in ("tokenizer/tokenizer.json", "shards/train/tokens.bin", "shards/validation/tokens.bin"):
        assert (tmp_path / "run" / file).read_bytes() == (tmp_path / "other" / file).read_bytes()


def test_its_setting_is_set_in_a_file(tmp_path, monkeypatch):
    name = contributing.add("Add a cleaning rule", penjing.data.clean, penjing.data.clean.RULES, tmp_path, monkeypatch)
    pipeline = tmp_path / "pipeline.toml"
    documents = [Document(text=text, source="a", line=1) for text in ("Only NOW is loud", "NOBODY HEARS")]
    for limit, kept in ((0.1, []), (0.5, documents[:1]), (1.0, documents)):
        pipeline.write_text(f"[rules.{name}]\nmax_capitals = {limit}\n")
        clean = Pipeline.load([str(pipeline)]).make(Counter())
        assert [record for record in map(clean, documents) if not isinstance(record, str)] == kept
    pipeline.write_text(f"[rules.{name}]\nmax_capital = 0.5\n")
    with pytest.raises(UserError, match="max_capitals"):
        Pipeline.load([str(pipeline)])


def test_an_unknown_one_is_an_error_before_anything_is_made(tmp_path, small_run):
    done = train("pretrain", *small_run, "data.clean=unicod", f"out={tmp_path / 'run'}")
    assert isinstance(done.exception, UserError)
    assert "unicode" in done.exception.line() and not (tmp_path / "run/shards").exists()


def test_tokens_made_with_other_rules_are_made_again_or_refused(tmp_path, small_run):
    data = jsonl(tmp_path / "twice.jsonl", [{"text": f"{TEXT} {number // 2}"} for number in range(400)])
    words, run = settings(small_run, data), tmp_path / "run"

    def counted(*more):
        done = train("pretrain", *words, "max_steps=2", f"out={run}", *more)
        assert done.exit_code == 0, done.output
        return sum(
            json.loads((run / f"shards/{half}/shards.json").read_text())["documents"]
            for half in ("train", "validation")
        )

    assert counted() == 400
    resumed = train("pretrain", *words, "max_steps=4", f"out={run}", "data.clean=exact_duplicates")
    assert isinstance(resumed.exception, UserError) and "data.clean" in resumed.exception.line()
    run = tmp_path / "second"
    assert counted("data.clean=exact_duplicates") == 200
    ready = settings(small_run, run / "shards")
    refused = train(
        "pretrain", *ready, "max_steps=2", f"out={tmp_path / 'third'}", f"tokenizer.path={run / 'tokenizer'}"
    )
    assert isinstance(refused.exception, UserError) and "data.clean" in refused.exception.line()


@pytest.mark.parametrize("recipe", ["sft", "dpo"])
def test_conversations_and_preferences_pass_the_rules(tmp_path, recipe, toy):
    name, kind = {"sft": ("sft", "chats"), "dpo": ("dpo", "preferences")}[recipe]
    rows = [json.loads(line) for line in (toy / f"{name}.jsonl").read_text().splitlines()][:20]
    data = jsonl(tmp_path / "data.jsonl", rows + rows[:5])
    corpus = Corpus(DataSettings(train=(str(data),), format=kind, clean=("exact_duplicates",)))
    counts = corpus.counts()
    assert len(list(corpus.records(counts))) == 20
    assert (counts.good, counts.left_out, counts.bad) == (20, 5, 0)
    assert counts.good + counts.left_out + counts.bad == counts.records == 25
