"""A running turn in OpenAI's stream format: reasoning, content and tool calls."""

import contextlib
import json
import re
import secrets
from collections.abc import Sequence
from typing import Any

from penjing.data.chat.turn_parser import TurnSpan, read_call
from penjing.data.tokenizer.tokenizer import END_TOOL_CALL, TOOL_CALL
from penjing.infer.text_stream import SpanDelta

Delta = dict[str, Any]


PARTIAL_CALL = re.compile(r'{"name": ("(?:[^"\\]|\\.)*"), "arguments": (.*)', re.DOTALL)


class TurnDeltas:
    """`SpanDelta`s of one turn in, OpenAI's deltas out. A call is sent when complete, an invalid one as content.

    is_forced: the turn must be a call. It is a tool call, with the beginning of its arguments, even if it was cut.
    max_calls: later calls are left out.
    """

    def __init__(self, is_forced: bool = False, max_calls: int | None = None) -> None:
        self.is_forced, self.max_calls = is_forced, max_calls
        self.calls = 0  # complete ones
        self._call = ""  # the text of the running call
        self._number = -1  # of its span
        self._has_content = False

    def add(self, spans: Sequence[SpanDelta], *, ended: bool = False) -> list[Delta]:
        """The new deltas. ended: no more spans follow."""
        deltas: list[Delta] = []
        for span in spans:
            if self._number >= 0 and span.number != self._number:
                deltas += self._end_call(closed=False)
            if span.kind != "tool_call":
                deltas += self._text("reasoning_content" if span.kind == "reasoning" else "content", span.text)
                continue
            self._number, self._call = span.number, self._call + span.text
            if span.closed:
                deltas += self._end_call(closed=True)
        return deltas + (self._end_call(closed=False) if ended and self._number >= 0 else [])

    def _text(self, name: str, text: str) -> list[Delta]:
        self._has_content = self._has_content or (name == "content" and bool(text))
        return [{name: text}] if text else []

    def _end_call(self, *, closed: bool) -> list[Delta]:
        text, self._call, self._number = self._call, "", -1
        call = read_call(TurnSpan("tool_call", text, closed))
        if call.problem and self.is_forced:
            return self._partial_call(text)
        if call.problem and not text.strip():
            return []  # only marks: not shown
        if call.problem:
            separator = "\n" if self._has_content else ""
            return self._text("content", f"{separator}{TOOL_CALL}{text}{END_TOOL_CALL if closed else ''}")
        if self.calls == self.max_calls:
            return []
        self.calls += 1
        return _call(self.calls - 1, call.name, json.dumps(call.arguments, ensure_ascii=False))

    def _partial_call(self, text: str) -> list[Delta]:
        """A forced call up to where it was cut; nothing if that is before its arguments."""
        match = PARTIAL_CALL.match(text.lstrip())
        if match is None:
            return []
        arguments = match[2]
        with contextlib.suppress(ValueError, RecursionError):  # they are complete, and more follows
            arguments = arguments[: json.JSONDecoder().raw_decode(arguments)[1]]
        return _call(0, json.loads(match[1]), arguments)


def _call(index: int, name: str, arguments: str) -> list[Delta]:
    function = {"name": name, "arguments": ""}
    opening = {"index": index, "id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
    return [{"tool_calls": [opening]}, {"tool_calls": [{"index": index, "function": {"arguments": arguments}}]}]


def merged(deltas: Sequence[Delta]) -> list[Delta]:
    """Merge neighbouring text deltas of the same kind."""
    result: list[Delta] = []
    for delta in deltas:
        (name,) = delta
        if result and name in result[-1] and name != "tool_calls":
            result[-1] = {name: result[-1][name] + delta[name]}
        else:
            result.append(delta)
    return result


def message_of(deltas: Sequence[Delta]) -> dict[str, Any]:
    """The message that all deltas add up to."""
    message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        for name in ("content", "reasoning_content"):
            if name in delta:
                message[name] = (message.get(name) or "") + delta[name]
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                calls.append({name: call[name] for name in ("id", "type")} | {"function": dict(call["function"])})
            else:
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    if calls:
        message["tool_calls"] = calls
    elif message["content"] is None:
        message["content"] = ""
    return message
