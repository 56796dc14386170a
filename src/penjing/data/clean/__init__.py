"""Cleaning rules. `data.clean` names those of a run; each record passes them in that order before it is used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from penjing.base.registry import look_up

RULES = {
    "exact_duplicates": "penjing.data.clean.exact_duplicates:ExactDuplicates",
    "unicode": "penjing.data.clean.unicode:Unicode",
}


def cleaner(names: Sequence[str], changed: Counter[str]) -> Callable[[Any], Any]:
    """These rules as one, for one pass over the records. changed: counts the records that each rule changes.

    Raises UserError for an unknown name.
    """
    rules = {name: look_up(RULES, name, what="cleaning rule")() for name in names}

    def clean(record: Any) -> Any:
        for name, rule in rules.items():
            cleaned = rule(record)
            if isinstance(cleaned, str):
                return f"{name}: {cleaned}"
            changed[name] += cleaned != record
            record = cleaned
        return record

    return clean
