"""Questions with one right answer, asked as a chat and graded by exact match."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penjing.base.errors import UserError
from penjing.data.formats import read_prompts
from penjing.data.tokenizer.tokenizer import END_TOOL_CALL, TOOL_CALL
from penjing.eval.task import Generate, Result, Task

MAX_ANSWER_TOKENS = 64
MAX_STORY_TOKENS = 160


@dataclass(frozen=True, kw_only=True, slots=True)
class Question(Generate):
    """One row of a question file. `answer` is empty if `must_contain` lists the words a story must contain."""

    must_contain: tuple[str, ...] = ()

    @property
    def is_counted(self) -> bool:
        """A story has no single right answer."""
        return not self.must_contain

    @property
    def wanted(self) -> str:
        return self.answer or f"a text with {', '.join(self.must_contain)}"


class Questions(Task):
    option = "questions"

    def __init__(self, data: Path | None = None, *, shots: int | None = None) -> None:
        if data is None:
            raise UserError("needs a file", where="task questions", next_step="Give --questions FILE.")
        self._questions = read_questions(data)

    def requests(self) -> list[Question]:
        return self._questions

    def score(self, request: Question, result: Result) -> float:
        return is_correct(request, result.text)


def read_questions(path: Path) -> list[Question]:
    """Read a JSONL file of questions. Raises UserError naming file, line and field."""
    questions = []
    for chat in read_prompts([path]):
        row = {name: value for name, value in chat.fields.items() if value is not None}  # tables fill up with null
        where = f"{chat.source}:{chat.line}"
        answer, chance, words = row.get("answer"), row.get("chance", 0.0), row.get("must_contain", [])
        if not isinstance(answer, str):
            problem = "is missing" if answer is None else "is not one text"
            raise UserError(f"field answer {problem}", where=where, got=answer, wanted="a text")
        if isinstance(chance, bool) or not isinstance(chance, int | float) or not 0 <= chance <= 1:
            raise UserError("field chance is no fraction", where=where, got=repr(chance), wanted="0 to 1")
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise UserError("field must_contain is no list of texts", where=where, got=repr(words))
        questions.append(
            Question(
                messages=chat.messages,
                tools=chat.tools,
                answer=answer,
                kind=str(row.get("kind", "question")),
                language=str(row.get("language", "en")),
                chance=float(chance),
                must_contain=tuple(words),
                max_new_tokens=MAX_STORY_TOKENS if words else MAX_ANSWER_TOKENS,
                where=where,
            )
        )
    return questions


def is_correct(question: Question, text: str) -> bool:
    """Exact match of the answer; a tool call must name a tool and give the answer as its one argument; a story must
    contain its words."""
    if question.must_contain:
        return all(word in text for word in question.must_contain)
    return _argument(text, question.tools) == question.answer if question.tools else text == question.answer


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
