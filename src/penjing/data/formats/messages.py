"""Parse messages: roles, contents, thoughts and tool calls, in all common formats."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from penjing.base.errors import UserError
from penjing.data.formats.schema import CHAT_FIELDS, MEDIA_FIELDS, QUESTION_FIELDS, ROLES, Chat, Message
from penjing.data.formats.source_location import SourceLocation, fields_of, present, text_of, type_name

_THINK, _END_THINK = "<think>", "</think>"  # data/tokenizer/tokenizer.py's, which imports this package


def is_empty(message: Message) -> bool:
    return not message.tool_calls and not message.content.strip()


def refuse_media(fields: Mapping[str, Any], where: SourceLocation) -> None:
    """Raises UserError if a record or a message has images, video or audio, which a text model cannot read."""
    for name in MEDIA_FIELDS:
        if fields.get(name):
            raise UserError(f"field {name} is not text", where=where, got=type_name(fields[name]), wanted="text only")


def system_of(record: Mapping[str, Any], where: SourceLocation) -> list[Message]:
    text = text_of(record.get("system"), "system", where)
    return [Message(role="system", content=text)] if text.strip() else []


def assistant_turn(content: str, reasoning: str = "", calls: tuple[dict[str, Any], ...] = ()) -> Message:
    """An assistant message. A leading <think>...</think> in the content becomes its `reasoning_content`.

    Content is never encoded as control tokens. A thought left in the content would be learned as plain text, but
    inference expects control tokens. Later <think> tags stay in the content.
    """
    stripped = content.lstrip()
    if not reasoning.strip() and stripped.startswith(_THINK) and _END_THINK in stripped:
        thought, _, remaining = stripped.removeprefix(_THINK).partition(_END_THINK)
        reasoning, content = thought.strip(), remaining.lstrip("\r\n")
    return Message(role="assistant", content=content, reasoning_content=reasoning, tool_calls=calls)


def alpaca_question(record: Mapping[str, Any], prefix: str, where: SourceLocation) -> list[Message]:
    """Alpaca's history and question. prefix: of the field names."""
    messages = []
    history = record.get("history") or []
    if not isinstance(history, (list, tuple)):
        raise UserError("field history is not a list", where=where, got=type_name(history), wanted="a list of pairs")
    for pair in history:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            got = type_name(pair)
            raise UserError("field history is not pairs", where=where, got=got, wanted="[question, answer]")
        messages.append(Message(role="user", content=text_of(pair[0], "history", where)))
        messages.append(assistant_turn(text_of(pair[1], "history", where)))
    parts = [text_of(record.get(prefix + name), prefix + name, where) for name in ("instruction", "input")]
    messages.append(Message(role="user", content="\n".join(part for part in parts if part.strip())))
    return messages


def question_of(record: Mapping[str, Any], where: SourceLocation) -> tuple[list[Message], tuple[dict[str, Any], ...]]:
    """The question of a record without its system message, and the tools: from a text, messages or Alpaca's fields.

    Empty if there is no such field, or if it is blank.
    """
    name = present(record, (*QUESTION_FIELDS, *CHAT_FIELDS))
    if name is not None and (name in CHAT_FIELDS or isinstance(record[name], list)):
        return turns_of({CHAT_FIELDS[0]: record[name], "tools": record.get("tools")}, where, field_name=name)
    if name is not None:
        messages = [Message(role="user", content=text_of(record[name], name, where))]
    elif present(record, ("instruction",)):
        messages = alpaca_question(record, "", where)
    else:
        messages = []
    if messages and not messages[-1].content.strip():
        messages = []
    return messages, tools_of(record.get("tools"), where)


def turns_of(
    record: Mapping[str, Any], where: SourceLocation, field_name: str = ""
) -> tuple[list[Message], tuple[dict[str, Any], ...]]:
    """The messages and tools of a record. field_name: the name in errors, if it is not the record's field."""
    field = present(record, CHAT_FIELDS)
    assert field is not None
    turns = record[field]
    field = field_name or field
    if not isinstance(turns, list):
        raise UserError(f"field {field} is not a list", where=where, got=type_name(turns), wanted="a list of messages")
    messages = system_of(record, where)
    tools = tools_of(record.get("tools"), where)
    for index, turn in enumerate(turns):
        if not isinstance(turn, dict):
            raise UserError(f"{field}[{index}] is not a message", where=where, got=type_name(turn), wanted="an object")
        if "human" in turn and "assistant" in turn:  # Firefly: both sides in one object
            messages.append(Message(role="user", content=text_of(turn["human"], "human", where)))
            messages.append(assistant_turn(text_of(turn["assistant"], "assistant", where)))
            continue
        tools = tools_of(turn.get("tools"), where) or tools
        message = _message(turn, f"{field}[{index}]", where)
        if message.role != "system" or message.content.strip():  # a system turn that only carries tools is dropped
            messages.append(message)
    return messages, tools


def _message(turn: Mapping[str, Any], name: str, where: SourceLocation) -> Message:
    refuse_media(turn, where)
    speaker = turn.get("role", turn.get("from"))
    role = ROLES.get(speaker.lower()) if isinstance(speaker, str) else None
    if role is None:
        got = repr(speaker) if speaker is not None else fields_of(turn)
        raise UserError(f"{name} has no known role", where=where, got=got, wanted="system, user, assistant or tool")
    calls = _tool_calls(turn.get("tool_calls") or turn.get("function_call"), name, where)
    field = "content" if "content" in turn else "value"
    if field not in turn and not calls:
        raise UserError(f"{name} has no content", where=where, got=fields_of(turn), wanted="content")
    if isinstance(speaker, str) and speaker.lower() == "function_call":
        return Message(role=role, content="", tool_calls=_tool_calls(turn.get(field), name, where))
    content = _content(turn.get(field), f"{name}.{field}", where)
    reasoning = text_of(turn.get("reasoning_content"), f"{name}.reasoning_content", where)
    if role == "assistant":
        return assistant_turn(content, reasoning, calls)
    return Message(role=role, content=content, reasoning_content=reasoning, tool_calls=calls)


def _content(value: object, name: str, where: SourceLocation) -> str:
    """Text, or OpenAI's list of parts when all of them are text."""
    if not isinstance(value, list):
        return text_of(value, name, where)
    parts = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text":
            got = part.get("type") if isinstance(part, dict) else type_name(part)
            raise UserError(f"{name} has a part that is not text", where=where, got=got, wanted="text parts only")
        parts.append(text_of(part.get("text"), name, where))
    return "\n".join(parts)


def _parse_json(value: object, name: str, where: SourceLocation) -> Any:
    """A value that may be written as a JSON string (MiniMind and ShareGPT do); an empty one is None."""
    if isinstance(value, str):
        if not value.strip():
            return None
        start = repr(value[:40])
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{name} is not JSON: {error}", where=where, got=start) from None
    text_of(json.dumps(value, ensure_ascii=False), name, where)
    return value


def _functions(value: object, name: str, where: SourceLocation) -> list[dict[str, Any]]:
    """A list of objects with a `name`; OpenAI's {"type": "function", "function": {...}} is unwrapped."""
    value = _parse_json(value, name, where)
    if not value:
        return []
    functions = []
    for item in value if isinstance(value, list) else [value]:
        item = item.get("function", item) if isinstance(item, dict) else item
        if not isinstance(item, dict) or not isinstance(item.get("name"), str):
            raise UserError(f"{name} is not a function", where=where, got=str(item)[:60], wanted='{"name": ...}')
        functions.append(item)
    return functions


def tools_of(value: object, where: SourceLocation) -> tuple[dict[str, Any], ...]:
    return tuple(_functions(value, "tools", where)) if value else ()


def _tool_calls(value: object, name: str, where: SourceLocation) -> tuple[dict[str, Any], ...]:
    if not value:
        return ()
    calls = []
    for item in _functions(value, f"{name}: the tool call", where):
        arguments = _parse_json(item.get("arguments", item.get("parameters")), f"{name}: arguments", where) or {}
        if not isinstance(arguments, dict):
            raise UserError(f"{name}: arguments", where=where, got=type_name(arguments), wanted="an object")
        calls.append({"name": item["name"], "arguments": arguments})
    return tuple(calls)


def conversation(messages: Sequence[Message], tools: tuple[dict[str, Any], ...], where: SourceLocation) -> Chat:
    """The chat of these messages. Raises UserError for an invalid order of roles.

    A system message must be first, an answer must follow a question, a tool result must follow a call. The same role
    may not follow itself, except tool results and an assistant after a tool call.
    """
    previous: Message | None = None
    for message in messages:
        role, previous_role = message.role, previous.role if previous else None
        is_out_of_order = (
            (role == "system" and previous is not None)
            or (role == "assistant" and previous_role in (None, "system"))
            or (role == "tool" and previous_role not in ("assistant", "tool"))
            or (role == "user" and previous_role == "user")
            or (role == "assistant" and previous_role == "assistant" and not (previous and previous.tool_calls))
        )
        if is_out_of_order:
            got = ", ".join(message.role for message in messages[:8])
            wanted = "system?, then user and assistant in turn"
            raise UserError("roles out of order", where=where, got=got, wanted=wanted)
        previous = message
    return Chat(messages=tuple(messages), tools=tools, source=str(where.path), line=where.line)
