"""Parse a model's turn into reasoning, content and tool calls.

Structure is read from control ids if the vocabulary has them. So marks as ordinary text, copied from a user or from a
tool's result, call nothing. In a vocabulary without these ids the marks are found in the text. No output of a model is
an error here: an invalid call carries its problem.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from penjing.data.formats import Message
from penjing.data.tokenizer import tokenizer as tokens
from penjing.data.tokenizer.tokenizer import Tokenizer

MAX_CALL_CHARACTERS = 20_000
NOT_CLOSED = "the call was not closed"
Kind = Literal["reasoning", "content", "tool_call"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One tool call. text: the text between the marks. problem: why it is invalid; empty if it is valid."""

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedTurn:
    """One turn. open: the reasoning was never closed, so there is no answer."""

    reasoning: str
    content: str
    calls: tuple[ToolCall, ...]
    open: bool = False

    @property
    def message(self) -> Message:
        """The turn as a message; the text of an invalid call is kept as content."""
        invalid = [call for call in self.calls if call.problem and call.text]
        valid = [call for call in self.calls if not call.problem]
        ends = ("" if call.problem == NOT_CLOSED else tokens.END_TOOL_CALL for call in invalid)
        texts = (f"{tokens.TOOL_CALL}{call.text}{end}" for call, end in zip(invalid, ends, strict=True))
        return Message(
            role="assistant",
            content="\n".join(text for text in (self.content, *texts) if text),
            reasoning_content=self.reasoning.strip(),
            tool_calls=tuple({"name": call.name, "arguments": call.arguments} for call in valid),
        )

    @property
    def as_called(self) -> Message:
        """The turn with all its calls, for a template that renders their results after it."""
        calls = tuple({"name": call.name or "unknown", "arguments": call.arguments} for call in self.calls)
        return Message(role="assistant", content="", tool_calls=calls)


@dataclass(slots=True)
class TurnSpan:
    """A span of a turn: reasoning, content, or the text of a call. closed: its end mark was generated. has_content: it
    has more than whitespace and stray marks."""

    kind: Kind
    text: str
    closed: bool = False
    has_content: bool = False


def parse(tokenizer: Tokenizer, ids: Sequence[int], *, thinking: bool | None = None) -> ParsedTurn:
    """Parse a model's turn from its ids, with or without the stop token.

    thinking: as given to `render` for the prompt: True, the turn begins inside reasoning; False, after an empty one.
    Newlines that the template puts around reasoning and calls are removed.
    """
    spans = split_spans(tokenizer, ids, thinking=thinking)
    reasoning, content, calls, is_open = "", "", [], False
    for index, span in enumerate(spans):
        text = span.text
        if span.kind == "reasoning":
            reasoning, is_open = text.removeprefix("\n").removesuffix("\n"), not span.closed
        elif span.kind == "tool_call":
            calls.append(read_call(span))
        else:
            after_call = index > 0 and spans[index - 1].kind == "tool_call"
            if after_call:
                text = text.removeprefix("\n")
            if index + 1 < len(spans) and spans[index + 1].kind == "tool_call":
                text = text.removesuffix("\n")
            if span.has_content or not (text.strip() or after_call):  # drop spans of marks only
                content += ("\n" if content else "") + text
    return ParsedTurn(reasoning=reasoning, content=content.lstrip("\n"), calls=tuple(calls), open=is_open)


def split_spans(tokenizer: Tokenizer, ids: Sequence[int], *, thinking: bool | None = None) -> list[TurnSpan]:
    """The spans of a turn in order; the turn may be incomplete. Reasoning is only possible at the beginning, and
    contains no calls. Stray marks count as content in `parse` only if the span has other content."""
    if ids and ids[-1] in tokenizer.stop:
        ids = ids[:-1]
    spans = [TurnSpan("reasoning", "\n") if thinking else TurnSpan("content", "")]  # the prompt has the newline
    may_think = thinking is None
    for is_mark, text in _segments(tokenizer, ids):
        current = spans[-1]
        if current.kind == "reasoning":
            if is_mark and text == tokens.END_THINK:
                current.closed = True
                spans.append(TurnSpan("content", ""))
            elif is_mark and text == tokens.THINK and not current.text.strip():
                current.text = ""  # the prompt opened the reasoning, and the model opens it again (Qwen3)
            else:
                current.text += text
        elif is_mark and text == tokens.THINK and may_think and not current.text.strip():
            spans[-1] = TurnSpan("reasoning", "")
        elif is_mark and text == tokens.TOOL_CALL:
            spans.append(TurnSpan("tool_call", ""))
        elif is_mark and text == tokens.END_TOOL_CALL and current.kind == "tool_call":
            current.closed = True
            spans.append(TurnSpan("content", ""))
        else:
            current.has_content = current.has_content or not (is_mark or text.isspace())
            current.text += text
        may_think = may_think and not spans[-1].text.strip() and len(spans) == 1
    return [span for span in spans if span.text or span.kind != "content"]


def without_reasoning(tokenizer: Tokenizer, ids: Sequence[int], thinking: bool | None = None) -> str:
    """The text after the reasoning of a turn; empty if the reasoning never ended. thinking: as for `parse`."""
    spans = split_spans(tokenizer, ids, thinking=thinking)
    if not spans or spans[0].kind != "reasoning":
        return tokenizer.decode(ids)
    if not tokenizer.has(tokens.END_THINK):  # the mark is text
        return tokenizer.decode(ids).partition(tokens.END_THINK)[2]
    end = tokenizer.control(tokens.END_THINK)
    return tokenizer.decode(ids[list(ids).index(end) + 1 :]) if end in ids else ""


# --- marks and the text between them ----------------------------------------------------------------------------------

Segment = tuple[bool, str]  # whether it is a mark, and its text


def _segments(tokenizer: Tokenizer, ids: Iterable[int]) -> Iterator[Segment]:
    marks = {tokenizer.control(token): token for token in tokens.VISIBLE_TOKENS if tokenizer.has(token)}
    text_marks = [token for token in tokens.VISIBLE_TOKENS if not tokenizer.has(token)]
    plain: list[int] = []
    for index in ids:
        if index in marks:
            yield from _split_marks(tokenizer.decode(plain), text_marks)
            yield True, marks[index]
            plain = []
        else:
            plain.append(index)
    yield from _split_marks(tokenizer.decode(plain), text_marks)


def _split_marks(text: str, marks: Sequence[str]) -> Iterator[Segment]:
    spans = re.split(f"({'|'.join(map(re.escape, marks))})", text) if marks else [text]
    yield from ((number % 2 == 1, segment) for number, segment in enumerate(spans) if segment)


# --- calls ------------------------------------------------------------------------------------------------------------


def read_call(span: TurnSpan) -> ToolCall:
    """Parse a call from the text between its marks."""
    text = span.text.strip()
    if not span.closed:
        return ToolCall(text=text, problem=NOT_CLOSED)
    if len(text) > MAX_CALL_CHARACTERS:
        return ToolCall(text=text, problem="the call is too long")
    try:
        value = _strict_json(text)
    except (ValueError, RecursionError):
        return ToolCall(text=text, problem="the call is not JSON")
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return ToolCall(text=text, problem='the call names no tool; wanted {"name": ..., "arguments": {...}}')
    arguments = value.get("arguments")
    if isinstance(arguments, str):  # some models write JSON inside JSON
        try:
            arguments = _strict_json(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        return ToolCall(name=value["name"], text=text, problem="the arguments are not an object")
    return ToolCall(name=value["name"], arguments=arguments, text=text)


def _strict_json(text: str) -> Any:
    """Raises ValueError or RecursionError, also for values that other JSON parsers reject."""
    value = json.loads(text, parse_constant=_finite, parse_float=_finite)
    json.dumps(value, ensure_ascii=False).encode("utf-8")  # lone surrogates cannot be encoded
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"not a number: {text}")
    return value
