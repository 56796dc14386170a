"""Questions about a story whose answers are known from the state of the world.

Chance is the accuracy of a reader who knows the kinds of words but not the story's meaning and picks at random among
the story's candidates (its people for `who`, its places for `where`, and so on). For `absent` the refusal counts
as one more candidate; a model that always refuses scores 1 there and 0 elsewhere, so read the kinds together.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penjing.data.synthetic.lexicon import COLOURS, FEELINGS, OPENINGS, PEOPLE, PLACES, THINGS, Being, Thing
from penjing.data.synthetic.rng import Rng, held_out
from penjing.data.synthetic.surface_realization import (
    LANGUAGES,
    bare_word,
    first_phrases,
    tell,
    word_answer,
    word_reason,
    word_roles,
)
from penjing.data.synthetic.tasks.plots import simulate
from penjing.data.synthetic.world import Fact, Pair, Reason, is_reserved, pair_of

# how_many_after: a sum or a difference of two numbers of the story. absent: asked like who, what or where, about
# something that is not in the story.
QUOTING_KINDS = ("who", "what", "where", "colour")
STORY_KINDS = ("who", "what", "where", "how_many", "how_many_after", "colour", "feeling", "why", "absent")


@dataclass(frozen=True, kw_only=True, slots=True)
class SyntheticQuestion:
    """One question with its only right answer.

    `wrong` are plausible wrong answers; `chance` is the accuracy of a blind guess, in (0, 1]; `pairs` are the
    combinations that the question asks about, of which at least one is held out in an evaluation; `must_contain` are
    the words that an answer to a story request needs; `thought` is what a training conversation thinks before the
    answer: see `count_to_answer`.
    """

    kind: str
    language: str
    story: str = ""
    question: str
    answer: str
    wrong: tuple[str, ...] = ()
    chance: float
    tool_call: dict[str, Any] | None = None
    pairs: tuple[Pair, ...] = ()
    must_contain: tuple[str, ...] = ()
    thought: str = ""

    @property
    def is_held_out(self) -> bool:
        """Whether the question asks about a combination that training never shows."""
        return any(held_out(*pair) for pair in self.pairs)


def count_to_answer(x: int, y: int, answer: int) -> str:
    """The thought before x + y or x - y: `8 5,9 4,10 3,11 2,12 1,13 0`; ten at once where that much is left.

    A million parameters do not learn a table of sums with gaps (0 of 40 held-out sums right), but they learn this: one
    small step, the same for all numbers, until nothing is left (docs/log.md). The test is honest: training asks about
    no held-out pair, and a test question comes without a thought, so the model has to write every step itself. A
    held-out pair may be a step in the middle of another question's thought; those that never are come out right too.
    """
    direction = 1 if answer > x else -1
    steps = [f"{x} {y}"]
    while y:
        size = 10 if y >= 10 else 1
        x, y = x + direction * size, y - size
        steps.append(f"{x} {y}")
    return ",".join(steps)


def quote(language: str, keys: Iterable[Any], question: str, sentence: str = "") -> str:
    """The thought before the answer to a look-up: `So Tom kite: Tom found the kite by the river.`, or `So kite: no`.

    keys: what the question may name, up to a word that the story lacks. sentence: the one that decides; empty: none.
    """
    table, words = LANGUAGES[language], [bare_word(key, language) for key in keys]
    named = table.key_space.join(word for word in words if word in question)
    return table.looking.format(keys=named, found=sentence or table.lacking)


_POOLS: dict[str, tuple[Any, ...]] = {
    "who": PEOPLE,
    "what": THINGS,
    "where": PLACES,
    "how_many": tuple(range(2, 10)),
    "colour": COLOURS,
    "feeling": FEELINGS,
}
_OTHER_REASONS = ("lost", "broken", "found", "mended", "none", "have")


def _sums(fact: Fact) -> list[int]:
    """The natural guesses for a question that needs a sum: both results and both operands, without repeats."""
    first, second = int(fact.pair[1]), int(fact.pair[2])
    return list(dict.fromkeys((first + second, abs(first - second), first, second)))


def _sample_pool(kind: str, rng: Rng) -> list[Any]:
    """Enough of a category for three wrong answers; a small category is shuffled, a large one sampled (faster)."""
    pool = _POOLS[kind]
    return rng.shuffled(pool) if len(pool) <= 8 else [rng.choice(pool) for _ in range(8)]


class Reading:
    """A story and its plan, from which questions are drawn one by one (drawing all would cost more than the story).

    split: train or held_out.
    """

    def __init__(self, seed: int, index: int, language: str, split: str) -> None:
        self.table = LANGUAGES[language]
        self.plan = simulate(seed, split, index)
        self.language, self.split = language, split
        self.rng = Rng(seed, split, "telling", index, language)
        self.sentences = tell(self.plan, language, self.rng)
        opening = OPENINGS[self.plan.opening][language == "zh"]
        self.text = f"{opening}{'，' if language == 'zh' else ', '}{self.table.sentence_space.join(self.sentences)}"

    def ask(self, fact: Fact) -> SyntheticQuestion:
        """The question about one fact of the plan."""
        answer, question = self._answer(fact.answer, fact), self._phrase(fact, self.table.asks[fact.ask])
        if fact.kind == "how_many_after":
            possible: Sequence[Any] = _sums(fact)
            thought = count_to_answer(int(fact.pair[1]), int(fact.pair[2]), int(answer))
        else:
            possible = self.plan.candidates[fact.kind]
            quotes, sentence = fact.kind in QUOTING_KINDS, self.sentences[fact.told]
            thought = quote(self.language, fact.roles.values(), question, sentence) if quotes else ""
        return SyntheticQuestion(
            kind=fact.kind,
            language=self.language,
            story=self.text,
            question=question,
            answer=answer,
            wrong=self._wrong(fact, answer),
            chance=1 / len(possible),  # 1.0 where the story has only one: evaluation leaves such questions out
            pairs=(fact.pair,),
            thought=thought,
        )

    def ask_absent(self) -> SyntheticQuestion | None:
        """A question that the story does not answer, or None if 6 attempts find none."""
        return next(filter(None, (self._ask_absent() for _ in range(6))), None)

    def _ask_absent(self) -> SyntheticQuestion | None:
        """A question of the story with one role replaced by an entry that is not in the story, or None."""
        rng = self.rng
        fact = rng.choice([fact for fact in self.plan.facts if fact.kind in ("who", "what", "where")])
        roles = [item for item in fact.roles.items() if isinstance(item[1], Being | Thing)]
        role, replaced = rng.choice(roles or [("", None)])
        phrases = first_phrases(self.language, fact.ask, role)
        if not phrases or (isinstance(replaced, Being) and not replaced.is_person):
            return None
        if (found := self._absent_entry(fact, replaced)) is None:
            return None
        entry, pair = found
        present, keys = self.plan.candidates[fact.kind], [*fact.roles.values()]
        values = [self._answer(value, fact) for value in (*present, *_sample_pool(fact.kind, rng))]
        question = self._phrase(replace(fact, roles={**fact.roles, role: entry}), phrases)
        return SyntheticQuestion(
            kind="absent",
            language=self.language,
            story=self.text,
            question=question,
            answer=self.table.refusal,
            wrong=tuple(dict.fromkeys(values))[:3],
            chance=1 / (len(present) + 1),
            pairs=(pair,),
            thought=quote(self.language, [*keys[: keys.index(replaced)], entry], question),
        )

    def _answer(self, value: Any, fact: Fact) -> str:
        return word_answer(value, self.language, many=fact.ask.endswith("_many"))

    def _phrase(self, fact: Fact, phrases: Sequence[str]) -> str:
        why = fact.roles.get("why")
        if self.language == "zh" and why is not None and self.table.reasons[why.name].startswith("{a.ta}"):
            # The clause begins with a pronoun; a question that begins with it needs the name instead.
            clause = fact.roles["a"].zh + word_reason(why, self.language)[1:]
            return self.rng.choice(self.table.asks["feeling_own"]).format(why=clause)
        return self.rng.choice(phrases).format(**word_roles(fact.roles, self.language))

    def _wrong(self, fact: Fact, answer: str) -> tuple[str, ...]:
        """Three wrong answers: the other candidates of the story first, then others of the same category."""
        if fact.kind == "how_many_after":
            pool = [*_sums(fact), *range(2, 10)]
        elif fact.kind == "why":
            roles = {"a": fact.roles["a"], "t": self.plan.candidates["what"][0]}
            pool = [*self.plan.candidates["why"], *(Reason(name, roles) for name in _OTHER_REASONS)]
        else:
            pool = [*self.plan.candidates[fact.kind], *_sample_pool(fact.kind, self.rng)]
        texts = dict.fromkeys(self._answer(value, fact) for value in pool)
        return tuple(text for text in texts if text != answer)[:3]

    def _absent_entry(self, fact: Fact, replaced: Any) -> tuple[Any, Pair] | None:
        """An entry that is not in the story and could replace `replaced`, with the combination that the question is
        about."""
        present = [value for kind in ("who", "what", "where") for value in self.plan.candidates[kind]]
        partners = [value for value in (fact.answer, *fact.roles.values()) if value is not replaced]
        for _ in range(20):
            entry = self.rng.choice(PEOPLE if isinstance(replaced, Being) else THINGS)
            pairs = [pair for pair in (pair_of(entry, partner) for partner in partners) if pair]
            if entry in present or not pairs:
                continue
            if self.split == "train":
                pairs = pairs[:1] if not is_reserved(entry, present) else []
            else:
                pairs = [pair for pair in pairs if held_out(*pair)]
            if pairs:
                return entry, pairs[0]
        return None

    def draw(self, count: int, absent_fraction: float) -> list[SyntheticQuestion]:
        """`count` different questions, of as many kinds as possible, in random order."""
        by_kind: dict[str, list[Fact]] = {}
        for fact in self.rng.shuffled(self.plan.facts):
            by_kind.setdefault(fact.kind, []).append(fact)
        chosen: list[SyntheticQuestion] = []
        seen: set[str] = set()
        while len(chosen) < count and by_kind:
            for kind in self.rng.shuffled(list(by_kind)):
                absent = self.ask_absent() if self.rng.bernoulli(absent_fraction) else None
                question = absent or self.ask(by_kind[kind].pop())
                if absent is None and not by_kind[kind]:
                    del by_kind[kind]
                if question.question not in seen and len(chosen) < count:
                    seen.add(question.question)
                    chosen.append(question)
        return chosen
