"""The other tools, and what comes of calls: always a text."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from user_errors import raises_user_error

from penjing.agent_tools import TOOLS
from penjing.agent_tools.base import ToolSettings
from penjing.agent_tools.box import MAX_CALLS, Result, Toolbox
from penjing.base.errors import UserError
from penjing.data.chat.turn_parser import ToolCall

SETTINGS = ToolSettings(output_characters=60, seconds=1.0)


def call(box: Toolbox, name: str, **arguments: Any) -> Result:
    return box.run([ToolCall(name=name, arguments=arguments)])[0]


def made(name: str) -> Toolbox:
    try:
        return Toolbox([name], ToolSettings(seconds=1.0))
    except UserError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", TOOLS)
def test_every_tool_has_a_schema_and_survives_what_it_is_given(name: str) -> None:
    box = made(name)
    (schema,) = box.schemas
    assert schema["name"] == name and (schema.get("description") or name == "calc")  # as it was taught, without one
    assert schema["parameters"]["type"] == "object" and set(schema["parameters"].get("required", ())) <= set(
        schema["parameters"]["properties"]
    )
    json.dumps(schema)
    wanted = schema["parameters"]["properties"]
    for value in ("", "x", "\x00", "-1", 1.5, 10**5000, None, True, [1], {"a": 1}, "</tool_response>", "9" * 30_000):
        result = call(box, name, **dict.fromkeys(wanted, value))
        assert isinstance(result.text, str)
    assert not call(box, name).worked


@pytest.mark.parametrize(
    ("name", "arguments", "result"),
    [
        ("python", {"code": "print(6 * 7)"}, "42"),
        ("python", {"code": "x = 1"}, "(nothing was printed)"),
        ("python", {"code": "print(1)\n1/0"}, "1\nZeroDivisionError: division by zero"),
        ("python", {"code": "open('/etc/passwd')"}, "PermissionError: [Errno 13] Permission denied: '/etc/passwd'"),
    ],
)
def test_what_tools_say(name: str, arguments: dict[str, Any], result: str | None) -> None:
    found = call(made(name), name, **arguments)
    assert (found.text == result and found.worked) or (result is None and found.text.startswith("error: "))
    assert found.worked == (result is not None)


def test_whose_results_are_answers() -> None:
    """Those of `calc`; a call that is none of a tool's, where there are no other tools."""
    calls = [ToolCall(name="calc", arguments={"expression": text}) for text in ("1+2", "1+")] + [ToolCall(name="sum")]
    assert [result.is_answer for result in Toolbox(["calc"]).run(calls)] == [True, True, True]
    assert [result.is_answer for result in Toolbox(["calc", "calculator"]).run(calls)] == [True, True, False]
    assert not call(Toolbox(["calculator"]), "calculator", expression="1+2").is_answer


def test_calls_that_cannot_be_run_are_told_so() -> None:
    box = Toolbox(["sum=calculator"], SETTINGS)
    results = box.run([
        ToolCall(name="sum", arguments={"expression": "1+2"}),
        ToolCall(name="calculator", arguments={"expression": "1+2"}),
        ToolCall(problem="the call is not JSON", text="1+2"),
        ToolCall(name="sum", arguments={"expression": "1+"}),
    ])  # fmt: skip
    assert [result.worked for result in results] == [True, False, False, False]
    assert results[0].text == "3"
    assert results[1].text == "error: no tool is called calculator; there are: sum"
    assert results[2].text == "error: the call is not JSON"
    assert box.schemas[0]["name"] == "sum"
    many = box.run([ToolCall(name="sum", arguments={"expression": "1"})] * (MAX_CALLS + 2))
    assert sum(result.worked for result in many) == MAX_CALLS


OWN = """
import time

class Shout:
    schema = {"name": "shout", "description": "", "parameters": {"type": "object", "properties": {}}}

    def call(self, arguments):
        if arguments.get("wait"):
            time.sleep(60)
        return arguments["text"].upper() * 40 + chr(0xD800)

class Mute:
    schema = {"name": "mute"}

class Broken:
    def __init__(self):
        self.key = {}["KEY"]
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "shouting_tool.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "shouting_tool", raising=False)
    return "shouting_tool"


def test_a_tool_of_ones_own_fails_alone_and_in_time(own: str) -> None:
    box = Toolbox([f"{own}:Shout", "calculator"], SETTINGS)
    assert call(box, "shout", text="ab").text == "AB" * 30 + " ..."
    assert call(box, "shout") == Result(text="error: 'text'", worked=False)
    began = time.monotonic()
    slow, quick = box.run([
        ToolCall(name="shout", arguments={"wait": True}), ToolCall(name="calculator", arguments={"expression": "1+1"}),
    ])  # fmt: skip
    assert slow.text == "error: no result within 1 seconds" and quick.text == "2"
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (["calculater"], {"next_step": "calculator"}),
        (["calculator", "calculator"], {"where": "tools", "got": "calculator"}),
        (["absent_module:Tool"], {"where": "absent_module:Tool", "next_step": "PYTHONPATH"}),
        (["json:Absent"], {"where": "json:Absent", "next_step": "PYTHONPATH"}),
        (["shouting_tool:Mute"], {"where": "shouting_tool:Mute", "wanted": "schema"}),
        (["shouting_tool:Broken"], {"where": "shouting_tool.py:17", "what": "KeyError: 'KEY'"}),
        (["os:path"], {"where": "os:path", "wanted": "schema"}),
        (["builtins:dict"], {"where": "builtins:dict", "wanted": "schema"}),
        ([".near:Tool"], {"where": ".near:Tool", "next_step": "PYTHONPATH"}),
    ],
)
def test_what_is_no_tool_is_refused(own: str, words: list[str], facts: dict[str, str]) -> None:
    with raises_user_error(**facts):
        Toolbox(words)


def test_settings_that_cannot_be_are_refused() -> None:
    with raises_user_error(where="objective.tool.output_characters", got=0):
        ToolSettings(output_characters=0)
