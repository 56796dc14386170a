"""Chats, prompts and preferences from records of any shape; the shape is detected for each record."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from penjing.base.errors import UserError
from penjing.data.formats.dispatch import kind_of, unknown_record
from penjing.data.formats.messages import (
    alpaca_question,
    assistant_turn,
    conversation,
    field_text,
    note_ignored,
    plain_question,
    question_of,
    reasoning_of,
    refuse_media,
    system_of,
    tools_of,
    turns_of,
)
from penjing.data.formats.schema import (
    ANSWER_FIELDS,
    CHAT_FIELDS,
    LABEL_FIELDS,
    QUESTION_FIELDS,
    REASONING_FIELDS,
    REFERENCE_FIELDS,
    Chat,
    Message,
    PreferenceRecord,
)
from penjing.data.formats.source_location import SourceLocation, fields_of, join_or, present, text_of, type_name


def chats_of(record: Mapping[str, Any], where: SourceLocation) -> list[Chat]:
    refuse_media(record, where)
    kind = kind_of(record)
    if kind == "preferences":
        hint = "Use it for DPO or KTO."
        raise UserError("preference data, not chats", where=where, got=fields_of(record), next_step=hint)
    prefixes = [""] if "instruction" in record else [name for name in ("en_", "zh_") if name + "instruction" in record]
    if present(record, CHAT_FIELDS):
        messages, tools = turns_of(record, where)
        if not any(message.role == "assistant" for message in messages):
            roles = ", ".join(message.role for message in messages[:8]) or "no message at all"
            raise UserError("no assistant turn", where=where, got=roles, wanted="at least one answer to learn from")
        chats = [conversation(messages, tools, where)]
    elif prefixes:
        chats = [_from_alpaca(record, prefix, where) for prefix in prefixes]
    elif present(record, QUESTION_FIELDS):
        chats = [_from_pair(record, where)]
    elif kind == "documents":
        raise UserError("a document, not a chat", where=where, got=fields_of(record), next_step="Use it to pretrain.")
    else:
        raise unknown_record(record, where)
    note_ignored(record, where.used, [message.content for chat in chats for message in chat.messages], where)
    return chats


def _from_alpaca(record: Mapping[str, Any], prefix: str, where: SourceLocation) -> Chat:
    if prefix + "output" not in record:
        raise UserError(f"no field {prefix}output", where=where, got=fields_of(record))
    question = alpaca_question(record, prefix, where)
    return _with_answer(record, question, prefix + "output", where)


def _from_pair(record: Mapping[str, Any], where: SourceLocation) -> Chat:
    question_field = present(record, QUESTION_FIELDS)
    answer_field = next((name for name in ANSWER_FIELDS if name in record), None)
    assert question_field is not None
    if answer_field is None:
        wanted = join_or(ANSWER_FIELDS)
        raise UserError("a question without an answer", where=where, got=fields_of(record), wanted=wanted)
    return _with_answer(record, [plain_question(record, question_field, where)], answer_field, where)


def _with_answer(record: Mapping[str, Any], question: list[Message], answer_field: str, where: SourceLocation) -> Chat:
    """The conversation of a record whose answer is a text."""
    where.used.update(REASONING_FIELDS)
    answer = assistant_turn(field_text(record, answer_field, where), where, reasoning_of(record, where))
    return conversation([*system_of(record, where), *question, answer], tools_of(record, where), where)


def prompt_of(record: Mapping[str, Any], where: SourceLocation) -> Chat:
    """A conversation that waits for an answer. A last assistant turn is dropped, whatever its content: files hold an
    answer or a placeholder there (MiniMind). Raises UserError.
    """
    refuse_media(record, where)
    if present(record, CHAT_FIELDS):
        messages, tools = turns_of(record, where)
    elif present(record, (*QUESTION_FIELDS, "instruction")):
        messages, tools = question_of(record, where)
        messages = [*system_of(record, where), *messages]
    else:
        wanted = join_or((*CHAT_FIELDS, *QUESTION_FIELDS))
        raise UserError("no conversation", where=where, got=fields_of(record), wanted=wanted)
    if messages and messages[-1].role == "assistant":
        messages.pop()
    if not messages or messages[-1].role not in ("user", "tool"):
        got = messages[-1].role if messages else "no message at all"
        raise UserError("the last turn asks nothing", where=where, got=got, wanted="a user turn")
    note_ignored(record, where.used | set(REFERENCE_FIELDS), [message.content for message in messages], where)
    return conversation(messages, tools, where)


# --- preferences -----------------------------------------------------------------------------------------------------


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
