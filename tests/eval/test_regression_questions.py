"""Runs that start from a model with known questions tell by kind what they changed, and what was lost."""

from __future__ import annotations

import io
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from user_errors import raises_user_error

from penjing.base.accuracy import scores_from_rows
from penjing.base.config import parse_overrides
from penjing.eval import scorer
from penjing.eval.regression_questions import RegressionQuestions
from penjing.eval.task import Result
from penjing.parallel.single import Single
from penjing.report.terminal import print_changes
from penjing.track.run_dir import RunDir
from penjing.train.config import Run
from penjing.train.resolve import questions_of_start
from penjing.workflows import quickstart
from penjing.workflows.train import execute, resolve_run

SMALL = {"who": 4, "tool": 6}


def train(recipe, *words):
    said = io.StringIO()
    outcome = execute(resolve_run(recipe, parse_overrides(words)), Console(file=said, width=200))
    return outcome, said.getvalue()


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """A file of ten questions of two kinds, and a story."""
    rows = [
        {
            "conversations": [{"role": "user", "content": f"{kind} {index}?"}],
            "answer": str(index),
            "kind": kind,
            "language": "en",
            "chance": 0.0,
        }
        for kind, number in SMALL.items()
        for index in range(number)
    ]
    rows.append({**rows[0], "answer": "", "kind": "story", "must_contain": ["kite"]})
    path = tmp_path_factory.mktemp("asked") / "eval.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def base(tmp_path_factory, small_run, toy, asked):
    folder = tmp_path_factory.mktemp("known") / "run"
    words = [word for word in small_run if not word.startswith(("data.", "max_steps", "eval"))]
    outcome, _ = train(
        "sft", *words, f"data.train={toy / 'sft.jsonl'}", "data.seq_len=256", "max_steps=3", f"out={folder}",
        f"eval.questions={asked}", "eval.every=0", "eval.sequences=8",
    )  # fmt: skip
    assert "questions" not in outcome  # they are known to it, and not asked: nothing is compared with before
    return folder


@pytest.fixture
def words(base, toy, small_run):
    common = [word for word in small_run if word.startswith(("compute", "log"))]
    more = ("batch.size=4", "max_steps=2", "eval.every=0", "eval.sequences=4", "data.val_fraction=0.25")
    return [*common, *more, f"init_from={base}", "data.seq_len=256"]


PAIRS = ("dpo.jsonl", "objective.own_answers=0")
PROMPTS = (
    "rl.jsonl",
    "objective.rollout.max_new_tokens=12",
    "objective.rollout.num_generations=4",  # so many, and so long, that their rewards differ
    "objective.rewards=repetition,length",
)
RUNS = [
    ("dpo", *PAIRS),
    ("dpo", *PAIRS, "lora.rank=2"),
    ("grpo", *PROMPTS),
    ("ppo", *PROMPTS),
]


@pytest.mark.parametrize(("recipe", "file", "more"), [(run[0], run[1], run[2:]) for run in RUNS], ids=str)
def test_every_way_of_preferring_and_reinforcing_says_what_it_changed(
    tmp_path, monkeypatch, words, toy, asked, recipe, file, more
):
    """Of a model that answers all before, and no more tools after: what it says is made up, where it stands is not."""
    times = []

    def ask(task, questions, *model, **how):
        times.append(len(questions))
        return [scorer.Graded(each, Result(text=""), len(times) == 1 or each.kind != "tool") for each in questions]

    monkeypatch.setattr(scorer, "grade", ask)
    out = tmp_path / "run"
    outcome, said = train(recipe, *words, *more, f"data.train={toy / file}", f"out={out}")
    assert times == [10, 10]
    found = json.loads((out / "outcome.json").read_text())["questions"]
    assert found == outcome["questions"]
    assert [(row["kind"], row["right"], row["asked"]) for row in found["before"]] == [("who", 4, 4), ("tool", 6, 6)]
    assert [(row["kind"], row["right"], row["asked"]) for row in found["after"]] == [("who", 4, 4), ("tool", 0, 6)]
    assert found["lost"] == [
        {"kind": "tool", "asked": 6, "before": 6, "after": 0},
        {"kind": "all", "asked": 10, "before": 10, "after": 4},
    ]
    assert str(asked) in said
    assert len(json.loads((out / "questions.json").read_text())["after"]["answers"]) == 10
    again, _ = train(recipe, *words, *more, f"data.train={toy / file}", f"out={out}")
    assert again["questions"] == found
    assert len(times) == 2  # a finished run knows


def test_what_was_lost_is_named_on_the_terminal():
    def rows(tool):
        right = {"who": 20, "tool": tool}
        return [{"kind": kind, "language": "en", "asked": 40, "right": right[kind], "chance": 0.0} for kind in right]

    def shown(after):
        screen = Console(file=io.StringIO(), width=120)
        print_changes(scores_from_rows(rows(40), rows(after)), screen)
        return screen.file.getvalue().splitlines()

    *table, verdict = shown(1)
    lost = next(line for line in table if "tool" in line).split()
    assert lost[:5] == ["tool", "all", "40", "0%", "100%"] and lost[6] == "2%" and lost[-1] == "lost"
    assert "tool 40 → 1 of 40" in verdict
    assert "who" not in verdict
    assert "→" not in shown(40)[-1]


def test_a_model_is_asked_as_it_stands_and_goes_on_where_it_was_killed(tmp_path, monkeypatch, words, toy, base):
    """Real answers; of a run that was killed after the last checkpoint only what is left is asked."""
    out = tmp_path / "run"
    settings = ("dpo", *words, f"data.train={toy / 'dpo.jsonl'}", "objective.own_answers=0", f"out={out}")
    outcome, _ = train(*settings)
    kept = json.loads((out / "questions.json").read_text())
    (out / "outcome.json").unlink()
    (out / "questions.json").write_text(json.dumps({name: kept[name] for name in kept if name != "after"}))
    times = []
    real = scorer.grade
    monkeypatch.setattr(scorer, "grade", lambda *given, **named: times.append(1) or real(*given, **named))
    again, _ = train(*settings)
    assert len(times) == 1
    assert again["questions"] == outcome["questions"]
    assert json.loads((out / "questions.json").read_text()) == kept


def test_a_run_that_was_begun_without_questions_has_nothing_to_compare_them_with(
    tmp_path, monkeypatch, words, toy, asked
):
    monkeypatch.setattr(scorer, "grade", lambda *given, **named: pytest.fail("asked"))
    settings = ("dpo", *words, f"data.train={toy / 'dpo.jsonl'}", "objective.own_answers=0", f"out={tmp_path / 'run'}")
    train(*settings, "eval.questions=none")
    outcome, said = train(*settings)
    assert "questions" not in outcome
    assert f"not asked before the first step: {asked}" in said


def test_less_memory_means_smaller_parts(tmp_path, monkeypatch, asked):
    sizes = []

    def ask(task, questions, *model, batch_size, **how):
        sizes.append(batch_size)
        if batch_size > 16:
            raise MemoryError
        return [scorer.Graded(each, Result(text=""), True) for each in questions]

    monkeypatch.setattr(scorer, "grade", ask)
    run = resolve_run("dpo", parse_overrides([f"eval.questions={asked}"]))
    prepared = SimpleNamespace(
        context=SimpleNamespace(strategy=Single(torch.device("cpu"))),
        stage=SimpleNamespace(tokenizer=None),
        model=None,
        folder=RunDir(tmp_path),
    )
    RegressionQuestions(run, Console(file=io.StringIO())).ask(prepared, "before")
    assert sizes == [64, 32, 16]
    assert json.loads((tmp_path / "questions.json").read_text())["before"]["rows"][1]["right"] == 6


def test_which_questions_a_model_is_known_by(tmp_path, base, asked, words):
    assert questions_of_start(str(base)) == str(asked)
    assert questions_of_start(str(next((base / "checkpoints").iterdir()))) == str(asked)
    assert questions_of_start(str(tmp_path)) == ""
    assert questions_of_start("some/hub-name") == ""
    resolved = resolve_run("dpo", parse_overrides(words))
    assert resolved.eval.questions == str(asked)
    assert resolve_run("reward", parse_overrides(words)).eval.questions == ""  # it cannot answer
    assert resolve_run("dpo", parse_overrides([*words, "eval.questions=none"])).eval.questions == "none"
    with raises_user_error(where="missing.jsonl"):  # before anything is read or built
        train("dpo", *words, "eval.questions=missing.jsonl", f"out={tmp_path / 'run'}")
    assert not (tmp_path / "run").exists()


def test_a_folder_that_was_moved_brings_its_questions_along(tmp_path, base, asked):
    settings = (base / "run.toml").read_text().replace(str(asked), "old/data/eval.jsonl")
    moved = tmp_path / "new"
    shutil.copytree(base, moved / "sft")
    (moved / "data").mkdir()
    (moved / "sft/run.toml").write_text(settings.replace(f'out = "{base}"', 'out = "old/sft"'))
    with pytest.warns(UserWarning, match="old/data/eval.jsonl"):
        assert questions_of_start(str(moved)) == ""
    shutil.copy(asked, moved / "data/eval.jsonl")
    assert questions_of_start(str(moved)) == str(moved / "data/eval.jsonl")


def test_the_quickstarts_sft_is_known_by_its_questions(tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr(quickstart, "resolve_run", lambda recipe, *layers: kept.extend(layers) or Run(max_steps=4000))
    monkeypatch.setattr(quickstart, "sft_steps", lambda *_: 1900)
    settings = quickstart.QuickstartOptions(out=tmp_path)
    run = quickstart._finetuning(settings, quickstart.data_files(settings))
    assert kept[0]["eval"]["questions"] == str(tmp_path / "data/eval.jsonl")
    assert ("max_steps", 4000, 1900) in [(one.field, one.was, one.now) for one in run.decisions]
    assert run.max_steps == 1900
    asked = quickstart.QuickstartOptions(out=tmp_path, settings=["sft.max_steps=4000"])
    assert quickstart._finetuning(asked, quickstart.data_files(asked)).max_steps == 4000


def test_nothing_is_asked_of_what_does_not_speak(asked):
    for recipe, setting in (("reward", "data.format=preferences"), ("pretrain", "eval.at_start=true")):
        run = resolve_run(recipe, parse_overrides([setting, f"eval.questions={asked}"]))
        assert RegressionQuestions(run, Console(file=io.StringIO())).questions == []
