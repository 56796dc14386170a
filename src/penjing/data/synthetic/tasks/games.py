"""Two games without a plot that teach copying from the context: an echo, and a roll call.

A small model learns to copy from its context late and suddenly. In a story most words can be guessed. In an echo every
word of the second line must be looked up, and in a roll call every answer.
"""

from typing import Any, NamedTuple

from penjing.data.synthetic.lexicon import (
    ANIMALS,
    COLOURS,
    PEOPLE,
    PLACES,
    THINGS,
    Being,
    PlaceWord,
    Thing,
    Word,
    described,
)
from penjing.data.synthetic.questions import SyntheticQuestion, quote
from penjing.data.synthetic.rng import Rng
from penjing.data.synthetic.surface_realization import LANGUAGES, bare_word, word_answer
from penjing.data.synthetic.world import is_reserved

# Questions about a roll call: their kind, the field that they name, and the field of the answer.
_ASKS = {
    "who_had": ("who", "thing", "who"),
    "who_was": ("who", "place", "who"),
    "what": ("what", "who", "thing"),
    "where": ("where", "who", "place"),
    "where_thing": ("where", "thing", "place"),
    "colour": ("colour", "thing", "colour"),
}
_ECHO_WORDS = (*PEOPLE, *ANIMALS, *THINGS, *THINGS, *PLACES, *COLOURS)


def echo(rng: Rng, language: str) -> str:
    """Rounds of a game: a line of words, and the same line again."""
    table = LANGUAGES[language]
    lines = [rng.choice(table.echo_titles)]
    for _ in range(rng.randint(3, 5)):
        words = table.echo_space.join(bare_word(entry, language) for entry in _words(rng))
        lines += [words, words]
    return "\n".join(lines)


def _words(rng: Rng) -> list[Any]:
    """4 to 7 words without a combination held out for evaluation."""
    chosen: list[Any] = []
    count = rng.randint(4, 7)
    while len(chosen) < count:
        entry = rng.choice(_ECHO_WORDS)
        if entry not in chosen and not is_reserved(entry, chosen):
            chosen.append(entry)
    return chosen


class _Entry(NamedTuple):
    """One line of the roll call: who, with a thing of which colour, where."""

    who: Being
    thing: Thing
    colour: Word
    place: PlaceWord


def _call(rng: Rng, count: int) -> list[_Entry]:
    """People with things and places, all different, without a combination held out for evaluation."""
    present: list[_Entry] = []
    while len(present) < count:
        entry = _Entry(rng.choice(PEOPLE), rng.choice(THINGS), rng.choice(COLOURS), rng.choice(PLACES))
        taken = any(entry.who is old.who or entry.thing is old.thing or entry.place is old.place for old in present)
        is_held_out = is_reserved(entry.thing, (entry.who, entry.place, entry.colour))
        if not taken and not is_held_out and not is_reserved(entry.who, (entry.place,)):
            present.append(entry)
    return present


def roll_call(rng: Rng, language: str, num_questions: int) -> tuple[str, list[SyntheticQuestion]]:
    """A line on each of 3 to 5 people, and questions about them."""
    table = LANGUAGES[language]
    present = _call(rng, rng.randint(3, 5))
    lines = [
        rng.choice(table.roll_call).format(a=entry.who, p=entry.place, t=described(entry.thing, entry.colour, None))
        for entry in present
    ]
    questions = [(entry, kind) for entry in present for kind in _ASKS]
    return table.sentence_space.join(lines), [
        _ask(lines, entry, kind, present, language, rng) for entry, kind in rng.shuffled(questions)[:num_questions]
    ]


def _ask(
    lines: list[str], entry: _Entry, kind: str, present: list[_Entry], language: str, rng: Rng
) -> SyntheticQuestion:
    table = LANGUAGES[language]
    subject, key, value = _ASKS[kind]
    answers = {other: word_answer(getattr(other, value), language) for other in present}
    question = rng.choice(table.roll_call_asks[kind]).format(a=entry.who, p=entry.place, t=entry.thing)
    return SyntheticQuestion(
        kind=subject,
        language=language,
        story=table.sentence_space.join(lines),
        question=question,
        answer=answers[entry],
        wrong=tuple(dict.fromkeys(answer for other, answer in answers.items() if answer != answers[entry]))[:3],
        chance=1 / len(set(answers.values())),
        thought=quote(language, [getattr(entry, key)], question, lines[present.index(entry)]),
    )
