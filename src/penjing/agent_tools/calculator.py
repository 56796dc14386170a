"""Sums: + - * / // % ** and brackets over exact numbers, read by a parser of its own. No text of a model is executed.

    sum     = product (("+" | "-") product)*
    product = signed (("*" | "/" | "//" | "%") signed)*
    signed  = ("+" | "-") signed | power
    power   = atom ("**" signed)?
    atom    = number | "(" sum ")"

`^` and raised digits are read as `**`, and × ÷ − and full-width signs as what they stand for. An expression has at most
200 characters and 40 brackets inside one another; numbers are fractions of at most 2048 bits, exponents whole and at
most 1024.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from penjing.agent_tools.base import BadArgumentsError, function, text
from penjing.agent_tools.numbers import LARGEST_BITS, bounded, lower_exponents, read_number, show

LONGEST_CHARACTERS = 200
DEEPEST = 40
LARGEST_EXPONENT = 1024
_SIGNS = ("**", "//", "+", "-", "*", "/", "%", "(", ")")
_MEANS = str.maketrans({"×": "*", "÷": "/", "−": "-", "·": "*"})
# As data/synthetic/dataset_rows.py has it; a test compares them.
TOY_WORLD_SCHEMA: dict[str, Any] = {
    "name": "calc",
    "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
}


class Calculator:
    schema = function(
        "calculator",
        "Work out an arithmetic expression.",
        {"expression": "such as (12+3)*4"},
    )

    def call(self, arguments: Mapping[str, Any]) -> str:
        return show(evaluate(text(arguments, "expression")))


class Calc(Calculator):
    """The calculator as the toy world teaches to call it: the tool of a quickstart's model.

    Its conversations end with the call, so that the result is the answer: what to say after one is taught nowhere.
    """

    schema = TOY_WORLD_SCHEMA
    result_is_answer = True


def evaluate(expression: str) -> Fraction:
    """The value of an expression. Raises BadArgumentsError for whatever is none."""
    if len(expression) > LONGEST_CHARACTERS:
        raise BadArgumentsError(f"the expression has more than {LONGEST_CHARACTERS} characters")
    parser = _Parser(_tokens(expression))
    value = parser.sum(0)
    if parser.next is not None:
        raise BadArgumentsError(f"the expression goes on after its end, with {_named(parser.next)}")
    return value


Token = Fraction | str


def _tokens(expression: str) -> list[Token]:
    written = lower_exponents(expression.translate(_MEANS), "**({})")
    written = unicodedata.normalize("NFKC", written).translate(_MEANS)
    found: list[Token] = []
    place = 0
    while place < len(written):
        if written[place].isspace():
            place += 1
            continue
        number = read_number(written, place)
        if number is not None:
            found.append(number[0])
            place = number[1]
            continue
        if written[place] == "^":
            found.append("**")
            place += 1
            continue
        sign = next((sign for sign in _SIGNS if written.startswith(sign, place)), None)
        if sign is None:
            raise BadArgumentsError(f"{written[place]!r} is not part of a sum")
        found.append(sign)
        place += len(sign)
    return found


def _named(token: Token | None) -> str:
    return "its end" if token is None else token if isinstance(token, str) else show(token)


class _Parser:
    def __init__(self, tokens: list[Token]) -> None:
        self.tokens = tokens
        self.place = 0

    @property
    def next(self) -> Token | None:
        return self.tokens[self.place] if self.place < len(self.tokens) else None

    def take(self) -> Token | None:
        token = self.next
        self.place += 1
        return token

    def sum(self, depth: int) -> Fraction:
        value = self.product(depth)
        while self.next in ("+", "-"):
            plus = self.take() == "+"
            other = self.product(depth)
            value = bounded(value + other if plus else value - other)
        return value

    def product(self, depth: int) -> Fraction:
        value = self.signed(depth)
        while self.next in ("*", "/", "//", "%"):
            sign = self.take()
            other = self.signed(depth)
            if sign != "*" and other == 0:
                raise BadArgumentsError("division by zero")
            if sign == "*":
                value = bounded(value * other)
            elif sign == "/":
                value = bounded(value / other)
            else:
                value = bounded(Fraction(value // other) if sign == "//" else value % other)
        return value

    def signed(self, depth: int) -> Fraction:
        if self.next in ("+", "-"):
            _check(depth)
            sign = self.take()
            value = self.signed(depth + 1)
            return -value if sign == "-" else value
        return self.power(depth)

    def power(self, depth: int) -> Fraction:
        base = self.atom(depth)
        if self.next != "**":
            return base
        self.take()
        _check(depth)
        exponent = self.signed(depth + 1)
        if exponent.denominator != 1 or abs(exponent) > LARGEST_EXPONENT:
            raise BadArgumentsError(f"exponents must be whole and at most {LARGEST_EXPONENT}")
        times = exponent.numerator
        if base == 0 and times < 0:
            raise BadArgumentsError("division by zero")
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if (bits - 1) * abs(times) > LARGEST_BITS:
            raise BadArgumentsError("the number is too large")
        return bounded(base**times)

    def atom(self, depth: int) -> Fraction:
        token = self.take()
        if isinstance(token, Fraction):
            return token
        if token != "(":
            raise BadArgumentsError(f"a number is missing before {_named(token)}")
        _check(depth)
        value = self.sum(depth + 1)
        if self.take() != ")":
            raise BadArgumentsError("a bracket is not closed")
        return value


def _check(depth: int) -> None:
    if depth >= DEEPEST:
        raise BadArgumentsError(f"more than {DEEPEST} brackets inside one another")
