"""Write records as JSON lines, and conversations in OpenAI's format with tools."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from penjing.base.errors import UserError
from penjing.base.files import atomic_write
from penjing.data.formats import schema
from penjing.data.formats.schema import Chat, Document, Message, PreferenceRecord

# Fields of a conversation, which `messages` and `tools` replace
_SHAPE = {*schema.CHAT_FIELDS, *schema.QUESTION_FIELDS, *schema.SYSTEM_FIELDS, *schema.TOOL_FIELDS}
_SHAPE |= {"instruction", "history", "context"}


def write_jsonl(path: Path, records: Iterable[Mapping[str, Any]]) -> int:
    """Write `records` as JSON lines, atomically; returns their number. Raises `UserError` when there are none."""
    num_records = 0
    with atomic_write(path) as stream:
        for record in records:
            stream.write(json.dumps(record, ensure_ascii=False).encode("utf-8") + b"\n")
            num_records += 1
        if not num_records:
            raise UserError("the source gave no record", where=path.name, next_step="Please report this.")
    return num_records


def chat_record(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """A conversation as a record without empty fields."""
    record: dict[str, Any] = {"messages": [_turn(message) for message in messages]}
    return record | ({"tools": [dict(tool) for tool in tools]} if tools else {})


def record_row(record: Document | Chat | PreferenceRecord) -> dict[str, Any]:
    """A record as the object that its reader makes the same record of. A prompt keeps its other fields."""
    if isinstance(record, Document):
        return {"text": record.text}
    if isinstance(record, Chat):
        row = chat_record(record.messages, record.tools)
        return {name: value for name, value in record.fields.items() if name not in _SHAPE} | row
    if len(record.chats) == 1:
        return chat_record(record.chats[0].messages, record.chats[0].tools) | {"label": record.is_chosen[0]}
    chosen, rejected = (chat_record(chat.messages, chat.tools) for chat in record.chats)
    row = {"chosen": chosen.pop("messages"), "rejected": rejected["messages"], **chosen}
    return row | ({"margin": record.margin} if record.margin else {})


def _turn(message: Message) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning_content:
        turn["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        turn["tool_calls"] = [dict(call) for call in message.tool_calls]
    if not message.is_target:
        turn["weight"] = 0
    return turn
