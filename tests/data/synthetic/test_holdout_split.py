"""Held-out combinations never appear in training and always in evaluation."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import combinations, pairwise
from typing import Any

import pytest

from penjing.data.synthetic import dataset_rows as rows
from penjing.data.synthetic.lexicon import ANIMALS, COLOURS, OPENINGS, PEOPLE, PLACES, THINGS
from penjing.data.synthetic.questions import STORY_KINDS, Reading
from penjing.data.synthetic.rng import held_out
from penjing.data.synthetic.tasks.drills import DRILL_KINDS, drill, story_request
from penjing.data.synthetic.tasks.plots import simulate
from penjing.data.synthetic.world import pair_of

ENTRIES: tuple[Any, ...] = (*PEOPLE, *ANIMALS, *THINGS, *PLACES)
BY_WORD = {entry.key: entry for entry in ENTRIES} | {thing.plural: thing for thing in THINGS}
BEGINNINGS = tuple(f"{opening}, " for opening, _ in OPENINGS)
COLOUR_NAMES = {colour.key: colour for colour in COLOURS}


def named_pairs(text: str) -> list[tuple[str, str, str]]:
    """Every combination of the split rule that an English text brings together, found by its words alone."""
    words = re.findall(r"\w+", text)
    entries = list(dict.fromkeys(BY_WORD[word] for word in words if word in BY_WORD))
    pairs = [pair_of(one, other) for one, other in combinations(entries, 2)]
    for word, following in pairwise(words):
        if word in COLOUR_NAMES and following in BY_WORD:
            pairs.append(pair_of(COLOUR_NAMES[word], BY_WORD[following]))
    return [pair for pair in pairs if pair]


def test_about_one_combination_in_eight_is_held_out() -> None:
    share = [held_out("person_thing", person.key, thing.key) for person in PEOPLE for thing in THINGS]
    assert 0.09 < sum(share) / len(share) < 0.16
    assert held_out("number", "3", "5") == held_out("number", "5", "3")


def test_every_single_word_is_seen_in_training() -> None:
    text = " ".join(Reading(0, index, "en", "train").text for index in range(3000))
    entries: tuple[Any, ...] = (*PEOPLE, *ANIMALS, *THINGS, *PLACES, *COLOURS)
    for entry in entries:
        assert entry.key in text, entry.key


def test_training_texts_bring_no_held_out_words_together() -> None:
    for index in range(1500):
        story = Reading(4, index, "en", "train")
        assert not any(held_out(*pair) for pair in named_pairs(story.text)), story.text
        for question in story.draw(99, 0.1):
            assert not question.is_held_out
            assert not any(held_out(*pair) for pair in named_pairs(f"{story.text} {question.question}"))


def test_training_facts_are_never_held_out() -> None:
    for index in range(1500):
        plan = simulate(4, "train", index)
        assert not any(held_out(*fact.pair) for fact in plan.facts)


@pytest.mark.parametrize("language", ["en", "zh"])
def test_drills_obey_the_split(language: str) -> None:
    for kind in DRILL_KINDS:
        if kind == "story":
            continue
        for index in range(150):
            training = drill(1, index, language=language, split="train", kind=kind)
            assert not training.is_held_out and (training.pairs or kind in ("copy", "reverse", "translate"))
            assert drill(1, index, language=language, split="held_out", kind=kind).is_held_out
    for index in range(300):
        assert not story_request(1, index, language=language).is_held_out


def test_training_drill_words_are_clean_by_their_text() -> None:
    for index in range(600):
        for kind in ("copy", "reverse"):
            question = drill(2, index, language="en", kind=kind)
            assert not any(held_out(*pair) for pair in named_pairs(question.answer)), question
    for index in range(600):
        question = drill(2, index, language="en", kind="sum")
        x, y = re.findall(r"\d+", question.question)
        assert not held_out("number", x, y)


def test_pretraining_file_brings_no_held_out_words_together(kind_of: Callable[[str], str]) -> None:
    """By the words alone, as the file has them; the combinations of roll calls and echoes are read in test_games.py."""
    checked = 0
    for text in rows.pretrain_documents(5, 1200):
        kind, (first, *lines) = kind_of(text), text.split("\n")
        if kind == "story":
            together = [first]
        elif kind == "reading":
            together = [f"{first} {question}" for question in lines[::2]]
        elif kind == "drills":
            questions = [first, *lines]
            together = [" ".join(both) for both in zip(questions[::2], questions[1::2], strict=True)]
        elif kind == "echo":
            together = lines
        else:
            continue
        for words in together:
            found = named_pairs(words)
            assert not any(held_out(*pair) for pair in found), words
            checked += len(found)
    assert checked > 5000


def test_conversations_bring_no_held_out_words_together() -> None:
    for row in rows.conversations(5, 1000):
        story = ""
        for message in row["conversations"]:
            if message["role"] == "user":
                lines = message["content"].split("\n")
                story = lines[0] if len(lines) == 2 else story
                # The people of a roll call share a text and no fact.
                if story.startswith(BEGINNINGS):
                    assert not any(held_out(*pair) for pair in named_pairs(f"{story} {lines[-1]}"))
                elif not story:
                    assert not any(held_out(*pair) for pair in named_pairs(lines[-1]))


@pytest.mark.parametrize("language", ["en", "zh"])
def test_each_evaluation_question_is_held_out_and_different(language: str) -> None:
    found = rows.held_out_questions(9, 40, language)
    assert set(found) == set(rows.KINDS)
    for kind, questions in found.items():
        assert len(questions) == 40, (kind, len(questions))
        assert all(question.is_held_out for question in questions), kind
        assert len({rows.prompt_text(question) for question in questions}) == 40
        if kind in STORY_KINDS:
            assert all(question.chance <= 0.5 for question in questions), kind
