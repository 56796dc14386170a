"""Grammar that can be checked by machine, in both languages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from penjing.data.synthetic.lexicon import ANIMALS, COLOURS, FEELINGS, OPENINGS, PEOPLE, PLACES, PROPERTIES, THINGS
from penjing.data.synthetic.questions import Reading
from penjing.data.synthetic.rng import Rng
from penjing.data.synthetic.surface_realization import LANGUAGES
from penjing.data.synthetic.tasks import games
from penjing.data.synthetic.tasks.drills import drill
from penjing.data.synthetic.tasks.games import echo, roll_call

english, chinese = LANGUAGES["en"], LANGUAGES["zh"]
# Written down a second time, so that a slip in the lexicon is noticed.
PREPOSITIONS = {
    "in": "garden park farm library kitchen shop forest yard field cave village",
    "on": "hill beach bridge farm",
    "at": "school market",
    "by": "river lake",
}
MEASURES = {
    "个": "球 杯子 铃铛 娃娃 盒子 袋子 篮子 机器人 面具 贝壳 苹果 鸡蛋 梨 桃子",
    "只": "风筝",
    "本": "书",
    "顶": "帽子",
    "把": "钥匙 雨伞",
    "盏": "灯",
    "面": "鼓",
    "条": "船 毯子",
    "件": "外套",
    "支": "笔 笛子",
    "块": "手表 石头 饼干",
    "辆": "单车",
    "枚": "戒指 硬币",
    "张": "卡片 地图",
    "根": "蜡烛 羽毛 香蕉",
    "朵": "花",
}


def texts(language: str, count: int = 700) -> Iterator[str]:
    """Stories, roll calls and everything asked about them."""
    for index in range(count):
        story = Reading(11, index, language, ("train", "held_out")[index % 2])
        called, about_them = roll_call(Rng(11, index), language, 8)
        yield from (story.text, called)
        for question in (*story.draw(99, 0.1), *about_them):
            yield from (question.question, question.answer, *question.wrong)


def narratives(language: str, count: int = 1500) -> Iterator[str]:
    """Texts that are whole sentences: stories and roll calls."""
    for index in range(count):
        yield Reading(12, index, language, "train").text
        yield roll_call(Rng(12, index), language, 1)[0]


def test_words_are_unique_in_each_language() -> None:
    entries: tuple[Any, ...] = (*PEOPLE, *ANIMALS, *THINGS, *PLACES, *COLOURS, *PROPERTIES, *FEELINGS)
    assert len({entry.key for entry in entries}) == len(entries)
    assert len({entry.zh for entry in entries}) == len(entries)
    assert len(PEOPLE) == 28 and len(PLACES) == 18 and len(THINGS) >= 36 and len(COLOURS) == 8
    assert all(len(person.zh) == 2 for person in PEOPLE)


def test_measure_words_and_prepositions_are_the_right_ones() -> None:
    expected = {noun: measure for measure, nouns in MEASURES.items() for noun in nouns.split()}
    assert {thing.zh: thing.measure for thing in THINGS} == expected
    assert {thing.measure for thing in THINGS} == set(MEASURES)
    for place in PLACES:
        preposition, article, noun = place.en.split()
        assert article == "the" and noun in PREPOSITIONS[preposition].split()
        assert place.zh == f"在{place.zh_inside}" and place.zh_inside[-1] in "里上边"


def test_both_languages_word_the_same_keys() -> None:
    assert english.events.keys() == chinese.events.keys()
    assert english.reasons.keys() == chinese.reasons.keys()
    assert english.asks.keys() == chinese.asks.keys() - {"feeling_own"}
    assert english.drills.keys() == chinese.drills.keys()
    assert english.roll_call_asks.keys() == chinese.roll_call_asks.keys() == games._ASKS.keys()
    assert all(len(opening) == 2 for opening in OPENINGS)


def test_english_articles_and_plurals() -> None:
    singular, plural = {thing.en for thing in THINGS}, {thing.plural for thing in THINGS}
    for text in texts("en"):
        for article, word in re.findall(r"\b(an?) (\w+)", text):
            assert (article == "an") == (word[0] in "aeiou"), text
            assert word not in plural, text
        for number, word in re.findall(r"\b(\d+) (\w+)", text):
            assert word in (singular if number == "1" else plural), text


def test_english_sentences_are_well_formed() -> None:
    nouns = "|".join(place.en.split()[2] for place in PLACES)
    phrases = {place.en for place in PLACES}
    for text in narratives("en"):
        assert text.isascii() and "  " not in text and "{" not in text and text == text.strip()
        assert text[0].isupper() and text[-1] in '.!"'
        for sentence in re.split(r'(?<=[.!"]) (?=[A-Z"])', text):
            assert sentence.lstrip('"')[0].isupper(), text
        for phrase in re.findall(rf"\b\w+ the (?:{nouns})\b", text):
            assert phrase in phrases, text
        assert not re.search(r"\b(\w+) \1\b", text), text
        assert text.count('"') % 2 == 0


@pytest.mark.parametrize("language", ["en", "zh"])
def test_questions_end_as_questions_do(language: str) -> None:
    """Those of roll calls and drills too; an answer but the refusal is a word or a phrase, without a full stop."""
    ends, full_stops = {"en": ("?", "."), "zh": ("？", "。")}[language], ".?!。？！"
    refusal = LANGUAGES[language].refusal
    for index in range(400):
        story = Reading(14, index, language, "train")
        _, about_them = roll_call(Rng(14, index), language, 8)
        for question in (*story.draw(99, 0.1), *about_them, drill(14, index, language=language)):
            assert question.question.endswith(ends) and question.question == question.question.strip()
            assert "\n" not in question.question + question.answer and "{" not in question.question + question.answer
            if language == "en":
                assert re.match("[A-Z0-9]", question.question)
                assert "  " not in question.question
            assert question.answer == refusal or question.answer[-1] not in full_stops


@pytest.mark.parametrize("language", ["en", "zh"])
def test_echoes_are_words_and_nothing_else(language: str) -> None:
    line = {"en": r"[A-Za-z]+( [A-Za-z]+){3,6}", "zh": "[\u4e00-\u9fff]{4,21}"}[language]
    for index in range(600):
        title, *lines = echo(Rng(15, index), language).split("\n")
        assert title in LANGUAGES[language].echo_titles
        assert all(re.fullmatch(line, words) for words in lines), lines


def test_chinese_measure_words_and_punctuation() -> None:
    nouns = "|".join(sorted((thing.zh for thing in THINGS), key=len, reverse=True))
    measures = {thing.zh: thing.measure for thing in THINGS}
    for text in texts("zh"):
        assert not re.search(r"[A-Za-z ,.!?:;\"'{}()]", text), text
        assert not re.search(r"[，。！？：]{2}", text), text
        assert text.count("“") == text.count("”")
        assert "两" not in text.replace("两个人", "") and "二" not in text.replace("第二天", "")
        for measure, noun in re.findall(rf"(?:\d|几)(\w)({nouns})(?![里上])", text):
            assert measures[noun] == measure, text
        for measure, noun in re.findall(rf"一(\w)(?:\w\w的)?[大小旧新]?({nouns})(?=[。，？]|$)", text):
            assert measures[noun] == measure, text


def test_chinese_sentences_are_well_formed() -> None:
    colours = "|".join(colour.zh for colour in COLOURS)
    for text in narratives("zh"):
        assert text[-1] in "。！”", text
        assert "在在" not in text and "的的" not in text and "了了" not in text
        assert not re.search(rf"(?:{colours})(?!的)", text), text
        assert not re.search("。后来，[^。]*。后来，", text), text
        assert not re.search(r"\d\d", text)


@pytest.mark.parametrize("language", ["en", "zh"])
def test_pronouns_fit_the_person(language: str) -> None:
    for index in range(600):
        reading = Reading(13, index, language, "train")
        for event in reading.plan.events:
            if event.name == "feel":
                person = event.roles["a"]
                own = [name for name, clause in english.reasons.items() if clause.startswith("{a.he}")]
                if event.roles["why"].name in own:
                    assert event.roles["why"].roles["a"] is person, reading.text
