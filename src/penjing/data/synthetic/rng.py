"""A reproducible random generator: the same labels give the same numbers on every platform and Python version.

Only `random.Random(int).random()` is used, whose sequence Python guarantees; `choice`, `shuffle` and `sample`
of the standard library have changed between versions, so they are implemented here. `hash()` of a string differs
between processes, so seeds come from BLAKE2.
"""

import random
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import blake2b
from typing import TypeVar

Item = TypeVar("Item")


def stable_number(label: str) -> int:
    """A 64-bit number that depends on `label` alone."""
    return int.from_bytes(blake2b(label.encode("utf-8"), digest_size=8).digest(), "big")


class Rng:
    """A random generator seeded by its labels, for example `Rng(seed, "train", 17)`."""

    __slots__ = ("random",)

    def __init__(self, *labels: object) -> None:
        self.random = random.Random(stable_number("/".join(map(str, labels)))).random

    def randrange(self, limit: int) -> int:
        """An integer from 0 to `limit` - 1."""
        return int(self.random() * limit)

    def randint(self, low: int, high: int) -> int:
        """An integer from `low` to `high`, both included."""
        return low + int(self.random() * (high - low + 1))

    def bernoulli(self, probability: float) -> bool:
        return self.random() < probability

    def choice(self, items: Sequence[Item]) -> Item:
        return items[int(self.random() * len(items))]

    def weighted_choice(self, shares: Mapping[str, float]) -> str:
        """One of the names, with its share as probability; the shares sum to 1."""
        roll = self.random()
        for name, share in shares.items():
            roll -= share
            if roll < 0:
                return name
        return next(iter(shares))

    def shuffled(self, items: Sequence[Item]) -> list[Item]:
        """All `items` in a random order (Fisher-Yates)."""
        order = list(items)
        for last in range(len(order) - 1, 0, -1):
            other = int(self.random() * (last + 1))
            order[last], order[other] = order[other], order[last]
        return order


# --- the split -------------------------------------------------------------------------------------------------------

# The combinations held out from training, so that memorizing cannot pass for reading. Training shows every single word.
# About one in eight combinations of the kinds below is used for evaluation only. The rule is a pure hash: it needs no
# list, seed or state, and never changes.
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
