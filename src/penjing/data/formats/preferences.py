"""Preference records: pairs of answers, and single answers with a label."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from penjing.base.errors import UserError
from penjing.data.formats.messages import (
    assistant_turn,
    conversation,
    note_ignored,
    question_of,
    refuse_media,
    system_of,
    turns_of,
)
from penjing.data.formats.schema import ANSWER_FIELDS, CHAT_FIELDS, LABEL_FIELDS, Chat, Message, PreferenceRecord
from penjing.data.formats.source_location import SourceLocation, fields_of, present, text_of, type_name


def preference_of(record: Mapping[str, Any], where: SourceLocation) -> PreferenceRecord:
    preference = _preference_of(record, where)
    used = where.used | {*CHAT_FIELDS, "margin"} if len(preference.chats) == 2 else where.used | set(LABEL_FIELDS)
    note_ignored(record, used, [message.content for chat in preference.chats for message in chat.messages], where)
    return preference


def _preference_of(record: Mapping[str, Any], where: SourceLocation) -> PreferenceRecord:
    refuse_media(record, where)
    if "chosen" in record or "rejected" in record:
        chats = tuple(_answered(record, name, where) for name in ("chosen", "rejected"))
        margin = record.get("margin") or 0.0
        if isinstance(margin, bool) or not isinstance(margin, (int, float)):
            raise UserError("field margin is not a number", where=where, got=type_name(margin), wanted="a number")
        if not abs(margin) <= sys.float_info.max:  # NaN, infinity, or an integer beyond every float
            raise UserError("field margin is not a number", where=where, got=str(margin)[:40], wanted="a finite number")
        return PreferenceRecord(chats=chats, is_chosen=(True, False), margin=float(margin))
    name = present(record, LABEL_FIELDS)
    if name is None:
        wanted = "chosen and rejected, or an answer and label"
        raise UserError("not a preference", where=where, got=fields_of(record), wanted=wanted)
    label = record[name]
    if label not in (True, False):
        raise UserError(f"field {name} is not a label", where=where, got=repr(label)[:40], wanted="true or false")
    if present(record, CHAT_FIELDS):
        chat = _ends_with_answer(*turns_of(record, where), present(record, CHAT_FIELDS) or "", where)
    else:
        answer = next((name for name in (*ANSWER_FIELDS, "output") if name in record), "completion")
        chat = _answered(record, answer, where)
    return PreferenceRecord(chats=(chat,), is_chosen=(bool(label),))


def _answered(record: Mapping[str, Any], name: str, where: SourceLocation) -> Chat:
    """The conversation that ends with the answer in field `name`. The field holds a text, a message, messages after the
    prompt, or all messages.
    """
    answer = record.get(name)
    where.used.add(name)
    if answer is None:
        raise UserError(f"no field {name}", where=where, got=fields_of(record), wanted=name)
    question, tools = question_of(record, where)
    answer = [answer] if isinstance(answer, dict) else answer
    if isinstance(answer, list):
        messages, answer_tools = turns_of({CHAT_FIELDS[0]: answer}, where, field_name=name)
        tools = answer_tools or tools
        if messages and messages[0].role not in ("assistant", "tool"):
            return _ends_with_answer(system_of(record, where) + messages, tools, name, where)
    else:
        messages = [assistant_turn(text_of(answer, name, where), where)]
    if not question:
        got = fields_of(record)
        raise UserError(f"field {name} is an answer without a prompt", where=where, got=got, wanted="prompt")
    return _ends_with_answer(system_of(record, where) + question + messages, tools, name, where)


def _ends_with_answer(
    messages: list[Message], tools: tuple[dict[str, Any], ...], name: str, where: SourceLocation
) -> Chat:
    if len(messages) < 2 or messages[-1].role != "assistant":
        got = ", ".join(message.role for message in messages[-8:]) or "no message at all"
        wanted = "an assistant turn last"
        raise UserError(f"field {name} does not end with an answer", where=where, got=got, wanted=wanted)
    if not messages[-1].is_target:
        raise UserError(f"the answer of field {name} has weight 0", where=where, wanted="an answer to learn from")
    return conversation(messages, tools, where)
