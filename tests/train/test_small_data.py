"""Small files: how many rows a step has, how long they are, that a run takes enough steps, and what it warns of."""

import json
import shutil
from dataclasses import replace

import pytest
from rich.console import Console
from short_runs import train
from user_errors import raises_user_error

from penjing.base import config
from penjing.base.config import parse_overrides
from penjing.planner.report import PlanOptions, make_report
from penjing.train import build_context
from penjing.train.config import Run
from penjing.train.load_model import load_trained
from penjing.train.resolve import fit_batch, fit_rows, step_rows
from penjing.train.step_probe import data_warnings, start_warnings
from penjing.workflows.train import execute, plan_only, resolve_run


@pytest.mark.parametrize(
    ("units", "epochs", "rows"),
    [
        (10, 10, 1),  # 100 steps of one row
        (10, 2, 1),  # as few as can be
        (91, 10, 2),  # an epoch of 45 steps
        (400, 10, 16),  # an epoch of 25
        (900, 3, 16),
        (1600, 2, 32),
        (5_000_000, 1, 32),
        (1, 1, 1),
    ],
)
def test_rows_of_a_step_follow_the_data(units, epochs, rows):
    assert step_rows(32, units, steps_of_batch_1=units * epochs, min_steps=100) == rows
    if rows > 1:
        assert units >= 25 * rows
        assert units * epochs >= 100 * rows


def test_rows_are_never_more_than_asked_and_divide_among_devices():
    assert step_rows(4, 1000, steps_of_batch_1=1e9, min_steps=100) == 4
    assert step_rows(32, 10, steps_of_batch_1=100, min_steps=100, multiple=8) == 8
    run = resolve_run("sft")
    for world in (1, 2, 4, 8):
        assert fit_batch(run, 1000, world).batch.size == 16, world
    kto = resolve_run("dpo", parse_overrides(["objective.loss=kto"]))
    assert fit_batch(kto, 40).batch.size == 16  # two passes of the 8 groups that share an estimate
    assert fit_batch(resolve_run("sft", parse_overrides(["batch.micro_size=4"])), 40).batch.size == 4


@pytest.mark.parametrize("words", [["batch.size=32"], ["max_steps=300"]])
@pytest.mark.parametrize("recipe", ["sft", "lora", "dpo", "reward", "pretrain", "distill"])
def test_what_is_asked_for_stays(recipe, words):
    run = resolve_run(recipe, parse_overrides(words))
    assert fit_batch(run, 10).batch == replace(run.batch, min_steps=0)
    assert fit_rows(run, 1000, 20).data == replace(run.data, min_seq_len=0)
    followed = fit_batch(resolve_run(recipe), 10)
    assert (followed.batch.size, followed.batch.min_steps) == (1, 0)


def test_a_number_of_steps_is_read_as_any_number():
    assert resolve_run("sft", parse_overrides(["max_steps=1e3"])).max_steps == 1000
    with raises_user_error(where="max_steps", got="'many'", wanted="a whole number"):
        resolve_run("sft", parse_overrides(["max_steps=many"]))


@pytest.mark.parametrize("recipe", ["tiny", "tiny_sft", "tiny_distill", "grpo", "ppo"])
def test_recipes_that_know_their_batch_keep_it(recipe):
    run = resolve_run(recipe)
    assert fit_batch(run, 10) == run


def test_few_conversations_stand_in_shorter_rows():
    run = resolve_run("sft", parse_overrides(["epochs=10"]))
    assert fit_rows(run, 3600, 60).data.seq_len == 144  # 25 rows
    assert fit_rows(resolve_run("sft"), 3600, 60).data.seq_len == 72  # 50 rows, twice
    assert fit_rows(run, 3600, 500).data.seq_len == 504  # the longest has to fit
    assert fit_rows(run, 300, 10).data.seq_len == 64
    assert fit_rows(run, 10**6, 900).data.seq_len == 1024
    asked = resolve_run("sft", parse_overrides(["data.seq_len=512"]))
    assert fit_rows(asked, 3600, 60) == asked
    assert fit_batch(asked, 10).batch.size == 1


def test_the_longest_conversation_fits_its_row_to_the_last_token(tmp_path):
    """A row of `seq_len` has as many inputs: all tokens of a conversation but the last. One more does not fit."""
    from penjing.data.chat.render import render
    from penjing.data.corpus import Split
    from penjing.data.formats import Chat, Message
    from penjing.data.packing.concat import PackedRows
    from penjing.data.tokenize_dataset import prepare_chats
    from penjing.data.tokenizer.train import train_tokenizer

    tokenizer = train_tokenizer(["so it is, and so it was"] * 20, 300)
    talks = [
        (Message(role="user", content=f"so {number}"), Message(role="assistant", content="it is" * number))
        for number in range(1, 8)
    ]
    chats = [Chat(messages=messages, tools=(), source="x", line=1) for messages in talks]
    ids = sorted(render(tokenizer, messages).ids for messages in talks)
    longest = max(map(len, ids))
    for seq_len, skipped in ((longest - 1, 0), (longest - 2, 1)):
        split = Split(share=0.3)
        made = prepare_chats(
            split.placed(chats), tokenizer, tmp_path / str(seq_len), seq_len=seq_len, split=split, about={}
        )
        assert (made.skipped, made.shortened) == (skipped, 0)
        found = []
        for half in (made.train, made.validation):
            rows = PackedRows(half, seq_len, end_of_text=tokenizer.end_of_text, seed=0, order="fixed")
            for row in map(rows.row, range(rows.rows_per_epoch)):
                for document in range(row.document_T.max() + 1):
                    of_T = row.document_T == document
                    found.append([int(row.ids_T[of_T][0]), *row.target_T[of_T].tolist()])
        assert sorted(found) == [each for each in ids if len(each) <= seq_len + 1]
    run = resolve_run("sft", parse_overrides(["epochs=10"]))
    for length in range(490, 520):
        assert fit_rows(run, 3600, length).data.seq_len >= length - 1
        assert fit_rows(run, 3600, length).data.seq_len == min(1024, 8 * ((length + 8) // 8))


def test_warnings():
    assert data_warnings(50, 32, 32, "rows") == []
    (few,) = data_warnings(49, 4, 32, "rows")
    assert "only 49 optimizer steps" in few
    (large,) = data_warnings(50, 33, 32, "pairs")
    assert "batch of 33 pairs is larger than an epoch of 32" in large
    assert start_warnings(None, 400) == start_warnings(5.99, 400) == []
    (misfit,) = start_warnings(6.0, 400)
    assert "6.00" in misfit
    assert "5.99" in misfit


def test_a_model_that_saw_only_texts_gets_no_warning_of_its_first_loss_on_conversations(tmp_path, monkeypatch):
    """The chat template's tokens are new to it. Of later stages, and on more texts, the loss does say something."""
    monkeypatch.setattr("penjing.train.step_probe.start_warnings", lambda loss, vocab_size: ["worse than guessing"])
    texts, chats = tmp_path / "texts.jsonl", tmp_path / "chats.jsonl"
    texts.write_text("".join(json.dumps({"text": f"{n} birds sing in tree {n}."}) + "\n" for n in range(60)))
    turns = [[{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n} birds"}] for n in range(60)]
    chats.write_text("".join(json.dumps({"messages": each}) + "\n" for each in turns))
    words = ["max_steps=1", "sample.every=0", "model.hidden_size=32", "model.num_hidden_layers=1"]
    words += ["tokenizer.vocab_size=300", "data.min_seq_len=0", "data.seq_len=32", "compute.device=cpu", "batch.size=2"]
    said = {"base": train("tiny", *words, f"data.train={texts}", f"out={tmp_path}/base")}
    for recipe, name, start, data in (
        ("tiny", "more", "base", texts),
        ("tiny_sft", "chat", "more", chats),
        ("tiny_sft", "chat2", "chat", chats),
        ("tiny", "texts2", "chat", texts),
        ("tiny_sft", "chat3", "texts2", chats),
    ):
        tied = [word for word in words if not word.startswith(("model.", "tokenizer."))]
        said[name] = train(
            recipe, *tied, f"init_from={tmp_path / start}", f"data.train={data}", f"out={tmp_path}/{name}"
        )
    warned = {name for name, text in said.items() if "worse than guessing" in text}
    assert warned == {"more", "chat2", "texts2", "chat3"}


def test_the_plan_page_takes_the_batch_that_training_takes():
    run = resolve_run("sft", parse_overrides(["epochs=10", "model=tiny"]))
    page = make_report("sft", run, PlanOptions(gpu="RTX 3090", unique="40k"))  # 39 rows of 1,024
    assert page.rows_per_step == fit_batch(run, 39).batch.size == 1
    assert page.steps == 391
    asked = resolve_run("sft", parse_overrides(["epochs=10", "model=tiny", "batch.size=64"]))
    page = make_report("sft", asked, PlanOptions(gpu="RTX 3090", unique="40k"))
    assert (page.rows_per_step, page.steps) == (64, 7)
    assert any("only 7 optimizer steps" in line for line in page.warnings)
    assert any("larger than an epoch" in line for line in page.warnings)


@pytest.mark.parametrize("recipe", ["sft", pytest.param("lora", marks=pytest.mark.nightly)])
def test_the_plan_page_takes_the_rows_that_training_takes(recipe):
    run = resolve_run(recipe, parse_overrides(["model=tiny"]))
    fitted = fit_rows(run, 10_000, 0)
    row = fitted.data.seq_len
    assert row < run.data.seq_len
    page = make_report(recipe, run, PlanOptions(gpu="RTX 3090", unique="10k"))
    assert page.seq_len == row
    assert page.rows_per_step == fit_batch(run, round(10_000 / row)).batch.size
    assert page.steps == -(-round(run.epochs * 10_000) // (row * page.rows_per_step)) >= 50
    assert not any("optimizer steps" in line or "larger than an epoch" in line for line in page.warnings)
    assert any(f"rows of {row} tokens" in line for line in page.warnings)
    # Rows that were asked for, and enough text for full ones, stay.
    asked = resolve_run(recipe, parse_overrides(["model=tiny", "data.seq_len=512"]))
    for each, unique, length in ((asked, "10k", 512), (run, "10M", run.data.seq_len)):
        page = make_report(recipe, each, PlanOptions(gpu="RTX 3090", unique=unique))
        assert page.seq_len == length
        assert not any("rows of" in line for line in page.warnings)


# --- whole runs ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def words(tmp_path_factory, small_run, toy):
    """91 conversations, and a model to begin with; nothing is said of the batch."""
    folder = tmp_path_factory.mktemp("few")
    short = [word for word in small_run if not word.startswith(("data.", "max_steps"))]
    train("sft", *short, f"data.train={toy / 'sft.jsonl'}", "data.seq_len=256", "max_steps=2", f"out={folder / 'base'}")
    lines = [
        {
            "conversations": [
                {"role": "user", "content": f"{number} {asked}"},
                {"role": "assistant", "content": "I am P."},
            ]
        }
        for number, asked in enumerate(["who are you?", "your name?", "who made you?"] * 30 + ["hello"])
    ]
    (folder / "identity.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return [f"init_from={folder / 'base'}", f"data.train={folder / 'identity.jsonl'}", "compute.device=cpu",
            "compute.dtype=float32", "checkpoint.every=20", "checkpoint.keep_last=99"]  # fmt: skip


def test_a_run_on_few_conversations_takes_enough_steps_and_is_taken_up_exactly(words, tmp_path):
    planned = plan_only(
        resolve_run("lora", parse_overrides([*words, f"out={tmp_path / 'never'}"])), Console(quiet=True)
    )
    folder = tmp_path / "run"
    train("lora", *words, f"out={folder}")
    run = config.resolve(Run, config.read_toml(folder / "run.toml"))
    assert (run.batch.min_steps, run.data.min_seq_len) == (0, 0)
    plan = json.loads((folder / "plan.json").read_text())
    assert plan["rows_per_step"] == run.batch.size == planned.rows_per_step
    assert plan["steps"] == planned.steps >= 100
    assert plan["steps"] == -(-plan["rows_per_epoch"] * 2 // run.batch.size)  # two epochs
    assert plan["rows_per_epoch"] >= 50 * run.batch.size
    assert plan["warnings"] == planned.warnings == []
    weights = json.loads((folder / "outcome.json").read_text())["weights_sha256"]
    for checkpoint in (folder / "checkpoints").iterdir():
        if int(checkpoint.name.rpartition("-")[2]) > 40:
            shutil.rmtree(checkpoint)
    (folder / "outcome.json").unlink()
    train("lora", *words, f"out={folder}")
    assert json.loads((folder / "outcome.json").read_text())["weights_sha256"] == weights
    trained = load_trained(folder)
    assert trained.run.data.seq_len < 100
    assert trained.context_tokens == 256  # of the model that it began with
    more = plan["steps"] + 2  # the batch stays, also where a number of steps is asked for
    train_further = resolve_run("lora", parse_overrides([*words, f"out={folder}", f"max_steps={more}"]))
    execute(train_further, Console(quiet=True), ["max_steps", "epochs"])
    assert config.resolve(Run, config.read_toml(folder / "run.toml")).batch.size == run.batch.size


def test_a_run_that_teaches_little_says_so_before_it_begins(words, tmp_path, monkeypatch):
    validate = build_context.validate_with_retry
    monkeypatch.setattr(
        build_context,
        "validate_with_retry",
        lambda stage: dict.fromkeys(validate(stage), 13.2),
    )
    said = train("lora", *words, "batch.size=32", "epochs=10", f"out={tmp_path / 'run'}")
    begins = said.index("step 1/")
    for line in ("too few to learn much", "is larger than an epoch", "held-out loss starts at 13.20"):
        assert said.count(line) == 1, line
        assert said.index(line) < begins
    assert len(json.loads((tmp_path / "run" / "plan.json").read_text())["warnings"]) == 3
