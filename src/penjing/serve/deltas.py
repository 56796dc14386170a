"""A turn that is being written, as OpenAI's streams have it: reasoning, content and tool calls."""

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
    """Pieces of one turn in (`TurnStream`), deltas out. A call waits for its end; what cannot be run stays words."""

    def __init__(self) -> None:
        self.calls = 0
        self._call = ""  # the text of the call that is being written
        self._number = -1  # of its stretch
        self._has_content = False

    def add(self, pieces: Sequence[SpanDelta], *, ended: bool = False) -> list[Delta]:
        """What is new. ended: nothing follows."""
        found: list[Delta] = []
        for piece in pieces:
            if self._number >= 0 and piece.number != self._number:
                found += self._end_call(closed=False)
            if piece.kind != "tool_call":
                found += self._text("reasoning_content" if piece.kind == "reasoning" else "content", piece.text)
                continue
            self._number, self._call = piece.number, self._call + piece.text
            if piece.closed:
                found += self._end_call(closed=True)
        return found + (self._end_call(closed=False) if ended and self._number >= 0 else [])

    def _text(self, name: str, text: str) -> list[Delta]:
        """Text, joined to what is just before it."""
        self._has_content = self._has_content or (name == "content" and bool(text))
        return [{name: text}] if text else []

    def _end_call(self, *, closed: bool) -> list[Delta]:
        text, self._call, self._number = self._call, "", -1
        call = read_call(TurnSpan("tool_call", text, closed))
        if call.problem and not text.strip():
            return []  # nothing but marks: not for readers
        if call.problem:
            before = "\n" if self._has_content else ""
            return self._text("content", f"{before}{TOOL_CALL}{text}{END_TOOL_CALL if closed else ''}")
        index, self.calls = self.calls, self.calls + 1
        named = {"name": call.name, "arguments": ""}
        begin = {"index": index, "id": f"call_{secrets.token_hex(12)}", "type": "function", "function": named}
        arguments = {"arguments": json.dumps(call.arguments, ensure_ascii=False)}
        return [{"tool_calls": [begin]}, {"tool_calls": [{"index": index, "function": arguments}]}]


def merged(deltas: Sequence[Delta]) -> list[Delta]:
    """The same with neighbours of one kind of text in one."""
    found: list[Delta] = []
    for delta in deltas:
        (name,) = delta
        if found and name in found[-1] and name != "tool_calls":
            found[-1] = {name: found[-1][name] + delta[name]}
        else:
            found.append(delta)
    return found


def message_of(deltas: Sequence[Delta]) -> dict[str, Any]:
    """The message that all deltas make together."""
    message: dict[str, Any] = {"role": "assistant", "content": None}
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        for name in ("content", "reasoning_content"):
            if name in delta:
                message[name] = (message.get(name) or "") + delta[name]
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                calls.append({name: part[name] for name in ("id", "type")} | {"function": dict(part["function"])})
            else:
                calls[-1]["function"]["arguments"] += part["function"]["arguments"]
    if calls:
        message["tool_calls"] = calls
    elif message["content"] is None:
        message["content"] = ""
    return message
