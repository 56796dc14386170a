"""The records that the readers return, and the field and role names that they accept."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["documents", "chats", "preferences", "prompts"]

SEPARATOR = "<|endoftext|>"
TEXT_FIELDS = ("text", "content", "raw_content")
CHAT_FIELDS = ("conversations", "messages", "conversation")
QUESTION_FIELDS = ("prompt", "question")
ANSWER_FIELDS = ("response", "answer", "completion", "std_answer")
SYSTEM_FIELDS = ("system", "system_prompt")
TOOL_FIELDS = ("tools", "functions")  # the latter is OpenAI's first name for them
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
SWITCH_FIELDS = ("weight", "train", "loss", "loss_mask")  # of a message: whether the loss includes it
QUESTION_PARTS = ("context", "choices", "options", "passage", "documents", "input")  # what a question may refer to
LABEL_FIELDS = ("label", "kto_tag")  # the latter is LLaMA-Factory's
MEDIA_FIELDS = ("images", "image", "videos", "video", "audios", "audio")  # of multimodal records, which are refused
# Fields that say where a record comes from or what it is about: nothing is lost if they are not learned. A name that
# speaks of weights is none of them, whatever its ending.
HARMLESS_FIELD = re.compile(
    r"(?!.*(?:weight|mask|loss|train|reject|reward))(?:"
    r"(?:.*[_-])?(?:u?u?id|ids|idx|index|hash|sha256|md5|scores?|ratings?|model|date|time|timestamp|url|urls|source|lang)"
    r"|(?:num|n|len)_.*|.*_(?:at|count|length|tokens)|__.*|unnamed: \d+|"
    r"|src|origin|link|dataset(?:_name)?|subset|split|licen[cs]e|author|title|created|updated|version|generator|language"
    r"|locale|country|categor(?:y|ies)|class|task(?:_type|_name)?|type|kind|topics?|tags?|domain|difficulty|level|quality"
    r"|length|tokens|meta(?:data)?|info|comments?|object)",
    re.IGNORECASE,
)
# Marks of templates: as text in a message or a document they are spelled out, and are no control tokens.
TEXT_MARK = re.compile(
    r"<(?:\|[A-Za-z_]{1,40}\||/?(?:s|think|tool_call|tool_response|bos|eos|pad|unk)|(?:start|end)_of_turn"
    r"|\uff5c[^\uff5c<>]{1,40}\uff5c)>|\[/?INST\]"
)
PLAIN_FORMATS = ("txt", "md", "py")
FORMATS = (*PLAIN_FORMATS, "jsonl", "json", "csv", "tsv", "parquet", "arrow")
ROLES = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "bot": "assistant", "chatgpt": "assistant",
    "tool": "tool", "observation": "tool", "function": "tool", "function_response": "tool",
    "function_call": "assistant",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One text. line: its first line in `source`, from 1 (in parquet: the row)."""

    text: str
    source: str
    line: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One turn. `role` is system, user, assistant or tool; a tool call is {"name": str, "arguments": dict}.

    is_target: False for an answer that the loss leaves out.
    """

    role: str
    content: str
    reasoning_content: str = ""
    tool_calls: tuple[dict[str, Any], ...] = ()
    is_target: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Chat:
    """One conversation with at least one answer. `tools` are the functions on offer, each with a `name`."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]
    source: str
    line: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferenceRecord:
    """A pair (chosen, rejected) of conversations, with is_chosen (True, False), or one labelled conversation.

    margin: by how much the first is better, in units of reward; 0 if unknown.
    """

    chats: tuple[Chat, ...]
    is_chosen: tuple[bool, ...]
    margin: float = 0.0
