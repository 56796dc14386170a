"""A turn that is being written, as what is new of it: reasoning, content and tool calls, as OpenAI's streams have them.

What all deltas say together is what `data/chat/turn_parser.parse` says of the whole turn: newlines that only stand
between its parts are left out. A call that cannot be run stays words.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any

from penjing.data.chat.turn_parser import TurnSpan, read_call
from penjing.data.tokenizer.tokenizer import END_TOOL_CALL, TOOL_CALL

Delta = dict[str, Any]


class TurnDeltas:
    """Of one answer. `update` is told all stretches so far and returns what is new.

    skip: characters of the turn that the client has already (`continue_ids`), found by a first `update`.
    """

    def __init__(self) -> None:
        self.calls = 0
        self._number = 0  # of the stretch that is being written
        self._shown = 0  # characters of it that are out
        self._content = False  # whether content is out, in an earlier stretch
        self._content_here = False

    def update(self, spans: Sequence[TurnSpan], *, ended: bool) -> list[Delta]:
        """What is new. Newlines at the end of a stretch wait for what follows them, and a call for its end."""
        found: list[Delta] = []
        while self._number < len(spans):
            is_last = self._number == len(spans) - 1
            found += self._new_of(spans, whole=ended or not is_last)
            if is_last and not ended:
                break
            self._number, self._shown, self._content = self._number + 1, 0, self._content or self._content_here
        return found

    def _new_of(self, spans: Sequence[TurnSpan], *, whole: bool) -> list[Delta]:
        span = spans[self._number]
        if span.kind == "call":
            return self._call(span) if whole else []
        is_thought = span.kind == "thought"
        text = span.text.strip() if is_thought else self._words(spans, whole)
        new, self._shown = text[self._shown :], max(self._shown, len(text))
        self._content_here = self._content_here or (bool(new) and not is_thought)
        return [{"reasoning_content" if is_thought else "content": new}] if new else []

    def _words(self, spans: Sequence[TurnSpan], whole: bool) -> str:
        """What is shown of a stretch of words, as `turn_parser.parse` joins them."""
        text, after_call = spans[self._number].text, self._number > 0 and spans[self._number - 1].kind == "call"
        before_call = self._number + 1 < len(spans) and spans[self._number + 1].kind == "call"
        if not text.strip() and (after_call or not whole):
            return ""
        if after_call:
            text = text.removeprefix("\n")
        if before_call or not whole:
            text = text.removesuffix("\n")
        return ("\n" if after_call else "") + text if self._content else text.lstrip("\n")

    def _call(self, span: TurnSpan) -> list[Delta]:
        call = read_call(span)
        if call.problem:
            text = f"{TOOL_CALL}{span.text}{END_TOOL_CALL if span.closed else ''}"
            begun, self._content_here = self._content, True
            return [{"content": ("\n" if begun else "") + text}]
        index, self.calls = self.calls, self.calls + 1
        named = {"name": call.name, "arguments": ""}
        begin = {"index": index, "id": f"call_{secrets.token_hex(12)}", "type": "function", "function": named}
        arguments = {"arguments": json.dumps(call.arguments, ensure_ascii=False)}
        return [{"tool_calls": [begin]}, {"tool_calls": [{"index": index, "function": arguments}]}]


def joined(deltas: Sequence[Delta]) -> dict[str, Any]:
    """The message that deltas make together."""
    message: dict[str, Any] = {"role": "assistant", "content": None}
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        for name in ("content", "reasoning_content"):
            if name in delta:
                message[name] = (message.get(name) or "") + delta[name]
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                calls.append({**part, "function": dict(part["function"])})
                del calls[-1]["index"]
            else:
                calls[-1]["function"]["arguments"] += part["function"]["arguments"]
    if calls:
        message["tool_calls"] = calls
    elif message["content"] is None:
        message["content"] = ""
    return message
