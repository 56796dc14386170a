"""What a quickstart makes of the data it is given: which files are used and for what, and what is wrong with them."""

import io
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from user_errors import raises_user_error

from penjing.base.config import parse_overrides
from penjing.base.errors import UserError
from penjing.base.files import read_json, write_json
from penjing.plan.little_data import Text, candidates, chosen, sizes
from penjing.train.stages.run_data import tokenized
from penjing.workflows import little_data, stage_steps
from penjing.workflows import quickstart as module
from penjing.workflows.quickstart import QuickstartOptions, quickstart
from penjing.workflows.stage_log import StageLog
from penjing.workflows.train import resolve_run

TURNS = [{"from": "human", "value": "a?"}, {"from": "gpt", "value": "b."}]
ANSWERED, WAITING = {"conversations": TURNS}, {"conversations": [*TURNS, {"from": "human", "value": "c?"}]}
PAIR = {"prompt": "a?", "chosen": "b.", "rejected": "c."}
PROMPT = {"conversations": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": ""}], "gt": ["b."]}
OUT = Path("out")


class Stopped(Exception):
    """Before anything is evaluated."""


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def jsonl(name, *rows):
    Path(name).write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))


def texts(num):
    return [{"text": f"Text {n} of a little book says that {n} and {n + 1} make {2 * n + 1}."} for n in range(num)]


@pytest.fixture
def begin(monkeypatch):
    """Do all but train: the files as they were sorted, the settings of the pretraining, and what was said."""
    corpora, runs = [], []

    def pretrained(options, run, console):
        runs.append(run)
        return "trained"

    def stop(*_):
        raise Stopped

    monkeypatch.setattr(module, "_train", pretrained)
    monkeypatch.setattr(module, "_record_tokens", lambda *_: None)
    monkeypatch.setattr(module, "_finetuning", lambda settings, corpus: corpora.append(corpus))
    monkeypatch.setattr(module, "_evaluate", stop)

    def run(data, *settings):
        console = Console(file=io.StringIO(), width=1000)
        with pytest.raises(Stopped):
            quickstart(QuickstartOptions(data=data, out=OUT, settings=settings), console)
        return corpora[-1], runs[-1], console.file.getvalue()

    return run


def test_every_file_is_used_or_named(begin):
    jsonl("my.jsonl", *texts(40))
    jsonl("share.json", WAITING, WAITING, ANSWERED)  # the first alone looks like a prompt
    jsonl("dpo[old].jsonl", PAIR)
    jsonl("rl.jsonl", PROMPT, PROMPT)
    corpus, _, said = begin("my.jsonl,share.json,dpo[old].jsonl,rl.jsonl")
    assert (corpus.documents, corpus.chats) == (["my.jsonl"], ["share.json"])
    assert "from my.jsonl, share.json; not used: dpo[old].jsonl (preferences), rl.jsonl (prompts) (" in said


def test_nothing_between_commas_is_no_folder(begin):
    jsonl("my.jsonl", *texts(40))
    Path("diary.txt").write_text("Dear diary.\n")
    corpus, run, _ = begin(",my.jsonl,")
    assert corpus.documents == ["my.jsonl"] == list(run.data.train)


@pytest.mark.parametrize(
    ("data", "settings", "words"),
    [
        ("", (), "--data: no data given; got ''"),
        (",", (), "--data: no data given; got ','"),
        ("nosuch.txt", (), "nosuch.txt: no such file"),
        ("b\udcd6.txt", (), r"--data: not valid UTF-8; got 'b\udcd6.txt'"),
        ("toyworld", ("max_stesp=3",), "Did you mean max_steps?"),
    ],
)
def test_words_that_cannot_be_leave_no_folder_behind(data, settings, words):
    Path("diary.txt").write_text("Dear diary.\n")
    with pytest.raises(UserError) as caught:
        quickstart(QuickstartOptions(data=data, out=OUT, settings=settings), Console(quiet=True))
    assert words in caught.value.line()
    assert not OUT.exists()


def test_without_a_text_it_says_what_there_is():
    jsonl("chats.jsonl", ANSWERED)
    jsonl("dpo.jsonl", PAIR)
    with raises_user_error(where="chats.jsonl,dpo.jsonl", got="chats.jsonl (chats), dpo.jsonl (preferences)"):
        quickstart(QuickstartOptions(data="chats.jsonl,dpo.jsonl", out=OUT), Console(quiet=True))


def test_a_broken_line_is_left_out_and_told(begin, monkeypatch):
    jsonl("my.jsonl", *texts(256)[:56], '{"text": "cut\n', *texts(256)[56:], {"text": ""})
    _, run, said = begin("my.jsonl")
    assert "256 texts" in said and "of 258 records 1 are broken and 1 left out (the text is empty: 1)" in said
    assert any("my.jsonl:57" in warning for warning in read_json(OUT / "quickstart.json")["data"]["warnings"])
    assert len(run.sample.prompts) == 2  # the file was read on behind it
    read = []
    monkeypatch.setattr(module, "load_trained", lambda path: SimpleNamespace(model=None, tokenizer=None))

    def score(model, tokenizer, given, **_):
        read.extend(given)
        return 1.0, 9

    monkeypatch.setattr(module, "score_texts", score)
    module._compare_with_zstd(OUT, replace(run, data=replace(run.data, val_fraction=0.9)))
    assert 200 < len(read) < 256


@pytest.mark.parametrize(("settings", "prompts"), [((), ("a?",)), (("sample.prompts=My own",), ("My own",))])
def test_samples_answer_questions_of_the_data_unless_the_settings_name_others(settings, prompts):
    jsonl("chats.jsonl", ANSWERED)
    run = resolve_run("tiny_sft", {"data": {"train": ["chats.jsonl"]}}, parse_overrides(settings))
    assert module.with_prompts(run, toy=False).sample.prompts == prompts


def test_a_folder_of_saved_pages_is_cleaned_and_the_report_says_so(begin):
    pytest.importorskip("trafilatura")
    Path("pages").mkdir()
    for number, row in enumerate(texts(30)):
        Path(f"pages/{number}.html").write_text(f"<html><body><nav>Home</nav><p>{row['text']}</p></body></html>")
    Path("pages/copy.html").write_text(Path("pages/7.html").read_text())
    Path("pages/facts.json").write_text('{"title": "a", "byline": "b"}')
    files, run, said = begin("pages")
    assert len(files.documents) == 31 and files.unused == ["pages/facts.json (not a known kind of record)"]
    assert run.data.clean == ("default",)
    assert "30 texts" in said and "facts.json" in said
    data = read_json(OUT / "quickstart.json")["data"]
    assert data["records"] == 31 and data["left_out"].startswith("1 (exact_duplicates")


def test_the_setting_that_an_error_names_may_be_given_in_the_same_folder(begin):
    jsonl("my.jsonl", *texts(40), "{broken}\n")
    with raises_user_error(next_step="data.max_bad_fraction"):
        begin("my.jsonl")
    assert "40 texts" in begin("my.jsonl", "data.max_bad_fraction=0.1")[2]
    (OUT / "pretrain").mkdir()  # the pretraining, which is left out here
    with raises_user_error(next_step="--fresh"):
        begin("my.jsonl")


def test_a_file_that_changed_since_is_refused(begin):
    jsonl("my.jsonl", *texts(40))
    begin("my.jsonl")
    assert "(from before)" in begin("my.jsonl")[2]
    jsonl("my.jsonl", *texts(41))
    with raises_user_error(where="my.jsonl", next_step="--fresh"):
        begin("my.jsonl")


def test_only_files_of_the_users_own_are_cleaned(begin):
    assert [module.cleaning(QuickstartOptions(data=data)) for data in ("toyworld", "sanguo")] == [(), ()]
    jsonl("my.jsonl", *texts(40))
    assert begin("my.jsonl", "data.clean=")[1].data.clean == ()


def test_too_many_broken_lines_are_refused_before_anything_is_trained(begin):
    jsonl("my.jsonl", *texts(97), *['{"text": "cut\n'] * 3)
    with pytest.raises(UserError, match=r"3 of 100 records are broken.*my\.jsonl:98.*data\.max_bad_fraction=0\.03"):
        quickstart(QuickstartOptions(data="my.jsonl", out=Path("other")), Console(quiet=True))
    assert "97 texts" in begin("my.jsonl", "data.max_bad_fraction=0.03")[2]


@pytest.mark.parametrize("fresh", [False, True])
def test_a_file_in_the_folders_place_is_one_line_and_stays(fresh):
    Path("my.txt").write_text("mine\n")
    for out, words in (("my.txt", "a file, not a folder"), ("my.txt/out", "cannot write: Not a directory")):
        with pytest.raises(UserError, match=words):
            quickstart(QuickstartOptions(out=Path(out), fresh=fresh), Console(quiet=True))
    assert Path("my.txt").read_text() == "mine\n"


def test_a_folder_that_cannot_be_emptied_is_one_line(monkeypatch):
    write_json(OUT / "quickstart.json", {})

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.raises(UserError, match="out: cannot be removed: Permission denied"):
        quickstart(QuickstartOptions(out=OUT, fresh=True), Console(quiet=True))


def test_a_file_named_in_another_encoding_is_trained_on(folder):
    """Its name stands in the shards' metadata, which is UTF-8."""
    old = os.fsdecode("中".encode("gbk") + b".txt")
    (folder / "archive").mkdir()
    (folder / "archive" / old).write_text("A text.\n")
    run = resolve_run("pretrain", {"data": {"train": ["archive"]}})

    def prepare(records, *rest, about, **options):
        assert {Path(record.source).name for record, _ in records} == {old}  # the end of the one text is held out
        write_json(folder / "about.json", about)
        return SimpleNamespace(skipped=0, shortened=0, held_out_share=0)

    tokenizer = SimpleNamespace(fingerprint="")
    tokenized(run, folder / "place", "shards.json", tokenizer, prepare, lambda text: None)
    assert list(read_json(folder / "about.json")["source_files"]) == [r"archive/\xd6\xd0.txt"]


@pytest.mark.parametrize(
    ("step_seconds", "other_seconds", "steps"),
    [(0.03, 10, 4000), (0.11, 20, 1600), (0.08, 20, 2700), (0.4, 60, 1600)],  # (345 - 1300 s - other) / s, in hundreds
)
def test_a_slow_machine_takes_fewer_steps_of_sft(tmp_path, step_seconds, other_seconds, steps):
    training = 1300 * step_seconds
    seconds = {"training_seconds": training, "seconds": training + other_seconds}
    write_json(tmp_path / "outcome.json", {**seconds, "tokens": 1300 * 4 * 256})
    assert stage_steps.sft_steps(tmp_path, 345.0, stage_steps.MIN_SFT_STEPS) == steps


@pytest.mark.parametrize(("step_seconds", "steps"), [(0.05, 1300), (0.2, 1100), (0.5, 900)])  # 220 s, in hundreds
def test_a_slow_machine_takes_fewer_steps_of_pretraining_and_keeps_its_number(
    tmp_path, monkeypatch, step_seconds, steps
):
    log = StageLog(tmp_path / "quickstart.json", {"stages": []}, Console(quiet=True))
    run = resolve_run("tiny")
    monkeypatch.setattr(stage_steps.StepTimer, "time_step", lambda timer, run: (step_seconds / 8, step_seconds / 2))
    assert stage_steps.pretrain_steps(run, log) == steps
    monkeypatch.setattr(stage_steps.StepTimer, "time_step", lambda timer, run: (1.0, 1.0))
    assert stage_steps.pretrain_steps(run, log) == steps == read_json(log.path)["pretrain_steps"]


@pytest.mark.parametrize(
    ("words", "momentum"),
    [
        ([], 0.9),
        (["optimizer.momentum=0.8"], 0.8),
        (["optimizer.name=adamw"], None),
        (["optimizer=adamw", "optimizer.eps=1e-7"], None),
    ],
)
def test_the_choice_for_a_text_leaves_what_was_asked_for(words, momentum):
    requested = parse_overrides(words)
    settings = {"optimizer.momentum": (0.9, "a short run"), "max_steps": (7, "the time")}
    log = SimpleNamespace(facts={"choice": {"settings": settings}})
    run = little_data.fit_to_text(resolve_run("tiny", {}, requested), requested, 1.0, log, has_chats=False)
    assert getattr(run.optimizer, "momentum", None) == momentum and run.max_steps == 7


@pytest.mark.parametrize(("seconds", "taken"), [(1.0, "chosen, the smallest: sees 0."), (3000.0, "chosen\n")])
def test_a_model_that_is_too_large_for_the_time_says_so(seconds, taken):
    text = Text(num_bytes=2_500_000)
    found = candidates(text, seconds, 256, lambda model: (0.05, 0.01), sizes(text))
    console = Console(file=io.StringIO(), width=200)
    little_data.print_candidates(found, chosen(found), "", console)
    shown = "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())
    assert taken in shown and shown.count("chosen") == 1
