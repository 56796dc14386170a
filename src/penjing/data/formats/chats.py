"""Chats from records of any shape; the shapes are told apart record by record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from penjing.base.errors import UserError
from penjing.data.formats.dispatch import kind_of, unknown_record
from penjing.data.formats.messages import (
    alpaca_question,
    asked_of,
    assistant_turn,
    conversation,
    refuse_media,
    system_of,
    turns_of,
)
from penjing.data.formats.schema import ANSWER_FIELDS, CHAT_FIELDS, QUESTION_FIELDS, Chat, Message
from penjing.data.formats.source_location import SourceLocation, either, names_of, present, text_of


def chats_of(record: Mapping[str, Any], place: SourceLocation) -> Iterator[Chat]:
    refuse_media(record, place)
    kind = kind_of(record)
    if kind == "preferences":
        hint = "Use it for DPO or KTO."
        raise UserError("preference data, not chats", where=place, got=names_of(record), next_step=hint)
    prefixes = [""] if "instruction" in record else [name for name in ("en_", "zh_") if name + "instruction" in record]
    if present(record, CHAT_FIELDS):
        messages, tools = turns_of(record, place)
        if not any(message.role == "assistant" for message in messages):
            roles = ", ".join(message.role for message in messages[:8]) or "no message at all"
            raise UserError("no assistant turn", where=place, got=roles, wanted="at least one answer to learn from")
        yield conversation(messages, tools, place)
    elif prefixes:
        for prefix in prefixes:
            yield _from_alpaca(record, prefix, place)
    elif present(record, QUESTION_FIELDS):
        yield _from_pair(record, place)
    elif kind == "documents":
        raise UserError("a document, not a chat", where=place, got=names_of(record), next_step="Use it to pretrain.")
    else:
        raise unknown_record(record, place)


def _from_alpaca(record: Mapping[str, Any], prefix: str, place: SourceLocation) -> Chat:
    if prefix + "output" not in record:
        raise UserError(f"no field {prefix}output", where=place, got=names_of(record))
    answer = assistant_turn(text_of(record[prefix + "output"], prefix + "output", place))
    return conversation([*system_of(record, place), *alpaca_question(record, prefix, place), answer], (), place)


def _from_pair(record: Mapping[str, Any], place: SourceLocation) -> Chat:
    question = present(record, QUESTION_FIELDS)
    answer = next((name for name in ANSWER_FIELDS if name in record), None)
    assert question is not None
    if answer is None:
        wanted = either(ANSWER_FIELDS)
        raise UserError("a question without an answer", where=place, got=names_of(record), wanted=wanted)
    asked = Message(role="user", content=text_of(record[question], question, place))
    answered = assistant_turn(text_of(record[answer], answer, place))
    return conversation([*system_of(record, place), asked, answered], (), place)


def prompt_of(record: Mapping[str, Any], place: SourceLocation) -> Chat:
    """A conversation that waits for an answer. An assistant's turn at its end is dropped, whatever it says: a file may
    hold an answer there, or a word in the place of one (MiniMind's). Raises UserError.
    """
    refuse_media(record, place)
    if present(record, CHAT_FIELDS):
        messages, tools = turns_of(record, place)
    elif present(record, (*QUESTION_FIELDS, "instruction")):
        messages, tools = asked_of(record, place)
        messages = [*system_of(record, place), *messages]
    else:
        wanted = either((*CHAT_FIELDS, *QUESTION_FIELDS))
        raise UserError("no conversation", where=place, got=names_of(record), wanted=wanted)
    if messages and messages[-1].role == "assistant":
        messages.pop()
    if not messages or messages[-1].role not in ("user", "tool"):
        got = messages[-1].role if messages else "no message at all"
        raise UserError("the last turn asks nothing", where=place, got=got, wanted="a user turn")
    return conversation(messages, tools, place)
