"""A running turn in OpenAI's stream format: reasoning, content and tool calls."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any

from penjing.data.chat.turn_parser import TurnSpan, read_call
from penjing.data.tokenizer.tokenizer import END_TOOL_CALL, TOOL_CALL
from penjing.infer.text_stream import SpanDelta

Delta = dict[str, Any]


class TurnDeltas:
    """`SpanDelta`s of one turn in, OpenAI's deltas out. A call is sent when complete, an invalid one as content."""

    def __init__(self) -> None:
        self.calls = 0
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
        """A text delta, or none."""
        self._has_content = self._has_content or (name == "content" and bool(text))
        return [{name: text}] if text else []

    def _end_call(self, *, closed: bool) -> list[Delta]:
        text, self._call, self._number = self._call, "", -1
        call = read_call(TurnSpan("tool_call", text, closed))
        if call.problem and not text.strip():
            return []  # only marks: not shown
        if call.problem:
            separator = "\n" if self._has_content else ""
            return self._text("content", f"{separator}{TOOL_CALL}{text}{END_TOOL_CALL if closed else ''}")
        index, self.calls = self.calls, self.calls + 1
        function = {"name": call.name, "arguments": ""}
        opening = {"index": index, "id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
        arguments = {"arguments": json.dumps(call.arguments, ensure_ascii=False)}
        return [{"tool_calls": [opening]}, {"tool_calls": [{"index": index, "function": arguments}]}]


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
    message: dict[str, Any] = {"role": "assistant", "content": None}
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
