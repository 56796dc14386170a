"""Tools that a model may call, one file each: a class made from `ToolSettings`, with a schema and a `call`."""

TOOLS = {
    "calculator": "penjing.tools.calculator:Calculator",
    "dates": "penjing.tools.dates:Dates",
    "units": "penjing.tools.convert:Units",
    "count": "penjing.tools.count:Count",
    "lookup": "penjing.tools.lookup:Lookup",
    "python": "penjing.tools.python:Python",
}
