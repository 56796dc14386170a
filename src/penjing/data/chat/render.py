"""Conversations to ids and loss weights: the one place that decides which tokens a model is trained on.

Structure is written as control ids, content is encoded as plain text between them, so a user message that contains
`<|im_end|>` or `<|im_start|>assistant` stays a user message. Weight 1: the assistant's turn, including its end token.
Weight 0: everything else, and a turn that the loss leaves out. A tokenizer with its own template uses that one;
data/chat/external_templates.py runs it and sets the weights by the same rule.

`thinking` has three values. None: a turn has `<think>` only if the message has reasoning; when answering, the model
decides. True and False: every turn opens with reasoning, which is empty if the message has none; a new answer begins
inside reasoning (True) or after an empty one (False). A model trained on both kinds (`data.thinking=switch`) follows
the switch. Empty reasoning is `<think></think>` without newlines: in a small vocabulary two newlines are two tokens,
and the first one also opens reasoning, so that requested reasoning came out empty.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from typing import Any, Literal

from penjing.base.errors import UserError
from penjing.data.chat.external_templates import TemplateSpan, split_rendered
from penjing.data.formats import Message
from penjing.data.tokenizer import tokenizer as tokens
from penjing.data.tokenizer.tokenizer import Tokenizer

Switch = Literal["auto", "on", "off"]
"""Thinking in settings: auto leaves it to the model."""


def parse_switch(switch: Switch) -> bool | None:
    """The setting as an argument of `render`."""
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
            self.text(token, weight)  # an external vocabulary without this token: the mark as text
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


def _write_turn(writer: _Writer, role: str, content: str) -> None:
    _open_turn(writer, role)
    writer.text(content, 0)
    _close_turn(writer, 0)


def _write_assistant(writer: _Writer, message: Message, thinking: bool | None) -> None:
    first = len(writer.weights)
    _open_turn(writer, "assistant")
    if message.reasoning_content or thinking is not None:
        writer.control(tokens.THINK, 1)
        if message.reasoning_content:
            writer.text(f"\n{message.reasoning_content}\n", 1)
        writer.control(tokens.END_THINK, 1)
        writer.text("\n\n", 1)
    content = message.content.lstrip("\n")
    writer.text(content, 1)
    for index, call in enumerate(message.tool_calls):
        if index or content:
            writer.text("\n", 1)
        writer.control(tokens.TOOL_CALL, 1)
        writer.text("\n" + _json({"name": call["name"], "arguments": call["arguments"]}) + "\n", 1)
        writer.control(tokens.END_TOOL_CALL, 1)
    _close_turn(writer, 1)
    if not message.is_target:
        writer.weights[first:] = [0] * (len(writer.weights) - first)


def _open_answer(writer: _Writer, thinking: bool | None) -> None:
    """The generation prompt: an open assistant turn."""
    _open_turn(writer, "assistant")
    if thinking is not None:
        writer.control(tokens.THINK, 0)
        if not thinking:
            writer.control(tokens.END_THINK, 0)
        writer.text("\n" if thinking else "\n\n", 0)


def _write_tool_results(writer: _Writer, contents: Iterable[str]) -> None:
    """All results go into one user turn."""
    writer.control(tokens.MESSAGE_START, 0)
    writer.text("user", 0)
    for content in contents:
        writer.text("\n", 0)
        writer.control(tokens.TOOL_RESPONSE, 0)
        writer.text(f"\n{content}\n", 0)
        writer.control(tokens.END_TOOL_RESPONSE, 0)
    _close_turn(writer, 0)


def _spans_to_ids(tokenizer: Tokenizer, spans: Sequence[TemplateSpan]) -> EncodedChat:
    """Ids of a conversation rendered by an external template, equal to `transformers`' ids of the whole string.

    Plain text between control tokens is encoded at once, across the borders of spans. A token is a target if any of
    its characters is.
    """
    ids: list[int] = []
    weights: list[int] = []
    text, targets = "", list[bool]()
    trims = False  # the last control token strips the whitespace after it

    def flush(trims_next: bool = False) -> None:
        nonlocal text, targets
        start = len(text) - len(text.lstrip()) if trims else 0
        stop = len(text.rstrip()) if trims_next else len(text)
        if stop > start:
            span_ids, ends = tokenizer.encode_with_ends(text[start:stop], after_control=bool(ids))
            ids.extend(span_ids)
            weights.extend(int(any(targets[start + first : start + max(last, first + 1)])) for first, last in ends)
        text, targets = "", []

    for span in spans:
        parts = [span.text] if span.is_content else tokenizer.control_pattern.split(span.text)
        for number, part in enumerate(parts):
            if number % 2:  # a control token; the others are text
                trims_before, trims_after = tokenizer.trims(part)
                flush(trims_before)
                ids.append(tokenizer.control(part))
                weights.append(int(span.is_target))
                trims = trims_after
            else:
                text, targets = text + part, targets + [span.is_target] * len(part)
    flush()
    return EncodedChat(ids, weights)


def _render_external(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[dict[str, Any]], ask: bool, thinking: bool | None
) -> EncodedChat:
    """Ids and weights of a conversation in the tokenizer's own template."""
    if not tokenizer.template:
        hint = "Train it on conversations first: penjing train sft init_from=... gives it ours."
        raise UserError("the tokenizer has no chat template", where="chat template", next_step=hint)
    spans = split_rendered(
        tokenizer.template,
        messages,
        tools,
        dict(tokenizer.roles.names),
        control=tokenizer.control_pattern,
        message_end=tokenizer.roles.message_end,
        ask=ask,
        thinking=thinking,
    )
    return _spans_to_ids(tokenizer, spans)


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]] = (),
    *,
    ask: bool = False,
    thinking: bool | None = None,
    thoughts: bool = True,
) -> EncodedChat:
    """Ids and weights of a conversation.

    ask: end with an open assistant turn, for the model to fill. thinking: see the file's docstring. thoughts: False
    leaves out what the messages have.
    A tokenizer with an external template uses that (data/chat/external_templates.py). Raises UserError if the template
    is not supported.
    """
    if not thoughts:
        messages = [replace(message, reasoning_content="") for message in messages]
    if not tokenizer.is_ours:
        return _render_external(tokenizer, messages, tools, ask, thinking)
    writer = _Writer(tokenizer)
    has_system = bool(messages) and messages[0].role == "system"
    if tools or has_system:
        listed = "# Tools" + "".join("\n" + _json(tool) for tool in tools) if tools else ""
        parts = (messages[0].content if has_system else "", listed)
        _write_turn(writer, "system", "\n\n".join(part for part in parts if part))
    for role, turns in groupby(messages[has_system:], key=attrgetter("role")):
        if role == "tool":
            _write_tool_results(writer, (message.content for message in turns))
        elif role == "assistant":
            for message in turns:
                _write_assistant(writer, message, thinking)
        else:
            for message in turns:
                _write_turn(writer, role, message.content)
    if ask:
        _open_answer(writer, thinking)
    return writer.done()


def after_calls(
    tokenizer: Tokenizer, turn: Message, results: Sequence[str], *, thinking: bool | None = None
) -> list[int]:
    """The ids that follow a model turn with tool calls: the results, and the opening of the next turn.

    They follow the turn's end token, and equal those that `render` writes there. turn: the turn, for
    templates that look back at it. Raises UserError if the template does not support it.
    """
    if tokenizer.is_ours:
        writer = _Writer(tokenizer)
        writer.text("\n", 0)  # ends the model's turn
        _write_tool_results(writer, results)
        _open_answer(writer, thinking)
        return writer.done().ids
    prompt = [Message(role="user", content="?"), turn]
    with_results = [*prompt, *(Message(role="tool", content=result) for result in results)]
    closed = _render_external(tokenizer, prompt, (), False, thinking).ids
    full = _render_external(tokenizer, with_results, (), True, thinking).ids
    # A template may render a turn differently once it is not the last. Only what follows the turn is used. Content is
    # never a control token, so turns can be counted by their end tokens.
    turns = closed.count(tokenizer.message_end)
    ends = [index for index, token in enumerate(full) if token == tokenizer.message_end]
    if not turns or len(ends) < turns:
        what, wanted = "the chat template does not support tool results", "one that ends each turn with a token"
        raise UserError(what, where="chat template", wanted=wanted)
    return full[ends[turns - 1] + 1 :]
