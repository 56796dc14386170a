"""Chats from records of any shape; the shape is detected for each record."""

from __future__ import annotations

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
    QUESTION_FIELDS,
    REASONING_FIELDS,
    REFERENCE_FIELDS,
    Chat,
    Message,
)
from penjing.data.formats.source_location import SourceLocation, fields_of, join_or, present


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
    return _answered(record, question, prefix + "output", where)


def _from_pair(record: Mapping[str, Any], where: SourceLocation) -> Chat:
    question_field = present(record, QUESTION_FIELDS)
    answer_field = next((name for name in ANSWER_FIELDS if name in record), None)
    assert question_field is not None
    if answer_field is None:
        wanted = join_or(ANSWER_FIELDS)
        raise UserError("a question without an answer", where=where, got=fields_of(record), wanted=wanted)
    return _answered(record, [plain_question(record, question_field, where)], answer_field, where)


def _answered(record: Mapping[str, Any], question: list[Message], answer_field: str, where: SourceLocation) -> Chat:
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
