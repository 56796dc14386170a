"""The words of the toy world: one entry per person, animal, thing, place, colour and feeling, in both languages.

Entries hold their inflected forms (article, measure word, place phrase), so that renderers need no grammar. `key` is
the English word; it is unique in the lexicon and identifies the entry in the split rule.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from penjing.base.config import read_toml


def article(word: str) -> str:
    """`a` or `an`. By letter: right for every word of this lexicon (a test lists the words that start with a vowel)."""
    return "an" if word[0] in "aeiou" else "a"


@dataclass(frozen=True, slots=True, eq=False)
class Being:
    """A person or an animal of a story; `zh_one` and `en_a` introduce an animal ("a bird", “一只小鸟”)."""

    key: str
    en: str
    zh: str
    he: str
    him: str
    ta: str
    en_a: str = ""
    zh_one: str = ""
    is_person: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Thing:
    """A thing one can have; `measure` is its Chinese measure word, `tags` say which plots it fits."""

    key: str
    en: str
    en_a: str
    plural: str
    zh: str
    zh_one: str
    measure: str
    tags: frozenset[str]


@dataclass(frozen=True, slots=True, eq=False)
class PlaceWord:
    """A place; `en` and `zh` are the whole phrases ("in the garden", “在花园里”), used for both story and answer."""

    key: str
    en: str
    zh: str
    zh_inside: str


@dataclass(frozen=True, slots=True, eq=False)
class Word:
    """A colour, property, feeling or dish."""

    key: str
    en: str
    zh: str

    @property
    def en_a(self) -> str:
        return f"{article(self.en)} {self.en}"


def _person(row: str, pronouns: tuple[str, str, str]) -> Being:
    en, zh = row.split()
    return Being(en, en, zh, *pronouns)


def _animal(row: str) -> Being:
    en, zh, measure = row.split()
    return Being(en, f"the {en}", zh, "it", "it", "它", f"{article(en)} {en}", f"一{measure}{zh}", False)


def _thing(row: str) -> Thing:
    en, plural, zh, measure, *tags = row.split()
    return Thing(en, en, f"{article(en)} {en}", plural, zh, f"一{measure}{zh}", measure, frozenset(tags))


def _places(name: str) -> tuple[PlaceWord, ...]:
    rows = map(str.split, _ROWS[name])
    return tuple(PlaceWord(en, f"{at} the {en}", f"在{zh}", zh) for at, en, zh in rows)


def _words(name: str) -> tuple[Word, ...]:
    return tuple(Word(en, en, zh) for en, zh in map(str.split, _ROWS[name]))


_ROWS: dict[str, list[str]] = read_toml(Path(__file__).with_name("lexicon.toml"))
PEOPLE = (
    *(_person(row, ("he", "him", "他")) for row in _ROWS["boys"]),
    *(_person(row, ("she", "her", "她")) for row in _ROWS["girls"]),
)
ANIMALS, THINGS = tuple(map(_animal, _ROWS["animals"])), tuple(map(_thing, _ROWS["things"]))
OUTDOORS = _places("outdoors")  # where the wind blows, rain falls and fruit is gathered
PLACES = OUTDOORS + _places("indoors")
COLOURS, PROPERTIES, DISHES = _words("colours"), _words("properties"), _words("dishes")
LOW_FEELINGS = _words("low_feelings")
SAD_FEELINGS = (LOW_FEELINGS[0], LOW_FEELINGS[2])
GLAD_FEELINGS = _words("glad_feelings")
HIGH_FEELINGS = (*GLAD_FEELINGS, *_words("excited"))
PROUD_FEELINGS = (*GLAD_FEELINGS, *_words("proud"))
FEELINGS = (*LOW_FEELINGS, *HIGH_FEELINGS, PROUD_FEELINGS[-1])
OPENINGS = tuple(tuple(row.split(", ")) for row in _ROWS["openings"])
RAINY_OPENING = 1  # not for the "rain" plot, which begins dry


@dataclass(frozen=True, slots=True, eq=False)
class Described:
    """A thing with its description at the first mention: "an old red kite", “一只红色的旧风筝”."""

    en: str
    zh: str
    colour: Word | None


@dataclass(frozen=True, slots=True, eq=False)
class NumberWord:
    """A number of things: "3 apples", “3个苹果”. Digits in both languages, so that an answer can be copied."""

    number: int
    en: str
    zh: str


@cache
def described(thing: Thing, colour: Word | None, looks: Word | None) -> Described:
    """The first mention of `thing` with an optional colour and an optional property."""
    words = [word.en for word in (looks, colour) if word] + [thing.en]
    zh = f"一{thing.measure}" + (f"{colour.zh}的" if colour else "") + (looks.zh if looks else "") + thing.zh
    return Described(f"{article(words[0])} {' '.join(words)}", zh, colour)


@cache
def amount(number: int, thing: Thing) -> NumberWord:
    """`number` of `thing`, with the right plural and measure word."""
    english = f"{number} {thing.en if number == 1 else thing.plural}"
    return NumberWord(number, english, f"{number}{thing.measure}{thing.zh}")


@cache
def tagged(*tags: str) -> tuple[Thing, ...]:
    """All things that carry every one of `tags`."""
    return tuple(thing for thing in THINGS if thing.tags.issuperset(tags))
