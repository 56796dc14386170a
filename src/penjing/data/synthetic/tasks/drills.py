"""Exercises without a story: copying, reversing, counting, comparing, sums, translation, tool calls, story requests."""

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from math import factorial
from typing import Any

from penjing.data.synthetic.lexicon import ANIMALS, COLOURS, FEELINGS, PEOPLE, PLACES, THINGS, Thing
from penjing.data.synthetic.questions import Reading, SyntheticQuestion, count_to_answer
from penjing.data.synthetic.rng import Rng, held_out
from penjing.data.synthetic.surface_realization import LANGUAGES, bare_word, word_answer
from penjing.data.synthetic.world import Pair, known_pair, pair_of

_WORDS = (PEOPLE, ANIMALS, THINGS, THINGS, PLACES, COLOURS)


def _allowed(pairs: list[Pair], split: str) -> bool:
    """Training: no pair is held out. Evaluation: at least one is."""
    return any(held_out(*pair) for pair in pairs) == (split == "held_out")


def _word_pairs(entries: list[Any]) -> list[Pair]:
    return [pair for pair in (pair_of(first, second) for first, second in combinations(entries, 2)) if pair]


def _number_pair(rng: Rng, split: str, low: int, high: int) -> tuple[int, int]:
    while True:
        x, y = rng.randint(low, high), rng.randint(low, high)
        if x != y and _allowed([("number", str(x), str(y))], split):
            return x, y


class DrillDraft:
    """The rng, language and split of a drill, and a method that builds its question."""

    def __init__(self, rng: Rng, language: str, split: str) -> None:
        self.rng, self.language, self.split = rng, language, split
        self.table = LANGUAGES[language]

    def finish(
        self,
        kind: str,
        phrase: str,
        answer: str,
        wrong: list[str],
        chance: float,
        *,
        pairs: tuple[Pair, ...],
        tool_call: dict[str, Any] | None = None,
        **slots: Any,
    ) -> SyntheticQuestion:
        """The finished question. slots: of the phrase."""
        return SyntheticQuestion(
            kind=kind,
            language=self.language,
            question=self.rng.choice(self.table.drills[phrase]).format(**slots),
            answer=answer,
            wrong=tuple(text for text in dict.fromkeys(wrong) if text != answer)[:3],
            chance=chance,
            pairs=pairs,
            tool_call=tool_call,
        )

    def words(self, count: int) -> list[Any]:
        """`count` different entries whose combinations the split allows."""
        while True:
            entries = [self.rng.choice(self.rng.choice(_WORDS)) for _ in range(count)]
            if len(set(entries)) == count and _allowed(_word_pairs(entries), self.split):
                return entries


def _copy(draft: DrillDraft) -> SyntheticQuestion:
    return _repeat(draft, "copy", draft.words(draft.rng.randint(2, 4)))


def _reverse(draft: DrillDraft) -> SyntheticQuestion:
    return _repeat(draft, "reverse", draft.words(3))


def _repeat(draft: DrillDraft, kind: str, entries: list[Any]) -> SyntheticQuestion:
    words = [bare_word(entry, draft.language) for entry in entries]
    if kind == "copy":
        answer, wrong = words, [words[::-1], words[1:], [*words[1:], words[0]]]
    else:
        answer, wrong = words[::-1], [words, [words[2], *words[:2]], [words[1], words[0], words[2]]]
    space, chance, pairs = draft.table.word_space, 1 / factorial(len(words)), tuple(_word_pairs(entries))
    texts = [space.join(each) for each in wrong]
    return draft.finish(kind, kind, space.join(answer), texts, chance, words=space.join(words), pairs=pairs)


def _compare(draft: DrillDraft) -> SyntheticQuestion:
    x, y = _number_pair(draft.rng, draft.split, 1, 20 if draft.rng.bernoulli(0.5) else 99)
    phrase, choose = draft.rng.choice((("bigger", max), ("smaller", min)))
    answer = choose(x, y)
    wrong = [str(x + y - answer), str(x + y)]
    return draft.finish("compare", phrase, str(answer), wrong, 1 / 2, x=x, y=y, pairs=(("number", str(x), str(y)),))


def _count(draft: DrillDraft) -> SyntheticQuestion:
    while True:
        number, thing = draft.rng.randint(2, 9), draft.rng.choice(THINGS)
        pair: Pair = ("count", str(number), thing.key)
        if _allowed([pair], draft.split):
            break
    words = draft.table.word_space.join([bare_word(thing, draft.language)] * number)
    wrong = [str(number + 1), str(number - 1), str(number + 2)]
    return draft.finish("count", "count", str(number), wrong, 1 / 8, t=thing, words=words, pairs=(pair,))


def _sum(draft: DrillDraft) -> SyntheticQuestion:
    """The result is drawn first, uniformly, so that guessing a frequent result does not pay."""
    rng = draft.rng
    while True:
        phrase = rng.choice(("plus", "minus"))
        answer = rng.randint(2, 19)
        x = rng.randint(1, answer - 1) if phrase == "plus" else rng.randint(answer + 1, 20)
        y = answer - x if phrase == "plus" else x - answer
        pair: Pair = ("number", str(x), str(y))
        if _allowed([pair], draft.split):
            break
    wrong = [str(abs(x - y) if phrase == "plus" else x + y), str(answer + 1), str(answer - 1)]
    question = draft.finish("sum", phrase, str(answer), wrong, 1 / 18, x=x, y=y, pairs=(pair,))
    return replace(question, thought=count_to_answer(x, y, answer))


def _translatable(draft: DrillDraft) -> tuple[dict[str, str], list[dict[str, str]], list[Pair]]:
    """A word or phrase in both languages, similar wrong ones, and its combinations."""
    rng, roll = draft.rng, draft.rng.random()
    if roll < 0.4 and draft.split == "train":
        pool = rng.choice((THINGS, THINGS, PLACES, COLOURS, ANIMALS, FEELINGS))
        entries = rng.shuffled(pool)[:4]
        forms = [{lang: _word_form(entry, lang) for lang in ("en", "zh")} for entry in entries]
        return forms[0], forms[1:], []
    with_place = roll > 0.8
    pool = PLACES if with_place else COLOURS
    while True:
        thing, first = rng.choice(THINGS), rng.choice(pool)
        pair = known_pair(first, thing)
        if _allowed([pair], draft.split):
            break
    second = rng.choice([entry for entry in pool if entry is not first])
    other = rng.choice([entry for entry in THINGS if entry is not thing])
    wrong_forms = [_phrase_form(thing, second), _phrase_form(other, first), _phrase_form(other, second)]
    return _phrase_form(thing, first), wrong_forms, [pair]


def _word_form(entry: Any, language: str) -> str:
    """A single entry for translation; a place as its phrase with the preposition."""
    return word_answer(entry, language) if entry in PLACES else bare_word(entry, language)


def _phrase_form(thing: Thing, with_entry: Any) -> dict[str, str]:
    if with_entry in PLACES:
        return {"en": f"the {thing.en} {with_entry.en}", "zh": f"{with_entry.zh_inside}的{thing.zh}"}
    return {"en": f"{with_entry.en} {thing.en}", "zh": f"{with_entry.zh}的{thing.zh}"}


def _translate(draft: DrillDraft) -> SyntheticQuestion:
    form, wrong_forms, pairs = _translatable(draft)
    source, target = draft.rng.choice((("en", "zh"), ("zh", "en")))
    wrong = [wrong_form[target] for wrong_form in wrong_forms]
    chance = 1 / len(THINGS) if not pairs else 1 / (len(THINGS) * len(COLOURS))
    phrase = "to_chinese" if target == "zh" else "to_english"
    return draft.finish("translate", phrase, form[target], wrong, chance, words=form[source], pairs=tuple(pairs))


def _tool(draft: DrillDraft) -> SyntheticQuestion:
    x, y = _number_pair(draft.rng, draft.split, 10, 99)
    sign = draft.rng.choice("+-")
    if sign == "-" and x < y:
        x, y = y, x
    expression = f"{x}{sign}{y}"
    wrong = [f"{y}{sign}{x}", f"{x}{'-' if sign == '+' else '+'}{y}", f"{x}{sign}{x}"]
    call = {"name": "calc", "arguments": {"expression": expression}}
    pairs = (("number", str(x), str(y)),)
    return draft.finish("tool", "tool", expression, wrong, 1 / 4, x=x, y=y, sign=sign, tool_call=call, pairs=pairs)


_MAKERS: dict[str, Callable[[DrillDraft], SyntheticQuestion]] = dict(
    copy=_copy, reverse=_reverse, compare=_compare, count=_count, sum=_sum, translate=_translate, tool=_tool
)
DRILL_KINDS = (*_MAKERS, "story")


def drill(seed: int, index: int, *, language: str, split: str = "train", kind: str | None = None) -> SyntheticQuestion:
    """Drill number `index` of a split: of the given kind, or of any kind but `story`."""
    if kind == "story":
        return story_request(seed, index, language=language, split=split)
    rng = Rng(seed, split, "drill", index, language, kind or "any")
    chosen = kind or rng.choice(tuple(_MAKERS))
    return _MAKERS[chosen](DrillDraft(rng, language, split))


def story_request(seed: int, index: int, *, language: str, split: str = "train") -> SyntheticQuestion:
    """A request for a story about a person and a thing, answered by story number `index`.

    `chance` is that of naming both by luck. In the held-out split the pair need not be held out: see
    `is_held_out`.
    """
    reading = Reading(seed, index, language, split)
    being, thing = reading.plan.candidates["who"][0], reading.plan.candidates["what"][0]
    phrase = reading.rng.choice(reading.table.story_requests)
    words = (being.en, thing.en) if language == "en" else (being.zh, thing.zh)
    return SyntheticQuestion(
        kind="story",
        language=language,
        question=phrase.format(a=being, t=thing),
        answer=reading.text,
        chance=1 / (len(PEOPLE) * len(THINGS)),
        pairs=(("person_thing", being.key, thing.key),),
        must_contain=words,
    )
