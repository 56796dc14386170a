"""A question and its answer from the fields of one record, with the choices that it has."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from penjing.base.errors import UserError
from penjing.data.formats import schema
from penjing.data.formats.fields import field_at
from penjing.data.formats.functions import tool_calls_of, tools_of
from penjing.data.formats.loose_json import parsed_json
from penjing.data.formats.messages import assistant_turn, field_text, reasoning_of, turns_of
from penjing.data.formats.schema import Message
from penjing.data.formats.source_location import SourceLocation, filled, present, text_of, type_name

Choices = Sequence[tuple[str, str]]  # letter and text of each
_CHAT_FIELDS, _CHOICE_FIELDS = frozenset(schema.CHAT_FIELDS), frozenset((*schema.CHOICE_FIELDS, "A"))
_REASONING_FIELDS = frozenset(schema.REASONING_FIELDS)
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_LABELLED = re.compile(r"\s*\(?([A-Za-z0-9])[).:、．]\s*(\S.*)", re.DOTALL)
_KEY = re.compile(r"\s*\(?([A-Za-z0-9])[).:]?\s*")


def chat_field(record: Mapping[str, Any]) -> str | None:
    """The field of a record that holds messages, if there is one."""
    if _CHAT_FIELDS.isdisjoint(record):
        return None
    lists = (name for name in schema.CHAT_FIELDS if isinstance(record.get(name), list) and record[name])
    name = next(lists, None) or present(record, schema.CHAT_FIELDS[:3])
    return None if name and record[name] in ([], "") and question_field(record) else name


def question_field(record: Mapping[str, Any]) -> str | None:
    """The field of a question outside of messages; Alpaca's `instruction` comes first. A text in `context` alone is one
    if an answer follows it."""
    name = "instruction" if record.get("instruction") is not None else filled(record, schema.QUESTION_FIELDS)
    if name is None and isinstance(record.get("context"), str) and filled(record, schema.ANSWER_FIELDS):
        return "context"
    return name


def answer_field(record: Mapping[str, Any], prefix: str = "") -> str | None:
    """The field of an answer; Alpaca's is `output`, whatever else there is. A question is not its own answer."""
    if "instruction" in record or prefix:
        return filled(record, [prefix + name for name in ("output", *schema.ANSWER_FIELDS)])
    return filled(record, [*schema.ANSWER_FIELDS, *(schema.KEY_FIELDS if choices_field(record) else ())])


def choices_field(record: Mapping[str, Any]) -> str | None:
    """The field of choices; `A` if they are in columns of their own."""
    if _CHOICE_FIELDS.isdisjoint(record):
        return None
    name = next((name for name in schema.CHOICE_FIELDS if record.get(name)), None)
    return name or ("A" if all(isinstance(record.get(name), str) for name in "AB") else None)


def question_of(record: Mapping[str, Any], where: SourceLocation) -> tuple[list[Message], tuple[dict[str, Any], ...]]:
    """The question of a record without its system message, and the tools: from a text, messages or Alpaca's fields.

    Empty if there is no such field, or if it is blank.
    """
    tools = tools_of(record, where)
    name = present(record, schema.QUESTION_FIELDS[:2]) or chat_field(record)
    if name is not None and (name in schema.CHAT_FIELDS or isinstance(record[name], list)):
        messages, message_tools = turns_of({name: record[name]}, name, where)
        return messages, message_tools or tools
    name = question_field(record)
    messages = pair_question(record, "", where) if name is not None else []
    return (messages if messages and messages[-1].content.strip() else []), tools


def pair_question(record: Mapping[str, Any], prefix: str, where: SourceLocation) -> list[Message]:
    """The history and the question of a record; the choices follow it, one a line. prefix: of Alpaca's field names."""
    messages = _history(record, where)
    name = question_field(record) or ""
    if prefix or name == "instruction":  # a context comes after an instruction, but before a question
        asked = ["question"] if not prefix and record.get("question") is not None else []
        names, between = [prefix + "instruction", prefix + "input", *asked, "context"], "\n"
    else:
        names, between = ["context", name] if name != "context" else [name], "\n\n"
    parts = [field_text(record, name, where, "question") for name in names]
    question = between.join(part for part in parts if part.strip()) or parts[-1]
    choices = choices_of(record, where)
    if any(text != letter for letter, text in choices):
        question = "\n".join([question, *(f"{letter}. {text}" for letter, text in choices)])
    return [*messages, Message(role="user", content=question)]


def pair_answer(record: Mapping[str, Any], name: str, where: SourceLocation) -> Message:
    """The answer in a field: a text, one of the choices, or calls of the record's tools (xLAM's `answers`)."""
    value = record.get(name)
    if choices := choices_of(record, where):
        key = filled(record, schema.KEY_FIELDS) or name
        where.used[key] = "answer"
        value = _right_choice(record.get(key), choices, key, where)[0]
    elif any(record.get(field) for field in schema.TOOL_FIELDS) and (calls := _calls(value, name, where)):
        where.used[name] = "answer"
        return Message(role="assistant", content="", tool_calls=calls)
    where.used[name] = "answer"
    if isinstance(value, dict) and isinstance(value.get("text"), list):  # SQuAD's answers
        value = next(iter(value["text"]), "")
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < math.inf:
        value = str(value)
    reasoning = reasoning_of(record, where)
    for field in _REASONING_FIELDS.intersection(record):
        where.used[field] = "thought"
    return assistant_turn(text_of(value, where.names.get(name, name), where), reasoning)


def with_truth(record: Mapping[str, Any], where: SourceLocation) -> Mapping[str, Any]:
    """The record of a prompt with its reference answer in `gt`, if it has one by another name only, or as a choice."""
    key = filled(record, schema.KEY_FIELDS)
    if key and record[key] is not None and record.get("gt") is None and (choices := choices_of(record, where)):
        where.used[key] = "reference"
        return {**record, "gt": _right_choice(record[key], choices, key, where)}
    names = (*schema.REFERENCE_FIELDS[:3], *schema.TRUTH_FIELDS)
    name = next((name for name in names if field_at(record, name) is not None), None)
    if name is None:
        return record
    where.used[name] = "reference"
    return record if name in names[:3] else {**record, "gt": field_at(record, name)}


def _calls(value: object, name: str, where: SourceLocation) -> tuple[dict[str, Any], ...]:
    value = parsed_json(value) if isinstance(value, str) and value.lstrip()[:1] == "[" else value
    if not isinstance(value, list) or not all(isinstance(item, dict) and "name" in item for item in value):
        return ()
    return tool_calls_of(value, name, where)


def _history(record: Mapping[str, Any], where: SourceLocation) -> list[Message]:
    history = record.get("history") or []
    where.used.setdefault("history", "")
    if isinstance(history, str) and not history.strip():
        return []
    if not isinstance(history, list):
        raise UserError("field history is not a list", where=where, got=type_name(history), wanted="a list of pairs")
    messages: list[Message] = []
    for pair in history:
        if not isinstance(pair, list) or len(pair) != 2:
            got = type_name(pair)
            raise UserError("field history is not pairs", where=where, got=got, wanted="[question, answer]")
        question, answer = (text_of(text, "history", where) for text in pair)
        messages += [Message(role="user", content=question), assistant_turn(answer)]
    if messages:
        where.used["history"] = "history"
    return messages


# --- choices ---------------------------------------------------------------------------------------------------------


def choices_of(record: Mapping[str, Any], where: SourceLocation) -> Choices:
    """Letter and text of each choice; empty if the record has none."""
    name = choices_field(record)
    if name is None:
        return ()
    if name == "A":
        letters = [letter for letter in _LETTERS if record.get(letter) is not None]
        for letter in letters:
            where.used[letter] = "choice"
        return [(letter, text_of(record[letter], letter, where)) for letter in letters]
    where.used[name] = "choices"
    value = record[name]
    if isinstance(value, str):
        value = parsed_json(value) or [line for line in value.splitlines() if line.strip()]
    labels, texts = None, value
    if isinstance(value, dict):  # ARC's lists, or texts by letter
        is_lists = isinstance(value.get("text"), list)
        labels, texts = (value.get("label"), value["text"]) if is_lists else (list(value), list(value.values()))
    elif isinstance(value, list) and all(isinstance(item, dict) for item in value):
        labels, texts = [item.get("label") for item in value], [item.get("text") for item in value]
    if not isinstance(texts, list) or not texts or not all(isinstance(text, (str, int, float)) for text in texts):
        raise UserError(f"field {name} is not choices", where=where, got=type_name(value), wanted="a list of texts")
    texts = [text_of(str(text), name, where) for text in texts]
    if isinstance(labels, list) and len(labels) == len(texts) and all(isinstance(label, str) for label in labels):
        return list(zip(labels, texts, strict=True))
    found = [match for text in texts if (match := _LABELLED.fullmatch(text))]
    if len(found) == len(texts):
        return [(match[1], match[2]) for match in found]
    has_letters = len(texts) <= len(_LETTERS)
    return [(_LETTERS[number] if has_letters else str(number), text) for number, text in enumerate(texts)]


def _right_choice(key: object, choices: Choices, name: str, where: SourceLocation) -> list[str]:
    """The right one of the choices as `B. its text`, as letter and as text; an answer in words stays as it is."""
    number = None
    if isinstance(key, str):
        text = key.strip()
        short = _KEY.fullmatch(text)
        letters = [letter.lower() for letter, _ in choices]
        number = next((i for i, choice in enumerate(choices) if text in (choice[1].strip(), ". ".join(choice))), None)
        if number is None and short and short[1].lower() in letters:
            number = letters.index(short[1].lower())
        if number is None and text.isdecimal() and len(text) < 3:
            key = int(text)
        elif number is None and len(text) > 1:
            return [key]
    if isinstance(key, int) and not isinstance(key, bool) and 0 <= key < len(choices):
        number = key
    if number is None:
        got = repr(key)[:40]
        raise UserError(f"field {name} names no choice", where=where, got=got, wanted="a letter, an index or a text")
    letter, text = choices[number]
    return [text] if letter == text else [f"{letter}. {text}", letter, text]
