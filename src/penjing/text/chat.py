"""Conversations to ids and loss weights: the one place where it is decided which tokens a model is taught to say.

Structure is written as control ids, content is encoded as plain text between them, so a user message that contains
`<|im_end|>` or `<|im_start|>assistant` stays a user message. Weight 1: what the assistant says, including the end of
its turn. Weight 0: everything else.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penjing.text import tokenizer as tokens
from penjing.text.records import Message
from penjing.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Rendered:
    """ids[i] is the token at i; weights[i] says whether the model is taught to produce it."""

    ids: list[int]
    weights: list[int]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


class _Writer:
    """Collects ids and weights; adjacent text is joined first, since BPE must see it as one piece."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.weights: list[int] = []
        self._text = ""
        self._weight = 0

    def text(self, text: str, weight: int) -> None:
        if weight != self._weight:
            self._flush()
            self._weight = weight
        self._text += text

    def control(self, token: str, weight: int) -> None:
        self._flush()
        self.ids.append(self.tokenizer.control(token))
        self.weights.append(weight)

    def _flush(self) -> None:
        if self._text:
            ids = self.tokenizer.encode(self._text)
            self.ids += ids
            self.weights += [self._weight] * len(ids)
            self._text = ""

    def done(self) -> Rendered:
        self._flush()
        return Rendered(self.ids, self.weights)


def _open_turn(writer: _Writer, role: str) -> None:
    writer.control(tokens.MESSAGE_START, 0)
    writer.text(role + "\n", 0)


def _close_turn(writer: _Writer, weight: int) -> None:
    writer.control(tokens.MESSAGE_END, weight)
    writer.text("\n", 0)


def _write_system(writer: _Writer, content: str, tools: Sequence[dict[str, Any]]) -> None:
    _open_turn(writer, "system")
    listed = "# Tools" + "".join("\n" + _json(tool) for tool in tools) if tools else ""
    writer.text("\n\n".join(part for part in (content, listed) if part), 0)
    _close_turn(writer, 0)


def _write_assistant(writer: _Writer, message: Message) -> None:
    _open_turn(writer, "assistant")
    if message.reasoning_content:
        writer.control(tokens.THINK, 1)
        writer.text(f"\n{message.reasoning_content}\n", 1)
        writer.control(tokens.END_THINK, 1)
        writer.text("\n\n", 1)
    writer.text(message.content.lstrip("\n"), 1)
    for index, call in enumerate(message.tool_calls):
        if index or message.content:
            writer.text("\n", 1)
        writer.control(tokens.TOOL_CALL, 1)
        writer.text("\n" + _json({"name": call["name"], "arguments": call["arguments"]}) + "\n", 1)
        writer.control(tokens.END_TOOL_CALL, 1)
    _close_turn(writer, 1)


def _write_tool_result(writer: _Writer, content: str, *, first: bool, last: bool) -> None:
    if first:
        writer.control(tokens.MESSAGE_START, 0)
        writer.text("user", 0)
    writer.text("\n", 0)
    writer.control(tokens.TOOL_RESPONSE, 0)
    writer.text(f"\n{content}\n", 0)
    writer.control(tokens.END_TOOL_RESPONSE, 0)
    if last:
        _close_turn(writer, 0)


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]] = (),
    *,
    ask: bool = False,
    thinking: bool = False,
) -> Rendered:
    """Ids and weights of a conversation.

    ask: end with an open assistant turn, for the model to fill. thinking: open that turn with `<think>`.
    """
    writer = _Writer(tokenizer)
    has_system = bool(messages) and messages[0].role == "system"
    if tools or has_system:
        _write_system(writer, messages[0].content if has_system else "", tools)
    rest = messages[1:] if has_system else messages
    for index, message in enumerate(rest):
        if message.role == "assistant":
            _write_assistant(writer, message)
        elif message.role == "tool":
            before = rest[index - 1].role if index else ""
            after = rest[index + 1].role if index + 1 < len(rest) else ""
            _write_tool_result(writer, message.content, first=before != "tool", last=after != "tool")
        else:
            _open_turn(writer, message.role)
            writer.text(message.content, 0)
            _close_turn(writer, 0)
    if ask:
        _open_turn(writer, "assistant")
        if thinking:
            writer.control(tokens.THINK, 0)
            writer.text("\n", 0)
    return writer.done()
