"""Turns stories, reasons and answers into words of either language."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from penjing.base.config import read_toml
from penjing.data.synthetic.lexicon import PlaceWord, Thing
from penjing.data.synthetic.rng import Rng
from penjing.data.synthetic.world import Reason, Roles, World

Alternatives = dict[str, list[str]]  # the phrasings of each key


@dataclass(frozen=True, slots=True, kw_only=True)
class Phrases:
    """The phrases of a language, from its TOML file."""

    refusal: str
    sentence_space: str
    looking: str
    lacking: str
    key_space: str
    because: str
    word_space: str
    echo_space: str
    story_requests: list[str]
    echo_titles: list[str]
    roll_call: list[str]
    events: Alternatives
    reasons: dict[str, str]
    asks: Alternatives
    drills: Alternatives
    roll_call_asks: Alternatives
    tool_asks: Alternatives
    tool_thoughts: dict[str, str]


LANGUAGES = {
    code: Phrases(**read_toml(Path(__file__).with_name(f"{name}.toml")))
    for code, name in (("en", "english"), ("zh", "chinese"))
}


def word_reason(reason: Reason, language: str) -> str:
    """A reason as a clause: "the kite was lost", “风筝丢了”."""
    return LANGUAGES[language].reasons[reason.name].format(**reason.roles)


def word_roles(roles: Roles, language: str) -> Roles:
    """The roles with a reason already worded, ready for a phrase."""
    return {**roles, "why": word_reason(roles["why"], language)} if "why" in roles else roles


def word_answer(value: Any, language: str, *, many: bool = False) -> str:
    """The canonical short answer: "Tom", "a kite", "in the garden", "3", "red", "because the kite was lost"."""
    if isinstance(value, int):
        return str(value)
    if isinstance(value, Reason):
        return LANGUAGES[language].because.format(why=word_reason(value, language))
    if isinstance(value, Thing) and language == "en":
        return value.plural if many else value.en_a
    word: str = value.en if language == "en" else value.zh
    return word


def bare_word(entry: Any, language: str) -> str:
    """The entry as a word alone, for drills: "kite", "garden", "Tom"."""
    if isinstance(entry, PlaceWord):
        return entry.key if language == "en" else entry.zh_inside
    return entry.key if language == "en" else str(entry.zh)


_THEN = ("Then ", "后来，")  # not twice in a row


def tell(plan: World, language: str, rng: Rng) -> list[str]:
    """The sentences of the story, one for each event, in one language; which phrasings are used is up to the rng."""
    table = LANGUAGES[language]
    sentences: list[str] = []
    for event in plan.events:
        phrases = table.events[event.name]
        phrase = rng.choice(phrases)
        if sentences and phrase.startswith(_THEN) and sentences[-1].startswith(_THEN):
            phrase = next((other for other in phrases if not other.startswith(_THEN)), phrase)
        sentence = phrase.format(**word_roles(event.roles, language))
        sentences.append(sentence[0].upper() + sentence[1:])
    return sentences


@cache
def first_phrases(language: str, ask: str, needed: str) -> tuple[str, ...]:
    """The phrasings of a question that mention the role `needed`."""
    return tuple(phrase for phrase in LANGUAGES[language].asks[ask] if "{" + needed + "." in phrase)
