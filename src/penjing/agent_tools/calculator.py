"""Sums: + - * / // % ** and brackets over exact numbers. No text of a model is executed.

Only digits, signs and brackets are let through; the order of operations is Python's own (`ast`). `^` and raised digits
are read as `**`, and × ÷ − and full-width signs as what they stand for. An expression has at most 200 characters and
40 brackets, or signs and exponents, inside one another; numbers are fractions of at most 2048 bits, exponents whole and
at most 1024.
"""

import ast
import unicodedata
from collections.abc import Mapping
from fractions import Fraction
from itertools import accumulate
from typing import Any

from penjing.agent_tools.base import BadArgumentsError, function, text
from penjing.agent_tools.numbers import LARGEST_BITS, NUMBER, bounded, lower_exponents, show

LONGEST_CHARACTERS = 200
DEEPEST = 40
LARGEST_EXPONENT = 1024
_SIGNS = frozenset("0123456789.+-*/%()")
_MEANS = str.maketrans({"×": "*", "÷": "/", "−": "-", "·": "*"})
# As data/synthetic/dataset_rows.py has it; a test compares them.
TOY_WORLD_SCHEMA: dict[str, Any] = {
    "name": "calc",
    "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
}


class Calculator:
    schema = function("calculator", "Work out an arithmetic expression.", {"expression": "such as (12+3)*4"})

    def call(self, arguments: Mapping[str, Any]) -> str:
        return show(evaluate(text(arguments, "expression")))


class Calc(Calculator):
    """The calculator as the toy world teaches to call it: the tool of a quickstart's model. Its conversations end with
    the call, so that the result is the answer: what to say after one is taught nowhere."""

    schema = TOY_WORLD_SCHEMA
    result_is_answer = True


def evaluate(expression: str) -> Fraction:
    """The value of an expression. Raises BadArgumentsError for whatever is none."""
    if len(expression) > LONGEST_CHARACTERS:
        raise BadArgumentsError(f"the expression has more than {LONGEST_CHARACTERS} characters")
    written = lower_exponents(expression.translate(_MEANS), "**({})")
    written = unicodedata.normalize("NFKC", written).translate(_MEANS).replace("^", "**")
    for letter in written:
        if letter not in _SIGNS and not letter.isspace():
            raise BadArgumentsError(f"{letter!r} is not part of a sum")
    _check(max(accumulate((letter == "(") - (letter == ")") for letter in written), default=0) - 1)
    numbers = [Fraction(found[0]) for found in NUMBER.finditer(written)]
    names = iter(range(len(numbers)))  # Python would read 0.1 as a float, and 007 not at all
    named = NUMBER.sub(lambda _: f" n{next(names)} ", written)
    try:
        tree = ast.parse(" ".join(named.split()), mode="eval")
    except SyntaxError:
        raise BadArgumentsError("the expression is no sum: a number, sign or bracket is missing") from None
    return _value(tree.body, numbers, 0)


def _check(depth: int) -> None:
    if depth >= DEEPEST:
        raise BadArgumentsError(f"more than {DEEPEST} brackets inside one another")


def _value(node: ast.expr, numbers: list[Fraction], depth: int) -> Fraction:
    """depth: of signs and exponents around it."""
    if isinstance(node, ast.Name):
        return numbers[int(node.id[1:])]
    if isinstance(node, ast.UnaryOp):
        _check(depth)
        value = _value(node.operand, numbers, depth + 1)
        return -value if isinstance(node.op, ast.USub) else value
    if not isinstance(node, ast.BinOp):
        raise BadArgumentsError("a sign is missing between two numbers or brackets")
    left = _value(node.left, numbers, depth)
    if isinstance(node.op, ast.Pow):
        _check(depth)
        return _power(left, _value(node.right, numbers, depth + 1))
    right = _value(node.right, numbers, depth)
    if isinstance(node.op, ast.Add | ast.Sub):
        return bounded(left + right if isinstance(node.op, ast.Add) else left - right)
    if isinstance(node.op, ast.Mult):
        return bounded(left * right)
    if right == 0:
        raise BadArgumentsError("division by zero")
    if isinstance(node.op, ast.Div):
        return bounded(left / right)
    return bounded(Fraction(left // right) if isinstance(node.op, ast.FloorDiv) else left % right)


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > LARGEST_EXPONENT:
        raise BadArgumentsError(f"exponents must be whole and at most {LARGEST_EXPONENT}")
    times = exponent.numerator
    if base == 0 and times < 0:
        raise BadArgumentsError("division by zero")
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if (bits - 1) * abs(times) > LARGEST_BITS:
        raise BadArgumentsError("the number is too large")
    return bounded(base**times)
