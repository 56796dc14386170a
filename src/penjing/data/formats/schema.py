"""The records that the readers return, and the field and role names that they accept."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
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
LABEL_FIELDS = ("label", "kto_tag")  # the latter is LLaMA-Factory's
MEDIA_FIELDS = ("images", "image", "videos", "video", "audios", "audio")  # of multimodal records, which are refused
# Of a prompt: what rewards and eval compare the answer with
REFERENCE_FIELDS = ("gt", "answer", "truth", "tests", "cases", "must_contain", "chance", "kind", "wrong", "tool_call")
# Fields that name a record, or say where it comes from or what it is about: nothing is lost if they are not learned.
_HARMLESS_FIELDS = """
    id uid uuid guid idx index index_level_0 unnamed:0 row_id line hash sha256 md5 doc_id document_id
    record_id sample_id example_id item_id problem_id question_id prompt_id task_id user_id conversation_id
    conversation_hash conv_id chat_id dialog_id dialogue_id session_id message_id message_tree_id turn_id
    source src origin data_source dataset dataset_name subset split dump url urls uri link file file_name
    file_path path license licence author created created_at updated updated_at added date time timestamp
    version generator model model_name language lang language_score locale country category topic topics tags
    domain difficulty num_tokens num_turns token_count char_count word_count
"""
# Marks of templates: as text in a message or a document they are spelled out, and are no control tokens.
TEXT_MARK = re.compile(
    r"<(?:\|[\w\u2581]{1,40}\||/?(?:s|think|tool_call|tool_response|bos|eos|pad|unk)|(?:start|end)_of_turn"
    r"|\uff5c[^\uff5c<>]{1,40}\uff5c)>|\[/?INST\]|<</?SYS>>"
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


def _spelling(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower()


_HARMLESS = frozenset(map(_spelling, ("", *_HARMLESS_FIELDS.split())))  # the empty name: row numbers from pandas


def is_harmless(name: str) -> bool:
    """Whether nothing is lost if a field of this name is not learned; `task_id`, `taskId`, `Task-ID` are one name."""
    return _spelling(name) in _HARMLESS


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
    """One conversation with at least one answer, or a prompt. `tools` are the functions on offer, each with a `name`.

    fields: of a prompt, its whole record, which may hold reference answers.
    """

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]
    source: str
    line: int
    fields: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferenceRecord:
    """A pair (chosen, rejected) of conversations, with is_chosen (True, False), or one labelled conversation.

    margin: by how much the first is better, in units of reward; 0 if unknown.
    """

    chats: tuple[Chat, ...]
    is_chosen: tuple[bool, ...]
    margin: float = 0.0
