"""Conversations to ids and loss weights: the one place where it is decided which tokens a model learns to produce.

Structure is written as control ids, content is encoded as plain text between them, so a user message that contains
`<|im_end|>` or `<|im_start|>assistant` stays a user message. Weight 1: what the assistant says, including the end of
its turn. Weight 0: everything else. A tokenizer that came with a template of its own is written in that one, which
data/chat/external_templates.py runs and cuts to the same rule.

Thinking is a switch of three positions. None: there is none; a turn opens with `<think>` where somebody thought, and
whether the model does is its own choice. True and False: every turn opens with a thought, empty where nothing was
thought; an answer that is asked for begins inside one, or behind an empty one. Trained on conversations of both kinds
that were written so (`data.thinking=switch`), a model knows what an empty thought asks of it. The empty one is
`<think></think>` without newlines: in a small vocabulary two newlines are two tokens, of which the first also opens a
thought, and thoughts that were asked for came out empty.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any, Literal

from penjing.base.errors import UserError
from penjing.data.chat.external_templates import TemplateSpan, cut
from penjing.data.formats import Message
from penjing.data.tokenizer import tokenizer as tokens
from penjing.data.tokenizer.tokenizer import Tokenizer

Switch = Literal["auto", "on", "off"]
"""Thinking in settings: auto leaves it to the model."""


def parse_switch(switch: Switch) -> bool | None:
    """A setting as `render` takes it."""
    return {"auto": None, "on": True, "off": False}[switch]


@dataclass(frozen=True, slots=True)
class EncodedChat:
    """ids[i] is the token at i; weights[i] says whether the model learns to produce it."""

    ids: list[int]
    weights: list[int]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


class _Writer:
    """Collects ids and weights; adjacent text is joined first, since BPE must see it as one piece."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.weights: list[int] = []
        self._text = ""
        self._weight = 0

    def text(self, text: str, weight: int) -> None:
        if weight != self._weight:
            self._flush()
            self._weight = weight
        self._text += text

    def control(self, token: str, weight: int) -> None:
        if token in tokens.VISIBLE_TOKENS and not self.tokenizer.has(token):
            self.text(token, weight)  # a vocabulary of somebody else's: the same words, in more tokens
            return
        self._flush()
        self.ids.append(self.tokenizer.control(token))
        self.weights.append(weight)

    def _flush(self) -> None:
        if self._text:
            ids = self.tokenizer.encode(self._text)
            self.ids += ids
            self.weights += [self._weight] * len(ids)
            self._text = ""

    def done(self) -> EncodedChat:
        self._flush()
        return EncodedChat(self.ids, self.weights)


def _open_turn(writer: _Writer, role: str) -> None:
    writer.control(tokens.MESSAGE_START, 0)
    writer.text(role + "\n", 0)


def _close_turn(writer: _Writer, weight: int) -> None:
    writer.control(tokens.MESSAGE_END, weight)
    writer.text("\n", 0)


def _write_system(writer: _Writer, content: str, tools: Sequence[dict[str, Any]]) -> None:
    _open_turn(writer, "system")
    listed = "# Tools" + "".join("\n" + _json(tool) for tool in tools) if tools else ""
    writer.text("\n\n".join(part for part in (content, listed) if part), 0)
    _close_turn(writer, 0)


def _write_assistant(writer: _Writer, message: Message, thinking: bool | None) -> None:
    _open_turn(writer, "assistant")
    if message.reasoning_content or thinking is not None:
        writer.control(tokens.THINK, 1)
        if message.reasoning_content:
            writer.text(f"\n{message.reasoning_content}\n", 1)
        writer.control(tokens.END_THINK, 1)
        writer.text("\n\n", 1)
    writer.text(message.content.lstrip("\n"), 1)
    for index, call in enumerate(message.tool_calls):
        if index or message.content:
            writer.text("\n", 1)
        writer.control(tokens.TOOL_CALL, 1)
        writer.text("\n" + _json({"name": call["name"], "arguments": call["arguments"]}) + "\n", 1)
        writer.control(tokens.END_TOOL_CALL, 1)
    _close_turn(writer, 1)


def _ask(writer: _Writer, thinking: bool | None) -> None:
    """An open turn of the assistant's."""
    _open_turn(writer, "assistant")
    if thinking is not None:
        writer.control(tokens.THINK, 0)
        if not thinking:
            writer.control(tokens.END_THINK, 0)
        writer.text("\n" if thinking else "\n\n", 0)


def _write_tool_results(writer: _Writer, contents: Iterable[str]) -> None:
    """They travel together in one turn of the user's."""
    writer.control(tokens.MESSAGE_START, 0)
    writer.text("user", 0)
    for content in contents:
        writer.text("\n", 0)
        writer.control(tokens.TOOL_RESPONSE, 0)
        writer.text(f"\n{content}\n", 0)
        writer.control(tokens.END_TOOL_RESPONSE, 0)
    _close_turn(writer, 0)


def _pieces_to_ids(tokenizer: Tokenizer, pieces: Sequence[TemplateSpan]) -> EncodedChat:
    """Ids of a conversation that somebody else's template wrote, exactly as `transformers` numbers the whole string.

    Plain text is encoded in stretches as long as they can be, across the borders of pieces; a token is a target if any
    character of it is.
    """
    ids: list[int] = []
    weights: list[int] = []
    text, targets = "", list[bool]()
    trims = False  # the control token before swallows the blanks after it

    def flush(trims_next: bool = False) -> None:
        nonlocal text, targets
        start = len(text) - len(text.lstrip()) if trims else 0
        stop = len(text.rstrip()) if trims_next else len(text)
        if stop > start:
            found, ends = tokenizer.encode_with_ends(text[start:stop], after_control=bool(ids))
            ids.extend(found)
            weights.extend(int(any(targets[start + first : start + max(last, first + 1)])) for first, last in ends)
        text, targets = "", []

    for piece in pieces:
        parts = [piece.text] if piece.said else tokenizer.control_pattern.split(piece.text)
        for number, part in enumerate(parts):
            if number % 2:  # a control token; the others are what stands between them
                trims_before, trims_after = tokenizer.trims(part)
                flush(trims_before)
                ids.append(tokenizer.control(part))
                weights.append(int(piece.is_target))
                trims = trims_after
            else:
                text, targets = text + part, targets + [piece.is_target] * len(part)
    flush()
    return EncodedChat(ids, weights)


def _render_external(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[dict[str, Any]], ask: bool, thinking: bool | None
) -> EncodedChat:
    """Ids and weights of a conversation in the form of the tokenizer's own template."""
    if not tokenizer.template:
        raise UserError(
            "the tokenizer has no chat template",
            where="chat template",
            next_step="Train it on conversations first: penjing train sft init_from=... gives it ours.",
        )
    pieces = cut(
        tokenizer.template,
        messages,
        tools,
        dict(tokenizer.roles.names),
        control=tokenizer.control_pattern,
        message_end=tokenizer.roles.message_end,
        ask=ask,
        thinking=thinking,
    )
    return _pieces_to_ids(tokenizer, pieces)


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]] = (),
    *,
    ask: bool = False,
    thinking: bool | None = None,
) -> EncodedChat:
    """Ids and weights of a conversation.

    ask: end with an open assistant turn, for the model to fill. thinking: see the file's docstring.
    A tokenizer with somebody else's template is followed in that (data/chat/external_templates.py); UserError if it
    cannot be.
    """
    if not tokenizer.is_ours:
        return _render_external(tokenizer, messages, tools, ask, thinking)
    writer = _Writer(tokenizer)
    has_system = bool(messages) and messages[0].role == "system"
    if tools or has_system:
        _write_system(writer, messages[0].content if has_system else "", tools)
    for role, turns in groupby(messages[has_system:], key=attrgetter("role")):
        if role == "tool":
            _write_tool_results(writer, (message.content for message in turns))
        elif role == "assistant":
            for message in turns:
                _write_assistant(writer, message, thinking)
        else:
            for message in turns:
                _open_turn(writer, role)
                writer.text(message.content, 0)
                _close_turn(writer, 0)
    if ask:
        _ask(writer, thinking)
    return writer.done()


def after_calls(
    tokenizer: Tokenizer, said: Message, results: Sequence[str], *, thinking: bool | None = None
) -> list[int]:
    """The ids that follow a turn of the model's which called tools: their results, and the opening of its next turn.

    They come right after the token that ended the turn, and are those that `render` writes there. said: the turn, for
    templates that look back at it. Raises UserError if a template cannot be followed over it.
    """
    if tokenizer.is_ours:
        writer = _Writer(tokenizer)
        writer.text("\n", 0)  # of the turn that has ended
        _write_tool_results(writer, results)
        _ask(writer, thinking)
        return writer.done().ids
    before = [Message(role="user", content="?"), said]
    after = [*before, *(Message(role="tool", content=result) for result in results)]
    closed = _render_external(tokenizer, before, (), False, thinking).ids
    whole = _render_external(tokenizer, after, (), True, thinking).ids
    # A template may write a turn otherwise once it is not the last; what was said stays, and what follows it is taken.
    # Words are never control tokens, so that turns can be counted by their ends.
    turns = closed.count(tokenizer.message_end)
    ends = [index for index, token in enumerate(whole) if token == tokenizer.message_end]
    if not turns or len(ends) < turns:
        raise UserError(
            "the chat template cannot be followed over tool calls",
            where="chat template",
            wanted="one that ends each turn with a token",
        )
    return whole[ends[turns - 1] + 1 :]
