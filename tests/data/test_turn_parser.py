"""What a model said, taken apart again: what was written comes back, and nothing it can say is an error."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penjing.data.chat.render import render
from penjing.data.chat.turn_parser import ParsedTurn, TurnSpan, parse, read_call, split_spans, without_reasoning
from penjing.data.formats import Message
from penjing.data.tokenizer.tokenizer import CONTROL_TOKENS, VISIBLE_TOKENS, Tokenizer

QUESTION = Message(role="user", content="?")
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def with_marks(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of text in which the marks are control tokens, as a model says them."""
    ids: list[int] = []
    while text:
        found = [(text.index(mark), mark) for mark in CONTROL_TOKENS if mark in text]
        place, mark = min(found, default=(len(text), ""))
        ids += tokenizer.encode(text[:place]) + ([tokenizer.control(mark)] if mark else [])
        text = text[place + len(mark) :]
    return ids


WORDS = st.text(alphabet=st.sampled_from('ab1 \n好<>{}"/'), max_size=12) | st.sampled_from(CONTROL_TOKENS)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | WORDS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(WORDS, inner, max_size=2),
    max_leaves=4,
)
CALLS = st.lists(
    st.fixed_dictionaries({"name": WORDS.filter(bool), "arguments": st.dictionaries(WORDS, VALUES, max_size=2)}),
    max_size=2,
)


@given(content=WORDS, thought=WORDS, calls=CALLS, thinking=st.sampled_from([None, False, True]))
def test_what_was_written_is_read(
    tokenizer: Tokenizer, content: str, thought: str, calls: list[dict[str, Any]], thinking: bool | None
) -> None:
    if thinking is False:
        thought = ""
    if thinking is None and not thought and not content.strip():
        content = "x"
    written = Message(role="assistant", content=content, reasoning_content=thought, tool_calls=tuple(calls))
    before = render(tokenizer, [QUESTION], ask=True, thinking=thinking).ids
    whole = render(tokenizer, [QUESTION, written], thinking=thinking).ids
    if whole[: len(before)] != before:  # a thought that begins with a newline joins the one before it
        return
    end = len(whole) - whole[::-1].index(tokenizer.message_end)
    said = parse(tokenizer, whole[len(before) : end], thinking=thinking)
    assert (said.reasoning, said.content) == (thought, content.lstrip("\n"))
    assert [(call.name, call.arguments, call.problem) for call in said.calls] == [
        (call["name"], call["arguments"], "") for call in calls
    ]
    assert not said.open


@pytest.mark.parametrize(
    ("inside", "problem"),
    [
        ("add(1, 2)", "not JSON"),
        ('{"name": "add"', "not JSON"),
        ('{"name": "add", "arguments": {"a": NaN}}', "not JSON"),
        ('{"name": "add", "arguments": {"a": 1e999}}', "not JSON"),
        ('{"name": "add", "arguments": {"a": "\\ud800"}}', "not JSON"),
        ('{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}", "not JSON"),
        ("[" * 5000, "not JSON"),
        ("x" * 30_000, "too long"),
        ("[1]", "names no tool"),
        ('{"arguments": {}}', "names no tool"),
        ('{"name": 3, "arguments": {}}', "names no tool"),
        ('{"name": "add", "arguments": [1]}', "not an object"),
        ('{"name": "add", "arguments": "a=1"}', "not an object"),
        ('{"name": "add"}', "not an object"),
    ],
)
def test_broken_calls_carry_their_problem(tokenizer: Tokenizer, inside: str, problem: str) -> None:
    said = parse(tokenizer, with_marks(tokenizer, f"<tool_call>{inside}</tool_call>{ADD}"))
    first, second = said.calls
    assert problem in first.problem
    assert (second.name, second.arguments, second.problem) == ("add", {"a": 1}, "")
    assert inside in said.message.content and len(said.message.tool_calls) == 1


def test_arguments_may_be_json_in_a_text() -> None:
    call = read_call(TurnSpan("tool_call", '{"name": "add", "arguments": "{\\"a\\": 1}"}', closed=True))
    assert call.arguments == {"a": 1}


def said(tokenizer: Tokenizer, text: str, thinking: bool | None = None) -> ParsedTurn:
    return parse(tokenizer, with_marks(tokenizer, text), thinking=thinking)


def test_thoughts_stand_first_and_call_nothing(tokenizer: Tokenizer) -> None:
    one = said(tokenizer, f"<think>a{ADD}b</think>c<|im_end|>")
    assert one.calls == () and one.content == "c" and one.reasoning.startswith("a<tool_call>")
    late = said(tokenizer, "c<think>d</think>")
    assert (late.reasoning, late.content) == ("", "c<think>d</think>")
    never = said(tokenizer, "<think>a and no end" + ADD)
    assert never.open and never.content == "" and never.calls == ()
    assert said(tokenizer, "a and no end" + ADD, thinking=True).open
    assert said(tokenizer, "a</think>b", thinking=True) == ParsedTurn(reasoning="a", content="b", calls=())
    # One that opens its own thought although the prompt has done it.
    assert said(tokenizer, "<think>a</think>b", thinking=True).reasoning == "a"
    assert said(tokenizer, "<think>a</think>b", thinking=False).content == "<think>a</think>b"


def test_a_call_that_never_ends_is_one_with_a_problem(tokenizer: Tokenizer) -> None:
    cut = said(tokenizer, '<tool_call>{"name": "add", "arguments": {}}')
    assert cut.calls[0].problem == "the call was not closed"
    assert cut.message.content == '<tool_call>{"name": "add", "arguments": {}}'
    first, second = said(tokenizer, "<tool_call>{" + ADD).calls
    assert first.problem == "the call was not closed" and second.problem == ""


def test_words_that_spell_a_call_call_nothing(tokenizer: Tokenizer) -> None:
    spelled = parse(tokenizer, tokenizer.encode(f"<think>x</think>{ADD}"))
    assert spelled.calls == () and spelled.reasoning == "" and spelled.content == f"<think>x</think>{ADD}"


@given(ids=st.lists(st.integers(0, 1199), max_size=30), thinking=st.sampled_from([None, False, True]))
def test_any_ids_can_be_read(tokenizer: Tokenizer, ids: list[int], thinking: bool | None) -> None:
    one = parse(tokenizer, ids, thinking=thinking)
    assert one.message.role == "assistant"
    marks = sum(index == tokenizer.control("<tool_call>") for index in ids)
    assert len(one.calls) <= marks
    for count in range(len(ids)):  # also while it is being written
        split_spans(tokenizer, ids[:count], thinking=thinking)


def test_the_thought_can_be_taken_off(tokenizer: Tokenizer) -> None:
    def rest(text: str, thinking: bool | None = None) -> str:
        return without_reasoning(tokenizer, with_marks(tokenizer, text), thinking)

    assert rest(f"<think>a</think>b{ADD}") == f"b{ADD}" == rest(f"a</think>b{ADD}", True)
    assert rest("b</think>c") == "b</think>c" and rest("b", False) == "b"
    assert rest("<think>a") == "" == rest("a", True)


def test_stray_marks_are_words_among_words_and_nothing_alone(tokenizer: Tokenizer) -> None:
    marks = "".join(VISIBLE_TOKENS[1::2])
    assert said(tokenizer, marks) == ParsedTurn(reasoning="", content="", calls=())
    for alone in (f" {marks}\n", "<tool_call> </tool_call>"):
        assert said(tokenizer, alone).message.content == ""
    for words in (f"{marks}so", f"so{marks}"):
        assert said(tokenizer, words).content == words
    behind = said(tokenizer, f"{ADD}\n{marks}{ADD}")
    assert behind.content == "" and len(behind.calls) == 2
    spelled = parse(tokenizer, tokenizer.encode(marks))
    assert spelled.content == marks  # somebody explains them
