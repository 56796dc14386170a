"""Check the regular expressions of an untrusted tokenizer.json before a library compiles them."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penjing.base.errors import UserError
from penjing.base.files import read_parsed

LARGEST_FILE_BYTES = 96 << 20  # vocabularies of 260,000 tokens take 35 MB
LONGEST_PATTERN = 8192
_UNBOUNDED_REPEAT = re.compile(r"[*+]|\{\d+,\}")
_AMBIGUOUS = re.compile(r"[|*+?]|\{\d*,\d*\}")  # not {3}
_BACKREFERENCE = re.compile(r"\\(?:[1-9]|k<)")


def read_checked(path: Path) -> str:
    """The text of a tokenizer.json. Raises UserError if it is too large, not a JSON object, or has a pattern with
    exponential backtracking."""
    text, table = read_parsed(path, "JSON", lambda text: (text, json.loads(text)), LARGEST_FILE_BYTES)
    if not isinstance(table, dict):
        raise UserError("not a readable tokenizer: not a table", where=path)
    for part in ("normalizer", "pre_tokenizer", "decoder", "post_processor"):
        for pattern in patterns(table.get(part)):
            if reason := risk(pattern):
                raise UserError(f"a pattern that could take for ever: {reason}", where=path, got=repr(pattern[:60]))
    return str(text)


def patterns(value: Any) -> Iterator[str]:
    """Every regular expression in a part of a tokenizer.json."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name == "Regex" and isinstance(inner, str):
                yield inner
            else:
                yield from patterns(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from patterns(inner)


def risk(pattern: str) -> str | None:
    """Why a pattern could cause exponential backtracking, in a few words; None if it cannot.

    The cause is a group with an unbounded repeat that can match one text in several ways, through any alternation or
    repeat inside. No pattern in common use has one.
    """
    if len(pattern) > LONGEST_PATTERN:
        return f"it has more than {LONGEST_PATTERN:,} characters"
    if _BACKREFERENCE.search(pattern):
        return "it has a backreference"
    open_groups: list[bool] = []  # for each open group: whether it can match in several ways
    position, in_class, depth = 0, False, 0
    while position < len(pattern):
        char = pattern[position]
        if char == "\\":
            position += 2
            continue
        if in_class:
            depth += (char == "[") - (char == "]")
            in_class = depth > 0
        elif char == "[":
            in_class, depth = True, 1
            position += 1 + pattern.startswith("^", position + 1)  # a leading ] is a literal
        elif char == "(":
            open_groups.append(False)
            position += pattern.startswith("?", position + 1)  # of (?: and the like
        elif char == ")" and open_groups:
            is_ambiguous = open_groups.pop()
            if is_ambiguous and _UNBOUNDED_REPEAT.match(pattern, position + 1):
                return "a repeated group with a repeat or a choice inside"
            if open_groups and is_ambiguous:
                open_groups[-1] = True
        elif open_groups and _AMBIGUOUS.match(pattern, position):
            open_groups[-1] = True
        position += 1
    return None
