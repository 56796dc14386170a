"""External chat templates: run in a sandbox, and split so that message content never becomes structure.

A Jinja template renders one string, in which its own control tokens cannot be told from the same text in a message.
So it is run on a conversation whose contents are replaced by placeholders, and the result is split at these: the text
between them is the template's own. The spans, with the contents put back, must equal the string that the template
renders for the real conversation. A template that changes contents, other than at their ends, is refused.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache, partial
from itertools import takewhile
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser

from penjing.base.errors import UserError
from penjing.data.chat.template_sandbox import LARGEST_TEMPLATE, LimitedEnvironment, TemplateLimit
from penjing.data.formats import Message

THINKING_SWITCHES = ("enable_thinking", "open_thinking")  # as Qwen3's and MiniMind's templates call it
# Around a placeholder's number. Contents may contain them; they are never searched.
_OPEN, _CLOSE = "\ue010", "\ue011"
Write = Callable[[Sequence[Message], Sequence[dict[str, Any]], bool], str]  # messages, tools, ask -> text
_MARK = re.compile(f"{_OPEN}(\\d+){_CLOSE}")


@dataclass(frozen=True, slots=True)
class TemplateSpan:
    """A span of a rendered conversation: the template's own text, or content, which is never a control token."""

    text: str
    is_content: bool
    is_target: bool = False  # whether it is a training target


# --- the sandbox -----------------------------------------------------------------------------------------------------


class _Generation(jinja2.ext.Extension):
    """Some templates mark assistant turns by `{% generation %}`; its body is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012  # the library's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


@lru_cache(maxsize=16)
def _compiled(source: str) -> tuple[LimitedEnvironment, jinja2.Template]:
    """The environment of transformers: blocks trimmed, JSON unescaped, no way out of the sandbox."""
    extensions = [_Generation, jinja2.ext.loopcontrols]
    environment = LimitedEnvironment({"tojson": _to_json}, trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    try:
        if len(source) > LARGEST_TEMPLATE:
            raise TemplateLimit(f"it has more than {LARGEST_TEMPLATE:,} characters")
        return environment, environment.from_string(source)
    except (jinja2.TemplateError, RecursionError) as error:
        raise UserError(f"the chat template cannot be read: {error}", where="chat template") from None


def as_dict(message: Message) -> dict[str, Any]:
    """A message for templates; reasoning under both names in use."""
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning_content:
        fields |= {"thinking": message.reasoning_content, "reasoning_content": message.reasoning_content}
    if message.tool_calls:
        fields["tool_calls"] = [{"type": "function", "function": call} for call in message.tool_calls]
    return fields


def run_template(
    source: str,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]],
    names: Mapping[str, str],
    *,
    ask: bool,
    thinking: bool,
) -> str:
    """Render a template. names: `bos_token` and the like. Raises UserError if it rejects the conversation."""
    wrapped = [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]
    environment, template = _compiled(source)
    values = {
        "messages": [as_dict(message) for message in messages],
        "tools": wrapped or None,
        "documents": None,
        "add_generation_prompt": ask,
        **dict.fromkeys(THINKING_SWITCHES, thinking),
        **names,
    }
    num_chars = sum(len(message.content) + len(message.reasoning_content) for message in messages) + len(str(tools))
    try:
        return environment.render(template, num_chars, values)
    except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        raise UserError(f"the chat template refuses this conversation: {error}", where="chat template") from None


# --- placeholders for content ----------------------------------------------------------------------------------------


class _Placeholders:
    """The placeholders so far, with the text and the message of each."""

    def __init__(self, control: re.Pattern[str]) -> None:
        self.control = control
        self.words: list[str] = []
        self.owner: list[int] = []

    def mark(self, words: str, owner: int) -> str:
        """A placeholder for `words`. Whitespace alone is kept: templates test whether content is empty."""
        if not words.strip():
            return words
        self.words.append(words)
        self.owner.append(owner)
        return f"{_OPEN}{len(self.words) - 1}{_CLOSE}"

    def mark_control_tokens(self, value: Any, owner: int) -> Any:
        """A JSON value in which only strings with a control token are replaced by placeholders."""

        def change(text: str) -> str:
            return self.mark(text, owner) if _OPEN in text or self.control.search(text) else text

        return _map_texts(value, change)


def _with_placeholders(messages: Sequence[Message], marks: _Placeholders) -> list[Message]:
    return [
        replace(
            message,
            content=marks.mark(message.content, index),
            reasoning_content=marks.mark(message.reasoning_content, index),
            tool_calls=tuple(
                {**marks.mark_control_tokens(call, index), "name": marks.mark(str(call.get("name", "")), index)}
                for call in message.tool_calls
            ),
        )
        for index, message in enumerate(messages)
    ]


def _forms(words: str) -> Iterator[str]:
    """The forms in which templates render content: unchanged, stripped, or inside a JSON string."""
    for form in (words, words.strip(), words.lstrip("\n"), words.strip("\n"), words.lstrip(), words.rstrip()):
        yield form
        yield _to_json(form)[1:-1]


def _locate_content(marked: str, real: str, marks: _Placeholders) -> list[tuple[str, int]] | None:
    """Split `real` like `marked` at its placeholders: (text, placeholder or -1). None if the text between differs."""
    parts = _MARK.split(marked)  # own, number, own, number, ..., own
    if not real.startswith(parts[0]):
        return None
    located, position = [(parts[0], -1)], len(parts[0])
    for number, suffix in zip(map(int, parts[1::2]), parts[2::2], strict=True):
        for form in _forms(marks.words[number]):
            if real.startswith(form, position) and real.startswith(suffix, position + len(form)):
                located += [(form, number), (suffix, -1)]
                position += len(form) + len(suffix)
                break
        else:
            return None
    return located if position == len(real) else None


# --- splitting -------------------------------------------------------------------------------------------------------


def split_rendered(
    source: str,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]],
    names: Mapping[str, str],
    *,
    control: re.Pattern[str],
    message_end: str,
    ask: bool,
    thinking: bool | None,
) -> list[TemplateSpan]:
    """A conversation as pieces: whose text each is, and whether the model learns it.

    control: finds the tokenizer's control tokens in a text. message_end: the one that closes an answer. Learned is
    what stands between the prompt for an answer and the end of its turn, that token included.
    thinking: these templates have two positions, and None is on where somebody thought before, else off. Thoughts that
    a template leaves out are said as words, <think> and all, since nothing else would be taught of them.
    Raises UserError if the template cannot be followed.
    """
    if thinking is None or not ask:
        thinking = thinking or any(message.reasoning_content for message in messages)
    enable_thinking = thinking
    if any(message.reasoning_content for message in messages) and not _renders_reasoning(source, tuple(names.items())):
        messages = [_inline_reasoning(message) for message in messages]

    def write(turns: Sequence[Message], offered: Sequence[dict[str, Any]], ask: bool) -> str:
        return run_template(source, turns, offered, names, ask=ask, thinking=enable_thinking)

    real = write(messages, tools, ask)
    for variant in (messages, _extract_reasoning(messages)):
        marks = _Placeholders(control)
        marked_messages = _with_placeholders(variant, marks)
        marked_tools = [marks.mark_control_tokens(tool, -1) for tool in tools]
        marked = write(marked_messages, marked_tools, ask)
        pieces = _locate_content(marked, real, marks)
        if pieces is not None:
            prompt = partial(_prompt, marked_messages, marked_tools, write)
            spans = list(_answers(pieces, variant, marks, prompt, message_end))
            return _with_spans(pieces, spans)
    what = "the chat template cannot be followed: it changes what was said"
    hint = "Put another chat_template.jinja into the tokenizer's folder."
    raise UserError(what, where="chat template", next_step=hint)


@lru_cache(maxsize=64)
def _renders_reasoning(source: str, names: tuple[tuple[str, str], ...]) -> bool:
    """Whether a template writes the thought of an answer. One that cannot be asked is taken to."""
    conversation = [
        Message(role="user", content="\ue020"),
        Message(role="assistant", content="\ue021", reasoning_content="\ue022"),
    ]
    try:
        return "\ue022" in run_template(source, conversation, (), dict(names), ask=False, thinking=True)
    except UserError:
        return True


def _inline_reasoning(message: Message) -> Message:
    """The message with its thought at the head of its content."""
    if not message.reasoning_content:
        return message
    parts = (f"<think>\n{message.reasoning_content}\n</think>", message.content.lstrip("\n"))
    return replace(message, reasoning_content="", content="\n\n".join(part for part in parts if part))


def _extract_reasoning(messages: Sequence[Message]) -> list[Message]:
    """Thoughts that stand inside the content, taken out of it as the templates do that look for them."""
    split = []
    for message in messages:
        if message.role == "assistant" and "</think>" in message.content and not message.reasoning_content:
            before, _, answer = message.content.rpartition("</think>")
            thought = before.rstrip("\n").rpartition("<think>")[2].lstrip("\n")
            message = replace(message, reasoning_content=thought, content=answer.lstrip("\n"))
        split.append(message)
    return split


def _prompt(
    messages: Sequence[Message], tools: Sequence[dict[str, Any]], write: Write, index: int
) -> tuple[int, str] | None:
    """Of the prompt for answer `index`: its last mark (-1: none) and what follows it, such as ` [/INST]`.

    None where the template refuses: it wants a whole exchange.
    """
    try:
        parts = _MARK.split(write(messages[:index], tools, True))
    except UserError:
        return None
    return int(parts[-2]) if len(parts) > 1 else -1, parts[-1]


def _answers(
    pieces: list[tuple[str, int]],
    messages: Sequence[Message],
    marks: _Placeholders,
    prompt: Callable[[int], tuple[int, str] | None],
    message_end: str,
) -> Iterator[tuple[int, int]]:
    """(first, last) character of each answer, from the end of the prompt for it to the end of its turn.

    All that the model has to produce is learned, the template's own text too, like the blank after `[/INST]`.
    """
    starts, position = [], 0
    for text, _ in pieces:
        starts.append(position)
        position += len(text)
    template_text = "".join(text if number < 0 else "\x00" * len(text) for text, number in pieces)  # words hidden
    owners = [-1 if number < 0 else marks.owner[number] for _, number in pieces]
    known: dict[tuple[str, str], int] = {}  # alike messages: the template runs once
    for index, message in enumerate(messages):
        answer_pieces = [piece for piece, owner in enumerate(owners) if owner == index]
        if message.role != "assistant" or not message.is_target or not answer_pieces:
            continue
        first, last = starts[answer_pieces[0]], starts[answer_pieces[-1]] + len(pieces[answer_pieces[-1]][0])
        marked = next((piece for piece in range(answer_pieces[0] - 1, -1, -1) if pieces[piece][1] >= 0), -1)
        low = starts[marked + 1] if marked >= 0 else 0
        key = (messages[index - 1].role if index else "", template_text[low:first])
        if key not in known:
            mark, suffix = prompt(index) or (-2, "")
            is_same_prompt = mark == (pieces[marked][1] if marked >= 0 else -1)
            known[key] = _common_prompt_length(suffix, template_text[low:first]) if is_same_prompt else first - low
        next_starts = [starts[piece] for piece in range(answer_pieces[-1] + 1, len(pieces)) if owners[piece] >= 0]
        end = template_text.find(message_end, last, min(next_starts, default=len(template_text))) if message_end else -1
        yield low + known[key], last if end < 0 else end + len(message_end)


def _common_prompt_length(prompt: str, written: str) -> int:
    """How much of the prompt's end stands before the answer too: all of it, or as many whole tokens and lines.

    Where a conversation goes on, some templates leave out a part of the prompt, such as an empty thought.
    """
    common = _common_prefix(prompt, written)
    return len(common) if common == prompt else max(common.rfind(border) for border in ">]\n") + 1


def _with_spans(pieces: list[tuple[str, int]], spans: list[tuple[int, int]]) -> list[TemplateSpan]:
    """The pieces cut again where an answer begins and ends."""
    borders = sorted({border for span in spans for border in span})
    result, position = [], 0
    for text, number in pieces:
        inner = [border - position for border in borders if position < border < position + len(text)]
        for start, stop in zip([0, *inner], [*inner, len(text)], strict=True):
            if stop > start:
                is_target = any(begin <= position + start < end for begin, end in spans)
                result.append(TemplateSpan(text[start:stop], number >= 0, is_target))
        position += len(text)
    return result


def _common_prefix(first: str, second: str) -> str:
    equal_pairs = takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return "".join(character for character, _ in equal_pairs)


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value in which every text is changed, names of fields included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map_texts(key, change): _map_texts(inner, change) for key, inner in value.items()}
    return type(value)(_map_texts(inner, change) for inner in value) if isinstance(value, (list, tuple)) else value


def answer_end(source: str, names: Mapping[str, str], ends: Sequence[str], special: Sequence[str]) -> str | None:
    """The token that a template puts after an answer: of `ends` where one stands there, else of `special`."""
    messages = [
        Message(role="user", content="\ue020"),
        Message(role="assistant", content="\ue021"),
        Message(role="user", content="\ue022"),
    ]
    for count in (3, 2):  # some close the last answer only, and some want to end with a question
        try:
            text = run_template(source, messages[:count], (), names, ask=False, thinking=False)
        except UserError:
            continue
        tail = text.partition("\ue021")[2].partition("\ue022")[0]
        for group in (ends, special):
            matches = [(tail.index(token), -len(token), token) for token in group if token and token in tail]
            if matches:
                return min(matches)[2]
    return None
