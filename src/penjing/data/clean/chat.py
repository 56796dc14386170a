"""Leave out conversations that no one would have: empty and repeated turns, roles out of order, echoes."""

from collections.abc import Sequence

from penjing.data.clean.rule import Record, Rule, chats_of
from penjing.data.formats.schema import Message

_MIN_ECHO = 20  # characters; a short answer may well repeat the question, as a greeting does


class Chat(Rule):
    """Of conversations and preferences; documents pass."""

    def __call__(self, record: Record) -> Record | str:
        return next(filter(None, (_fault(chat.messages) for chat in chats_of(record))), record)


def _fault(messages: Sequence[Message]) -> str:
    """What is wrong; empty if nothing is."""
    seen: set[tuple[str, str]] = set()
    before = ""
    for number, message in enumerate(messages):
        content = " ".join(message.content.split())
        if not content and not message.tool_calls and (message.role != "assistant" or not message.reasoning_content):
            return "an empty turn"
        if (message.role == "system" and number > 0) or message.role == before != "tool":
            return "roles out of order"
        if message.role == "assistant" and before in ("", "system"):
            return "an answer without a question"
        if len(content) >= _MIN_ECHO:
            if message.role == "assistant" and ("user", content) in seen:
                return "an answer repeats the question"
            if message.role in ("user", "assistant") and (message.role, content) in seen:
                return "a repeated turn"
        seen.add((message.role, content))
        before = message.role
    return ""
