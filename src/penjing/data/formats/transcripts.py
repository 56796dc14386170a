"""Conversations written as one text: `Human:` and `Assistant:`, or glaive's `USER:`, `FUNCTION RESPONSE:`."""

import re
from typing import Any

_ROLES = {"system": "system", "human": "user", "user": "user", "assistant": "assistant", "function response": "tool"}
_NAMES = "|".join(f"{name.capitalize()}|{name.upper()}" for name in _ROLES)
_LABEL = re.compile(rf"(?:\A|\n\n)\s*({_NAMES}):[ \t]*")
_END = re.compile(r"\s*<\|endoftext\|>\s*\Z")


def transcript_turns(text: str) -> list[dict[str, Any]] | None:
    """The turns of a transcript that begins with a label and has one of the assistant; None for any other text."""
    if not _LABEL.match(text.lstrip()[:30]):
        return None
    _, *parts = _LABEL.split(text.strip())
    turns = [
        {"role": _ROLES[label.lower()], "content": _END.sub("", content).strip()}
        for label, content in zip(parts[::2], parts[1::2], strict=True)
    ]
    if turns and turns[-1]["role"] == "assistant" and not turns[-1]["content"]:
        turns.pop()  # an open turn at the end of a prompt
        return turns
    return turns if any(turn["role"] == "assistant" for turn in turns) else None
