"""Exams in many subjects: MMLU (arXiv:2009.03300), CMMLU (arXiv:2306.09212) and C-Eval (arXiv:2305.08322).

Which of the letters A to D follows the question with its four answers. Prompts are those of lm-evaluation-harness;
solved examples are the first ones of the subject's `dev` file.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from penjing.base.errors import UserError
from penjing.data.formats.csv_parquet import csv_records
from penjing.eval.benchmark import Benchmark, Row, name_of_file, shown_before, solved
from penjing.eval.exam_subjects import CEVAL, CMMLU
from penjing.eval.task import LogLikelihood

LETTERS = ("A", "B", "C", "D")


class Exam(Benchmark):
    chance = "25"
    language: ClassVar[str] = "zh"
    ask: ClassVar[str] = "答案："
    description: ClassVar[str]
    subjects: ClassVar[Mapping[str, str]] = {}  # their names in the description; others: with spaces

    def request(self, row: Row, where: str) -> LogLikelihood:
        question, answer = (row[name] if name in row else row[name.lower()] for name in ("Question", "Answer"))
        answers = row.get("choices") or [row[letter] for letter in LETTERS]
        options = [f"{letter}. {text}\n" for letter, text in zip(LETTERS, answers, strict=True)]
        return LogLikelihood(
            text=f"{question.strip()}\n{''.join(options)}{self.ask}",
            choices=[f" {letter}" for letter in LETTERS],
            answer=LETTERS.index(answer) if answer in LETTERS else answer,
            kind=str(row.get("subject") or name_of_file(where)),
            language=self.language,
            where=where,
            begins=False,
        )

    def requests(self) -> Iterator[LogLikelihood]:
        for request in super().requests():
            subject = self.subjects.get(request.kind, request.kind.replace("_", " "))
            yield shown_before(self.description.format(subject) + "\n\n", request)

    def with_shots(self, requests: Sequence[Any]) -> Iterator[Any]:
        by_subject: dict[str, list[Any]] = {}
        for example in self.shot_pool():
            by_subject.setdefault(example.kind, []).append(example)
        for request in requests:
            own = by_subject.get(request.kind, [])
            if len(own) < self.shots:
                got, where = f"{len(own)} of {request.kind}", f"{self.data}, task {self.name}"
                raise UserError("too few examples", where=where, got=got, wanted=f"{self.shots} in its dev file")
            yield shown_before(solved(own[: self.shots]), request)


class Cmmlu(Exam):
    name = "cmmlu"
    patterns = ("cmmlu/test/*.csv", "CMMLU/data/test/*.csv")
    shot_patterns = ("cmmlu/dev/*.csv", "CMMLU/data/dev/*.csv")
    archives = ("cmmlu*.zip",)
    description = "以下是关于{}的单项选择题，请直接给出正确答案的选项。"
    subjects = CMMLU


class CEval(Exam):
    name = "ceval"
    patterns = ("ceval*/val/*.csv", "ceval*/*/val*.parquet")  # the answers of its test files are secret
    shot_patterns = ("ceval*/dev/*.csv", "ceval*/*/dev*.parquet")
    archives = ("ceval*.zip",)
    description = "以下是中国关于{}的单项选择题，请选出其中的正确答案。"
    subjects = CEVAL


class Mmlu(Exam):
    name = "mmlu"
    patterns = ("mmlu/all/test*.parquet", "mmlu/*/test*.parquet", "mmlu/**/test/*_test.csv")
    shot_patterns = ("mmlu/all/dev*.parquet", "mmlu/*/dev*.parquet", "mmlu/**/dev/*_dev.csv")
    archives = ("mmlu*.tar", "data.tar")
    language = "en"
    ask = "Answer:"
    description = "The following are multiple choice questions (with answers) about {}."

    def numbered(self, path: Path) -> Iterator[tuple[int, Any]]:
        """The authors' CSV files have no names of columns."""
        if path.suffix != ".csv":
            return super().numbered(path)
        return csv_records(path, ("question", *LETTERS, "answer"))
