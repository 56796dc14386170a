"""Parse messages: roles, contents, thoughts and tool calls, in all common formats."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from penjing.base.errors import UserError
from penjing.data.formats.schema import (
    CHAT_FIELDS,
    MEDIA_FIELDS,
    QUESTION_FIELDS,
    REASONING_FIELDS,
    ROLES,
    SWITCH_FIELDS,
    SYSTEM_FIELDS,
    TEXT_MARK,
    TOOL_FIELDS,
    Chat,
    Message,
    is_harmless,
)
from penjing.data.formats.source_location import SourceLocation, fields_of, present, text_of, type_name

# data/tokenizer/tokenizer.py's, which imports this package
_THINK, _END_THINK = "<think>", "</think>"
_TOOL_CALL, _END_TOOL_CALL = "<tool_call>", "</tool_call>"
_ANALYSIS = "analysis"  # OpenAI's channel of thoughts


def is_empty(message: Message) -> bool:
    return not message.tool_calls and not message.content.strip()


def refuse_media(fields: Mapping[str, Any], where: SourceLocation) -> None:
    """Raises UserError if a record or a message has images, video or audio, which a text model cannot read."""
    for name in MEDIA_FIELDS:
        if fields.get(name):
            raise UserError(f"field {name} is not text", where=where, got=type_name(fields[name]), wanted="text only")


def field_text(record: Mapping[str, Any], name: str, where: SourceLocation) -> str:
    """The text of a field of the record, which counts as used."""
    where.used.add(name)
    return text_of(record.get(name), name, where)


def system_of(record: Mapping[str, Any], where: SourceLocation) -> list[Message]:
    text = field_text(record, present(record, SYSTEM_FIELDS) or "system", where)
    return [Message(role="system", content=text)] if text.strip() else []


def note_ignored(
    fields: Mapping[str, Any], used: Iterable[str], contents: Sequence[str], where: SourceLocation, suffix: str = ""
) -> None:
    """Note the fields that nothing uses, unless they are empty, harmless, or repeat the contents of the messages."""
    for name, value in fields.items():
        is_blank = value is None or value == [] or value == {} or (isinstance(value, str) and not value.strip())
        if name in used or is_blank or is_harmless(name):
            continue
        if not (isinstance(value, str) and contents and (value in contents or all(text in value for text in contents))):
            where.ignored.add(f"field {name[:30].encode('utf-8', 'backslashreplace').decode()}{suffix}")


def note_marks(text: str, where: SourceLocation) -> None:
    if "<" in text or "[" in text:
        where.ignored.update(f"the mark {mark} as text" for mark in TEXT_MARK.findall(text))


def assistant_turn(
    content: str,
    where: SourceLocation,
    reasoning: str = "",
    calls: tuple[dict[str, Any], ...] = (),
    is_target: bool = True,
) -> Message:
    """An assistant message. A thought at the start of the content becomes its `reasoning_content`, tool calls at the
    end its `tool_calls`.

    Content is never encoded as control tokens. A thought or a call left in the content would be learned as plain text,
    but inference expects control tokens. The <think> before a thought may be missing, as in the answers of models whose
    prompt ends with it. Marks elsewhere stay in the content.
    """
    before, end, answer = content.partition(_END_THINK)
    head = before.strip()
    thought = head.removeprefix(_THINK).strip()
    is_thought = end and (head.startswith(_THINK) or _THINK not in head)
    if is_thought and (not reasoning.strip() or thought in ("", reasoning.strip())):
        reasoning, content = reasoning if reasoning.strip() else thought, answer.lstrip("\r\n")
    if not calls:
        content, calls = _split_calls(content, where)
    return Message(
        role="assistant", content=content, reasoning_content=reasoning, tool_calls=calls, is_target=is_target
    )


def _split_calls(content: str, where: SourceLocation) -> tuple[str, tuple[dict[str, Any], ...]]:
    """The content before the tool calls at its end, and the calls; the whole content if one of them is not valid."""
    text, *parts = content.split(_TOOL_CALL)
    calls: tuple[dict[str, Any], ...] = ()
    for part in parts:
        body, end, rest = part.partition(_END_TOOL_CALL)
        try:
            parsed = _tool_calls(body, "content", where) if end and not rest.strip() else ()
        except UserError:
            parsed = ()
        if not parsed:
            return content, ()
        calls += parsed
    return (text.rstrip() if calls else content), calls


def alpaca_question(record: Mapping[str, Any], prefix: str, where: SourceLocation) -> list[Message]:
    """Alpaca's history and question. prefix: of the field names."""
    messages = []
    history = record.get("history") or []
    where.used.add("history")
    if not isinstance(history, (list, tuple)):
        raise UserError("field history is not a list", where=where, got=type_name(history), wanted="a list of pairs")
    for pair in history:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            got = type_name(pair)
            raise UserError("field history is not pairs", where=where, got=got, wanted="[question, answer]")
        messages.append(Message(role="user", content=text_of(pair[0], "history", where)))
        messages.append(assistant_turn(text_of(pair[1], "history", where), where))
    parts = [field_text(record, prefix + name, where) for name in ("instruction", "input")]
    parts.append(field_text(record, "context", where))
    messages.append(Message(role="user", content="\n".join(part for part in parts if part.strip())))
    return messages


def plain_question(record: Mapping[str, Any], name: str, where: SourceLocation) -> Message:
    """The question in field `name`, after the text that it refers to in field `context`."""
    parts = [field_text(record, field, where) for field in ("context", name)]
    return Message(role="user", content="\n\n".join(part for part in parts if part.strip()) if parts[0] else parts[1])


def question_of(record: Mapping[str, Any], where: SourceLocation) -> tuple[list[Message], tuple[dict[str, Any], ...]]:
    """The question of a record without its system message, and the tools: from a text, messages or Alpaca's fields.

    Empty if there is no such field, or if it is blank.
    """
    name = present(record, (*QUESTION_FIELDS, *CHAT_FIELDS))
    tools = tools_of(record, where)
    if name is not None and (name in CHAT_FIELDS or isinstance(record[name], list)):
        where.used.add(name)
        messages, message_tools = turns_of({CHAT_FIELDS[0]: record[name]}, where, field_name=name)
        return messages, message_tools or tools
    if name is not None:
        messages = [plain_question(record, name, where)] if field_text(record, name, where).strip() else []
    elif present(record, ("instruction",)):
        messages = alpaca_question(record, "", where)
    else:
        messages = []
    if messages and not messages[-1].content.strip():
        messages = []
    return messages, tools


def turns_of(
    record: Mapping[str, Any], where: SourceLocation, field_name: str = ""
) -> tuple[list[Message], tuple[dict[str, Any], ...]]:
    """The messages and tools of a record. field_name: the name in errors, if it is not the record's field."""
    field = present(record, CHAT_FIELDS)
    assert field is not None
    where.used.add(field_name or field)
    turns = record[field]
    field = field_name or field
    if not isinstance(turns, list):
        raise UserError(f"field {field} is not a list", where=where, got=type_name(turns), wanted="a list of messages")
    messages = system_of(record, where)
    tools = tools_of(record, where)
    follows_thought = False
    for index, turn in enumerate(turns):
        if not isinstance(turn, dict):
            raise UserError(f"{field}[{index}] is not a message", where=where, got=type_name(turn), wanted="an object")
        if "human" in turn and "assistant" in turn:  # Firefly: both sides in one object
            messages.append(Message(role="user", content=text_of(turn["human"], "human", where)))
            messages.append(assistant_turn(text_of(turn["assistant"], "assistant", where), where))
            note_ignored(turn, ("human", "assistant"), (), where, " of a message")
            continue
        tools = tools_of(turn, where) or tools
        message = _message(turn, f"{field}[{index}]", where)
        if follows_thought and message.role == "assistant":
            message = _with_thought(message, messages.pop(), f"{field}[{index}]", where)
        follows_thought = message.role == "assistant" and turn.get("channel") == _ANALYSIS
        if message.role != "system" or message.content.strip():  # a system turn that only carries tools is dropped
            messages.append(message)
    return messages, tools


def _with_thought(message: Message, thought: Message, name: str, where: SourceLocation) -> Message:
    """The message after the thought of the turn before it (OpenAI's channel `analysis`)."""
    if message.is_target != thought.is_target:
        raise UserError(f"{name} and its thought have two weights", where=where, wanted="the same")
    parts = (thought.reasoning_content, message.reasoning_content)
    return replace(message, reasoning_content="\n".join(part for part in parts if part.strip()))


def _message(turn: Mapping[str, Any], name: str, where: SourceLocation) -> Message:
    refuse_media(turn, where)
    speaker_field = "role" if "role" in turn else "from"
    speaker = turn.get(speaker_field)
    role = ROLES.get(speaker.lower()) if isinstance(speaker, str) else None
    if role is None:
        got = repr(speaker) if speaker is not None else fields_of(turn)
        raise UserError(f"{name} has no known role", where=where, got=got, wanted="system, user, assistant or tool")
    calls_field = "tool_calls" if turn.get("tool_calls") else "function_call"
    calls = _tool_calls(turn.get(calls_field), name, where)
    field = "content" if "content" in turn else "value"
    if field not in turn and not calls:
        raise UserError(f"{name} has no content", where=where, got=fields_of(turn), wanted="content")
    used = {speaker_field, field, *TOOL_FIELDS}
    if role == "tool":
        used |= {"name", "tool_call_id"}
    if isinstance(speaker, str) and speaker.lower() == "function_call":
        content, calls = "", _tool_calls(turn.get(field), name, where)
    else:
        content = _content(turn.get(field), f"{name}.{field}", where)
    if role == "assistant":
        used |= {calls_field, *REASONING_FIELDS, *SWITCH_FIELDS}
        message = assistant_turn(content, where, reasoning_of(turn, where, name), calls, _is_target(turn, name, where))
        if turn.get("channel") == _ANALYSIS:
            message = replace(message, content="", reasoning_content=message.content)
        used |= {"channel"} if turn.get("channel") in (_ANALYSIS, "final") else set()
    else:  # it has no weight anyway
        used |= {field for field in SWITCH_FIELDS if turn.get(field) in (0, None)}
        message = Message(role=role, content=content)
    note_ignored(turn, used, (content,), where, f" of {role} messages")
    return message


def reasoning_of(fields: Mapping[str, Any], where: SourceLocation, name: str = "") -> str:
    """The thought in a message, or beside the answer of a record. name: of the message, in errors."""
    texts = [text_of(fields.get(field), f"{name}.{field}".strip("."), where) for field in REASONING_FIELDS]
    thoughts = list(dict.fromkeys(text for text in texts if text.strip()))
    if len(thoughts) > 1:
        raise UserError(f"{name or 'the answer'} has two thoughts", where=where, got=", ".join(REASONING_FIELDS))
    return thoughts[0] if thoughts else texts[0]


def _is_target(turn: Mapping[str, Any], name: str, where: SourceLocation) -> bool:
    """Whether the loss includes an answer: not if its `weight`, or a field of the same meaning, is 0 or false."""
    switches = {field: turn[field] for field in SWITCH_FIELDS if turn.get(field) is not None}
    for field, value in switches.items():
        if value not in (0, 1):  # also false and true
            got = repr(value)[:40]
            raise UserError(f"{name}.{field} is not a weight", where=where, got=got, wanted="0, 1, false or true")
    if len(set(switches.values())) > 1:
        raise UserError(f"{name} has two weights", where=where, got=switches)
    return all(switches.values())


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
        note_ignored(part, ("type", "text", "cache_control"), (), where, " of a content part")
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


def tools_of(fields: Mapping[str, Any], where: SourceLocation) -> tuple[dict[str, Any], ...]:
    name = next((name for name in TOOL_FIELDS if fields.get(name)), TOOL_FIELDS[0])
    where.used.add(name)
    return tuple(_functions(fields.get(name), name, where)) if fields.get(name) else ()


def _tool_calls(value: object, name: str, where: SourceLocation) -> tuple[dict[str, Any], ...]:
    if not value:
        return ()
    calls = []
    for item in _functions(value, f"{name}: the tool call", where):
        arguments = _parse_json(item.get("arguments", item.get("parameters")), f"{name}: arguments", where) or {}
        if not isinstance(arguments, dict):
            raise UserError(f"{name}: arguments", where=where, got=type_name(arguments), wanted="an object")
        calls.append({"name": item["name"], "arguments": arguments})
        note_ignored(item, ("name", "arguments", "parameters", "type"), (), where, " of a tool call")
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
        note_marks(message.content, where)
        note_marks(message.reasoning_content, where)
    return Chat(messages=tuple(messages), tools=tools, source=str(where.path), line=where.line)
