"""What a model said, taken apart: its thoughts, its words, and the tools it calls.

Structure is read from control ids where the vocabulary has them, so that the same marks typed as ordinary text, copied
from a user or from a tool's result, call nothing. In a vocabulary without them the marks are text, and so they are read
from text. Nothing a model can say is an error here: a call that cannot be understood carries its problem.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from penjing.data.formats import Message
from penjing.data.tokenizer import tokenizer as tokens
from penjing.data.tokenizer.tokenizer import Tokenizer

LONGEST_CALL_CHARACTERS = 20_000
Kind = Literal["reasoning", "content", "tool_call"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call of a tool. text: what stood between the marks. problem: why it cannot be run; empty if it can."""

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedTurn:
    """One turn. open: the thought was never closed, so that nothing was answered."""

    reasoning: str
    content: str
    calls: tuple[ToolCall, ...]
    open: bool = False

    @property
    def message(self) -> Message:
        """The turn as part of a conversation; one with a call that cannot be run keeps it as words, if it has any."""
        broken = [call for call in self.calls if call.problem and call.text]
        sound = [call for call in self.calls if not call.problem]
        words = [self.content, *(f"{tokens.TOOL_CALL}{call.text}{tokens.END_TOOL_CALL}" for call in broken)]
        return Message(
            role="assistant",
            content="\n".join(part for part in words if part),
            reasoning_content=self.reasoning.strip(),
            tool_calls=tuple({"name": call.name, "arguments": call.arguments} for call in sound),
        )

    @property
    def as_called(self) -> Message:
        """The turn with every one of its calls, for a template that writes their results behind it."""
        calls = tuple({"name": call.name or "unknown", "arguments": call.arguments} for call in self.calls)
        return Message(role="assistant", content="", tool_calls=calls)


@dataclass(slots=True)
class TurnSpan:
    """A stretch of a turn: a thought, words, or what stands in a call. closed: its end was said too. has_words: there
    is more than blanks and marks out of place."""

    kind: Kind
    text: str
    closed: bool = False
    has_words: bool = False


def parse(tokenizer: Tokenizer, ids: Sequence[int], *, thinking: bool | None = None) -> ParsedTurn:
    """A turn of the model's, from its ids (the token that ended it may be among them).

    thinking: how the prompt opened the turn, as `render` was told: True, inside a thought; False, behind an empty one.
    """
    return _parsed_turn(parts(tokenizer, ids, thinking=thinking))


def parts(tokenizer: Tokenizer, ids: Sequence[int], *, thinking: bool | None = None) -> list[TurnSpan]:
    """The stretches of a turn in order, also of one that is still being written."""
    if ids and ids[-1] in tokenizer.stop:
        ids = ids[:-1]
    return _parts(_pieces(tokenizer, ids), thinking)


def without_thought(tokenizer: Tokenizer, ids: Sequence[int], thinking: bool | None = None) -> str:
    """The text behind the thought at the beginning of a turn; none if it never ended. thinking: as for `parse`."""
    found = parts(tokenizer, ids, thinking=thinking)
    if not found or found[0].kind != "reasoning":
        return tokenizer.decode(ids)
    if not tokenizer.has(tokens.END_THINK):  # it is spelled as text
        return tokenizer.decode(ids).partition(tokens.END_THINK)[2]
    end = tokenizer.control(tokens.END_THINK)
    return tokenizer.decode(ids[list(ids).index(end) + 1 :]) if end in ids else ""


# --- marks and what stands between them -------------------------------------------------------------------------------

Piece = tuple[bool, str]  # whether it is a mark, and its text


def _pieces(tokenizer: Tokenizer, ids: Iterable[int]) -> Iterator[Piece]:
    marks = {tokenizer.control(token): token for token in tokens.VISIBLE_TOKENS if tokenizer.has(token)}
    spelled = [token for token in tokens.VISIBLE_TOKENS if not tokenizer.has(token)]
    plain: list[int] = []
    for index in ids:
        if index in marks:
            yield from _split(tokenizer.decode(plain), spelled)
            yield True, marks[index]
            plain = []
        else:
            plain.append(index)
    yield from _split(tokenizer.decode(plain), spelled)


def _split(text: str, marks: Sequence[str]) -> Iterator[Piece]:
    found = re.split(f"({'|'.join(map(re.escape, marks))})", text) if marks else [text]
    yield from ((number % 2 == 1, piece) for number, piece in enumerate(found) if piece)


def _parts(pieces: Iterable[Piece], thinking: bool | None) -> list[TurnSpan]:
    """A thought can stand at the beginning alone, and in it nothing is called. Marks out of place are words
    to `_parsed_turn` only where words stand beside them."""
    found = [TurnSpan("reasoning", "\n") if thinking else TurnSpan("content", "")]  # the newline stands in the prompt
    may_think = thinking is None
    for is_mark, text in pieces:
        now = found[-1]
        if now.kind == "reasoning":
            if is_mark and text == tokens.END_THINK:
                now.closed = True
                found.append(TurnSpan("content", ""))
            elif is_mark and text == tokens.THINK and not now.text.strip():
                now.text = ""  # asked to think, but the model opens its thought itself (Qwen3)
            else:
                now.text += text
        elif is_mark and text == tokens.THINK and may_think and not now.text.strip():
            found[-1] = TurnSpan("reasoning", "")
        elif is_mark and text == tokens.TOOL_CALL:
            found.append(TurnSpan("tool_call", ""))
        elif is_mark and text == tokens.END_TOOL_CALL and now.kind == "tool_call":
            now.closed = True
            found.append(TurnSpan("content", ""))
        else:
            now.has_words = now.has_words or not (is_mark or text.isspace())
            now.text += text
        may_think = may_think and not found[-1].text.strip() and len(found) == 1
    return [part for part in found if part.text or part.kind != "content"]


def _parsed_turn(found: Sequence[TurnSpan]) -> ParsedTurn:
    """The newlines that the template puts around thoughts and calls are no part of them."""
    reasoning, words, calls, is_open = "", "", [], False
    for index, part in enumerate(found):
        text = part.text
        if part.kind == "reasoning":
            reasoning, is_open = text.removeprefix("\n").removesuffix("\n"), not part.closed
        elif part.kind == "tool_call":
            calls.append(read_call(part))
        else:
            after_call = index > 0 and found[index - 1].kind == "tool_call"
            if after_call:
                text = text.removeprefix("\n")
            if index + 1 < len(found) and found[index + 1].kind == "tool_call":
                text = text.removesuffix("\n")
            if part.has_words or not (text.strip() or after_call):  # marks alone are not for readers
                words += ("\n" if words else "") + text
    return ParsedTurn(reasoning=reasoning, content=words.lstrip("\n"), calls=tuple(calls), open=is_open)


# --- calls ------------------------------------------------------------------------------------------------------------


def read_call(part: TurnSpan) -> ToolCall:
    """A call from what stood between its marks."""
    text = part.text.strip()
    if not part.closed:
        return ToolCall(text=text, problem="the call was not closed")
    if len(text) > LONGEST_CALL_CHARACTERS:
        return ToolCall(text=text, problem="the call is too long")
    try:
        value = _strict_json(text)
    except (ValueError, RecursionError):
        return ToolCall(text=text, problem="the call is not JSON")
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return ToolCall(text=text, problem='the call names no tool; wanted {"name": ..., "arguments": {...}}')
    arguments = value.get("arguments")
    if isinstance(arguments, str):  # JSON inside JSON, as some write it
        try:
            arguments = _strict_json(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        return ToolCall(name=value["name"], text=text, problem="the arguments are not an object")
    return ToolCall(name=value["name"], arguments=arguments, text=text)


def _strict_json(text: str) -> Any:
    """Raises ValueError or RecursionError, also for what other readers reject."""
    value = json.loads(text, parse_constant=_finite, parse_float=_finite)
    json.dumps(value, ensure_ascii=False).encode("utf-8")  # half characters cannot be written
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"not a number: {text}")
    return value
