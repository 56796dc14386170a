"""What the readers hand out, and the names of fields and roles that they know."""

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
MEDIA_FIELDS = ("images", "image", "videos", "video", "audios", "audio")  # beside text; without them it is another
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
    """One text to learn from. `line` is where it starts in `source`, from 1 (in parquet: the row)."""

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
    """Whole conversations and whether each one's answer is wanted: (chosen, rejected) with (True, False), or one alone.

    margin: by how much the first is better, in the units of a reward; 0 where nobody said.
    """

    chats: tuple[Chat, ...]
    wanted: tuple[bool, ...]
    margin: float = 0.0
