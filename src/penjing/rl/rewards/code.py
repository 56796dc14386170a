"""1 if the answer's program passes its tests in the sandbox (agent_tools/sandbox.py), else 0.

The program is the last fenced block of code, or the whole answer without one. The prompt's record has `cases`, a list
of {"stdin", "stdout"} of which each is a run of its own, or `tests`, Python that is run after the program in the same
process and raises if something is wrong. A program that leaves before the tests are through has not passed.

Output is compared out here, with what the program has never seen: `cases` cannot be forged. `tests` can, by whoever
sets out to: they share an interpreter with the program, which can read them, return objects that equal everything, or
replace what they call. A policy that is rewarded for long enough may find such ways; where there is a choice, take
`cases`, and read what is rewarded.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from penjing.agent_tools.sandbox import START_SECONDS, check_sandbox, run
from penjing.base.errors import UserError
from penjing.objective.policy import RewardSettings
from penjing.rl.rewards.base import Reward, RewardContext, RewardInput, Setting

_FENCE = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)


def program(text: str) -> str:
    """The last fenced block, or everything."""
    blocks: list[str] = _FENCE.findall(text)
    return blocks[-1] if blocks else text


def tests_and_cases(context: RewardContext) -> tuple[str, list[dict[str, Any]]]:
    """What a program is tried with. Raises UserError if the record has neither, or cases that are none."""
    tests, cases = context.record.get("tests") or "", context.record.get("cases") or []
    if isinstance(tests, list):
        tests = "\n".join(map(str, tests))
    if not tests and not cases:
        raise UserError(
            "the reward code needs tests", where=context.where or None, wanted='"tests": PYTHON, or "cases": [...]'
        )
    if not isinstance(cases, list) or not all(isinstance(case, dict) and "stdout" in case for case in cases):
        raise UserError(
            "these cases test nothing",
            where=context.where or None,
            got=repr(cases)[:80],
            wanted='"cases": [{"stdin": TEXT, "stdout": TEXT}, ...]',
        )
    return str(tests), cases


class Code(Reward):
    def __init__(self, settings: RewardSettings, setting: Setting) -> None:
        """Raises UserError where the system cannot contain a program."""
        super().__init__(settings, setting)
        check_sandbox(run("", cpu_seconds=START_SECONDS, memory_mebibytes=settings.code_mebibytes))

    def check(self, context: RewardContext) -> None:
        tests_and_cases(context)

    def __call__(self, answers: Sequence[RewardInput]) -> list[float]:
        with ThreadPoolExecutor(self.settings.code_workers) as pool:
            return list(pool.map(self.one, answers))

    def one(self, answer: RewardInput) -> float:
        code = program(answer.text_written)
        tests, cases = tests_and_cases(answer)
        limits = {"cpu_seconds": self.settings.code_seconds, "memory_mebibytes": self.settings.code_mebibytes}
        if tests and not run(f"{code}\n\n{tests}\n", **limits).finished:  # type: ignore[arg-type]
            return 0.0
        for case in cases:
            ran = run(code, stdin=str(case.get("stdin", "")), **limits)  # type: ignore[arg-type]
            if not ran.finished or ran.output.split() != str(case["stdout"]).split():
                return 0.0
        return 1.0
