"""Regression questions: asked before the first step of a run and after its last.

A file of questions is named by `eval.questions`, or by the settings of the run that this one starts from: a
model must still answer after training what it answered before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from penjing.base.accuracy import change_lines, scores_of
from penjing.base.errors import UserError
from penjing.base.files import read_json, sha256_file, write_json
from penjing.base.markup import escape_markup, print_table
from penjing.data.chat.render import parse_switch
from penjing.eval import questions as asking
from penjing.train.build import PreparedRun
from penjing.train.config import Run
from penjing.train.from_pretrained import NONE
from penjing.train.oom_recovery import retry_on_oom

AT_ONCE = 64  # prompts read and answered together
BETWEEN_WAITS = AT_ONCE  # questions that rank 0 answers while the others wait


class KnownQuestions:
    """The questions of a run; there are none where nobody named any."""

    def __init__(self, run: Run, console: Console) -> None:
        """Raises UserError for a file that is not there, or is none of questions."""
        self.run, self._console, self._at_once = run, console, AT_ONCE
        named = run.eval.questions
        speaks = run.data.format != "documents" and run.objective.generates_text
        wanted = speaks and run.eval.at_start and named not in ("", NONE)
        self.path = Path(named)
        # A story has no one right answer, and takes as long to write as many others.
        self.questions = [each for each in asking.read_questions(self.path) if not each.must_contain] if wanted else []

    def describe(self) -> list[tuple[str, str]]:
        if not self.questions:
            return []
        return [
            ("questions", f"{len(self.questions):,} of {self.path}, asked before the first step and after the last")
        ]

    def ask(self, prepared: PreparedRun, when: str) -> None:
        """Answer them all on rank 0, and keep what was said in the run's folder. when: `before` or `after`."""
        strategy = prepared.context.strategy
        if not self.questions:
            return
        self._console.print(f"  asking {len(self.questions):,} questions ({when}) ...")
        answered: list[asking.GradedAnswer] = []
        for first in range(0, len(self.questions), BETWEEN_WAITS):
            if strategy.rank == 0:
                answered += self._answers(prepared, self.questions[first : first + BETWEEN_WAITS])
            strategy.any(False)  # the others wait, and not for longer than ranks wait for each other
        if strategy.rank == 0:
            answers = [
                {"kind": one.question.kind, "right": one.right, "question": one.question.text, "said": one.said}
                for one in answered
            ]
            result = {"rows": asking.table(when, answered), "answers": answers}
            write_json(prepared.folder.questions, {**self._saved(prepared), when: result})

    def _answers(self, prepared: PreparedRun, questions: Sequence[asking.Question]) -> list[asking.GradedAnswer]:
        """In smaller parts where memory does not suffice."""
        how = self.run.objective.sampling
        thinking = parse_switch(how.thinking) if how else None
        tokenizer = prepared.stage.tokenizer

        def halve_batch(message: str) -> None:
            if self._at_once == 1:
                raise UserError(f"out of memory: {message}", where="eval.questions", next_step="Leave them out: none.")
            self._at_once //= 2

        return retry_on_oom(
            lambda: asking.ask(prepared.model, tokenizer, questions, thinking=thinking, rows=self._at_once), halve_batch
        )

    def _saved(self, prepared: PreparedRun) -> dict[str, Any]:
        """What is known from before of the same questions."""
        about = {"file": str(self.path), "sha256": sha256_file(self.path)}
        known = read_json(prepared.folder.questions) if prepared.folder.questions.is_file() else {}
        return {**known, **about} if known.get("sha256") == about["sha256"] else about

    def compare(self, prepared: PreparedRun, outcome: dict[str, Any]) -> dict[str, Any]:
        """Ask again after the last step, and write the outcome with what became of them.

        A finished run knows that already, and one that was begun without these questions has nothing to compare with.
        """
        if not self.questions:
            return outcome
        strategy = prepared.context.strategy
        wanted = strategy.rank == 0 and "questions" not in outcome
        if wanted and "before" not in self._saved(prepared):
            note = f"not asked, since they were not asked before the first step: {self.path}"
            self._console.print(escape_markup("questions", note))
            wanted = False
        if not strategy.broadcast(wanted):
            return outcome
        self.ask(prepared, "after")
        if strategy.rank == 0:
            outcome = {**outcome, "questions": self._changes(prepared)}
            write_json(prepared.folder.outcome, outcome)
        return outcome

    def _changes(self, prepared: PreparedRun) -> dict[str, Any]:
        """Right and asked by kind and language, before and after, and what was lost."""
        saved = self._saved(prepared)
        before, after = saved["before"]["rows"], saved["after"]["rows"]
        lost = [
            {"kind": each.name, "asked": each.before.asked, "before": each.before.right, "after": each.after.right}
            for each in change_lines(scores_of(before, after))
            if each.is_lost
        ]
        return {"file": saved["file"], "sha256": saved["sha256"], "before": before, "after": after, "lost": lost}


def print_changes(outcome: Mapping[str, Any], console: Console) -> None:
    """The table of kinds before and after, and one line that names what was lost."""
    rows, lost = [], []
    for each in change_lines(scores_of(outcome["before"], outcome["after"])):
        before, after, (low, high) = each.before, each.after, each.before.interval
        verdict = Text("lost", style="bold red") if each.is_lost else ""
        share = f"{before.fraction:.0%} -> {after.fraction:.0%}"
        counts = (before.asked, before.right, after.right)
        rows.append((f"  {each.name}", *counts, share, f"{low:.0%} to {high:.0%}", verdict))
        if each.is_lost:
            lost.append(f"{each.name} {before.right} -> {after.right} of {before.asked}")
    headings = ("  questions", "asked>", "before>", "after>", "", "95 % of before>", "")
    print_table(console, headings, rows)
    if lost:
        console.print(escape_markup("lost", ", ".join(lost)))
    else:
        console.print(Text("  lost: nothing; no kind of question fell below the 95 % interval it had before"))
