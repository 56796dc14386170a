"""Questions: answers, wrong answers, chance, and what each kind promises."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from itertools import product

import pytest

from penjing.data.synthetic import dataset_rows as rows
from penjing.data.synthetic.lexicon import PEOPLE, THINGS
from penjing.data.synthetic.questions import QUOTING_KINDS, Reading, SyntheticQuestion, count_to_answer
from penjing.data.synthetic.rng import Rng
from penjing.data.synthetic.tasks.drills import drill, story_request

# These never change: with other rolls everybody's corpus would be another.
GOLDEN_ROLLS = [118, 471, 38, 505, 395]
GOLDEN_SHUFFLE = [1, 3, 5, 0, 4, 2]
VERBATIM = ("who", "where", "how_many", "colour", "feeling", "why")
LANGUAGES = ("en", "zh")


@cache
def all_questions(language: str, count: int = 500) -> list[SyntheticQuestion]:
    return [
        question
        for index in range(count)
        for question in Reading(21, index, language, ("train", "held_out")[index % 2]).draw(99, 0.1)
    ]


@pytest.mark.parametrize("language", LANGUAGES)
def test_answers_stand_in_the_story(language: str) -> None:
    for question in all_questions(language):
        assert question.answer and question.question
        if question.kind in VERBATIM:
            # An animal is introduced as "a fox" and answered as "the fox".
            assert question.answer.removeprefix("the ") in question.story, question
        if question.kind == "what":
            noun = question.answer.split()[-1]
            assert noun in question.story, question


@pytest.mark.parametrize("language", LANGUAGES)
def test_wrong_answers_and_chance(language: str) -> None:
    drills = [drill(3, index, language=language) for index in range(500)]
    for question in [*all_questions(language), *drills]:
        assert 0 < question.chance <= 1
        assert question.answer not in question.wrong
        assert len(set(question.wrong)) == len(question.wrong)
        assert 2 <= len(question.wrong) <= 4, question


@pytest.mark.parametrize("language", LANGUAGES)
def test_absent_is_really_absent(language: str) -> None:
    refusal = {"en": "The story does not say.", "zh": "故事里没有说。"}[language]
    seen = 0
    for question in all_questions(language):
        assert (question.kind == "absent") == (question.answer == refusal)
        if question.kind != "absent":
            continue
        seen += 1
        text = question.story
        if language == "en":
            names = [p.en for p in PEOPLE] + [form for t in THINGS for form in (t.en, t.plural)]
            strange = [
                n for n in names if re.search(rf"\b{n}\b", question.question) and not re.search(rf"\b{n}\b", text)
            ]
        else:
            names = [p.zh for p in PEOPLE] + [t.zh for t in THINGS]
            strange = [name for name in names if name in question.question and name not in text]
        # A noun of one character (花) can be part of a place (花园里): there the missing word cannot be seen by text.
        assert strange or language == "zh", question
    assert seen > 300


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_kind_exists(language: str) -> None:
    kinds = {question.kind for question in all_questions(language)}
    kinds |= {drill(1, index, language=language).kind for index in range(300)}
    kinds |= {story_request(1, 0, language=language).kind}
    assert kinds == set(rows.KINDS)


@pytest.mark.parametrize("language", LANGUAGES)
def test_drill_answers_are_right(language: str) -> None:
    space = {"en": " ", "zh": "、"}[language]
    for index in range(1200):
        question = drill(8, index, language=language, split=("train", "held_out")[index % 2])
        numbers = [int(number) for number in re.findall(r"\d+", question.question)]
        words = re.split("[:：]", question.question)[-1].strip(" .。?？").split(space)
        if question.kind == "sum":
            minus = "-" in question.question or "减" in question.question
            assert int(question.answer) == numbers[0] + (-numbers[1] if minus else numbers[1])
            assert 0 < int(question.answer) <= 20 and max(numbers) <= 20
        elif question.kind == "compare":
            small = "small" in question.question or "小" in question.question
            assert int(question.answer) == (min if small else max)(numbers)
        elif question.kind == "count":
            assert int(question.answer) == len(words) and len(set(words)) == 1
        elif question.kind == "copy":
            assert question.answer.split(space) == words
        elif question.kind == "reverse":
            assert question.answer.split(space) == words[::-1] and len(words) == 3
        elif question.kind == "tool":
            assert question.tool_call == {"name": "calc", "arguments": {"expression": question.answer}}
            assert [int(part) for part in re.split(r"[+-]", question.answer)] == numbers


def test_thoughts_count_to_the_answer() -> None:
    """For all numbers: every step keeps the result, and the last one has nothing left."""
    assert count_to_answer(8, 3, 11) == "8 3,9 2,10 1,11 0" and count_to_answer(20, 12, 8) == "20 12,10 2,9 1,8 0"
    for x, y in product(range(1, 31), range(1, 31)):
        for sign, answer in ((1, x + y), (-1, x - y)):
            steps = [tuple(map(int, step.split(" "))) for step in count_to_answer(x, y, answer).split(",")]
            assert steps[0] == (x, y) and steps[-1] == (answer, 0) and len(steps) <= 13
            assert all(a + sign * b == answer for a, b in steps)
    for language in LANGUAGES:
        for question in all_questions(language):
            if question.kind == "how_many_after":
                assert question.thought.endswith(f",{question.answer} 0")
            elif question.kind in (*QUOTING_KINDS, "absent"):
                check_quote(question)
            else:
                assert not question.thought


def check_quote(question: SyntheticQuestion) -> None:
    """Words of the question, then a sentence of the story, with the answer in it unless the wind blew something away;
    or that the story lacks the last word."""
    keys, found = re.split("[:：] ?", question.thought.removeprefix("So "), maxsplit=1)
    words = re.split("[ ，]", keys)
    assert all(word in question.question for word in words)
    if question.kind == "absent":
        assert found in ("no", "没有") and f" {words[-1]}" not in f" {question.story}"
    else:
        assert found[1:] in question.story and all(word in question.story for word in words)
        assert question.answer.split(" ")[-1] in found or "wind" in found or "风" in found


def test_translations_turn_around() -> None:
    nouns = {thing.en: thing.zh for thing in THINGS}
    for index in range(400):
        question = drill(5, index, language="en", split="held_out", kind="translate")
        source = question.question.split(": ")[1].rstrip(".?")
        english, other = (source, question.answer) if source.isascii() else (question.answer, source)
        noun = english.split()[1]
        assert other.endswith("的" + nouns[noun]), question


def test_blind_majority_guess_does_not_beat_the_stated_chance_of_sums() -> None:
    answers = Counter(drill(6, index, language="en", kind="sum").answer for index in range(4000))
    assert answers.most_common(1)[0][1] / 4000 < 2 * drill(6, 0, language="en", kind="sum").chance


def test_guessing_within_the_story_gives_about_the_stated_chance() -> None:
    """A reader that always takes the first number of the story is no better than the stated chance."""
    questions = [q for q in all_questions("en") if q.kind == "how_many" and q.chance == 0.5]
    first = [re.findall(r"\d+", question.story)[0] == question.answer for question in questions]
    assert 0.4 < sum(first) / len(first) < 0.6


def test_story_requests_name_what_the_story_has() -> None:
    for language in LANGUAGES:
        for index in range(300):
            request = story_request(2, index, language=language)
            assert all(word in request.answer and word in request.question for word in request.must_contain)


def test_items_depend_only_on_seed_split_and_index() -> None:
    late = Reading(7, 40, "en", "train").draw(99, 0.1)
    for index in range(40):
        Reading(7, index, "zh", "train").draw(99, 0.1)
    assert Reading(7, 40, "en", "train").draw(99, 0.1) == late
    assert Reading(8, 40, "en", "train").draw(99, 0.1) != late
    assert list(rows.conversations(7, 10)) == list(rows.conversations(7, 15))[:10]
    assert drill(7, 3, language="zh", split="train") == drill(7, 3, language="zh", split="train")


def test_dice_never_change() -> None:
    """Fixed numbers: a change here changes everybody's corpus."""
    rng = Rng(0, "golden")
    assert [rng.randrange(1000) for _ in range(5)] == GOLDEN_ROLLS
    assert rng.shuffled(range(6)) == GOLDEN_SHUFFLE
