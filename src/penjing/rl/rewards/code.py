"""1 if the answer's program passes its tests in the sandbox (agent_tools/sandbox.py), else 0.

The program is the last fenced code block, or the whole answer if there is none. The prompt's record has `cases`, a list
of {"stdin", "stdout"}, each of which is a run of its own; or `tests`, Python that runs after the program in the same
process and raises an error if something is wrong. A program that exits before the tests end has not passed.

The output of `cases` is compared outside the sandbox with text that the program never sees: it cannot cheat. With
`tests` it can: they share its interpreter, so it can read them, return objects that equal everything, or replace what
they call. A policy may learn to do so. Prefer `cases`, and read the answers that are rewarded.
"""

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from penjing.agent_tools.sandbox import START_SECONDS, check_sandbox, run
from penjing.base.errors import UserError
from penjing.objective.policy import RewardSettings
from penjing.rl.rewards.base import Reward, RewardContext, RewardInput, RewardRuntime

_FENCE = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)


def extract_code(text: str) -> str:
    """The last fenced block, or all of the text."""
    blocks: list[str] = _FENCE.findall(text)
    return blocks[-1] if blocks else text


def tests_and_cases(context: RewardContext) -> tuple[str, list[dict[str, Any]]]:
    """What a program is tested with. Raises UserError if the record has neither, or if its cases are malformed."""
    tests, cases = context.record.get("tests") or "", context.record.get("cases") or []
    if isinstance(tests, list):
        tests = "\n".join(map(str, tests))
    if not tests and not cases:
        raise UserError(
            "the reward code needs tests", where=context.where or None, wanted='"tests": PYTHON, or "cases": [...]'
        )
    if not isinstance(cases, list) or not all(isinstance(case, dict) and "stdout" in case for case in cases):
        wanted = '"cases": [{"stdin": TEXT, "stdout": TEXT}, ...]'
        raise UserError("malformed cases", where=context.where or None, got=repr(cases)[:80], wanted=wanted)
    return str(tests), cases


class Code(Reward):
    def __init__(self, settings: RewardSettings, runtime: RewardRuntime) -> None:
        """Raises UserError if this system cannot sandbox a program."""
        super().__init__(settings, runtime)
        check_sandbox(run("", cpu_seconds=START_SECONDS, memory_mebibytes=settings.code_mebibytes))

    def check(self, context: RewardContext) -> None:
        tests_and_cases(context)

    def __call__(self, answers: Sequence[RewardInput]) -> list[float]:
        with ThreadPoolExecutor(self.settings.code_workers) as pool:
            return list(pool.map(self.score, answers))

    def score(self, answer: RewardInput) -> float:
        code = extract_code(answer.answer_text)
        tests, cases = tests_and_cases(answer)
        limits = {"cpu_seconds": self.settings.code_seconds, "memory_mebibytes": self.settings.code_mebibytes}
        if tests and not run(f"{code}\n\n{tests}\n", **limits).finished:  # type: ignore[arg-type]
            return 0.0
        for case in cases:
            result = run(code, stdin=str(case.get("stdin", "")), **limits)  # type: ignore[arg-type]
            if not result.finished or result.output.split() != str(case["stdout"]).split():
                return 0.0
        return 1.0
