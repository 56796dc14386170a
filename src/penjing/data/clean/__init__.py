"""Cleaning rules. `data.clean` names those of a run; each record passes them in that order before it is used."""

from __future__ import annotations

RULES = {
    "exact_duplicates": "penjing.data.clean.exact_duplicates:ExactDuplicates",
    "unicode": "penjing.data.clean.unicode:Unicode",
}
