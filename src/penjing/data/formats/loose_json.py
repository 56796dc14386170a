"""JSON inside a text, also as programs write it that do not know JSON: Python's `str` of a list, glaive's calls."""

import ast
import json
import re
import warnings
from typing import Any

_LARGEST_LITERAL = 1 << 20  # characters; Python's parser takes some hundred bytes for each
_QUOTED_ARGUMENTS = re.compile(r"""("arguments"\s*:\s*)'(.*)'(\s*\}\s*)""", re.DOTALL)


def strict_json(text: str | bytes, default: Any = None) -> Any:
    """The value of a text; `default` if it is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return default


def parsed_json(text: str) -> Any:
    """The value of a text; None if it is neither JSON nor a Python literal of the same types."""
    value = strict_json(text)
    if value is None and _QUOTED_ARGUMENTS.search(text):  # glaive: {"name": "f", "arguments": '{"a": 1}'}
        value = strict_json(_QUOTED_ARGUMENTS.sub(r"\1\2\3", text))
    if value is not None or len(text) > _LARGEST_LITERAL:
        return value
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            return json.loads(json.dumps(ast.literal_eval(text.strip())))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
