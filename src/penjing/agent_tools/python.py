"""Python code of a model, run in the sandbox (agent_tools/sandbox.py). Linux only, and only where it is asked for by
name."""

from collections.abc import Mapping
from typing import Any

from penjing.agent_tools.base import ToolSettings, function, text
from penjing.agent_tools.sandbox import START_SECONDS, check_sandbox, run


class Python:
    schema = function("python", "Run a Python program; what it prints is the result.", {"code": "the program"})
    waits = True  # for another process: several calls go side by side

    def __init__(self, settings: ToolSettings) -> None:
        """Raises UserError where the system cannot contain a program."""
        self.seconds, self.mebibytes = settings.seconds, settings.mebibytes
        check_sandbox(run("", cpu_seconds=START_SECONDS, memory_mebibytes=self.mebibytes))

    def call(self, arguments: Mapping[str, Any]) -> str:
        code = text(arguments, "code", longest=20_000)
        ran = run(code, cpu_seconds=self.seconds, memory_mebibytes=self.mebibytes)
        if ran.timed_out:
            return f"{ran.output}(stopped after {self.seconds:g} seconds)"
        if not ran.finished:
            last = ran.errors.strip().splitlines()[-1:] or ["the program did not end well"]
            return f"{ran.output}{last[0]}"
        return ran.output.rstrip("\n") or "(nothing was printed)"
