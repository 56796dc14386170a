"""The tools that are on offer in a conversation, by name, and what comes of a call: always a text, never an error."""

from __future__ import annotations

import importlib
import inspect
import queue
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from penjing.agent_tools import TOOLS
from penjing.agent_tools.base import BadArgumentsError, Tool, ToolSettings
from penjing.base.errors import UserError
from penjing.base.registry import look_up
from penjing.data.chat.turn_parser import ToolCall

WORKERS = 4  # calls of tools that wait for something, side by side
MOST_CALLS = 8  # of one turn; the others are told that there were too many


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What the model reads. worked: the call was well-formed, of a known tool, and was not refused by it. is_answer: a
    conversation's answer ends with it (a tool with `result_is_answer`)."""

    text: str
    worked: bool
    is_answer: bool = False


class Toolbox:
    """Tools by the names under which they are offered.

    words: each `calculator`, or `NAME=calculator` to offer it under another name, as a data set may call it; or
    `module:Class`, a tool of the user's own, which is imported. Raises UserError for what is none of these.
    """

    def __init__(self, words: Sequence[str], settings: ToolSettings = ToolSettings()) -> None:
        self.settings = settings
        self.tools: dict[str, Tool] = {}
        self.schemas: list[dict[str, Any]] = []
        self.own: set[str] = set()
        for word in words:
            called, _, source = word.rpartition("=")
            tool = _make(source, settings)
            name = called or str(tool.schema["name"])
            if name in self.tools:
                raise UserError("two tools of one name", where="tools", got=name)
            self.tools[name] = tool
            self.schemas.append({**tool.schema, "name": name})
            if ":" in source:
                self.own.add(name)

    def __len__(self) -> int:
        return len(self.tools)

    def run(self, calls: Sequence[ToolCall]) -> tuple[Result, ...]:
        """The result of each call of a turn, in order."""
        waits = any(getattr(self.tools.get(call.name), "waits", False) or call.name in self.own for call in calls)
        if waits and len(calls) > 1:
            with ThreadPoolExecutor(WORKERS) as pool:
                return tuple(pool.map(self._one, range(len(calls)), calls))
        return tuple(map(self._one, range(len(calls)), calls))

    def _one(self, number: int, call: ToolCall) -> Result:
        text, worked = self._run(number, call)
        meant = [self.tools[call.name]] if call.name in self.tools else self.tools.values()
        is_answer = all(getattr(tool, "result_is_answer", False) for tool in meant)
        return Result(text=self._short(text), worked=worked, is_answer=is_answer)

    def _run(self, number: int, call: ToolCall) -> tuple[str, bool]:
        """What a call gives, and whether it worked."""
        if number >= MOST_CALLS:
            return f"error: more than {MOST_CALLS} calls in one turn", False
        if call.problem:
            return f"error: {call.problem}", False
        if call.name not in self.tools:
            return f"error: no tool is called {call.name[:40]}; there are: {', '.join(self.tools)}", False
        tool = self.tools[call.name]
        try:
            if call.name in self.own:
                return _in_time(tool, call.arguments, self.settings.seconds), True
            return tool.call(call.arguments), True
        except BadArgumentsError as error:
            return f"error: {error}", False

    def _short(self, text: str) -> str:
        longest = self.settings.output_characters
        text = text.encode("utf-8", "replace").decode("utf-8")  # half characters could not be read by a tokenizer
        return text if len(text) <= longest else text[:longest] + " ..."


def _make(source: str, settings: ToolSettings) -> Tool:
    """A tool by its name in the table, or by module and class."""
    maker = _import(source) if ":" in source else look_up(TOOLS, source, what="tool")
    takes_settings = bool(inspect.signature(maker).parameters)
    tool: Tool = maker(settings) if takes_settings else maker()
    schema = getattr(tool, "schema", None)
    if (
        not isinstance(schema, Mapping)
        or not isinstance(schema.get("name"), str)
        or not callable(getattr(tool, "call", None))
    ):
        raise UserError("not a tool", where=source, wanted='a class with schema = {"name": ...} and call(arguments)')
    return tool


def _import(source: str) -> Any:
    module, _, name = source.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"the tool cannot be imported: {error}",
            where=source,
            next_step="Give MODULE:CLASS; a module in this folder is found with PYTHONPATH=. before the command.",
        ) from None


def _in_time(tool: Tool, arguments: Mapping[str, Any], seconds: float) -> str:
    """A call of the user's own code, whose faults are told to the model; a call that hangs is left behind.

    Raises BadArgumentsError.
    """
    answers: queue.Queue[tuple[bool, str]] = queue.Queue()

    def work() -> None:
        try:
            answers.put((True, str(tool.call(arguments))))
        except Exception as error:  # code that nobody here knows
            answers.put((False, str(error) or type(error).__name__))

    threading.Thread(target=work, daemon=True).start()
    try:
        worked, text = answers.get(timeout=seconds)
    except queue.Empty:
        raise BadArgumentsError(f"no result within {seconds:g} seconds") from None
    if not worked:
        raise BadArgumentsError(text)
    return text
