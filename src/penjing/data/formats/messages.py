"""Messages: roles, contents, thoughts and tool calls, in any of the spellings people have."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from penjing.base.errors import UserError
from penjing.data.formats.schema import CHAT_FIELDS, MEDIA_FIELDS, QUESTION_FIELDS, ROLES, Chat, Message
from penjing.data.formats.source_location import SourceLocation, names_of, present, text_of, type_name

_THINK, _END_THINK = "<think>", "</think>"  # data/tokenizer/tokenizer.py's, which imports this package


def says_nothing(message: Message) -> bool:
    return not message.tool_calls and not message.content.strip()


def refuse_media(fields: Mapping[str, Any], place: SourceLocation) -> None:
    """Raises UserError where a record or a message comes with pictures or sound, which a model of text cannot see."""
    for name in MEDIA_FIELDS:
        if fields.get(name):
            raise UserError(f"field {name} is not text", where=place, got=type_name(fields[name]), wanted="text only")


def system_of(record: Mapping[str, Any], place: SourceLocation) -> list[Message]:
    text = text_of(record.get("system"), "system", place)
    return [Message(role="system", content=text)] if text.strip() else []


def assistant_turn(content: str, reasoning: str = "", calls: tuple[dict[str, Any], ...] = ()) -> Message:
    """What an assistant says. A thought that its words begin with, as <think>...</think>, is taken out of them.

    Words are never control tokens: as a part of them a thought would be learned spelled out, which is not how it is
    asked for and read where the model is used. Whatever stands further on stays as it was written.
    """
    opened = content.lstrip()
    if not reasoning.strip() and opened.startswith(_THINK) and _END_THINK in opened:
        thought, _, rest = opened.removeprefix(_THINK).partition(_END_THINK)
        reasoning, content = thought.strip(), rest.lstrip("\r\n")
    return Message(role="assistant", content=content, reasoning_content=reasoning, tool_calls=calls)


def alpaca_question(record: Mapping[str, Any], prefix: str, place: SourceLocation) -> list[Message]:
    """Alpaca's earlier turns and its question. prefix: of the names of its fields."""
    messages = []
    history = record.get("history") or []
    if not isinstance(history, (list, tuple)):
        raise UserError("field history is not a list", where=place, got=type_name(history), wanted="a list of pairs")
    for pair in history:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            got = type_name(pair)
            raise UserError("field history is not pairs", where=place, got=got, wanted="[question, answer]")
        messages.append(Message(role="user", content=text_of(pair[0], "history", place)))
        messages.append(assistant_turn(text_of(pair[1], "history", place)))
    parts = [text_of(record.get(prefix + name), prefix + name, place) for name in ("instruction", "input")]
    messages.append(Message(role="user", content="\n".join(part for part in parts if part.strip())))
    return messages


def asked_of(record: Mapping[str, Any], place: SourceLocation) -> tuple[list[Message], tuple[dict[str, Any], ...]]:
    """What a record asks, without its system message, and the tools on offer: a text, messages or Alpaca's fields.

    Nothing where no such field is, or where it is blank.
    """
    name = present(record, (*QUESTION_FIELDS, *CHAT_FIELDS))
    if name is not None and (name in CHAT_FIELDS or isinstance(record[name], list)):
        return turns_of({CHAT_FIELDS[0]: record[name], "tools": record.get("tools")}, place, called=name)
    if name is not None:
        messages = [Message(role="user", content=text_of(record[name], name, place))]
    elif present(record, ("instruction",)):
        messages = alpaca_question(record, "", place)
    else:
        messages = []
    if messages and not messages[-1].content.strip():
        messages = []
    return messages, tools_of(record.get("tools"), place)


def turns_of(
    record: Mapping[str, Any], place: SourceLocation, called: str = ""
) -> tuple[list[Message], tuple[dict[str, Any], ...]]:
    """called: the name of the field in errors, where it is not the record's own."""
    field = present(record, CHAT_FIELDS)
    assert field is not None
    turns = record[field]
    field = called or field
    if not isinstance(turns, list):
        raise UserError(f"field {field} is not a list", where=place, got=type_name(turns), wanted="a list of messages")
    messages = system_of(record, place)
    tools = tools_of(record.get("tools"), place)
    for index, turn in enumerate(turns):
        if not isinstance(turn, dict):
            raise UserError(f"{field}[{index}] is not a message", where=place, got=type_name(turn), wanted="an object")
        if "human" in turn and "assistant" in turn:  # Firefly: both sides in one object
            messages.append(Message(role="user", content=text_of(turn["human"], "human", place)))
            messages.append(assistant_turn(text_of(turn["assistant"], "assistant", place)))
            continue
        tools = tools_of(turn.get("tools"), place) or tools
        message = _message(turn, f"{field}[{index}]", place)
        if message.role != "system" or message.content.strip():  # a system turn that only carries tools says nothing
            messages.append(message)
    return messages, tools


def _message(turn: Mapping[str, Any], name: str, place: SourceLocation) -> Message:
    refuse_media(turn, place)
    speaker = turn.get("role", turn.get("from"))
    role = ROLES.get(speaker.lower()) if isinstance(speaker, str) else None
    if role is None:
        got = repr(speaker) if speaker is not None else names_of(turn)
        raise UserError(f"{name} has no known role", where=place, got=got, wanted="system, user, assistant or tool")
    calls = _tool_calls(turn.get("tool_calls") or turn.get("function_call"), name, place)
    field = "content" if "content" in turn else "value"
    if field not in turn and not calls:
        raise UserError(f"{name} has no content", where=place, got=names_of(turn), wanted="content")
    if isinstance(speaker, str) and speaker.lower() == "function_call":
        return Message(role=role, content="", tool_calls=_tool_calls(turn.get(field), name, place))
    content = _content(turn.get(field), f"{name}.{field}", place)
    reasoning = text_of(turn.get("reasoning_content"), f"{name}.reasoning_content", place)
    if role == "assistant":
        return assistant_turn(content, reasoning, calls)
    return Message(role=role, content=content, reasoning_content=reasoning, tool_calls=calls)


def _content(value: object, name: str, place: SourceLocation) -> str:
    """Text, or OpenAI's list of parts when all of them are text."""
    if not isinstance(value, list):
        return text_of(value, name, place)
    parts = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text":
            got = part.get("type") if isinstance(part, dict) else type_name(part)
            raise UserError(f"{name} has a part that is not text", where=place, got=got, wanted="text parts only")
        parts.append(text_of(part.get("text"), name, place))
    return "\n".join(parts)


def _parsed(value: object, name: str, place: SourceLocation) -> Any:
    """A value that may be written as a JSON string (MiniMind and ShareGPT do); an empty one is None."""
    if isinstance(value, str):
        if not value.strip():
            return None
        start = repr(value[:40])
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{name} is not JSON: {error}", where=place, got=start) from None
    text_of(json.dumps(value, ensure_ascii=False), name, place)
    return value


def _functions(value: object, name: str, place: SourceLocation) -> list[dict[str, Any]]:
    """A list of objects with a `name`; OpenAI's {"type": "function", "function": {...}} is unwrapped."""
    value = _parsed(value, name, place)
    if not value:
        return []
    found = []
    for item in value if isinstance(value, list) else [value]:
        item = item.get("function", item) if isinstance(item, dict) else item
        if not isinstance(item, dict) or not isinstance(item.get("name"), str):
            raise UserError(f"{name} is not a function", where=place, got=str(item)[:60], wanted='{"name": ...}')
        found.append(item)
    return found


def tools_of(value: object, place: SourceLocation) -> tuple[dict[str, Any], ...]:
    return tuple(_functions(value, "tools", place)) if value else ()


def _tool_calls(value: object, name: str, place: SourceLocation) -> tuple[dict[str, Any], ...]:
    if not value:
        return ()
    calls = []
    for item in _functions(value, f"{name}: the tool call", place):
        arguments = _parsed(item.get("arguments", item.get("parameters")), f"{name}: arguments", place) or {}
        if not isinstance(arguments, dict):
            raise UserError(f"{name}: arguments", where=place, got=type_name(arguments), wanted="an object")
        calls.append({"name": item["name"], "arguments": arguments})
    return tuple(calls)


def conversation(messages: Sequence[Message], tools: tuple[dict[str, Any], ...], place: SourceLocation) -> Chat:
    """The chat of these messages. Raises UserError for roles in an order that no conversation has.

    A system message comes first or not at all, a question before any answer, an answer of a tool after a call; and
    nobody speaks twice in a row, but for an assistant that calls several tools.
    """
    before: Message | None = None
    for message in messages:
        role, last = message.role, before.role if before else None
        wrong = (
            (role == "system" and before is not None)
            or (role == "assistant" and last in (None, "system"))
            or (role == "tool" and last not in ("assistant", "tool"))
            or (role == "user" and last == "user")
            or (role == "assistant" and last == "assistant" and not (before and before.tool_calls))
        )
        if wrong:
            got = ", ".join(each.role for each in messages[:8])
            wanted = "system?, then user and assistant in turn"
            raise UserError("roles out of order", where=place, got=got, wanted=wanted)
        before = message
    return Chat(messages=tuple(messages), tools=tools, source=str(place.path), line=place.line)
