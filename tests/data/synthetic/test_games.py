"""The two games: an echo is one, and a roll call is read again here, by patterns, to answer its questions anew."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations, pairwise
from typing import Any

import pytest

from penjing.data.synthetic import dataset_rows as rows
from penjing.data.synthetic.lexicon import ANIMALS, COLOURS, PEOPLE, PLACES, THINGS
from penjing.data.synthetic.questions import SyntheticQuestion
from penjing.data.synthetic.rng import Rng, held_out
from penjing.data.synthetic.tasks.games import echo, roll_call

LANGUAGES = ("en", "zh")
# What an echo calls an entry: nouns stand alone.
WORDS: dict[str, dict[str, Any]] = {
    "en": {entry.key: entry for entry in (*PEOPLE, *ANIMALS, *THINGS, *PLACES, *COLOURS)},
    "zh": {entry.zh: entry for entry in (*PEOPLE, *ANIMALS, *THINGS, *COLOURS)} | {p.zh_inside: p for p in PLACES},
}
# What a text and its answers call them: a place with its preposition.
PHRASES: dict[str, dict[str, Any]] = {
    "en": {entry.en: entry for entry in (*PEOPLE, *THINGS, *PLACES, *COLOURS)},
    "zh": {entry.zh: entry for entry in (*PEOPLE, *THINGS, *PLACES, *COLOURS)},
}


def kept_for_evaluation(entries: list[Any]) -> list[tuple[str, str, str]]:
    """The held-out combinations among entries, by a second writing of which kinds of combination there are."""
    found = []
    for one, other in combinations(entries, 2):
        for a, b in ((one, other), (other, one)):
            for kind, left, right in (
                ("person_thing", (*PEOPLE, *ANIMALS), THINGS),
                ("person_place", (*PEOPLE, *ANIMALS), PLACES),
                ("thing_place", THINGS, PLACES),
                ("colour_thing", COLOURS, THINGS),
            ):
                if a in left and b in right and held_out(kind, a.key, b.key):
                    found.append((kind, a.key, b.key))
    return found


def test_the_check_of_combinations_finds_some() -> None:
    assert 30 < len(kept_for_evaluation([*PEOPLE[:6], *THINGS[:12], *PLACES[:6], *COLOURS])) < 90


# ------------------------------------------------------------------------------------------------------------- echoes


def echoes(language: str) -> Iterator[str]:
    return (echo(Rng(31, "echo", index), language) for index in range(800))


def readings_of(line: str) -> list[list[str]]:
    """Every way to cut a line without spaces into words of the world."""
    ways: list[list[list[str]]] = [[[]]]
    for end in range(1, len(line) + 1):
        ways.append(
            [
                [*before, line[start:end]]
                for start in range(max(0, end - 4), end)
                if line[start:end] in WORDS["zh"]
                for before in ways[start]
            ]
        )
    return ways[-1]


@cache
def words_of(line: str, language: str) -> list[Any]:
    if language == "en":
        return [WORDS["en"][word] for word in line.split(" ")]
    readings = readings_of(line)
    assert len(readings) == 1, (line, readings)
    return [WORDS["zh"][word] for word in readings[0]]


def check_echo(text: str, language: str) -> list[list[Any]]:
    """Its lines as entries; the second of each two is the first again, and no two words are held out together."""
    title, *lines = text.split("\n")
    assert title and len(lines) % 2 == 0 and lines[::2] == lines[1::2], text
    found = [words_of(line, language) for line in lines[::2]]
    for line in found:
        assert len(set(line)) == len(line) and not kept_for_evaluation(line), text
    return found


@pytest.mark.parametrize("language", LANGUAGES)
def test_echoes_repeat_every_line_and_hold_nothing_back(language: str) -> None:
    rounds, lengths, seen = Counter[int](), Counter[int](), Counter[Any]()
    titles = set()
    for text in echoes(language):
        lines = check_echo(text, language)
        rounds[len(lines)] += 1
        titles.add(text.split("\n")[0])
        for line in lines:
            lengths[len(line)] += 1
            seen.update(line)
    assert set(rounds) == {3, 4, 5} and min(rounds.values()) > 800 / 5
    assert set(lengths) == {4, 5, 6, 7} and min(lengths.values()) > sum(lengths.values()) / 6
    assert len(titles) == 3
    assert set(seen) == set(WORDS[language].values()), "every word is played with"


@pytest.mark.parametrize("language", LANGUAGES)
def test_an_echo_cannot_be_guessed_from_its_words(language: str) -> None:
    """Each line is drawn anew: hardly any two words follow each other often enough to be learned by heart."""
    follows = Counter[tuple[str, str]]()
    for text in echoes(language):
        for line in check_echo(text, language):
            follows.update((one.key, other.key) for one, other in pairwise(line))
    assert max(follows.values()) < 30 and len(follows) > 3000


# --------------------------------------------------------------------------------------------------------- roll calls


@dataclass(frozen=True)
class Line:
    """What the text says of one person, in its own words."""

    who: str
    place: str
    colour: str
    thing: str

    def entries(self, language: str) -> list[Any]:
        return [PHRASES[language][word] for word in (self.who, self.place, self.colour, self.thing)]


_EN_PLACE, _EN_THING = r"(?:in|on|at|by) the \w+", r"(?:a|an) (?P<colour{0}>\w+) (?P<thing{0}>\w+)"
LINES = {
    "en": re.compile(
        r"(?P<who>[A-Z]\w+) (?:"
        rf"was (?P<place1>{_EN_PLACE}) with {_EN_THING.format(1)}"
        rf"|had {_EN_THING.format(2)} (?P<place2>{_EN_PLACE})"
        rf"|was (?P<place3>{_EN_PLACE})\. (?P=who) had {_EN_THING.format(3)}"
        r")\.(?: |$)"
    ),
    "zh": re.compile(
        r"(?P<who>\w\w)(?P<place1>在\w{1,3}?[里上边])(?:，有|玩，带着|。(?P=who)有)一\w(?P<colour1>\w色)的(?P<thing1>\w+?)。"
    ),
}


@cache
def read_roll_call(text: str, language: str) -> list[Line]:
    found, at = [], 0
    while at < len(text):
        match = LINES[language].match(text, at)
        assert match, (text, at)
        said = {name.rstrip("123"): word for name, word in match.groupdict().items() if word}
        found.append(Line(**said))
        at = match.end()
    return found


# Question: (what it gives, what it asks for). Each pattern is the whole question.
ASKED: dict[str, dict[str, tuple[str, str]]] = {
    "en": {
        r"(?:Who had|Tell me who had) the (\w+)[?.]": ("thing", "who"),
        rf"(?:Who|Tell me who) was ({_EN_PLACE})[?.]": ("place", "who"),
        r"What did (\w+) have\?|Tell me what (\w+) had\.": ("who", "thing"),
        r"Where was (\w+)\?|Tell me where (\w+) was\.": ("who", "place"),
        r"Where was the (\w+)\?|Tell me where the (\w+) was\.": ("thing", "place"),
        r"What colour was the (\w+)\?|Tell me the colour of the (\w+)\.": ("thing", "colour"),
    },
    "zh": {
        r"谁有(\w+)？|(\w+)在谁那里？": ("thing", "who"),
        r"(?:请问)?谁(在\w+)？": ("place", "who"),
        r"(?:请问)?(\w\w)有什么？": ("who", "thing"),
        r"(?:请问)?(\w+)在哪里？": ("", "place"),  # a person or a thing
        r"(\w+)是什么颜色的?？": ("thing", "colour"),
    },
}


def answers_to(question: str, lines: list[Line], language: str) -> tuple[str, list[str], list[str]]:
    """What the question asks for, every answer the text gives to it, and what all lines have to offer."""
    matches = [(match, form) for pattern, form in ASKED[language].items() if (match := re.fullmatch(pattern, question))]
    assert len(matches) == 1, (question, matches)
    (match, (given, wanted)) = matches[0]
    word = next(word for word in match.groups() if word)
    fitting = [line for line in lines if word in ((getattr(line, given),) if given else (line.who, line.thing))]
    return wanted, [getattr(line, wanted) for line in fitting], [getattr(line, wanted) for line in lines]


def worded(wanted: str, word: str, language: str) -> str:
    if wanted == "thing" and language == "en":
        return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"
    return word


def check_answer(text: str, question: str, answer: str, language: str) -> tuple[str, list[str]]:
    """The text gives one answer, this one, and says it; returns what was asked for and all answers of that kind."""
    wanted, found, offered = answers_to(question, read_roll_call(text, language), language)
    assert [worded(wanted, word, language) for word in found] == [answer], (text, question, answer)
    assert found[0] in text
    return wanted, list(dict.fromkeys(worded(wanted, word, language) for word in offered))


@cache
def roll_calls(language: str) -> list[tuple[str, list[SyntheticQuestion]]]:
    return [roll_call(Rng(32, "call", index), language, 4 + index % 6) for index in range(700)]


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_answer_of_a_roll_call_follows_from_its_text(language: str) -> None:
    wanted = Counter[str]()
    for index, (text, questions) in enumerate(roll_calls(language)):
        assert len(questions) == 4 + index % 6
        assert len({question.question for question in questions}) == len(questions)
        for question in questions:
            assert question.story == text and question.language == language
            kind, offered = check_answer(text, question.question, question.answer, language)
            assert question.kind == {"who": "who", "thing": "what", "place": "where", "colour": "colour"}[kind]
            # The other answers of the text, and the chance of taking the right one among them blindly.
            assert question.chance == 1 / len(offered)
            assert set(question.wrong) <= set(offered) - {question.answer}
            assert len(question.wrong) == min(3, len(offered) - 1)
            wanted[kind] += 1
    assert set(wanted) == {"who", "thing", "place", "colour"}
    assert min(wanted.values()) > sum(wanted.values()) / 9


@pytest.mark.parametrize("language", LANGUAGES)
def test_people_of_a_roll_call_differ_and_are_no_held_out_fact(language: str) -> None:
    sizes, seen = Counter[int](), set()
    for text, _ in roll_calls(language):
        lines = read_roll_call(text, language)
        sizes[len(lines)] += 1
        for field in ("who", "place", "thing"):
            assert len({getattr(line, field) for line in lines}) == len(lines), text
        for line in lines:
            assert not kept_for_evaluation(line.entries(language)), text
            seen.update(line.entries(language))
    assert set(sizes) == {3, 4, 5} and min(sizes.values()) > 700 / 5
    assert seen == set(PHRASES[language].values()), "every word is called"


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_right_answer_stands_anywhere_in_the_text(language: str) -> None:
    """Always taking the first, or the last, of the candidates is no better than chance."""
    first = last = chance = count = 0.0
    for text, questions in roll_calls(language):
        for question in questions:
            _, offered = check_answer(text, question.question, question.answer, language)
            first += question.answer == offered[0]
            last += question.answer == offered[-1]
            chance += question.chance
            count += 1
    assert abs(first - chance) / count < 0.04 and abs(last - chance) / count < 0.04


# ------------------------------------------------------------------------------------------------- games in the files


def test_games_of_the_pretraining_file(kind_of: Callable[[str], str]) -> None:
    seen = Counter[str]()
    for text in rows.pretrain_documents(33, 500):
        language = "en" if text.isascii() else "zh"
        kind = kind_of(text)
        if kind == "echo":
            check_echo(text, language)
        if kind == "roll_call":
            story, *rest = text.split("\n")
            for line in read_roll_call(story, language):
                assert not kept_for_evaluation(line.entries(language)), text
            for question, answer in zip(rest[::2], rest[1::2], strict=True):
                check_answer(story, question, answer, language)
        seen[f"{kind} {language}"] += 1
    assert {"echo en", "echo zh", "roll_call en", "roll_call zh"} <= set(seen)


def test_roll_calls_in_conversations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "CONVERSATION_SHARES", {"request": 0.0, "tool": 0.0, "drill": 0.0, "roll_call": 1.0})
    for row in rows.conversations(33, 150):
        messages = row["conversations"]
        story, first = messages[0]["content"].split("\n")
        language = "en" if story.isascii() else "zh"
        asked = [first, *(message["content"] for message in messages[2::2])]
        assert 5 <= len(asked) <= 7 and len(set(asked)) == len(asked)
        for question, reply in zip(asked, messages[1::2], strict=True):
            check_answer(story, question, reply["content"], language)
        for line in read_roll_call(story, language):
            assert not kept_for_evaluation(line.entries(language)), story


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_same_rolls_play_the_same_game(language: str) -> None:
    assert echo(Rng(1, 2), language) == echo(Rng(1, 2), language) != echo(Rng(1, 3), language)
    one, again, other = (roll_call(Rng(1, number), language, 6) for number in (2, 2, 3))
    assert one == again != other
