"""A stranger's tokenizer.json, looked at before a library compiles what it says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penjing.base.errors import UserError
from penjing.base.files import open_regular

LARGEST_FILE_BYTES = 96 << 20  # vocabularies of 260,000 tokens take 35 MB
LONGEST_PATTERN = 8192
_ENDLESS = re.compile(r"[*+]|\{\d+,\}")
_SEVERAL_WAYS = re.compile(r"[|*+?]|\{\d*,\d*\}")  # not {3}
_BACK = re.compile(r"\\(?:[1-9]|k<)")


def read_checked(path: Path) -> str:
    """The text of a tokenizer.json. Raises UserError if it is too large, no table, or has a pattern that could take
    time without end on texts made for it."""
    try:
        with open_regular(path) as stream:
            raw = stream.read(LARGEST_FILE_BYTES + 1)
        if len(raw) > LARGEST_FILE_BYTES:
            raise UserError("too large for a tokenizer", where=path, wanted=f"at most {LARGEST_FILE_BYTES >> 20} MiB")
        text = raw.decode("utf-8")
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"not a readable tokenizer: {error}", where=path) from None
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror or error}", where=path) from None
    if not isinstance(table, dict):
        raise UserError("not a readable tokenizer: not a table", where=path)
    for part in ("normalizer", "pre_tokenizer", "decoder", "post_processor"):
        for pattern in patterns(table.get(part)):
            if why := risk(pattern):
                raise UserError(f"a pattern that could take for ever: {why}", where=path, got=repr(pattern[:60]))
    return text


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
    """Why a backtracking engine could try exponentially many ways, in a few words; None if it cannot.

    It takes a group that is repeated without end and can itself match one text in several ways: by a choice or a repeat
    inside, were it only of one or two. Patterns in use have none.
    """
    if len(pattern) > LONGEST_PATTERN:
        return f"it has more than {LONGEST_PATTERN:,} characters"
    if _BACK.search(pattern):
        return "it refers back to what it found"
    open_groups: list[bool] = []  # of each group that is open: whether it could match in several ways
    place, in_class, depth = 0, False, 0
    while place < len(pattern):
        char = pattern[place]
        if char == "\\":
            place += 2
            continue
        if in_class:
            depth += (char == "[") - (char == "]")
            in_class = depth > 0
        elif char == "[":
            in_class, depth = True, 1
            place += 1 + pattern.startswith("^", place + 1)  # a ] that comes first is itself
        elif char == "(":
            open_groups.append(False)
            place += pattern.startswith("?", place + 1)  # of (?: and the like
        elif char == ")" and open_groups:
            several = open_groups.pop()
            if several and _ENDLESS.match(pattern, place + 1):
                return "a repeated group with a repeat or a choice inside"
            if open_groups and several:
                open_groups[-1] = True
        elif open_groups and _SEVERAL_WAYS.match(pattern, place):
            open_groups[-1] = True
        place += 1
    return None
