"""Tools that a model may call, one file each: a class made from `ToolSettings`, with a schema and a `call`."""

TOOLS = {
    "calculator": "penjing.agent_tools.calculator:Calculator",
    "calc": "penjing.agent_tools.calculator:Calc",
    "python": "penjing.agent_tools.python:Python",
}
