"""Regression questions: asked before the first step of a run and after its last.

`eval.questions` names the file; the default is the file of the run that this one starts from. The comparison shows
what training made the model forget.
"""

from pathlib import Path
from typing import Any

from rich.console import Console

from penjing.base.accuracy import change_lines, scores_from_rows
from penjing.base.files import sha256_file, write_json
from penjing.base.markup import escape_markup
from penjing.data.chat.render import parse_switch
from penjing.eval import scorer
from penjing.eval.questions import Questions
from penjing.track.run_record import RunRecord
from penjing.train.build import PreparedRun
from penjing.train.config import Run
from penjing.train.resolve import NONE

QUESTIONS_PER_SYNC = 64  # questions that rank 0 answers while the other ranks wait


class RegressionQuestions:
    """The regression questions of a run; empty if the run names no file."""

    def __init__(self, run: Run, console: Console) -> None:
        """Raises UserError if the file is missing or is not a file of questions."""
        self.run, self._console = run, console
        questions_file = run.eval.questions
        generates_chat = run.data.format != "documents" and run.objective.generates_text
        is_enabled = generates_chat and run.eval.at_start and questions_file not in ("", NONE)
        self.path = Path(questions_file)
        # A story has no single right answer, and takes as long to generate as many short answers.
        self._task = Questions(self.path) if is_enabled else None
        self.questions = [one for one in self._task.requests() if one.is_counted] if self._task else []
        self._grade = scorer.ShrinkingGrader("eval.questions", "Ask no questions: eval.questions=none.")

    def describe(self) -> list[tuple[str, str]]:
        if not self.questions:
            return []
        return [
            ("questions", f"{len(self.questions):,} of {self.path}, asked before the first step and after the last")
        ]

    def ask(self, prepared: PreparedRun, when: str) -> None:
        """Answer all questions on rank 0 and save the answers in the run's folder. when: `before` or `after`."""
        strategy, sampling = prepared.context.strategy, self.run.objective.sampling
        if self._task is None or not self.questions:
            return
        model, tokenizer = prepared.model, prepared.stage.tokenizer
        thinking = parse_switch(sampling.thinking) if sampling else None
        self._console.print(f"  asking {len(self.questions):,} questions ({when}) ...")
        graded_answers: list[scorer.Graded] = []
        for first in range(0, len(self.questions), QUESTIONS_PER_SYNC):
            part = self.questions[first : first + QUESTIONS_PER_SYNC]
            if strategy.rank == 0:
                graded_answers += self._grade(self._task, part, model, tokenizer, thinking=thinking)
            strategy.any(False)  # the other ranks wait here; waiting longer would exceed the collective timeout
        if strategy.rank == 0:
            answers = [
                {"kind": one.request.kind, "right": one.is_correct, "question": one.request.text, "said": one.text}
                for one in graded_answers
            ]
            result = {"rows": scorer.score_rows(when, graded_answers), "answers": answers}
            write_json(prepared.folder.questions, {**self._saved(prepared), when: result})

    def _saved(self, prepared: PreparedRun) -> dict[str, Any]:
        file_info = {"file": str(self.path), "sha256": sha256_file(self.path)}
        saved = RunRecord(prepared.folder.path).answers.raw
        return {**saved, **file_info} if saved.get("sha256") == file_info["sha256"] else file_info

    def compare(self, prepared: PreparedRun, outcome: dict[str, Any]) -> dict[str, Any]:
        """Ask again after the last step, and write the comparison into the outcome. Does nothing if the outcome has the
        comparison already, or if these questions were not asked before training."""
        if not self.questions:
            return outcome
        strategy = prepared.context.strategy
        must_ask = strategy.rank == 0 and "questions" not in outcome
        if must_ask and "before" not in self._saved(prepared):
            note = f"not asked again: they were not asked before the first step: {self.path}"
            self._console.print(escape_markup("questions", note))
            must_ask = False
        if not strategy.broadcast(must_ask):
            return outcome
        self.ask(prepared, "after")
        if strategy.rank == 0:
            outcome = {**outcome, "questions": self._changes(prepared)}
            write_json(prepared.folder.outcome, outcome)
        return outcome

    def _changes(self, prepared: PreparedRun) -> dict[str, Any]:
        """Right and asked by kind and language, before and after, and the kinds that regressed."""
        saved = self._saved(prepared)
        before, after = saved["before"]["rows"], saved["after"]["rows"]
        regressed = [
            {"kind": line.name, "asked": line.before.total, "before": line.before.correct, "after": line.after.correct}
            for line in change_lines(scores_from_rows(before, after))
            if line.is_regression
        ]
        return {"file": saved["file"], "sha256": saved["sha256"], "before": before, "after": after, "lost": regressed}
