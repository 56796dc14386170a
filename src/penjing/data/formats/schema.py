"""The records that the readers return, and the field and role names that they accept."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["documents", "chats", "preferences", "prompts"]

SEPARATOR = "<|endoftext|>"
TEXT_FIELDS = ("text", "content", "raw_content", "paragraphs")
CHAT_FIELDS = ("conversations", "messages", "conversation", "chat", "dialogue", "dialog")
QUESTION_FIELDS = ("prompt", "question", "problem", "query", "q", "input", "inputs")
# A solution shows the way to an answer, and a record may have both.
ANSWER_FIELDS = (
    "response", "solution", "answer", "completion", "std_answer", "output", "target", "outputs", "targets", "a",
    "continuation", "final_answer", "answers",
)  # fmt: skip
CHOICE_FIELDS = ("choices", "options")
# Of a question with choices: the right one as its letter, its index from 0, or its text
KEY_FIELDS = ("answer", "answerkey", "answer_key", "answer_idx", "gold", "correct", "correct_answer", "correct_option")
CHOSEN_FIELDS = ("chosen", "chosen_response", "response_chosen", "accepted")
REJECTED_FIELDS = ("rejected", "rejected_response", "response_rejected")
SYSTEM_FIELDS = ("system", "system_prompt", "system_message")
TOOL_FIELDS = ("tools", "functions")  # the latter is OpenAI's first name for them
REASONING_FIELDS = (
    "reasoning_content", "reasoning", "thinking", "thought", "thoughts", "rationale", "chain_of_thought", "cot",
    "complex_cot",
)  # fmt: skip
SWITCH_FIELDS = ("weight", "train", "loss", "loss_mask", "trainable")  # of a message: whether the loss includes it
LABEL_FIELDS = ("label", "kto_tag")  # the latter is LLaMA-Factory's
MEDIA_FIELDS = ("images", "image", "videos", "video", "audios", "audio")  # of multimodal records, which are refused
# Of a prompt: what rewards and eval compare the answer with
REFERENCE_FIELDS = ("gt", "answer", "truth", "tests", "cases", "must_contain", "chance", "kind", "wrong", "tool_call")
# More names of reference answers; `a.b` is a field of a field
TRUTH_FIELDS = ("ground_truth", "reward_model.ground_truth", "reference_answer", "solution", "final_answer")
# What `data.columns` may name
STANDARD_FIELDS = (
    "text", "question", "answer", "system", "context", "reasoning", "messages", "tools", "choices", "history",
    "chosen", "rejected", "label", "margin", "gt",
)  # fmt: skip
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
    r"<(?:\|[\w\u2581]{1,40}\||/?(?:s|think|tool_call|tool_response|function_?call|function=[\w.-]+|tools|bos|eos|pad|unk)"
    r"|(?:start|end)_of_turn|\uff5c[^\uff5c<>]{1,40}\uff5c)>|\[/?INST\]|<</?SYS>>|\[TOOL_CALLS\]"
)
TEXT_FORMATS = ("txt", "md", "py", "html", "warc", "epub")  # that hold documents, not records
BINARY_FORMATS = ("parquet", "arrow", "epub")  # that are packed themselves
FORMATS = (*TEXT_FORMATS, "jsonl", "json", "csv", "tsv", "parquet", "arrow")
SUFFIXES = {"htm": "html", "xhtml": "html", "markdown": "md", "ndjson": "jsonl"}  # other spellings
ROLES = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user", "prompter": "user",
    "assistant": "assistant", "gpt": "assistant", "bot": "assistant", "chatgpt": "assistant", "model": "assistant",
    "ai": "assistant",
    "tool": "tool", "observation": "tool", "function": "tool", "function_response": "tool", "tool_response": "tool",
    "ipython": "tool",
    "function_call": "assistant", "tool_call": "assistant",
}  # fmt: skip


def _spelling(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower()


_HARMLESS = frozenset(map(_spelling, ("", *_HARMLESS_FIELDS.split())))  # the empty name: row numbers from pandas


# Names that the readers look for, in small letters
KNOWN_FIELDS = frozenset((
    *TEXT_FIELDS, *CHAT_FIELDS, *QUESTION_FIELDS, *ANSWER_FIELDS, *CHOICE_FIELDS, *KEY_FIELDS, *CHOSEN_FIELDS,
    *REJECTED_FIELDS, *SYSTEM_FIELDS, *TOOL_FIELDS, *REASONING_FIELDS, *LABEL_FIELDS, "instruction", "context",
    "history",
))  # fmt: skip


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

    @property
    def text(self) -> str:
        """The thought and the content."""
        return "\n".join(filter(None, (self.reasoning_content, self.content)))


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

    @property
    def reference(self) -> dict[str, Any]:
        """Of a prompt, what rewards compare its answer with."""
        return {name: self.fields[name] for name in REFERENCE_FIELDS if name in self.fields}


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferenceRecord:
    """A pair (chosen, rejected) of conversations, with is_chosen (True, False), or one labelled conversation.

    margin: by how much the first is better, in units of reward; 0 if unknown.
    """

    chats: tuple[Chat, ...]
    is_chosen: tuple[bool, ...]
    margin: float = 0.0
