"""Right and wrong answers, the table of them, and question files with mistakes in them."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from user_errors import raises_user_error

from penjing.base.errors import UserError
from penjing.data.chat.render import render
from penjing.data.formats import Message
from penjing.data.tokenizer.train import train_tokenizer
from penjing.eval import questions as module
from penjing.eval import scorer
from penjing.eval.questions import Question, Questions, is_correct, read_questions
from penjing.eval.scorer import Graded, accuracy, score_rows
from penjing.eval.task import Result

ROOMY = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=512))
CALC = {"name": "calc", "parameters": {"type": "object"}}


def question(answer="4", *, tools=(), words=(), kind="sum", language="en", chance=0.0, text="2 + 2 = ?"):
    return Question(
        messages=(Message(role="user", content=text),),
        tools=tuple(tools),
        answer=answer,
        kind=kind,
        language=language,
        chance=chance,
        must_contain=tuple(words),
        max_new_tokens=module.MAX_STORY_TOKENS if words else module.MAX_ANSWER_TOKENS,
    )


def answer_questions(model, tokenizer, asked, **how):
    return scorer.grade(Questions.__new__(Questions), asked, model, tokenizer, **how)


@pytest.mark.parametrize(
    ("said", "right"), [("4", True), ("four", False), ("4.", False), ("", False), ("44", False), ("The 4", False)]
)
def test_an_answer_must_match_exactly(said, right):
    assert is_correct(question("4"), said) == right


@pytest.mark.parametrize(
    ("said", "right"),
    [
        ("Mia saw a kite and a frog.", True),
        ("A frog.", False),
        ("", False),
    ],
)
def test_a_story_must_hold_its_words(said, right):
    assert is_correct(question("", words=["kite", "frog"]), said) == right


def call(value):
    return f"<tool_call>\n{json.dumps(value)}\n</tool_call>"


@pytest.mark.parametrize(
    ("said", "right"),
    [
        (call({"name": "calc", "arguments": {"expression": "12*7"}}), True),
        (call({"name": "calc", "arguments": {"expression": "12*8"}}), False),
        (call({"name": "search", "arguments": {"expression": "12*7"}}), False),
        (call({"arguments": {"expression": "12*7"}}), False),
        (call({"name": "calc", "arguments": {"expression": "12*7", "more": 1}}), False),
        (call({"name": "calc", "arguments": {}}), False),
        (call({"name": "calc", "arguments": "12*7"}), False),
        (call({"name": "calc"}), False),
        (call(["calc"]), False),
        ("<tool_call>\n{broken\n</tool_call>", False),
        ("12*7", False),
        ("Sure: " + call({"name": "calc", "arguments": {"expression": "12*7"}}), False),
        (call({"name": "calc", "arguments": {"expression": "12*7"}}) * 2, False),
        ("", False),
    ],
)
def test_a_tool_call_must_be_one_call_of_an_offered_tool(said, right):
    assert is_correct(question("12*7", tools=[CALC]), said) == right


def test_table_and_accuracy():
    answered = [
        Graded(question(kind="sum", chance=0.0), Result(text="4"), True),
        Graded(question(kind="sum", chance=0.5), Result(text="5"), False),
        Graded(question(kind="sum", language="zh", chance=0.25), Result(text="4"), True),
        Graded(question(kind="story", words=["kite"]), Result(text="no"), False),
    ]
    assert score_rows("sft", answered) == [
        {"stage": "sft", "kind": "sum", "language": "en", "asked": 2, "right": 1, "chance": 0.25},
        {"stage": "sft", "kind": "sum", "language": "zh", "asked": 1, "right": 1, "chance": 0.25},
    ]
    assert accuracy(answered) == pytest.approx(2 / 3)
    assert accuracy(answered, "en") == 0.5
    assert accuracy(answered, "zh") == 1.0
    assert accuracy(answered, "fr") == 0.0
    assert accuracy([]) == 0.0
    assert score_rows("sft", []) == []


ROW = {"messages": [{"role": "user", "content": "2 + 2 = ?"}], "answer": "4"}


def write(path, *rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def test_reading_a_file(tmp_path):
    full = {
        **ROW,
        "kind": "tool",
        "language": "zh",
        "chance": 0.5,
        "tools": [{"type": "function", "function": CALC}],
        "must_contain": ["猫"],
        "answer": "",
    }
    first, second = read_questions(write(tmp_path / "q.jsonl", ROW, full))
    empty = dict.fromkeys(("kind", "language", "chance", "must_contain"))
    [again] = read_questions(write(tmp_path / "null.jsonl", {**ROW, **empty}))
    assert replace(again, where=first.where) == first
    assert (first.text, first.answer, first.kind, first.language, first.chance) == (
        "2 + 2 = ?",
        "4",
        "question",
        "en",
        0,
    )
    assert first.tools == first.must_contain == ()
    assert (second.kind, second.language, second.chance, second.must_contain) == ("tool", "zh", 0.5, ("猫",))
    assert second.tools == (CALC,)
    assert is_correct(replace(second, must_contain=(), answer="1+1"), call({"name": "calc", "arguments": {"x": "1+1"}}))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"answer": None}, "field answer is missing"),
        ({"answer": 4}, "field answer is not one text; got 4; wanted a text"),
        ({"chance": "half"}, "field chance is no fraction; got 'half'"),
        ({"chance": 1.5}, "field chance is no fraction; got 1.5"),
        ({"chance": True}, "field chance is no fraction"),
        ({"must_contain": "kite"}, "field must_contain is no list of texts; got 'kite'"),
        ({"must_contain": [1]}, "field must_contain is no list of texts"),
        ({"messages": []}, ""),
        ({"messages": [{"role": "assistant", "content": "4"}]}, "asks nothing"),
    ],
)
def test_mistakes_name_file_and_line(tmp_path, change, line):
    path = write(tmp_path / "q.jsonl", ROW, ROW, {**ROW, **change})
    with pytest.raises(UserError) as caught:
        read_questions(path)
    assert f"{path}:3" in str(caught.value)
    assert line in str(caught.value)


def test_a_line_that_is_not_json_is_named(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps(ROW) + "\n{oops\n")
    with raises_user_error(where="q.jsonl:2", got="'oops'"):
        read_questions(path)


def test_questions_are_asked_as_chats_and_stories_get_more_room(monkeypatch):
    tokenizer = train_tokenizer(["two and two is four, said the cat to the frog"] * 50, 300)
    asked = []

    def answers(model, prompts, *, max_new_tokens, stop, rows):
        assert stop == {tokenizer.message_end, tokenizer.end_of_text}
        asked.append((max_new_tokens, [tokenizer.decode(ids, hide=False) for ids in prompts]))
        return [tokenizer.encode(f" {len(asked)}.{number} ") for number in range(len(prompts))]

    monkeypatch.setattr(scorer, "generate", answers)
    given = [question("1.0", text="a?"), question("", words=["kite"], text="b?"), question("1.0", text="c?")]
    answered = answer_questions(ROOMY, tokenizer, given)
    assert [(one.request, one.text, one.is_correct) for one in answered] == [
        (given[0], "1.0", True),
        (given[1], "2.0", False),
        (given[2], "1.1", False),
    ]
    assert [room for room, _ in asked] == [module.MAX_ANSWER_TOKENS, module.MAX_STORY_TOKENS]
    assert asked[1][1] == ["<|im_start|>user\nb?<|im_end|>\n<|im_start|>assistant\n"]
    assert answer_questions(ROOMY, tokenizer, []) == []


def test_answers_that_were_cut_off_are_known_and_may_be_given_more_room(monkeypatch):
    tokenizer = train_tokenizer(["two and two is four, said the cat to the frog"] * 50, 300)
    lengths = {64: [64, 63], 7: [7, 6], 80: [80, 64]}

    def answers(model, prompts, *, max_new_tokens, stop, rows):
        return [tokenizer.encode("a" * length)[:length] for length in lengths[max_new_tokens]]

    monkeypatch.setattr(scorer, "generate", answers)
    given = [question(text="a?"), question(text="b?")]
    for room in (0, 7, 80):
        assert [one.result.is_truncated for one in answer_questions(ROOMY, tokenizer, given, max_tokens=room)] == [
            True,
            False,
        ]
    # A model's own longest sequence cuts too.
    prompt = len(render(tokenizer, given[0].messages, (), ask=True).ids)
    short = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=prompt + 63))
    assert [one.result.is_truncated for one in answer_questions(short, tokenizer, given)] == [False, True]
    none = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=prompt))
    with raises_user_error(where="q.jsonl:2", got=f"{prompt} tokens", wanted=f"under {prompt}"):
        answer_questions(none, tokenizer, [replace(given[0], where="q.jsonl:2")])
