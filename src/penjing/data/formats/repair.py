"""Rules for conversations that break the order of turns, or that write tools as text. Each repair is counted.

- Functions in the system message become tools; calls and results in texts become calls and results.
- An empty turn is dropped; the last answer too, if another one is left to learn.
- Turns of one role in a row become one, with a blank line between them.
- What the assistant says before the first question stays, but is not learned: it answers nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from penjing.base.errors import UserError
from penjing.data.formats.schema import Message
from penjing.data.formats.source_location import SourceLocation
from penjing.data.formats.tool_text import Part, parts_of, result_of, tools_in

TOOLS_READ = "functions read from the system text"
CALLS_READ = "calls and results read from text"
DROPPED = "empty turns dropped"
MERGED = "turns of one role merged"
GREETING = "a greeting before the first question kept, but not learned"


def repaired(
    messages: Sequence[Message], tools: tuple[dict[str, Any], ...], where: SourceLocation, *, keeps_end: bool = False
) -> tuple[list[Message], tuple[dict[str, Any], ...]]:
    """The messages and tools after all rules. keeps_end: the last message stays, even if it is empty."""
    if messages and messages[0].role == "system":
        text, listed = tools_in(messages[0].content, where)
        if listed and tools in ((), listed):
            where.repairs.add(TOOLS_READ)
            tools = listed
            messages = [*([replace(messages[0], content=text)] if text else []), *messages[1:]]
    turns: list[Message] = []
    for message in messages:
        turns += _with_structure(message, turns[-1] if turns else None, tools, where)
    merged: list[Message] = []
    for turn in _without_blanks(turns, where, keeps_end=keeps_end):
        joined = _joined(merged[-1], turn, where) if merged else None
        merged[-1:] = [joined] if joined is not None else [*merged[-1:], turn]
    return _without_greeting(merged, where), tools


def _with_structure(
    message: Message, previous: Message | None, tools: Sequence[dict[str, Any]], where: SourceLocation
) -> list[Message]:
    """The turns that a turn stands for: its calls and results written as text become calls and results."""
    turns: list[Message] = []
    follows_call = previous is not None and (previous.role == "tool" or bool(previous.tool_calls))
    if message.role == "tool" or (message.role == "user" and follows_call):
        turns = [Message(role="tool", content=result) for result in result_of(message.content)]
    elif message.role == "assistant" and not message.tool_calls:
        parts = parts_of(message.content, {tool["name"] for tool in tools}, where)
        turns = list(_turns_of_parts(message, parts)) if parts else []
    if turns:
        where.repairs.add(CALLS_READ)
    return turns or [message]


def _turns_of_parts(message: Message, parts: Sequence[Part]) -> Iterator[Message]:
    """A text after a call, without a result between them, stands before the call."""
    answer = replace(message, content="")
    for kind, value in [*parts, ("result", None)]:
        if kind == "text":
            answer = replace(answer, content=f"{answer.content}\n{value}".strip())
        elif kind == "calls":
            answer = replace(answer, tool_calls=(*answer.tool_calls, *value))
        else:
            if not is_blank(answer):
                yield answer
            answer = Message(role="assistant", content="", is_target=message.is_target)
            if value is not None:
                yield Message(role="tool", content=value)


def is_blank(message: Message) -> bool:
    """Whether a turn has neither text nor calls."""
    return not message.tool_calls and not message.content.strip()


def _without_blanks(turns: list[Message], where: SourceLocation, *, keeps_end: bool) -> list[Message]:
    """The turns that are not blank. All of them, if no answer would be left to learn."""
    kept = []
    for turn, following in zip(turns, [*turns[1:], None], strict=True):
        is_thought = turn.reasoning_content and following is not None and following.role == "assistant"
        if turn.role == "tool" or not is_blank(turn) or is_thought or (keeps_end and following is None):
            kept.append(turn)
    if len(kept) == len(turns):
        return turns
    if turns[-1].role == "assistant" and is_blank(turns[-1]) and not keeps_end:
        while kept and kept[-1].role != "assistant":  # its question
            kept.pop()
    if not keeps_end and not any(turn.role == "assistant" and turn.is_target and not is_blank(turn) for turn in kept):
        return turns
    where.repairs.add(DROPPED)
    return kept


def _joined(first: Message, second: Message, where: SourceLocation) -> Message | None:
    """Two turns of one role as one; None if they stay two: results of tools, and what follows a call."""
    if first.role != second.role or first.role == "tool" or first.tool_calls or is_blank(second):
        return None
    if first.is_target != second.is_target:
        raise UserError("two turns of the assistant in a row have two weights", where=where, wanted="the same")
    thoughts = "\n".join(turn.reasoning_content for turn in (first, second) if turn.reasoning_content.strip())
    if is_blank(first):  # a thought in a turn of its own
        return replace(second, reasoning_content=thoughts)
    if second.reasoning_content.strip():
        what = "a thought follows an answer: roles out of order"
        raise UserError(what, where=where, wanted="a question between two answers")
    where.repairs.add(MERGED)
    content = first.content if first == second else f"{first.content}\n\n{second.content}".rstrip()
    return replace(second, content=content, reasoning_content=thoughts)


def _without_greeting(turns: list[Message], where: SourceLocation) -> list[Message]:
    """The turns, of which those of the assistant before the first question are not learned."""
    for number, turn in enumerate(turns):
        if turn.role == "user":
            break
        if turn.role == "assistant":
            where.repairs.add(GREETING)
            turns[number] = replace(turn, is_target=False)
    return turns
