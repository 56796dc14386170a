"""Cleaning rules. `data.clean` names those of a run; each record passes them in that order before it is used."""

from __future__ import annotations

RULES = {
    "decontamination": "penjing.data.clean.decontamination:Decontamination",
    "exact_duplicates": "penjing.data.clean.exact_duplicates:ExactDuplicates",
    "near_duplicates": "penjing.data.clean.near_duplicates:NearDuplicates",
    "unicode": "penjing.data.clean.unicode:Unicode",
}
