"""Talking in the terminal: commands, interrupts, what is read again, and the editor."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import stat
import sys

import pytest
from rich.console import Console
from small_models import small_model

from penjing.agent_tools.box import Toolbox
from penjing.base.errors import UserError
from penjing.commands import chat_input
from penjing.commands.chat import converse
from penjing.commands.chat_commands import COMMANDS, command_of
from penjing.commands.chat_input import EditorReader, PlainReader, make_reader
from penjing.commands.chat_screen import Screen
from penjing.data.formats import Message, read_chats
from penjing.data.tokenizer.train import train_tokenizer
from penjing.infer.conversation import Conversation, GenerationOptions, TextDelta, TurnEnd
from penjing.infer.generate import generate, make_engine
from penjing.infer.sample import Sampling


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["what is it? It is a kite. I think so."] * 20, 320)


@pytest.fixture(scope="module")
def model(tokenizer):
    return small_model(vocab_size=tokenizer.size, max_position_embeddings=400, sharpen=3)


@pytest.fixture
def start(tokenizer, model):
    """A conversation with a real engine."""
    engines = []

    def make(answers=True, context_tokens=400, **options):
        engines.append(make_engine(model, slots=1, max_tokens=400))
        options = GenerationOptions(**{"max_tokens": 12, **options})
        return Conversation(engines[-1], tokenizer, options, is_chat_model=answers, context_tokens=context_tokens)

    yield make
    for engine in engines:
        engine.close()


def answer(parts):
    """The last turn's end, once all is written."""
    return [part for part in parts if isinstance(part, TurnEnd)][-1]


def run(talk, line):
    command, rest = command_of(line)
    return command.run(talk, rest)


def test_answers_are_those_of_generate(start, model, tokenizer):
    from penjing.data.chat.render import render

    talk = start()
    for text in ("what is it?", "I think so"):
        prompt = render(tokenizer, [*talk.messages, Message(role="user", content=text)], ask=True).ids
        (wanted,) = generate(model, [prompt], max_new_tokens=12, stop=tokenizer.stop)
        pieces = [piece for part in talk.ask(text) if isinstance(part, TextDelta) for piece in part.spans]
        assert "".join(piece.text for piece in pieces) == tokenizer.decode(wanted)
    assert [message.role for message in talk.messages] == ["user", "assistant"] * 2


def test_a_pretrained_model_goes_on_from_each_text_alone(start, tokenizer):
    talk = start(answers=False)
    for text in ("what is", "it is a kite. I think"):
        assert answer(talk.ask(text)).prompt_tokens == 1 + len(tokenizer.encode(text))
    for line in ("/system be kind", "/think on", "/save x"):
        with pytest.raises(UserError, match="only pretrained"):
            run(talk, line)


def test_retry_draws_with_the_next_seed_and_replaces_the_answer(start):
    talk = start(sampling=Sampling(temperature=2.0), seed=5)
    with pytest.raises(UserError, match="nothing was asked"):
        run(talk, "/retry")
    answer(talk.ask("what is it?"))
    first = talk.messages[1]
    answer(run(talk, "/retry"))
    again = talk.messages[1]
    assert len(talk.messages) == 2 and again != first
    other = start(sampling=Sampling(temperature=2.0), seed=6)
    answer(other.ask("what is it?"))
    assert other.messages[1] == again


def test_an_answer_that_is_stopped_is_kept(start):
    talk = start(max_tokens=100)
    written = 0
    for part in talk.ask("what is it?"):
        written += isinstance(part, TextDelta)
        if written == 3:
            talk.stop()
    assert part.finish_reason == "cancelled" and part.tokens < 6
    assert [message.role for message in talk.messages] == ["user", "assistant"] and talk.messages[1].content
    assert talk.engine.idle and answer(talk.ask("so?")).finish_reason != "cancelled"


def test_an_answer_that_nobody_waits_for_leaves_the_engine_free(start):
    talk = start(max_tokens=100)
    parts = talk.ask("what is it?")
    next(parts)
    parts.close()
    assert talk.engine.idle and talk.messages == []


def test_settings(start):
    talk = start()
    assert run(talk, "/temperature 0.5") == "temperature: 0.5" and talk.options.sampling.temperature == 0.5
    assert run(talk, "/top_p 0.9") == "top_p: 0.9" and talk.options.sampling == Sampling(temperature=0.5, top_p=0.9)
    for line in ("/temperature -1", "/temperature warm", "/top_p 2", "/think maybe", "/adapter cat"):
        before = talk.options
        with pytest.raises(UserError):
            run(talk, line)
        assert talk.options is before
    for words, thinking in (("on", True), ("off", False), ("auto", None)):
        assert run(talk, f"/think {words}") == f"thinking: {words}" and talk.options.thinking is thinking
    assert run(talk, "/temperature") == "temperature: 0.5"
    talk.engine.forward.adapters = ("cat",)
    run(talk, "/adapter cat")
    assert talk.options.adapter == "cat"
    run(talk, "/adapter none")
    assert talk.options.adapter == ""


def test_the_system_prompt_opens_the_conversation_until_it_is_taken_away(start, tokenizer):
    talk = start()
    plain = talk._prompt([Message(role="user", content="so?")])
    run(talk, "/system be kind\nand short")
    assert len(talk._prompt([Message(role="user", content="so?")])) > len(plain)
    answer(talk.ask("so?"))
    run(talk, "/new")
    assert talk.messages == [] and talk.system == "be kind\nand short"
    run(talk, "/system")
    assert talk._prompt([Message(role="user", content="so?")]) == plain


def test_what_is_saved_can_be_trained_on(start, tmp_path):
    talk, path = start(toolbox=Toolbox(["calculator"])), tmp_path / "chats.jsonl"
    with pytest.raises(UserError, match="nothing was answered"):
        run(talk, f"/save {path}")
    run(talk, "/system be kind")
    talk.messages = [
        Message(role="user", content="what is 1+1?\n好"),
        Message(
            role="assistant",
            content="",
            reasoning_content="hm",
            tool_calls=({"name": "calculator", "arguments": {"expression": "1+1"}},),
        ),
        Message(role="tool", content="2"),
        Message(role="assistant", content="It is 2."),
    ]
    run(talk, f"/save {path}")
    run(talk, f"/save {path}")
    (one, two) = read_chats([path])
    assert one.messages == two.messages == (Message(role="system", content="be kind"), *talk.messages)
    assert [tool["name"] for tool in one.tools] == ["calculator"]
    talk.messages[-1] = Message(role="assistant", content=" ")
    with pytest.raises(UserError, match="empty"):
        run(talk, f"/save {path}")
    talk.messages.pop()
    with pytest.raises(UserError, match="cannot write"):
        run(talk, f"/save {tmp_path}")
    with pytest.raises(UserError, match="cannot write"):
        run(talk, "/save ~nobody-of-this-name/chats.jsonl")


def test_the_oldest_exchange_is_forgotten_whole(start):
    talk = start(context_tokens=60, max_tokens=9)
    said = [
        Message(role="user", content="a " * 50),
        Message(role="assistant", content="", tool_calls=({"name": "x", "arguments": {}},)),
        Message(role="tool", content="1"),
        Message(role="assistant", content="b"),
        Message(role="user", content="c"),
    ]
    assert talk._fit(said) == said[-1:]


@pytest.mark.parametrize("answers", [True, False])
def test_a_question_must_leave_space_for_its_answer_in_the_context(start, answers):
    """The model reads 400 tokens, but was trained on 80."""
    talk = start(answers, context_tokens=80, max_tokens=30)
    length = len(talk._prompt([Message(role="user", content="")]))
    per_word = len(talk.tokenizer.encode(" I think so" * 9)) // 9
    fits = " I think so" * ((50 - length) // per_word)
    assert answer(talk.ask(fits)).tokens == 30
    before = list(talk.messages)
    for too_long in (" I think so" * ((50 - length) // per_word + 1), "I think so" * 200):
        with pytest.raises(UserError, match="too long"):
            list(talk.ask(too_long))
        assert talk.messages == before
    talk = start(answers, context_tokens=80, max_tokens=300)
    end = answer(talk.ask("so?"))
    assert end.prompt_tokens + end.tokens == 80 and end.finish_reason == "length"


ESCAPES = "\x1b]0;title\x07\x1b[2J\x9b1m\x90q\x7f\b\rb\u0085\ud800"


def test_no_control_characters_reach_the_terminal():
    """Of answers, thoughts, calls and results on any console; of names and errors on the console of the commands."""
    from penjing.agent_tools.box import Result
    from penjing.base.markup import Terminal
    from penjing.infer.text_stream import SpanDelta

    call = json.dumps({"name": ESCAPES, "arguments": {ESCAPES: ESCAPES}})
    pieces = [SpanDelta("reasoning", 0, "a " + ESCAPES), *(SpanDelta("content", 1, letter) for letter in ESCAPES)]
    pieces += [SpanDelta("tool_call", 2, call, True), SpanDelta("content", 3, "\n\nz" + ESCAPES)]
    shown = Console(file=io.StringIO(), width=200)
    result = Result(text="1\n" + ESCAPES, worked=True)
    Screen(shown).show([TextDelta(pieces), result])
    clean = "]0;title[2J1mqb\ufffd"
    assert shown.file.getvalue() == (
        f"thinking: a {clean}\n\n{clean}\n  {clean}({clean}={clean})\nz{clean}  = 1\n{clean}\n"
    )
    console = Terminal(file=io.StringIO(), force_terminal=True, width=200)
    console.print(ESCAPES, style="red", markup=False)
    with console.status("busy"):
        console.out(ESCAPES)
    left = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "", console.file.getvalue())
    assert left.count(clean) == 2 and not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", left)


@pytest.mark.parametrize(("line", "named"), [("/temp 3", "/temperature"), ("/sytem x", "/system"), ("/quux", "/help")])
def test_a_command_that_is_not_there_names_the_nearest(line, named):
    with pytest.raises(UserError, match=named):
        command_of(line)


def test_a_path_is_no_command():
    assert command_of("/etc/passwd is a file") == (None, "/etc/passwd is a file")
    assert command_of(" /new")[0] is None


class Lines:
    """Reads these; an exception among them is raised."""

    def __init__(self, *lines):
        self.lines = [*lines, EOFError()]

    def read(self):
        line = self.lines.pop(0)
        if isinstance(line, BaseException):
            raise line
        return line


def test_a_line_that_cannot_be_answered_does_not_end_the_talk(start):
    talk, shown = start(context_tokens=200), Console(file=io.StringIO(), width=200)
    broken = UnicodeDecodeError("utf-8", b"\xe4", 0, 1, "unexpected end of data")
    lines = Lines("what", broken, "\udce4\udcbd", "long " * 90, "/nothing", "", "/retry", "so?")
    converse(talk, lines, shown, ends_with_empty_line=False)
    said = shown.file.getvalue()
    assert [message.content for message in talk.messages if message.role == "user"] == ["what", "so?"]
    assert said.count("too long") == 1 and said.count("not UTF-8") == 2 and "/nothing: no such command" in said


def test_an_empty_line_ends_where_lines_come_from_a_pipe(start):
    talk = start()
    converse(talk, Lines("", "so?"), Console(file=io.StringIO()), ends_with_empty_line=True)
    assert talk.messages == []


@pytest.fixture
def sigint():
    """Ctrl-C as a terminal has it: a shell's background job ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("sigint")
def test_ctrl_c_stops_the_answer_and_a_second_one_the_program(start, monkeypatch):
    talk = start(max_tokens=60)
    before = signal.getsignal(signal.SIGINT)
    presses = [signal.SIGINT]
    monkeypatch.setattr(Screen, "write", lambda self, found: presses and os.kill(os.getpid(), presses.pop()))
    converse(talk, Lines("what"), Console(file=io.StringIO()), ends_with_empty_line=True)
    assert [message.role for message in talk.messages] == ["user", "assistant"]
    assert signal.getsignal(signal.SIGINT) is before
    monkeypatch.setattr(Screen, "write", lambda self, found: os.kill(os.getpid(), signal.SIGINT))
    monkeypatch.setattr(talk, "stop", lambda: None)
    with pytest.raises(KeyboardInterrupt):
        converse(talk, Lines("what"), Console(file=io.StringIO()), ends_with_empty_line=True)
    assert talk.engine.idle and signal.getsignal(signal.SIGINT) is before


def test_the_summary_tells_rate_first_token_and_what_was_read_again():
    shown = io.StringIO()
    turn = {"tokens": 42, "prompt_tokens": 512, "cached_tokens": 482, "first_token_seconds": 0.12}
    console = Console(file=shown, width=200, force_terminal=True, color_system=None)
    Screen(console).show([TurnEnd(**turn, tokens_per_second=89.4, finish_reason="cancelled")])
    for part in ("42 tokens", "89/s", "120 ms", "512", "30 new", "stopped"):
        assert part in shown.getvalue()


# --- input -----------------------------------------------------------------------------------------------------------


def typed(keys, tmp_path, monkeypatch, reads=1):
    """What the editor makes of these keys."""
    pytest.importorskip("prompt_toolkit")
    from prompt_toolkit.input import create_pipe_input
    from prompt_toolkit.output import DummyOutput

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with create_pipe_input() as pipe:
        pipe.send_text(keys)
        reader = EditorReader(COMMANDS, input=pipe, output=DummyOutput())
        return [reader.read() for _ in range(reads)]


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ("one\r", "one"),
        ("one\x1b\rtwo\r", "one\ntwo"),
        ("one\\\rtwo\r", "one\ntwo"),
        ("\x1b[200~one\r\ntwo\x1b[201~\r", "one\ntwo"),
        ("gone\x03kept\r", "kept"),
    ],
)
def test_keys(keys, line, tmp_path, monkeypatch):
    assert typed(keys, tmp_path, monkeypatch) == [line]


def test_ctrl_c_and_ctrl_d_on_an_empty_line_end(tmp_path, monkeypatch):
    for key in "\x03\x04":
        with pytest.raises(EOFError):
            typed(key, tmp_path, monkeypatch)


def test_the_history_is_kept_and_for_the_user_alone(tmp_path, monkeypatch):
    typed("first\r", tmp_path, monkeypatch)
    file = tmp_path / "penjing" / "chat_history"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert typed("\x1b[A\r", tmp_path, monkeypatch) == ["first"]
    file.chmod(0o644)
    typed("second\r", tmp_path, monkeypatch)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.unlink()
    file.symlink_to(tmp_path / "other")
    assert typed("third\r", tmp_path, monkeypatch) == ["third"] and not (tmp_path / "other").exists()


def test_commands_are_completed(tmp_path, monkeypatch):
    from prompt_toolkit.document import Document

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    completer = EditorReader(COMMANDS).session.completer
    found = [each.text for each in completer.get_completions(Document("/te"), None)]
    assert found == ["/temperature"] and not list(completer.get_completions(Document("so /te"), None))


def test_without_prompt_toolkit_lines_are_plain_and_it_is_said_once(monkeypatch):
    shown = Console(file=io.StringIO(), width=200)
    monkeypatch.setattr(chat_input, "is_interactive", lambda console: True)
    monkeypatch.setitem(sys.modules, "prompt_toolkit", None)
    reader = make_reader(shown, COMMANDS)
    assert isinstance(reader, PlainReader) and shown.file.getvalue().count("penjing[chat]") == 1
    lines = iter(["one\\", "two", "three"])
    monkeypatch.setattr(shown, "input", lambda prompt: next(lines))
    assert [reader.read(), reader.read()] == ["one\ntwo", "three"]


def test_a_pipe_is_read_as_it_is(monkeypatch):
    shown = Console(file=io.StringIO(), width=200)
    reader = make_reader(shown, COMMANDS)
    monkeypatch.setattr(shown, "input", lambda prompt: "C:\\")
    assert isinstance(reader, PlainReader) and reader.read() == "C:\\" and not shown.file.getvalue()
