"""Questions with one right answer, asked as a chat and judged by exact match."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penjing.base.errors import UserError
from penjing.data.chat.render import render
from penjing.data.chat.turn_parser import without_reasoning
from penjing.data.formats import Message, read_prompts
from penjing.data.tokenizer.tokenizer import END_TOOL_CALL, TOOL_CALL, Tokenizer
from penjing.infer.generate import generate
from penjing.model.transformer import Transformer

LONGEST_ANSWER = 64  # tokens
LONGEST_STORY = 160
LONGEST_THOUGHT = 192  # before either, where one is asked for


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One row of a question file. `answer` is empty where `must_contain` lists the words a story must hold."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]  # the functions on offer, each with a `name`
    answer: str
    kind: str
    language: str
    chance: float
    must_contain: tuple[str, ...] = ()
    where: str = ""  # file and line

    @property
    def text(self) -> str:
        return self.messages[-1].content


@dataclass(frozen=True, slots=True)
class GradedAnswer:
    """A question and what the model said. cut: it had not come to an end where it had to stop."""

    question: Question
    said: str
    right: bool
    cut: bool = False


def read_questions(path: Path) -> list[Question]:
    """Read a JSONL file of questions. Raises UserError naming file, line and field."""
    questions = []
    for chat, row in read_prompts([path]):
        where = f"{chat.source}:{chat.line}"
        chance, words = row.get("chance", 0.0), row.get("must_contain", [])
        if not isinstance(row.get("answer"), str):
            raise UserError("field answer is missing", where=where, got=row.get("answer"), wanted="a text")
        if isinstance(chance, bool) or not isinstance(chance, int | float) or not 0 <= chance <= 1:
            raise UserError("field chance is no fraction", where=where, got=repr(chance), wanted="0 to 1")
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise UserError("field must_contain is no list of texts", where=where, got=repr(words))
        questions.append(
            Question(
                messages=chat.messages,
                tools=chat.tools,
                answer=row["answer"],
                kind=str(row.get("kind", "question")),
                language=str(row.get("language", "en")),
                chance=float(chance),
                must_contain=tuple(words),
                where=where,
            )
        )
    return questions


def ask(
    model: Transformer,
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    *,
    thinking: bool | None = None,
    max_tokens: int = 0,
    rows: int = 64,
) -> list[GradedAnswer]:
    """Answer every question greedily, each as the first turn of a chat of its own.

    thinking: as `render` is told. Thoughts are no part of what is judged. max_tokens: of an answer and its thought; 0:
    64, of a story 160, and 192 more with thoughts. rows: prompts that are read and answered together. Raises UserError
    for a question that fills the context.
    """
    max_context = model.config.max_position_embeddings
    answers: dict[int, GradedAnswer] = {}
    more = LONGEST_THOUGHT if thinking else 0
    for is_story, usual in ((False, LONGEST_ANSWER), (True, LONGEST_STORY)):
        chosen = [index for index, question in enumerate(questions) if bool(question.must_contain) == is_story]
        if not chosen:
            continue
        asked = [questions[index] for index in chosen]
        prompts = [render(tokenizer, one.messages, one.tools, ask=True, thinking=thinking).ids for one in asked]
        for one, prompt in zip(asked, prompts, strict=True):
            if len(prompt) >= max_context:
                got = f"{len(prompt)} tokens"
                raise UserError("too long", where=one.where, got=got, wanted=f"under {max_context}")
        longest = max_tokens or usual + more
        written = generate(model, prompts, max_new_tokens=longest, stop=tokenizer.stop, rows=rows)
        for index, one, prompt, ids in zip(chosen, asked, prompts, written, strict=True):
            text = without_reasoning(tokenizer, ids, thinking).strip()
            cut = len(ids) == min(longest, max_context - len(prompt))
            answers[index] = GradedAnswer(one, text, is_right(one, text), cut)
    return [answers[index] for index in range(len(questions))]


def is_right(question: Question, text: str) -> bool:
    """Exact match of the answer; a tool call must name a tool and give the answer as its one argument; a story must
    hold its words."""
    if question.must_contain:
        return all(word in text for word in question.must_contain)
    if question.tools:
        return _argument(text, question.tools) == question.answer
    return text == question.answer


def _argument(answer: str, tools: Sequence[dict[str, Any]]) -> str | None:
    """The only argument of the one tool call in `answer`; None if it is not one well-formed call of one of `tools`."""
    if not (answer.startswith(TOOL_CALL) and answer.endswith(END_TOOL_CALL)):
        return None
    try:
        call = json.loads(answer.removeprefix(TOOL_CALL).removesuffix(END_TOOL_CALL))
        (value,) = call["arguments"].values()
        if call["name"] not in [tool["name"] for tool in tools]:
            return None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return str(value)


def table(stage: str, answered: Sequence[GradedAnswer]) -> list[dict[str, Any]]:
    """Right and asked per kind and language, with the chance level: the mean over the questions asked."""
    groups: dict[tuple[str, str], list[GradedAnswer]] = defaultdict(list)
    for one in answered:
        if not one.question.must_contain:
            groups[one.question.kind, one.question.language].append(one)
    return [
        {
            "stage": stage,
            "kind": kind,
            "language": language,
            "asked": len(group),
            "right": sum(one.right for one in group),
            "chance": sum(one.question.chance for one in group) / len(group),
        }
        for (kind, language), group in groups.items()
    ]


def accuracy(answered: Sequence[GradedAnswer], language: str | None = None) -> float:
    """Share of right answers, stories not counted."""
    chosen = [
        one.right for one in answered if not one.question.must_contain and language in (None, one.question.language)
    ]
    return sum(chosen) / len(chosen) if chosen else 0.0
