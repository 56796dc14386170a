"""Cleaning rules. `data.clean` names those of a run; each record passes them in that order before it is used."""

RULES = {
    "blocked_words": "penjing.data.clean.blocked_words:BlockedWords",
    "chat": "penjing.data.clean.chat:Chat",
    "decontamination": "penjing.data.clean.decontamination:Decontamination",
    "exact_duplicates": "penjing.data.clean.exact_duplicates:ExactDuplicates",
    "html": "penjing.data.clean.html:Html",
    "language": "penjing.data.clean.language:Language",
    "length": "penjing.data.clean.length:Length",
    "lines": "penjing.data.clean.lines:Lines",
    "mojibake": "penjing.data.clean.mojibake:Mojibake",
    "near_duplicates": "penjing.data.clean.near_duplicates:NearDuplicates",
    "personal_data": "penjing.data.clean.personal_data:PersonalData",
    "repetition": "penjing.data.clean.repetition:Repetition",
    "simplified": "penjing.data.clean.simplified:Simplified",
    "symbols": "penjing.data.clean.symbols:Symbols",
    "unicode": "penjing.data.clean.unicode:Unicode",
}
