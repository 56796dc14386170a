"""A model answers a file of prompts: chats come out, each answer depends on its seed alone, a stop loses nothing."""

import io
import json
import os
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from user_errors import raises_user_error

from penjing.base.config import parse_overrides
from penjing.base.errors import UserError
from penjing.commands.chat import chat as talk
from penjing.data.formats import Chat, Message, NoBadRecords, read_chats
from penjing.data.tokenizer.tokenizer import VISIBLE_TOKENS, Tokenizer
from penjing.eval.suite import Suite
from penjing.infer.conversation import GenerationOptions
from penjing.kernels.cpu import library
from penjing.model.transformer import Transformer
from penjing.workflows import generate
from penjing.workflows.evaluate import EvalOptions, evaluate
from penjing.workflows.generate import AnswerOptions, generate_file, split_turns
from penjing.workflows.train import execute, resolve_run

DRAWN = AnswerOptions(temperature=1.0, max_tokens=12, cut="keep", seed=4)


@pytest.fixture(scope="module")
def model(tmp_path_factory, small_run, toy):
    folder = tmp_path_factory.mktemp("model") / "run"
    words = [word for word in small_run if not word.startswith(("data", "steps"))]
    words += [f"data.train={toy / 'sft.jsonl'}", "data.format=chats", "data.seq_len=256", "max_steps=4"]
    execute(resolve_run("pretrain", parse_overrides([*words, f"out={folder}"])), Console(quiet=True))
    return folder


def said(tokenizer, text, asked=DRAWN):
    """A message from text whose marks are control tokens."""
    pieces = re.split("(" + "|".join(VISIBLE_TOKENS) + ")", text)
    ids = [
        index
        for piece in pieces
        for index in ([tokenizer.control(piece)] if piece in VISIBLE_TOKENS else tokenizer.encode(piece))
    ]
    return generate._message(SimpleNamespace(finish_reason="stop", ids=ids), tokenizer, asked)


def write(model, prompts, out, asked=DRAWN, **place):
    return generate_file(model, [prompts], out, Console(file=io.StringIO()), asked, **{"device": "cpu", **place})


@pytest.fixture(scope="module")
def whole(tmp_path_factory, model, toy):
    out = tmp_path_factory.mktemp("whole") / "answers.jsonl"
    return out, write(model, toy / "rl.jsonl", out)


def test_what_comes_out_is_a_file_of_chats_in_order(whole, toy):
    out, done = whole
    asked = [json.loads(line)["conversations"][0]["content"] for line in (toy / "rl.jsonl").read_text().splitlines()]
    chats = list(read_chats([out]))
    assert done.written == len(chats)
    assert done.written + done.left_out == len(asked) == 20
    assert [chat.messages[0].content for chat in chats] == [text for text in asked if text in {
        chat.messages[0].content for chat in chats
    }]  # fmt: skip
    assert all(chat.messages[-1].role == "assistant" for chat in chats)
    about = json.loads(out.with_name("answers.jsonl.about.json").read_text())
    assert about["settings"]["seed"] == 4
    assert about["state"]["done"] == 20


def test_a_stop_anywhere_loses_nothing(tmp_path, monkeypatch, model, toy, whole):
    monkeypatch.setattr(generate, "PROMPTS_AT_ONCE", 6)
    out, made = tmp_path / "answers.jsonl", []
    original = generate._lines

    def stop_later(*words):
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(1)
        return original(*words)

    monkeypatch.setattr(generate, "_lines", stop_later)
    with pytest.raises(KeyboardInterrupt):
        write(model, toy / "rl.jsonl", out)
    with open(out, "ab") as stream:
        stream.write(b'{"messages": [{"role": "us')  # killed in the middle of a line
    monkeypatch.setattr(generate, "_lines", original)
    assert write(model, toy / "rl.jsonl", out) == whole[1]
    assert out.read_bytes() == whole[0].read_bytes()


def test_a_second_process_does_not_write_the_same_answers(tmp_path, monkeypatch, model, toy, whole):
    honest, out = generate._answer, tmp_path / "answers.jsonl"

    def beside(*given):
        with raises_user_error(got=f"process {os.getpid()} "):
            write(model, toy / "rl.jsonl", out)
        honest(*given)

    monkeypatch.setattr(generate, "_answer", beside)
    write(model, toy / "rl.jsonl", out)
    assert out.read_bytes() == whole[0].read_bytes()


def test_finished_it_does_nothing_more(monkeypatch, whole, model, toy):
    monkeypatch.setattr(generate, "_lines", None)
    assert write(model, toy / "rl.jsonl", whole[0]) == whole[1]


def test_answers_of_before_dtype_and_weights_were_noted_go_on(tmp_path, whole, model, toy):
    out = tmp_path / "answers.jsonl"
    out.write_bytes(whole[0].read_bytes())
    about = json.loads(whole[0].with_name("answers.jsonl.about.json").read_text())
    assert about.pop("dtype") == "float32" and about["settings"].pop("weights") == "auto"
    out.with_name("answers.jsonl.about.json").write_text(json.dumps(about))
    assert write(model, toy / "rl.jsonl", out) == whole[1]


@pytest.mark.skipif(bool(library.unavailable_decode_reason()), reason="no kernels for a CPU here")
def test_weights_are_quantised_where_asked_for(tmp_path, monkeypatch, penjing, model, toy):
    """By both verbs, and a file is not gone on with by others."""
    out, words = tmp_path / "answers.jsonl", ("--weights", "int8", "--device", "cpu", "--max-tokens", 12)
    penjing("generate", model, "--prompts", toy / "rl.jsonl", "--out", out, "--keep-cut", *words)
    asked = AnswerOptions(max_tokens=12, cut="keep", weights="int8")
    monkeypatch.setattr(generate, "_lines", None)
    write(model, toy / "rl.jsonl", out, asked)
    with pytest.raises(UserError, match="another settings"):
        write(model, toy / "rl.jsonl", out, replace(asked, weights="auto"))
    penjing("chat", model, "--prompt", "So?", *words)
    made = []
    monkeypatch.setattr("penjing.commands.chat.make_engine", lambda *_, weights, **__: made.append(weights) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        talk(model, Console(quiet=True), GenerationOptions(), prompt="So?", weights="int8", device="cpu")
    assert made == ["int8"]
    refused = penjing("chat", model, "--prompt", "So?", "--weights", "int4", check=False)
    assert refused.returncode == 2 and "int8" in refused.stderr


def test_answers_that_were_removed_are_written_anew(tmp_path, whole, model, toy):
    out = tmp_path / "answers.jsonl"
    for name in (out.name, out.name + ".about.json"):
        (tmp_path / name).write_bytes(whole[0].with_name(name).read_bytes())
    with open(out, "rb+") as stream:
        stream.truncate(40)
    with pytest.raises(UserError, match="40 bytes"):
        write(model, toy / "rl.jsonl", out)
    assert out.stat().st_size == 40
    out.unlink()
    assert write(model, toy / "rl.jsonl", out) == whole[1]
    assert out.read_bytes() == whole[0].read_bytes()


@pytest.mark.parametrize("text", ["R\n</think>\n\nA", "<think>\nR\n</think>\n\nA", "\n<think>R</think>A"])
def test_a_thought_is_one_whoever_opens_it(model, text):
    tokenizer = Tokenizer.load(model / "tokenizer")
    message = said(tokenizer, text, AnswerOptions(thinking="on"))
    assert (message.content, message.reasoning_content) == ("A", "R")


def test_several_answers_of_each_prompt_differ(tmp_path, model, toy):
    out = tmp_path / "answers.jsonl"
    done = write(model, toy / "rl.jsonl", out, AnswerOptions(answers=3, temperature=1.0, max_tokens=12, cut="keep"))
    assert done.written + done.left_out == 60
    said = [chat.messages[-1].content for chat in read_chats([out])]
    assert len(set(said)) > 30


def test_conversations_with_answers_are_answered_anew(tmp_path, model, toy):
    few = tmp_path / "few.jsonl"
    few.write_text("\n".join((toy / "sft.jsonl").read_text().splitlines()[:5]) + "\n")
    before = list(read_chats([few]))
    write(model, few, tmp_path / "out.jsonl")
    for chat in read_chats([tmp_path / "out.jsonl"]):
        assert any(chat.messages[:-1] == other.messages[:-1] for other in before)


def test_every_question_may_be_answered_in_turn(tmp_path, model, toy):
    few, out = tmp_path / "few.jsonl", tmp_path / "out.jsonl"
    few.write_text("\n".join((toy / "sft.jsonl").read_text().splitlines()[:12]) + "\n")
    asked = AnswerOptions(temperature=1.0, max_tokens=12, cut="keep", seed=4, turns="all")
    done = write(model, few, out, asked)
    chats, before = list(read_chats([out])), list(read_chats([few]))
    assert done.written == len(chats) > 6
    longer = 0
    for chat in chats:
        questions = [message for message in chat.messages if message.role == "user"]
        origin = next(other for other in before if questions[0] in other.messages)
        theirs = [message for message in origin.messages if message.role == "user"]
        assert questions == theirs[: len(questions)]
        roles = [message.role for message in chat.messages if message.role != "system"]
        assert roles == ["user", "assistant"] * len(questions)
        longer += len(questions) > 1
    assert longer > 3
    # What was said before stands in the next question's prompt: another first answer, other ones after it.
    again = tmp_path / "again.jsonl"
    write(model, few, again, asked)
    assert again.read_bytes() == out.read_bytes()


def test_in_turn_a_conversation_ends_at_a_tools_result():
    user, said = Message(role="user", content="2 + 3?"), Message(role="assistant", content="", tool_calls=({},))
    tool = Message(role="tool", content="5")
    chat = Chat(messages=(user, said, tool), tools=(), source="x", line=1)
    assert split_turns(chat, "all") == [(user,)]
    assert split_turns(Chat(messages=(user, said, user), tools=(), source="x", line=1), "all") == [(user,), (user,)]
    assert split_turns(chat, "last") == [(user, said, tool)]


def test_answers_that_were_cut_off_are_left_out(tmp_path, model, toy):
    done = write(model, toy / "rl.jsonl", tmp_path / "a.jsonl", AnswerOptions(max_tokens=1))
    assert done.left_out == 20 - done.written
    assert done.written < 20


def test_answers_that_could_only_be_the_same_are_refused(tmp_path, model, toy):
    with pytest.raises(
        UserError, match=r"--answers: all 4 answers to a prompt would be the same.*--temperature above 0"
    ):
        write(model, toy / "rl.jsonl", tmp_path / "a.jsonl", AnswerOptions(answers=4))


def test_other_settings_or_a_strangers_file_are_refused(tmp_path, whole, model, toy):
    with pytest.raises(UserError, match="another settings"):
        write(model, toy / "rl.jsonl", whole[0], AnswerOptions(max_tokens=13))
    with pytest.raises(UserError, match="another prompts"):
        write(model, toy / "sft.jsonl", whole[0])
    with pytest.raises(UserError, match="another dtype") as caught:
        write(model, toy / "rl.jsonl", whole[0], dtype="bfloat16")
    assert "bfloat16" in str(caught.value) and "float32" in str(caught.value)
    stranger = tmp_path / "mine.jsonl"
    stranger.write_text("mine\n")
    with pytest.raises(UserError, match="is there already"):
        write(model, toy / "rl.jsonl", stranger)
    assert stranger.read_text() == "mine\n"


@pytest.mark.parametrize(
    ("text", "content", "thoughts", "calls"),
    [
        ("Seven.", "Seven.", "", 0),
        ("<think>\n3 + 4\n</think>\n\nSeven.", "Seven.", "3 + 4", 0),
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', "", "", 1),
        (
            'Wait.\n<tool_call>{"name": "a", "arguments": {}}</tool_call>\n'
            '<tool_call>{"name": "b", "arguments": {}}</tool_call>',
            "Wait.",
            "",
            2,
        ),
        ("<tool_call>\nnot json\n</tool_call>", "<tool_call>not json</tool_call>", "", 0),
        ('<tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>', None, "", 0),
        ("<tool_call>" + "[" * 5000 + "</tool_call>", None, "", 0),
        ('<tool_call>{"name": "a", "arguments": {"n": ' + "9" * 5000 + "}}</tool_call>", None, "", 0),
        ("so\0", "so\ufffd", "", 0),
    ],
)
def test_an_answer_is_taken_apart(model, text, content, thoughts, calls):
    message = said(Tokenizer.load(model / "tokenizer"), text)
    wanted = text if content is None else content
    assert (message.content, message.reasoning_content, len(message.tool_calls)) == (wanted, thoughts, calls)


def test_marks_that_are_words_call_nothing_and_an_open_thought_is_no_answer(model):
    tokenizer = Tokenizer.load(model / "tokenizer")
    words = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    copied = SimpleNamespace(finish_reason="stop", ids=tokenizer.encode(words))
    message = generate._message(copied, tokenizer, AnswerOptions())
    assert (message.content, message.tool_calls) == (words, ())
    assert said(tokenizer, "<think>\nnever ends") is None
    assert said(tokenizer, '<tool_call>{"name": "a", "arguments": {"b": "\\u0000"}}</tool_call>') is None


def turns(*contents):
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]}


def test_a_conversation_that_waits_is_asked_its_last_question(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (turns("a", "b"), turns("a", "b", "c"))))
    assert [[message.content for message in chat.messages] for chat in generate.read_questions([path])] == [
        ["a"],
        ["a", "b", "c"],
    ]


class Moved(Exception):
    pass


@pytest.mark.parametrize("verb", ["chat", "eval --questions", "eval --text", "generate"])
def test_every_verb_takes_a_gpu_where_there_is_one_and_the_device_it_is_told(tmp_path, monkeypatch, model, toy, verb):
    def to(module, place):
        raise Moved(place)

    screen, answers = Console(quiet=True), AnswerOptions(temperature=1.0)
    options, asked = GenerationOptions(max_tokens=1), Suite(names=["questions"], questions=toy / "eval.jsonl")
    run = {
        "chat": lambda **where: talk(model, screen, options, prompt="So?", **where),
        "eval --questions": lambda **where: evaluate([model], asked, None, screen, EvalOptions(**where)),
        "eval --text": lambda **where: evaluate(
            [model], Suite(names=[]), toy / "pretrain.jsonl", screen, EvalOptions(**where)
        ),
        "generate": lambda **where: generate_file(model, [toy / "rl.jsonl"], tmp_path / "a", screen, answers, **where),
    }[verb]
    monkeypatch.setattr(Transformer, "to", to)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    for where, place in (({}, "cuda:0"), ({"device": "cpu"}, "cpu")):
        with pytest.raises(Moved) as caught:
            run(**where)
        assert str(caught.value) == place


def test_bits_per_byte_of_models_with_other_windows_say_so(tmp_path, model):
    other, text, said = tmp_path / "other", tmp_path / "a.txt", io.StringIO()
    shutil.copytree(model, other)
    settings = other / "run.toml"
    settings.write_text(settings.read_text().replace("seq_len = 256", "seq_len = 512", 1))
    text.write_text("Tom had a red cup.")
    evaluate([model, other], Suite(names=[]), [text], Console(file=said, width=300), EvalOptions())
    windows = [line.split()[-3:] for line in said.getvalue().splitlines() if line.startswith("  window, tokens")]
    assert windows == [["256", "512", "+256"]]
    assert said.getvalue().count("in windows of 512 tokens") == 1


def test_conversations_with_an_empty_answer_are_counted(tmp_path):
    path, counts = tmp_path / "prompts.jsonl", NoBadRecords()
    path.write_text("".join(json.dumps(turns(*each)) + "\n" for each in (("a", "b"), ("a", ""), ("a", "", "c", "d"))))
    assert [chat.messages[-1].content for chat in generate.read_questions([path], counts)] == ["a", "a\n\nc"]
    assert counts.reasons == {"an answer is empty": 1} and counts.changed["empty turns dropped"] == 1


def test_a_broken_prompt_is_not_left_out(tmp_path):
    path = tmp_path / "prompts.jsonl"
    good = json.dumps(turns("a")) + "\n"
    path.write_text(good * 200 + '{"messages": [\n' + good)
    with pytest.raises(UserError, match=r"prompts\.jsonl:201: broken JSON"):
        list(generate.read_questions([path]))
