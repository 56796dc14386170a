"""Rows of the training and evaluation files: pretraining texts, conversations, preferences, prompts, questions."""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from penjing.data.synthetic.questions import STORY_KINDS, Reading, SyntheticQuestion
from penjing.data.synthetic.rng import Rng, held_out
from penjing.data.synthetic.surface_realization import LANGUAGES, word_answer
from penjing.data.synthetic.tasks.drills import DRILL_KINDS, drill
from penjing.data.synthetic.tasks.games import echo, roll_call
from penjing.data.synthetic.world import Fact

KINDS = (*STORY_KINDS, *DRILL_KINDS)
Row = dict[str, Any]

# Each file has its own stories: item i of a file uses story (offset + i).
_OFFSETS = {"pretrain": 0, "sft": 10**9, "dpo": 2 * 10**9, "rl": 3 * 10**9}

_PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}}
TOOLS = json.dumps([{"type": "function", "function": {"name": "calc", "parameters": _PARAMETERS}}])
# Kinds for plain text; a tool call needs the chat format.
_PLAIN_DRILLS = tuple(kind for kind in DRILL_KINDS if kind not in ("tool", "story"))
_ABSENT_FRACTION = 0.15
# Of the conversations; "reading" is questions about a story.
CONVERSATION_SHARES = {"request": 0.10, "tool": 0.06, "drill": 0.24, "roll_call": 0.12, "reading": 0.48}


def _row_start(name: str, seed: int, index: int) -> tuple[Rng, str, int]:
    """The rng of a row, its language, and the number of the story it tells."""
    rng = Rng(seed, name, index)
    return rng, rng.choice(tuple(LANGUAGES)), _OFFSETS[name] + index


def plain(question: SyntheticQuestion) -> str:
    """A question and its answer, a line each: the same words begin an answer here and in a chat."""
    return f"{question.question}\n{question.answer}"


# The kinds of pretraining text in their best order for learning: first copying, then looking things up, then reading.
# Each entry: the end of its part of the file as a fraction, and the shares of the kinds of text in that part.
CURRICULUM: tuple[tuple[float, dict[str, float]], ...] = (
    (0.15, {"echo": 1.0}),
    (0.35, {"echo": 0.2, "roll_call": 0.8}),
    (1.0, {"reading": 0.45, "story": 0.2, "drills": 0.2, "roll_call": 0.1, "echo": 0.05}),
)


def pretrain_documents(seed: int, count: int) -> Iterator[str]:
    """The `count` texts of a file: games first, then stories, questions and drills.

    Plain stories, stories with up to 9 questions, 5 to 8 drills, roll calls with questions, echoes.
    """
    for index in range(count):
        rng, language, story_index = _row_start("pretrain", seed, index)
        shares = next(shares for until, shares in CURRICULUM if index < until * count or until == 1.0)
        questions: list[SyntheticQuestion] = []
        match rng.weighted_choice(shares):
            case "story":
                lines = [Reading(seed, story_index, language, "train").text]
            case "reading":
                reading = Reading(seed, story_index, language, "train")
                lines, questions = [reading.text], reading.draw(rng.randint(7, 9), _ABSENT_FRACTION)
            case "drills":
                lines, questions = [], _drills(seed, story_index, language, rng.randint(5, 8), rng)
            case "roll_call":
                text, questions = roll_call(rng, language, rng.randint(5, 8))
                lines = [text]
            case _:
                lines = [echo(rng, language)]
        yield "\n".join([*lines, *map(plain, questions)])


def _drills(seed: int, story_index: int, language: str, count: int, rng: Rng) -> list[SyntheticQuestion]:
    kinds = [rng.choice(_PLAIN_DRILLS) for _ in range(count)]
    return [drill(seed, story_index * 16 + offset, language=language, kind=kind) for offset, kind in enumerate(kinds)]


def prompt_text(question: SyntheticQuestion) -> str:
    """The first user message: the story, if any, and the question."""
    return f"{question.story}\n{question.question}" if question.story else question.question


def opening(text: str, tools: str = "") -> list[Row]:
    """The messages before the first answer; tools are announced in a system message."""
    system = [{"role": "system", "content": "", "tools": tools}] if tools else []
    return [*system, {"role": "user", "content": text}]


def _opening(question: SyntheticQuestion) -> list[Row]:
    return opening(prompt_text(question), TOOLS if question.tool_call else "")


def reply(content: str, thought: str = "", **more: Any) -> Row:
    thinking = {"reasoning_content": thought} if thought else {}
    return {"role": "assistant", "content": content, **thinking, **more}


def _reply(question: SyntheticQuestion) -> Row:
    if question.tool_call:
        return reply("", tool_calls=json.dumps([question.tool_call]))
    return reply(question.answer, question.thought)


def conversations(seed: int, count: int) -> Iterator[Row]:
    """Conversations: mostly a story with up to 10 questions, then drills, roll calls, story requests and tool calls."""
    for index in range(count):
        rng, language, story_index = _row_start("sft", seed, index)
        match rng.weighted_choice(CONVERSATION_SHARES):
            case "request":
                questions = [drill(seed, story_index, language=language, kind="story")]
            case "tool":
                questions = [drill(seed, story_index, language=language, kind="tool")]
            case "drill":
                questions = _drills(seed, story_index, language, rng.randint(4, 8), rng)
            case "roll_call":
                questions = roll_call(rng, language, rng.randint(5, 7))[1]
            case _:
                questions = Reading(seed, story_index, language, "train").draw(rng.randint(5, 7), _ABSENT_FRACTION)
        messages = [*_opening(questions[0]), _reply(questions[0])]
        for question in questions[1:]:
            messages += [{"role": "user", "content": question.question}, _reply(question)]
        yield {"conversations": messages}


def _short_question(name: str, seed: int, index: int) -> tuple[Rng, SyntheticQuestion, Fact | None]:
    """One question with a short answer, three in four about a story; the fact is None for all but those."""
    rng, language, story_index = _row_start(name, seed, index)
    if rng.bernoulli(0.25):
        return rng, drill(seed, story_index, language=language, kind=rng.choice(_PLAIN_DRILLS)), None
    reading = Reading(seed, story_index, language, "train")
    if rng.bernoulli(_ABSENT_FRACTION) and (absent := reading.ask_absent()):
        return rng, absent, None
    kind = rng.choice(tuple(dict.fromkeys(fact.kind for fact in reading.plan.facts)))
    fact = rng.choice([fact for fact in reading.plan.facts if fact.kind == kind])
    return rng, reading.ask(fact), fact


def _rejected(rng: Rng, question: SyntheticQuestion, fact: Fact | None) -> str:
    """A bad answer: mostly a wrong one, else in the wrong language, repeated, too long or evasive."""
    space = " " if question.language == "en" else ""
    roll = rng.random()
    if roll < 0.6 and question.wrong:
        return rng.choice(question.wrong)
    if roll < 0.7 and fact is not None and not isinstance(fact.answer, int):
        other = "zh" if question.language == "en" else "en"
        return word_answer(fact.answer, other, many=fact.ask.endswith("_many"))
    if roll < 0.8:
        return space.join([question.answer] * rng.randint(3, 5))
    if roll < 0.9 and question.story:
        return question.story
    return "I do not know." if question.language == "en" else "我不知道。"


def preferences(seed: int, count: int) -> Iterator[Row]:
    """Pairs of a right answer and a bad one to the same prompt."""
    for index in range(count):
        rng, question, fact = _short_question("dpo", seed, index)
        prompt = _opening(question)
        bad = replace(question, answer=_rejected(rng, question, fact))  # after the same thought
        yield {"chosen": [*prompt, _reply(question)], "rejected": [*prompt, _reply(bad)]}


def prompt_row(messages: list[Row], answer: str, kind: str, language: str) -> Row:
    """A prompt for reinforcement learning, with the only right answer in `gt`."""
    waiting = [*messages, {"role": "assistant", "content": ""}]
    return {"conversations": waiting, "gt": [answer], "kind": kind, "language": language}


def prompts(seed: int, count: int) -> Iterator[Row]:
    for index in range(count):
        _, question, _ = _short_question("rl", seed, index)
        yield prompt_row(_opening(question), question.answer, question.kind, question.language)


def _evaluation_row(question: SyntheticQuestion) -> Row:
    row: Row = {
        "conversations": _opening(question),
        "answer": "" if question.kind == "story" else question.answer,
        "kind": question.kind,
        "language": question.language,
        "chance": question.chance,
        "wrong": list(question.wrong),
    }
    if question.tool_call:
        row["tool_call"] = question.tool_call
    if question.must_contain:
        row["must_contain"] = list(question.must_contain)
    return row


def _held_out_story_questions(seed: int, index: int, language: str, kinds: set[str]) -> Iterator[SyntheticQuestion]:
    """At most one question of each of `kinds` about one story, about a held-out combination and not guessable."""
    reading = Reading(seed, index, language, "held_out")
    if "absent" in kinds and (absent := reading.ask_absent()):
        yield absent
    kinds = set(kinds)
    for fact in reading.rng.shuffled(reading.plan.facts):
        if fact.kind in kinds and held_out(*fact.pair) and (question := reading.ask(fact)).chance <= 0.5:
            kinds.remove(fact.kind)
            yield question


def held_out_questions(seed: int, per_kind: int, language: str) -> dict[str, list[SyntheticQuestion]]:
    """`per_kind` different held-out questions of every kind (fewer only where that many do not exist)."""
    questions_by_kind: dict[str, dict[str, SyntheticQuestion]] = {kind: {} for kind in KINDS}
    for index in range(60 * per_kind + 600):
        missing_kinds = {kind for kind in STORY_KINDS if len(questions_by_kind[kind]) < per_kind}
        if not missing_kinds:
            break
        for question in _held_out_story_questions(seed, index, language, missing_kinds):
            questions_by_kind[question.kind].setdefault(prompt_text(question), question)
    for kind in DRILL_KINDS:
        for index in range(60 * per_kind + 600):
            if len(questions_by_kind[kind]) >= per_kind:
                break
            question = drill(seed, index, language=language, split="held_out", kind=kind)
            if question.is_held_out:
                questions_by_kind[kind].setdefault(prompt_text(question), question)
    return {kind: list(questions.values()) for kind, questions in questions_by_kind.items()}


def evaluation(seed: int, per_kind: int) -> Iterator[Row]:
    """Evaluation rows, alternating kinds and languages, so that any beginning of the file is balanced."""
    columns = [column for language in LANGUAGES for column in held_out_questions(seed, per_kind, language).values()]
    for row in zip_longest(*columns):
        yield from map(_evaluation_row, filter(None, row))
