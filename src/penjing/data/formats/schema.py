"""The records that the readers return, and the field and role names that they accept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["documents", "chats", "preferences", "prompts"]

SEPARATOR = "<|endoftext|>"
TEXT_FIELDS = ("text", "content", "raw_content")
CHAT_FIELDS = ("conversations", "messages", "conversation")
QUESTION_FIELDS = ("prompt", "question")
ANSWER_FIELDS = ("response", "answer", "completion", "std_answer")
LABEL_FIELDS = ("label", "kto_tag")  # the latter is LLaMA-Factory's
MEDIA_FIELDS = ("images", "image", "videos", "video", "audios", "audio")  # of multimodal records, which are refused
PLAIN_FORMATS = ("txt", "md", "py")
FORMATS = (*PLAIN_FORMATS, "jsonl", "json", "csv", "tsv", "parquet")
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
    """One turn. `role` is system, user, assistant or tool; a tool call is {"name": str, "arguments": dict}."""

    role: str
    content: str
    reasoning_content: str = ""
    tool_calls: tuple[dict[str, Any], ...] = ()


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
