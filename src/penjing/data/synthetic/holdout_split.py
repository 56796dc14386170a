"""The combinations held out from training, so that memorizing cannot pass for reading.

Training shows every single word. About one in eight combinations of the kinds below is used for evaluation only. The
rule is a pure hash: it needs no list, seed or state, and never changes.
"""

from __future__ import annotations

from functools import cache

from penjing.data.synthetic.rng import stable_number

HELD_OUT_ONE_IN = 8


@cache
def held_out(kind_of_pair: str, a: str, b: str) -> bool:
    """Whether the combination (`a`, `b`) is kept for evaluation; words by their English form, numbers as digits.

    Kinds: person_thing, thing_place, person_place (`person` includes animals), colour_thing, count (how many, thing)
    and number. Number pairs are unordered: a model that has seen 3 + 5 knows 5 + 3.
    """
    if kind_of_pair == "number" and int(a) > int(b):
        a, b = b, a
    return stable_number(f"held out/{kind_of_pair}/{a}/{b}") % HELD_OUT_ONE_IN == 0
