"""Exact numbers in and out of text, of bounded size."""

import re
import unicodedata
from decimal import Context, Decimal
from fractions import Fraction

from penjing.agent_tools.base import BadArgumentsError

LARGEST_BITS = 2048  # of a number's top and bottom: about 600 digits
_SHOWN_DIGITS = 12
_LONGEST_WHOLE = 40  # digits of a whole number that is written out
NUMBER = re.compile(r"\d{1,40}(?:\.\d{1,40})?|\.\d{1,40}", re.ASCII)
_RAISED = re.compile("[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+")


def lower_exponents(text: str, form: str) -> str:
    """Raised digits in a form that has {} for the exponent: with `^{}` 10² is 10^2. NFKC alone would make it 102."""

    def lowered(found: re.Match[str]) -> str:
        return form.format(unicodedata.normalize("NFKC", found[0]).replace("\u2212", "-"))

    return _RAISED.sub(lowered, text)


def bounded(value: Fraction) -> Fraction:
    """The value itself. Raises BadArgumentsError if it takes too many digits."""
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > LARGEST_BITS:
        raise BadArgumentsError("the number is too large")
    return value


def show(value: Fraction) -> str:
    """Whole numbers whole; others with up to 12 digits, exact where that is enough."""
    if value.denominator == 1 and len(str(abs(value.numerator))) <= _LONGEST_WHOLE:
        return str(value.numerator)
    context = Context(prec=_SHOWN_DIGITS)
    rounded = context.divide(Decimal(value.numerator), Decimal(value.denominator)).normalize(context)
    size = rounded.adjusted()
    return f"{rounded:f}" if -6 <= size < 20 else f"{rounded:E}"
