"""The tools of a conversation, by name. A call always returns text and never raises."""

import inspect
import queue
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from penjing.agent_tools import TOOLS
from penjing.agent_tools.base import BadArgumentsError, Tool, ToolSettings
from penjing.base.errors import UserError, user_code
from penjing.base.registry import look_up_or_import
from penjing.data.chat.turn_parser import ToolCall

WORKERS = 4  # threads for tools that wait
MAX_CALLS = 8  # of one turn; further calls return an error text


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The text that the model reads. worked: the call was valid, named a known tool, and the tool raised no error.
    is_answer: the answer ends with this result (a tool with `result_is_answer`)."""

    text: str
    worked: bool
    is_answer: bool = False


class Toolbox:
    """Tools by the names under which they are offered.

    specs: each `calculator`, or `NAME=calculator` to offer it under another name, as a data set may call it; or
    `module:Class`, a tool of the user's own, which is imported. Raises UserError for what is none of these.
    """

    def __init__(self, specs: Sequence[str], settings: ToolSettings = ToolSettings()) -> None:
        self.settings = settings
        self.tools: dict[str, Tool] = {}
        self.schemas: list[dict[str, Any]] = []
        self.user_code: set[str] = set()
        for spec in specs:
            alias, _, source = spec.rpartition("=")
            tool = _make_tool(source, settings)
            name = alias or str(tool.schema["name"])
            if name in self.tools:
                raise UserError("two tools of one name", where="tools", got=name)
            self.tools[name] = tool
            self.schemas.append({**tool.schema, "name": name})
            if ":" in source:
                self.user_code.add(name)

    def __len__(self) -> int:
        return len(self.tools)

    def run(self, calls: Sequence[ToolCall]) -> tuple[Result, ...]:
        """The result of each call of a turn, in order."""
        waits = any(getattr(self.tools.get(call.name), "waits", False) or call.name in self.user_code for call in calls)
        if waits and len(calls) > 1:
            with ThreadPoolExecutor(WORKERS) as pool:
                return tuple(pool.map(self._run_one, range(len(calls)), calls))
        return tuple(map(self._run_one, range(len(calls)), calls))

    def _run_one(self, number: int, call: ToolCall) -> Result:
        text, worked = self._run(number, call)
        tools = [self.tools[call.name]] if call.name in self.tools else self.tools.values()
        is_answer = all(getattr(tool, "result_is_answer", False) for tool in tools)
        return Result(text=self._truncate(text), worked=worked, is_answer=is_answer)

    def _run(self, number: int, call: ToolCall) -> tuple[str, bool]:
        """The text of a call, and whether it worked."""
        if number >= MAX_CALLS:
            return f"error: more than {MAX_CALLS} calls in one turn", False
        if call.problem:
            return f"error: {call.problem}", False
        if call.name not in self.tools:
            return f"error: no tool is called {call.name[:40]}; there are: {', '.join(self.tools)}", False
        tool = self.tools[call.name]
        try:
            if call.name in self.user_code:
                return _call_with_timeout(tool, call.arguments, self.settings.seconds), True
            return tool.call(call.arguments), True
        except BadArgumentsError as error:
            return f"error: {error}", False

    def _truncate(self, text: str) -> str:
        max_characters = self.settings.output_characters
        text = text.encode("utf-8", "replace").decode("utf-8")  # a tokenizer cannot encode lone surrogates
        return text if len(text) <= max_characters else text[:max_characters] + " ..."


def _make_tool(source: str, settings: ToolSettings) -> Tool:
    """A tool by its name in the table, or by module and class."""
    maker = look_up_or_import(TOOLS, source, what="tool")
    wanted = 'a class with schema = {"name": ...} and call(arguments)'
    try:
        takes_settings = bool(inspect.signature(maker).parameters)
    except (TypeError, ValueError):  # a module, a number, a class of Python's own
        raise UserError("not a tool", where=source, wanted=wanted) from None
    with user_code(maker):
        tool: Tool = maker(settings) if takes_settings else maker()
    schema, call = (getattr(tool, name, None) for name in ("schema", "call"))
    if not (isinstance(schema, Mapping) and isinstance(schema.get("name"), str) and callable(call)):
        raise UserError("not a tool", where=source, wanted=wanted)
    return tool


def _call_with_timeout(tool: Tool, arguments: Mapping[str, Any], seconds: float) -> str:
    """Call user code. Its errors are returned to the model; a call that hangs is abandoned. Raises
    BadArgumentsError."""
    answers: queue.Queue[tuple[bool, str]] = queue.Queue()

    def target() -> None:
        try:
            answers.put((True, str(tool.call(arguments))))
        except Exception as error:  # user code may raise anything
            answers.put((False, str(error) or type(error).__name__))

    threading.Thread(target=target, daemon=True).start()
    try:
        worked, text = answers.get(timeout=seconds)
    except queue.Empty:
        raise BadArgumentsError(f"no result within {seconds:g} seconds") from None
    if not worked:
        raise BadArgumentsError(text)
    return text
