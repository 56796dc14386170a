"""Conversations with calls of a calculator, in English and Chinese, half of them with thoughts.

The numbers are too large to be memorized. Some tasks have two steps, where the second needs the result of the first.
In some the calculator is available but not needed.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from penjing.data.synthetic.dataset_rows import opening, prompt_row, reply
from penjing.data.synthetic.rng import Rng
from penjing.data.synthetic.surface_realization import LANGUAGES
from penjing.data.synthetic.tasks.drills import drill

# The same as in penjing.agent_tools, which this floor cannot import; a test compares them.
CALCULATOR: dict[str, Any] = {
    "name": "calculator",
    "description": "Work out an arithmetic expression.",
    "parameters": {
        "type": "object",
        "properties": {"expression": {"type": "string", "description": "such as (12+3)*4"}},
        "required": ["expression"],
    },
}
_TOOLS = json.dumps([CALCULATOR])
KINDS = {"sum": 0.35, "product": 0.25, "two_steps": 0.25, "direct": 0.15}
THOUGHT_FRACTION = 0.5
_DIRECT = ("copy", "reverse")
_OFFSETS = {"tools": 4 * 10**9, "tools_rl": 5 * 10**9}


@dataclass(frozen=True, slots=True)
class ToolTask:
    """A question, the expressions to compute in order with their results, and the answer."""

    kind: str
    language: str
    question: str
    steps: tuple[tuple[str, int], ...]
    answer: str


def tool_task(name: str, seed: int, index: int) -> ToolTask:
    """Task number `index` of the file `name`."""
    rng = Rng(seed, name, index)
    language, kind = rng.choice(tuple(LANGUAGES)), rng.weighted_choice(KINDS)
    if kind == "direct":
        question = drill(seed, _OFFSETS[name] + index, language=language, kind=rng.choice(_DIRECT))
        return ToolTask(kind, language, question.question, (), question.answer)
    phrases = kind
    low, high = (100, 999) if kind == "sum" else (12, 99)
    a, b, c = rng.randint(low, high), rng.randint(low, high), 0
    if kind == "product":
        steps = [(f"{a}*{b}", a * b)]
    elif kind == "two_steps":
        c = rng.randint(3, 9)
        steps = [(f"{a}+{b}", a + b), (f"{a + b}*{c}", (a + b) * c)]
    elif rng.bernoulli(0.5):
        phrases, steps = "plus", [(f"{a}+{b}", a + b)]
    else:
        a, b = max(a, b), min(a, b)
        phrases, steps = "minus", [(f"{a}-{b}", a - b)]
    text = rng.choice(LANGUAGES[language].tool_asks[phrases]).format(a=a, b=b, c=c)
    return ToolTask(kind, language, text, tuple(steps), str(steps[-1][1]))


def tool_conversations(seed: int, count: int) -> Iterator[dict[str, Any]]:
    """Complete conversations with calls and results, in MiniMind's format."""
    for index in range(count):
        task = tool_task("tools", seed, index)
        thinks = Rng(seed, "thinks", index).bernoulli(THOUGHT_FRACTION)
        thoughts = LANGUAGES[task.language].tool_thoughts
        messages, result = opening(task.question, _TOOLS), ""
        for number, (expression, value) in enumerate(task.steps):
            call = {"name": "calculator", "arguments": {"expression": expression}}
            thought = thoughts["then" if number else "call"].format(expression=expression, result=result)
            messages.append(reply("", thought if thinks else "", tool_calls=json.dumps([call])))
            result = str(value)
            messages.append({"role": "tool", "content": result})
        thought = thoughts["answer" if task.steps else "direct"].format(result=result)
        messages.append(reply(task.answer, thought if thinks else ""))
        yield {"conversations": messages}


def tool_prompts(seed: int, count: int) -> Iterator[dict[str, Any]]:
    """Questions alone, with the only right answer in `gt`."""
    for index in range(count):
        task = tool_task("tools_rl", seed, index)
        yield prompt_row(opening(task.question, _TOOLS), task.answer, task.kind, task.language)
