"""What a run decides about its settings: one pass, a record of each decision, in run.toml and before step 1."""

import json
import pathlib
import re
import tomllib

import pytest
import short_runs
from user_errors import raises_user_error

from penjing.base import config
from penjing.base.config import Decision, parse_overrides
from penjing.checkpoint.load import Checkpoint
from penjing.planner.report import PlanOptions, make_report
from penjing.train.config import Run
from penjing.train.load_model import read_settings
from penjing.train.resolve import Facts, decide, record, resolve, with_settings
from penjing.workflows.train import resolve_run

SOURCE = pathlib.Path(config.__file__).parents[1]
SHAPE = ("model=tiny", "model.hidden_size=32", "model.num_hidden_layers=1", "model.intermediate_size=64")
WORDS = (*SHAPE, "model.vocab_size=400", "data.seq_len=32", "compute.device=cpu", "compute.threads=1", "seed=3")


def decided(run):
    return {one.field: (one.was, one.now) for one in run.decisions}


class Known(Facts):
    world = 2

    def __init__(self):
        self.asked = []

    def dtype(self, run):
        self.asked.append(("dtype", run.batch.size))
        return "float32", "a test"

    def conversations(self, run):
        self.asked.append(("conversations", run.compute.dtype))
        return 3600, 60

    def units_per_epoch(self, run):
        self.asked.append(("units", run.data.seq_len))
        return 50

    def micro_size(self, run):
        self.asked.append(("memory", run.batch.size))
        return 1, "memory"


def test_each_rule_sees_what_was_decided_before():
    run, facts = resolve_run("sft", {"data": {"train": ["x"]}}), Known()
    found = resolve(run, facts)
    assert facts.asked == [("dtype", 32), ("conversations", "float32"), ("units", 72), ("memory", 2)]
    assert decided(found) == {
        "compute.dtype": ("auto", "float32"),
        "data.seq_len": (1024, 72),
        "data.min_seq_len": (64, 0),
        "batch.size": (32, 2),
        "batch.min_steps": (100, 0),
        "batch.micro_size": (0, 1),
    }
    for one in found.decisions:  # what the records say is what changed
        run = with_settings(run, {one.field: one.now})
    assert run == found


def test_nothing_is_recorded_where_nothing_changes():
    run = Run()
    assert decide(run, "batch.size", run.batch.size, "no") is run
    noted = record(run, "compute.compile", "blocks", "long")
    assert noted == run and decided(noted) == {"compute.compile": ("auto", "blocks")}


@pytest.mark.parametrize("why", ["plain", 'a "quote" # and \\ more', "two\nlines\x00\x7f\ttab", "因为", ""])
def test_the_records_are_comments_that_change_no_setting(why):
    run = decide(Run(), "init_from", 'a # "b"', why)
    run = decide(record(run, "compute.compile", "off", why), "eval.questions", "x.jsonl", why)
    text = config.to_toml(run, [*run.decisions, Decision("model", "26m", "other", why)])
    assert config.resolve(Run, tomllib.loads(text)) == run
    assert re.search(r"^init_from = .*  # was empty: ", text, re.MULTILINE)
    assert re.search(r"^compile = \"auto\"  # off here: ", text, re.MULTILINE)
    assert re.search(r"^\[model\]  # was 26m: |^\[model\]  # other here: ", text, re.MULTILINE)


def test_requests_are_followed_and_recorded():
    asked = resolve_run("sft", parse_overrides(["batch.size=8"]))
    assert decided(asked) == {"batch.min_steps": (100, 0), "data.min_seq_len": (64, 0)}
    assert asked.batch.size == 8
    assert resolve_run("sft", parse_overrides(["batch.size=8", "batch.min_steps=7"])).batch.min_steps == 7
    assert decided(resolve_run("sft", parse_overrides(["data.seq_len=512"]))) == {"data.min_seq_len": (64, 0)}
    adapted = resolve_run("sft", parse_overrides(["lora.rank=4", "lora.alpha=8"]))
    assert decided(adapted)["optimizer.learning_rate"] == (2e-4, adapted.optimizer.learning_rate)
    off = resolve_run("sft", {"lora": {"rank": 4}}, parse_overrides(["lora.rank=0"]))
    assert off.optimizer.learning_rate == 2e-4


def comments(folder):
    return {
        line.split(" = ")[0]: line.partition("  # ")[2]
        for line in (folder / "run.toml").read_text().splitlines()
        if "  # " in line
    }


@pytest.mark.parametrize("old", [False, True])
def test_a_run_says_and_keeps_what_it_decided_and_why_when_it_is_resumed_too(tmp_path, monkeypatch, old):
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"a red kite, number {n}, in the sky"}) + "\n" for n in range(60)))
    words = (*WORDS, f"data.train={texts}", "checkpoint.every=9", "checkpoint.keep_last=99")
    whole = tmp_path / "whole"
    said = short_runs.train("pretrain", *words, f"out={whole}")
    rows = read_settings(whole).batch.size
    assert rows < 64 and re.search(rf"batch\.size +64 +{rows} ", said)
    first = comments(whole)
    assert first["size"].startswith("was 64: ") and first["compile"].startswith("off here: ")
    assert read_settings(whole).compute.compile == "auto"
    cut = tmp_path / "cut"
    short_runs.cut_back(whole, cut, 9)
    if old:  # a checkpoint that holds no reasons
        state = Checkpoint.state
        monkeypatch.setattr(Checkpoint, "state", lambda one: {**state(one), "decisions": {}})
    short_runs.train("pretrain", *words, f"out={cut}")
    assert comments(cut)["size"] == ("was 64: as the run was started" if old else first["size"])
    assert short_runs.newest(cut).name == short_runs.newest(whole).name


def test_the_shape_of_the_start_model_is_a_decision(tmp_path):
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"a red kite, number {n}"}) + "\n" for n in range(60)))
    words = (*WORDS, f"data.train={texts}", "max_steps=1", "batch.size=2", "eval.every=0")
    short_runs.train("pretrain", *words, f"out={tmp_path / 'start'}")
    run = resolve_run("sft", parse_overrides([f"init_from={tmp_path / 'start'}", "data.seq_len=32"]))
    assert decided(run)["model"] == ("26m", f"that of {tmp_path / 'start'}")
    assert run.model == read_settings(tmp_path / "start").model
    text = config.to_toml(run, run.decisions)
    assert re.search(r"^\[model\]  # was 26m: ", text, re.MULTILINE) and config.resolve(Run, tomllib.loads(text)) == run


def test_a_plan_of_float8_names_what_the_card_lacks():
    run = resolve_run("pretrain", parse_overrides(["compute.fp8=tensorwise"]))
    with raises_user_error(where="compute.fp8") as refused:
        make_report("pretrain", run, PlanOptions(gpu="T4"))
    assert "8.9" in str(refused.value)


def test_no_other_file_changes_settings():
    """`replace` of a run or one of its groups, by the names that runs have here."""
    found = [
        f"{path.relative_to(SOURCE)}: {call}"
        for path in SOURCE.rglob("*.py")
        if path.name != "resolve.py"
        for call in re.findall(r"(?<![.\w])replace\((?:\w+\.)*(?:run|variant)\b[^)]*", path.read_text(encoding="utf-8"))
        if "report/" not in str(path) and "workflows/report" not in str(path)
    ]
    assert not found
