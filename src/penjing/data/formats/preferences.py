"""Preferences: pairs of answers, and single answers with a judgement."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from penjing.base.errors import UserError
from penjing.data.formats.messages import asked_of, assistant_turn, conversation, refuse_media, system_of, turns_of
from penjing.data.formats.schema import ANSWER_FIELDS, CHAT_FIELDS, LABEL_FIELDS, Chat, Message, PreferenceRecord
from penjing.data.formats.source_location import SourceLocation, names_of, present, text_of, type_name


def preference_of(record: Mapping[str, Any], place: SourceLocation) -> PreferenceRecord:
    refuse_media(record, place)
    if "chosen" in record or "rejected" in record:
        chats = tuple(_answered(record, name, place) for name in ("chosen", "rejected"))
        margin = record.get("margin") or 0.0
        if isinstance(margin, bool) or not isinstance(margin, (int, float)):
            raise UserError("field margin is not a number", where=place, got=type_name(margin), wanted="a number")
        if not abs(margin) <= sys.float_info.max:  # NaN, infinity, or an integer beyond every float
            raise UserError("field margin is not a number", where=place, got=str(margin)[:40], wanted="a finite number")
        return PreferenceRecord(chats=chats, wanted=(True, False), margin=float(margin))
    name = present(record, LABEL_FIELDS)
    if name is None:
        wanted = "chosen and rejected, or an answer and label"
        raise UserError("not a preference", where=place, got=names_of(record), wanted=wanted)
    label = record[name]
    if label not in (True, False):
        raise UserError(f"field {name} is not a judgement", where=place, got=repr(label)[:40], wanted="true or false")
    if present(record, CHAT_FIELDS):
        chat = _ending_in_answer(*turns_of(record, place), present(record, CHAT_FIELDS) or "", place)
    else:
        answer = next((name for name in (*ANSWER_FIELDS, "output") if name in record), "completion")
        chat = _answered(record, answer, place)
    return PreferenceRecord(chats=(chat,), wanted=(bool(label),))


def _answered(record: Mapping[str, Any], name: str, place: SourceLocation) -> Chat:
    """The conversation that ends with the answer in field `name`: text, a message or messages after the prompt, or all
    messages.
    """
    answer = record.get(name)
    if answer is None:
        raise UserError(f"no field {name}", where=place, got=names_of(record), wanted=name)
    question, tools = asked_of(record, place)
    answer = [answer] if isinstance(answer, dict) else answer
    if isinstance(answer, list):
        messages, more = turns_of({CHAT_FIELDS[0]: answer}, place, called=name)
        tools = more or tools
        if messages and messages[0].role not in ("assistant", "tool"):
            return _ending_in_answer(system_of(record, place) + messages, tools, name, place)
    else:
        messages = [assistant_turn(text_of(answer, name, place))]
    if not question:
        got = names_of(record)
        raise UserError(f"field {name} is an answer without a prompt", where=place, got=got, wanted="prompt")
    return _ending_in_answer(system_of(record, place) + question + messages, tools, name, place)


def _ending_in_answer(
    messages: list[Message], tools: tuple[dict[str, Any], ...], name: str, place: SourceLocation
) -> Chat:
    if len(messages) < 2 or messages[-1].role != "assistant":
        got = ", ".join(message.role for message in messages[-8:]) or "no message at all"
        wanted = "an assistant turn last"
        raise UserError(f"field {name} does not end with an answer", where=place, got=got, wanted=wanted)
    return conversation(messages, tools, place)
