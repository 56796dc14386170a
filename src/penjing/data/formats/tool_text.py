"""Tools, calls and results that other programs write as text: in the system message, in answers, in questions."""

import ast
import json
import re
from collections.abc import Collection, Iterator
from typing import Any, Literal

from penjing.base.errors import UserError
from penjing.data.formats.functions import Objects, functions_of, tool_calls_of
from penjing.data.formats.loose_json import parsed_json
from penjing.data.formats.source_location import SourceLocation

Part = tuple[Literal["text", "calls", "result"], Any]

# Hermes, Qwen and ours: <tool_call>; glaive: <functioncall>, which nothing closes; Llama: <function=f>{...}</function>
# and <|python_tag|>; Mistral: [TOOL_CALLS].
_PARTS = re.compile(
    r"<(?P<tag>tool_call|function_?call)>(?P<body>.*?)(?:</(?P=tag)>|(?=<(?P=tag)>)|<\|endoftext\|>|\Z)"
    r"|<function=(?P<name>[\w.-]+)>(?P<arguments>.*?)</function>"
    r"|(?:\[TOOL_CALLS\]|<\|python_tag\|>)(?P<rest>.*)"
    r"|<tool_response>(?P<result>.*?)</tool_response>",
    re.DOTALL,
)
_RESULT = re.compile(r"\s*FUNCTION RESPONSE:\s*(.*)", re.DOTALL)
_MARKS = ("<tool_call>", "<function", "[TOOL_CALLS]", "<|python_tag|>", "<tool_response>")
_TOOLS = re.compile(r"<tools>((?:(?!<tools>).)*?)</tools>", re.DOTALL)
_LISTED = re.compile(r"(?:functions?|tools?)\b[^.\n\[{<]*(?:\.[^\n\[{<]*)?[:\-.]?\s*(?=[\[{])")
_ACCESS = re.compile(r",? with access to the following (?:functions?|tools?)\b.*", re.DOTALL)
_OF_FUNCTIONS = {"parameters", "description", "arguments", "inputs", "input_schema"}  # besides their name
_SENTENCE = re.compile(r"(?<=[.!?:。！？：])\s|\n|#+ ")


def parts_of(content: str, names: Collection[str], where: SourceLocation) -> list[Part] | None:
    """An answer in parts: text, calls and results; None if no call or result in it is valid.

    names: of the tools on offer. Text may follow a call of one of them; a call of another that is not at the end is an
    example in a text.
    """
    if "<" not in content and "[" not in content:
        return None
    if names and content.lstrip().startswith("[") and (calls := _python_calls(content.strip(), names)):
        return [("calls", calls)]
    if not any(mark in content for mark in _MARKS):
        return None
    parts: list[Part] = []
    end = 0
    for match in _PARTS.finditer(content):
        parts.append(("text", content[end : match.start()].strip()))
        end = match.end()
        if match["result"] is not None:
            parts.append(("result", match["result"].strip()))
        elif calls := _calls(match, where):
            parts.append(("calls", calls))
        else:
            return None
    parts = [part for part in (*parts, ("text", content[end:].strip())) if part != ("text", "")]
    kinds = [kind for kind, _ in parts]
    if "calls" not in kinds:
        return None
    first_call = kinds.index("calls")
    is_known = all(call["name"] in names for kind, calls in parts if kind == "calls" for call in calls)
    is_at_end = kinds[-1] == "calls" and "text" not in kinds[first_call:]
    return parts if is_known or is_at_end or kinds[first_call + 1] == "result" else None


def _python_calls(content: str, names: Collection[str]) -> Objects:
    """The calls of a content such as `[add(a=1), look up(word="a")]`, as ToolACE writes them."""
    functions = {f"function_{number}": name for number, name in enumerate(sorted(names, key=len, reverse=True))}
    for function, name in functions.items():
        content = re.sub(rf"(?<![\w]){re.escape(name)}\(", f"{function}(", content)
    try:
        calls: Any = ast.parse(content, mode="eval").body
        found = [
            {
                "name": functions[call.func.id],
                "arguments": {each.arg: ast.literal_eval(each.value) for each in call.keywords},
            }
            for call in calls.elts
        ]
        json.dumps(found)
        is_valid = all(not call.args and all(each.arg for each in call.keywords) for call in calls.elts)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError, KeyError, AttributeError):
        return ()
    return tuple(found) if is_valid else ()


def _calls(match: re.Match[str], where: SourceLocation) -> Objects:
    """The calls of a match; none if one is not valid."""
    if match["name"]:
        value: Any = {"name": match["name"], "arguments": match["arguments"]}
    elif match["tag"] == "tool_call" and not match[0].endswith("</tool_call>"):
        return ()
    else:
        text = match["body"] if match["tag"] else match["rest"].removesuffix("</s>").removesuffix("<|eom_id|>")
        value = parsed_json(text.strip())
    try:
        return tool_calls_of(value, "the answer", where)
    except UserError:
        return ()


def result_of(content: str) -> list[str]:
    """The tool results that are a whole turn of the user; empty if it is anything else."""
    if match := _RESULT.fullmatch(content):
        return [match[1].strip()]
    found = [match for match in _PARTS.finditer(content) if match["result"] is not None]
    rest = _PARTS.sub("", content) if found else content
    return [match["result"].strip() for match in found] if found and not rest.strip() else []


def tools_in(system: str, where: SourceLocation) -> tuple[str, Objects]:
    """A system message without the functions that it lists and without what it says of them, and the functions."""
    if "{" not in system:
        return system, ()
    for block in _TOOLS.finditer(system):
        if tools := _functions(block[1], where):
            start = _sentence_start(system, system.index("<tools>"))
            heading = system.rfind("# Tools", 0, start)  # Qwen's
            end = max(block.end(), system.rfind("</tool_call>") + len("</tool_call>"))
            return _joined(system[: heading if heading >= 0 else start], system[end:]), tools
    listed = _LISTED.search(system)
    start, end = listed.span() if listed else (0, 0)
    if not (tools := _functions(system[end:], where)):
        return system, ()
    before, after = system[:end], system[end:]
    rest = after[max((stop for _, stop in _json_values(after)), default=len(after)) :]
    if _ACCESS.search(before):
        return _joined(_ACCESS.sub(".", before), rest), tools
    return _joined(system[: _sentence_start(system, start)], rest), tools


def _joined(before: str, after: str) -> str:
    parts = (before.strip(), after.lstrip(" \n.,;").rstrip())
    text = "\n".join(part for part in parts if part.strip("#."))
    return text.removeprefix("SYSTEM:").strip()


def _sentence_start(text: str, position: int) -> int:
    return max((match.end() for match in _SENTENCE.finditer(text, 0, position)), default=0)


def _json_values(text: str) -> Iterator[tuple[Any, int]]:
    """JSON values one after another, with the end of each."""
    decoder, position = json.JSONDecoder(), 0
    while match := re.compile(r"[\s,]*(?=[\[{])").match(text, position):
        try:
            value, position = decoder.raw_decode(text, match.end())
        except (ValueError, RecursionError):
            return
        yield value, position


def _functions(text: str, where: SourceLocation) -> Objects:
    """The functions that a text lists, as JSON or as Python writes it; none if one is no function."""
    values = [value for value, _ in _json_values(text)] or [parsed_json(text.strip())]
    items = [item for value in values for item in (value if isinstance(value, list) else [value])]
    try:
        functions = functions_of(items, "tools", where)
    except UserError:
        return ()
    return functions if any(not _OF_FUNCTIONS.isdisjoint(each) for each in functions) else ()
