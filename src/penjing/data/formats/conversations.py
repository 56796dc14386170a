"""Chats, prompts and preferences from records of any shape; the shape is detected for each record."""

import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from penjing.base.errors import UserError
from penjing.data.formats import schema
from penjing.data.formats.dispatch import kind_of, unknown_record
from penjing.data.formats.functions import tools_of
from penjing.data.formats.messages import assistant_turn, conversation, refuse_media, system_of, turns_of
from penjing.data.formats.pairs import answer_field, chat_field, pair_answer, pair_question, question_field, question_of
from penjing.data.formats.schema import Chat, Message, PreferenceRecord
from penjing.data.formats.source_location import SourceLocation, fields_of, filled, join_or, present, text_of, type_name


def chats_of(record: Mapping[str, Any], where: SourceLocation) -> list[Chat]:
    refuse_media(record, where)
    kind = kind_of(record)
    if kind == "preferences":
        hint = "Use it for DPO or KTO."
        raise UserError("preference data, not chats", where=where, got=fields_of(record), next_step=hint)
    prefixes = [] if "instruction" in record else [name for name in ("en_", "zh_") if name + "instruction" in record]
    if name := chat_field(record):
        messages, tools = turns_of(record, name, where)
        if not any(message.role == "assistant" for message in messages):
            roles = ", ".join(message.role for message in messages[:8]) or "no message at all"
            raise UserError("no assistant turn", where=where, got=roles, wanted="at least one answer to learn from")
        chats = [conversation(messages, tools, where)]
    elif prefixes or question_field(record):
        chats = [_from_pair(record, prefix, where) for prefix in prefixes or [""]]
    elif kind == "documents":
        raise UserError("a document, not a chat", where=where, got=fields_of(record), next_step="Use it to pretrain.")
    else:
        raise unknown_record(record, where)
    where.note_ignored(record, where.used, [message.content for chat in chats for message in chat.messages])
    return chats


def _from_pair(record: Mapping[str, Any], prefix: str, where: SourceLocation) -> Chat:
    name = answer_field(record, prefix)
    if name is None and (prefix or "instruction" in record):
        raise UserError(f"no field {prefix}output", where=where, got=fields_of(record))
    if name is None:
        wanted = join_or(schema.ANSWER_FIELDS)
        raise UserError("a question without an answer", where=where, got=fields_of(record), wanted=wanted)
    if isinstance(record.get("prompt"), list) or _are_messages(record[name]):
        return _answered(record, name, where, keeps_end=False)
    question = pair_question(record, prefix, where)
    answer = pair_answer(record, name, where)
    return conversation([*system_of(record, where), *question, answer], tools_of(record, where), where)


def _are_messages(value: object) -> bool:
    """Whether an answer is a message or messages, as TRL writes them."""
    items = value if isinstance(value, list) else [value]
    return bool(items) and all(isinstance(item, dict) and ("role" in item or "from" in item) for item in items)


def prompt_of(record: Mapping[str, Any], where: SourceLocation) -> Chat:
    """A conversation that waits for an answer. Assistant turns at its end are dropped: an answer, or MiniMind's
    placeholder."""
    refuse_media(record, where)
    if chat_field(record) is None and question_field(record) is None:
        wanted = join_or((*schema.CHAT_FIELDS[:3], *schema.QUESTION_FIELDS))
        raise UserError("no conversation", where=where, got=fields_of(record), wanted=wanted)
    if name := chat_field(record):
        messages, tools = turns_of(record, name, where)
    else:
        messages, tools = question_of(record, where)
        messages = [*system_of(record, where), *messages]
    while messages and messages[-1].role == "assistant":
        messages.pop()
    if not messages or messages[-1].role not in ("user", "tool"):
        got = messages[-1].role if messages else "no message at all"
        raise UserError("the last turn asks nothing", where=where, got=got, wanted="a user turn")
    used = {*where.used, *schema.REFERENCE_FIELDS, *(name.partition(".")[0] for name in schema.TRUTH_FIELDS)}
    where.note_ignored(record, used, [message.content for message in messages])
    return conversation(messages, tools, where, keeps_end=True)


# --- preferences -----------------------------------------------------------------------------------------------------


def preferences_of(record: Mapping[str, Any], where: SourceLocation) -> list[PreferenceRecord]:
    """The one preference of a record."""
    preference = _preference_of(record, where)
    used = {*where.used, *((*schema.CHAT_FIELDS[:3], "margin") if len(preference.chats) == 2 else schema.LABEL_FIELDS)}
    where.note_ignored(record, used, [message.content for chat in preference.chats for message in chat.messages])
    return [preference]


def _preference_of(record: Mapping[str, Any], where: SourceLocation) -> PreferenceRecord:
    refuse_media(record, where)
    chosen, rejected = filled(record, schema.CHOSEN_FIELDS), filled(record, schema.REJECTED_FIELDS)
    if chosen or rejected:
        chats = tuple(_answered(record, name, where) for name in (chosen or "chosen", rejected or "rejected"))
        margin: Any = record.get("margin") or 0.0
        if isinstance(margin, str):  # in a table without types
            with suppress(ValueError):
                margin = float(margin)
        is_number = isinstance(margin, (int, float)) and not isinstance(margin, bool)
        if not is_number or not abs(margin) <= sys.float_info.max:  # NaN, infinity, or an integer beyond every float
            got = str(margin)[:40] if is_number else type_name(margin)
            raise UserError("field margin is not a number", where=where, got=got, wanted="a finite number")
        return PreferenceRecord(chats=chats, is_chosen=(True, False), margin=float(margin))
    name = present(record, schema.LABEL_FIELDS)
    if name is None:
        wanted = "chosen and rejected, or an answer and label"
        raise UserError("not a preference", where=where, got=fields_of(record), wanted=wanted)
    label = {"true": True, "1": True, "false": False, "0": False}.get(str(record[name]).lower(), record[name])
    where.used[name] = "label"
    if label not in (True, False):
        raise UserError(f"field {name} is not a label", where=where, got=repr(label)[:40], wanted="true or false")
    if field := chat_field(record):
        messages, tools = turns_of(record, field, where)
        chat = _ends_with_answer(messages, tools, field, where)
    else:
        chat = _answered(record, answer_field(record) or "completion", where)
    return PreferenceRecord(chats=(chat,), is_chosen=(bool(label),))


def _answered(record: Mapping[str, Any], name: str, where: SourceLocation, *, keeps_end: bool = True) -> Chat:
    """The conversation that ends with the answer in a field: a text, a message, messages after the prompt, or all."""
    answer = record.get(name)
    where.used[name] = name if name in ("chosen", "rejected") else "answer"
    if answer is None:
        raise UserError(f"no field {name}", where=where, got=fields_of(record), wanted=name)
    question, tools = question_of(record, where)
    answer = [answer] if isinstance(answer, dict) else answer
    if isinstance(answer, list):
        messages, answer_tools = turns_of({name: answer}, name, where)
        tools = answer_tools or tools
        if messages and messages[0].role not in ("assistant", "tool"):
            return _ends_with_answer(system_of(record, where) + messages, tools, name, where, keeps_end=keeps_end)
    else:
        messages = [assistant_turn(text_of(answer, name, where))]
    if not question:
        got = fields_of(record)
        raise UserError(f"field {name} is an answer without a prompt", where=where, got=got, wanted="prompt")
    messages = system_of(record, where) + question + messages
    return _ends_with_answer(messages, tools, name, where, keeps_end=keeps_end)


def _ends_with_answer(
    messages: list[Message],
    tools: tuple[dict[str, Any], ...],
    name: str,
    where: SourceLocation,
    *,
    keeps_end: bool = True,
) -> Chat:
    if len(messages) < 2 or messages[-1].role != "assistant":
        got = ", ".join(message.role for message in messages[-8:]) or "no message at all"
        wanted = "an assistant turn last"
        raise UserError(f"field {name} does not end with an answer", where=where, got=got, wanted=wanted)
    if not messages[-1].is_target:
        raise UserError(f"the answer of field {name} has weight 0", where=where, wanted="an answer to learn from")
    return conversation(messages, tools, where, keeps_end=keeps_end)
