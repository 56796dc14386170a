"""Questions with one right answer, asked as a chat and graded by exact match."""

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

MAX_ANSWER_TOKENS = 64
MAX_STORY_TOKENS = 160
MAX_THINKING_TOKENS = 192  # added to either when thinking is on


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One row of a question file. `answer` is empty if `must_contain` lists the words a story must contain."""

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
    """A question and the model's answer. is_truncated: the answer reached the token limit."""

    question: Question
    text: str
    is_correct: bool
    is_truncated: bool = False


def read_questions(path: Path) -> list[Question]:
    """Read a JSONL file of questions. Raises UserError naming file, line and field."""
    questions = []
    for chat, row in read_prompts([path]):
        where = f"{chat.source}:{chat.line}"
        chance, words = row.get("chance", 0.0), row.get("must_contain", [])
        if not isinstance(row.get("answer"), str):
            problem = "is missing" if row.get("answer") is None else "is not one text"
            raise UserError(f"field answer {problem}", where=where, got=row.get("answer"), wanted="a text")
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


def answer_questions(
    model: Transformer,
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    *,
    thinking: bool | None = None,
    max_tokens: int = 0,
    batch_size: int = 64,
) -> list[GradedAnswer]:
    """Answer every question greedily, each as the first turn of its own chat.

    thinking: as in `render`; thoughts are not graded. max_tokens: limit of an answer with its thought; 0: 64, for a
    story 160, with thinking 192 more. batch_size: prompts that are answered together. Raises UserError for a question
    that fills the context.
    """
    max_context = model.config.max_position_embeddings
    answers: dict[int, GradedAnswer] = {}
    thinking_tokens = MAX_THINKING_TOKENS if thinking else 0
    for is_story, default_tokens in ((False, MAX_ANSWER_TOKENS), (True, MAX_STORY_TOKENS)):
        indices = [index for index, question in enumerate(questions) if bool(question.must_contain) == is_story]
        if not indices:
            continue
        batch = [questions[index] for index in indices]
        prompts = [render(tokenizer, item.messages, item.tools, ask=True, thinking=thinking).ids for item in batch]
        for question, prompt in zip(batch, prompts, strict=True):
            if len(prompt) >= max_context:
                got = f"{len(prompt)} tokens"
                raise UserError("too long", where=question.where, got=got, wanted=f"under {max_context}")
        max_new_tokens = max_tokens or default_tokens + thinking_tokens
        generated = generate(model, prompts, max_new_tokens=max_new_tokens, stop=tokenizer.stop, rows=batch_size)
        for index, question, prompt, ids in zip(indices, batch, prompts, generated, strict=True):
            text = without_reasoning(tokenizer, ids, thinking).strip()
            is_truncated = len(ids) == min(max_new_tokens, max_context - len(prompt))
            answers[index] = GradedAnswer(question, text, is_correct(question, text), is_truncated)
    return [answers[index] for index in range(len(questions))]


def is_correct(question: Question, text: str) -> bool:
    """Exact match of the answer; a tool call must name a tool and give the answer as its one argument; a story must
    contain its words."""
    if question.must_contain:
        return all(word in text for word in question.must_contain)
    if question.tools:
        return _argument(text, question.tools) == question.answer
    return text == question.answer


def _argument(answer: str, tools: Sequence[dict[str, Any]]) -> str | None:
    """The only argument of the only tool call in `answer`; None unless it is one well-formed call of one of `tools`."""
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


def score_rows(stage: str, graded_answers: Sequence[GradedAnswer]) -> list[dict[str, Any]]:
    """Right and asked per kind and language; chance is the mean over the questions asked."""
    groups: dict[tuple[str, str], list[GradedAnswer]] = defaultdict(list)
    for graded in graded_answers:
        if not graded.question.must_contain:
            groups[graded.question.kind, graded.question.language].append(graded)
    return [
        {
            "stage": stage,
            "kind": kind,
            "language": language,
            "asked": len(group),
            "right": sum(graded.is_correct for graded in group),
            "chance": sum(graded.question.chance for graded in group) / len(group),
        }
        for (kind, language), group in groups.items()
    ]


def accuracy(graded_answers: Sequence[GradedAnswer], language: str | None = None) -> float:
    """Fraction of right answers, stories not counted."""
    correct = [
        graded.is_correct
        for graded in graded_answers
        if not graded.question.must_contain and language in (None, graded.question.language)
    ]
    return sum(correct) / len(correct) if correct else 0.0
