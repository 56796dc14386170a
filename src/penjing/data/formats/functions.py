"""Functions that a conversation offers, and calls of them, as JSON objects or as JSON text."""

import json
from collections.abc import Mapping
from typing import Any

from penjing.base.errors import UserError
from penjing.data.formats.loose_json import parsed_json
from penjing.data.formats.schema import TOOL_FIELDS
from penjing.data.formats.source_location import SourceLocation, text_of, type_name

Objects = tuple[dict[str, Any], ...]


def tools_of(fields: Mapping[str, Any], where: SourceLocation) -> Objects:
    """The functions that a record or message offers."""
    name = next((name for name in TOOL_FIELDS if fields.get(name)), TOOL_FIELDS[0])
    where.used.setdefault(name, "")
    if not fields.get(name):
        return ()
    where.used[name] = "tools"
    return functions_of(fields[name], name, where)


def functions_of(value: object, name: str, where: SourceLocation) -> Objects:
    """Objects with a `name`; OpenAI's {"type": "function", "function": {...}} is unwrapped."""
    value = _parse_json(value, name, where)
    items = value if isinstance(value, list) else [value] if value else []
    items = [item.get("function", item) if isinstance(item, dict) else item for item in items]
    for item in items:
        if not isinstance(item, dict) or not isinstance(item.get("name"), str):
            raise UserError(f"{name} is not a function", where=where, got=str(item)[:60], wanted='{"name": ...}')
    return tuple(items)


def tool_calls_of(value: object, name: str, where: SourceLocation) -> Objects:
    """Calls as {"name": str, "arguments": dict}. name: of the message, in errors."""
    calls = []
    for item in functions_of(value, f"{name}: the tool call", where):
        arguments = _parse_json(item.get("arguments", item.get("parameters")), f"{name}: arguments", where) or {}
        if not isinstance(arguments, dict):
            raise UserError(f"{name}: arguments", where=where, got=type_name(arguments), wanted="an object")
        calls.append({"name": item["name"], "arguments": arguments})
        where.note_ignored(item, ("name", "arguments", "parameters", "type"), (), " of a tool call")
    return tuple(calls)


def _parse_json(value: object, name: str, where: SourceLocation) -> Any:
    """A value that may be written as a JSON string (MiniMind and ShareGPT do); an empty one is None."""
    if isinstance(value, str):
        if not value.strip():
            return None
        start, value = repr(value[:40]), parsed_json(value)
        if value is None:
            raise UserError(f"{name} is not JSON", where=where, got=start)
    if value:
        text_of(json.dumps(value, ensure_ascii=False), name, where)
    return value
