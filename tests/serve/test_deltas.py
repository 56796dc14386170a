"""A turn in OpenAI's format: broken calls are words, and whole ones are counted; tokens are counted as they are."""

from __future__ import annotations

import json

import pytest

from penjing.infer.requests import Event, Token
from penjing.infer.text_stream import SpanDelta
from penjing.serve.deltas import TurnDeltas, message_of
from penjing.serve.response_fields import RequestStats

GOOD = '{"name": "add", "arguments": {"a": 1}}'
BROKEN = '{"name": "add", "arguments": [1]}'


def spans(*turn):
    """The deltas of (kind, text) and (kind, text, closed), each text letter by letter."""
    for number, (kind, text, *closed) in enumerate(turn):
        yield from (SpanDelta(kind, number, letter) for letter in text)
        if any(closed):
            yield SpanDelta(kind, number, "", True)


@pytest.mark.parametrize(
    ("turn", "content", "calls"),
    [
        ([("tool_call", BROKEN, True)], f"<tool_call>{BROKEN}</tool_call>", 0),
        ([("content", "so"), ("tool_call", BROKEN, True)], f"so\n<tool_call>{BROKEN}</tool_call>", 0),
        ([("tool_call", GOOD[:-4])], f"<tool_call>{GOOD[:-4]}", 0),
        ([("tool_call", GOOD)], f"<tool_call>{GOOD}", 0),
        ([("tool_call", "no"), ("tool_call", GOOD, True)], "<tool_call>no", 1),
        (
            [("tool_call", GOOD, True), ("tool_call", BROKEN, True), ("tool_call", GOOD, True)],
            f"<tool_call>{BROKEN}</tool_call>",
            2,
        ),
        ([("tool_call", " \n"), ("tool_call", "", True)], None, 0),
    ],
)
def test_a_broken_call_is_content_and_a_whole_one_a_call(turn, content, calls):
    deltas, running = [], TurnDeltas()
    for span in spans(*turn):
        deltas += running.add([span])
    deltas += running.add([], ended=True)
    message = message_of(deltas)
    assert message["content"] == (content if content or calls else "")
    found = message.get("tool_calls", [])
    assert [json.loads(call["function"]["arguments"]) for call in found] == [{"a": 1}] * calls
    opened = [call["index"] for delta in deltas for call in delta.get("tool_calls", ()) if "id" in call]
    assert opened == list(range(calls)) and len({call["id"] for call in found}) == calls


def test_completion_tokens_are_those_that_the_model_sampled():
    """Its end counts, and an event that only tells of an end does not."""
    token = Token(7, -1.0)
    stats = RequestStats(context=99)
    stats.add_prompt(5, 3)
    stats.observe(0, [Event(0, 0, token, cached_tokens=4), Event(0, 0, token)])
    stats.observe(0, [Event(0, 0, token, "stop")])
    stats.observe(1, [Event(0, 1, token, cached_tokens=5), Event(0, 1, None, "cancelled")])
    stats.observe(2, [Event(0, 2, None, "length")])
    assert stats.completion_tokens == [3, 1, 0] and stats.timing["context_used"] == 5 + 3
    assert stats.usage == {
        "prompt_tokens": 5,
        "completion_tokens": 4,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
