"""Parse messages: roles, contents, thoughts and tool calls, in all common formats."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from penjing.base.errors import UserError
from penjing.data.formats import schema
from penjing.data.formats.functions import tool_calls_of, tools_of
from penjing.data.formats.repair import repaired
from penjing.data.formats.schema import Chat, Message
from penjing.data.formats.source_location import SourceLocation, fields_of, present, text_of, type_name

# Marks of a thought at the start of an answer. Some have marks around the answer too.
_THOUGHTS = {f"<{name}>": f"</{name}>" for name in ("think", "thinking", "thought", "reasoning")}
_THOUGHTS["<|begin_of_thought|>"] = "<|end_of_thought|>"
_THINK, _END_THINK = "<think>", "</think>"  # data/tokenizer/tokenizer.py's, which imports this package
_ANSWER = re.compile(r"\s*(?:<answer>(.*)</answer>|<\|begin_of_solution\|>(.*)<\|end_of_solution\|>)\s*", re.DOTALL)
_MEDIA_FIELDS, _SWITCH_FIELDS = frozenset(schema.MEDIA_FIELDS), frozenset(schema.SWITCH_FIELDS)
_THOUGHT_FIELDS, _TOOL_FIELDS = frozenset(schema.REASONING_FIELDS), frozenset(schema.TOOL_FIELDS)
_ANALYSIS = "analysis"  # OpenAI's channel of thoughts


def refuse_media(fields: Mapping[str, Any], where: SourceLocation) -> None:
    """Raises UserError if a record or a message has images, video or audio, which a text model cannot read."""
    for name in schema.MEDIA_FIELDS if not _MEDIA_FIELDS.isdisjoint(fields) else ():
        if fields.get(name):
            raise UserError(f"field {name} is not text", where=where, got=type_name(fields[name]), wanted="text only")


def field_text(record: Mapping[str, Any], name: str, where: SourceLocation, role: str) -> str:
    """The text of a field of the record, which counts as used. role: what it is read as."""
    where.used.setdefault(name, "")
    text = text_of(record.get(name), where.names.get(name, name), where)
    if text.strip():
        where.used[name] = role
    return text


def system_of(record: Mapping[str, Any], where: SourceLocation) -> list[Message]:
    text = field_text(record, present(record, schema.SYSTEM_FIELDS) or "system", where, "system")
    return [Message(role="system", content=text)] if text.strip() else []


def assistant_turn(
    content: str, reasoning: str = "", calls: tuple[dict[str, Any], ...] = (), is_target: bool = True
) -> Message:
    """An assistant message. A thought at the start of the content becomes its `reasoning_content`, since content is
    never encoded as control tokens, which inference expects. The <think> before a thought may be missing, as in answers
    of models whose prompt ends with it. Marks elsewhere stay in the content.
    """
    thought, answer = _split_thought(content)
    if thought is not None and (not reasoning.strip() or thought in ("", reasoning.strip())):
        reasoning, content = reasoning if reasoning.strip() else thought, answer
    return Message(
        role="assistant", content=content, reasoning_content=reasoning, tool_calls=calls, is_target=is_target
    )


def _split_thought(content: str) -> tuple[str | None, str]:
    """The thought that a content begins with, and the answer after it; None if it begins with none."""
    if "</" not in content and "<|" not in content:
        return None, content
    start = content.lstrip()
    opening = next((mark for mark in _THOUGHTS if start.startswith(mark)), "")
    thought, end, answer = start.removeprefix(opening).partition(_THOUGHTS.get(opening, _END_THINK))
    if not end or (not opening and _THINK in thought):
        return None, content
    marked = _ANSWER.fullmatch(answer)
    return thought.strip(), (marked[1] or marked[2] or "").strip() if marked else answer.lstrip("\r\n")


def turns_of(
    record: Mapping[str, Any], field: str, where: SourceLocation
) -> tuple[list[Message], tuple[dict[str, Any], ...]]:
    """The messages and tools of a field of the record, with the record's own system message and tools."""
    turns = record[field]
    where.used.setdefault(field, "messages")
    if not isinstance(turns, list):
        got = "text that is neither JSON nor a transcript" if isinstance(turns, str) else type_name(turns)
        raise UserError(f"field {field} is not a list", where=where, got=got, wanted="a list of messages")
    messages = system_of(record, where)
    tools = tools_of(record, where)
    for index, turn in enumerate(turns):
        if not isinstance(turn, dict):
            raise UserError(f"{field}[{index}] is not a message", where=where, got=type_name(turn), wanted="an object")
        if "human" in turn and "assistant" in turn:  # Firefly: both sides in one object
            messages.append(Message(role="user", content=text_of(turn["human"], "human", where)))
            messages.append(assistant_turn(text_of(turn["assistant"], "assistant", where)))
            where.note_ignored(turn, ("human", "assistant"), (), " of a message")
            continue
        tools = (tools_of(turn, where) if not _TOOL_FIELDS.isdisjoint(turn) else ()) or tools
        message = _message(turn, f"{field}[{index}]", where)
        if message.role != "system" or message.content.strip():  # a system turn that only carries tools is dropped
            messages.append(message)
    return messages, tools


def _message(turn: Mapping[str, Any], name: str, where: SourceLocation) -> Message:
    refuse_media(turn, where)
    speaker_field = "role" if "role" in turn else "from"
    speaker = turn.get(speaker_field)
    role = schema.ROLES.get(speaker.lower()) if isinstance(speaker, str) else None
    if role is None:
        got = repr(speaker) if speaker is not None else fields_of(turn)
        raise UserError(f"{name} has no known role", where=where, got=got, wanted="system, user, assistant or tool")
    calls_field = "tool_calls" if turn.get("tool_calls") else "function_call"
    calls = tool_calls_of(turn[calls_field], name, where) if calls_field in turn else ()
    field = "content" if "content" in turn else next((name for name in ("value", "text") if name in turn), "content")
    if field not in turn and not calls:
        raise UserError(f"{name} has no content", where=where, got=fields_of(turn), wanted="content")
    if isinstance(speaker, str) and speaker.lower() in ("function_call", "tool_call"):
        content, calls = "", tool_calls_of(turn.get(field), name, where)
    else:
        content = _content(turn.get(field), f"{name}.{field}", where)
    if role == "assistant":
        message = assistant_turn(content, reasoning_of(turn, where, name), calls, _is_target(turn, name, where))
        if turn.get("channel") == _ANALYSIS:
            message = replace(message, content="", reasoning_content=message.content)
    else:
        message = Message(role=role, content=content)
    if len(turn) > 2:  # more than the two that every message has
        used = {speaker_field, field, *schema.TOOL_FIELDS}
        if role == "assistant":
            used |= {calls_field, *schema.REASONING_FIELDS, *schema.SWITCH_FIELDS}
            used |= {"channel"} if turn.get("channel") in (_ANALYSIS, "final") else set()
        else:  # it has no weight anyway
            used |= {field for field in schema.SWITCH_FIELDS if turn.get(field) in (0, None)}
            used |= {"name", "tool_call_id"} if role == "tool" else set()
        where.note_ignored(turn, used, (content,), f" of {role} messages")
    return message


def reasoning_of(fields: Mapping[str, Any], where: SourceLocation, name: str = "") -> str:
    """The thought in a message, or beside the answer of a record. name: of the message, in errors."""
    if _THOUGHT_FIELDS.isdisjoint(fields):
        return ""
    here = [field for field in schema.REASONING_FIELDS if field in fields]
    texts = [text_of(fields[field], f"{name}.{field}".strip("."), where) for field in here]
    thoughts = list(dict.fromkeys(text for text in texts if text.strip()))
    if len(thoughts) > 1:
        raise UserError(f"{name or 'the answer'} has two thoughts", where=where, got=", ".join(schema.REASONING_FIELDS))
    return thoughts[0] if thoughts else ""


def _is_target(turn: Mapping[str, Any], name: str, where: SourceLocation) -> bool:
    """Whether the loss includes an answer: not if its `weight`, or a field of the same meaning, is 0 or false."""
    if _SWITCH_FIELDS.isdisjoint(turn):
        return True
    switches = {field: turn[field] for field in schema.SWITCH_FIELDS if turn.get(field) is not None}
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
        where.note_ignored(part, ("type", "text", "cache_control"), (), " of a content part")
    return "\n".join(parts)


def conversation(
    messages: Sequence[Message], tools: tuple[dict[str, Any], ...], where: SourceLocation, *, keeps_end: bool = False
) -> Chat:
    """The chat of these messages, repaired where a rule says how (`data/formats/repair.py`). keeps_end: as there.

    Raises UserError for other orders of roles: a system message must be first, and a tool result must follow a call.
    """
    messages, tools = repaired(messages, tools, where, keeps_end=keeps_end)
    previous = ""
    for message in messages:
        is_late = message.role == "system" and previous
        if is_late or (message.role == "tool" and previous not in ("assistant", "tool")):
            got = ", ".join(message.role for message in messages[:8])
            wanted = "system?, then user and assistant in turn"
            raise UserError("roles out of order", where=where, got=got, wanted=wanted)
        previous = message.role
        where.note_marks(message.content)
        where.note_marks(message.reasoning_content)
    return Chat(messages=tuple(messages), tools=tools, source=str(where.path), line=where.line)
