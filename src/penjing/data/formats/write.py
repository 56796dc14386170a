"""Conversations in the form that `read_chats` reads: OpenAI's, with tools beside the messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penjing.data.formats.schema import Message


def chat_record(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """A conversation, without empty fields."""
    record: dict[str, Any] = {"messages": [_turn(message) for message in messages]}
    return record | ({"tools": [dict(tool) for tool in tools]} if tools else {})


def _turn(message: Message) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning_content:
        turn["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        turn["tool_calls"] = [dict(call) for call in message.tool_calls]
    return turn
