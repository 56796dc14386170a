"""Tasks asked at every validation of a run: `eval.tasks`, from the files in `eval.data`."""

import warnings
from pathlib import Path

from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.eval.scorer import Graded, ShrinkingGrader, accuracy
from penjing.eval.suite import Suite
from penjing.infer.requests import NotFiniteError
from penjing.model.transformer import Transformer
from penjing.parallel.base import Strategy
from penjing.train.config import Run

REQUESTS_PER_SYNC = 512  # that rank 0 answers while the other ranks wait


class TrainingTasks:
    """The tasks of a run; none if it names none. Raises UserError if one is unknown or its files are missing."""

    def __init__(self, run: Run) -> None:
        settings = run.eval
        data, questions = (Path(name) if name else None for name in (settings.data, settings.questions))
        self.suite = Suite(names=settings.tasks, data=data, questions=questions, limit=settings.limit)
        self._requests = {name: self.suite.requests(name) for name in self.suite.tasks}
        self._grade = ShrinkingGrader("eval.tasks", "Leave out eval.tasks.")

    def describe(self) -> list[tuple[str, str]]:
        asked = ", ".join(f"{name} ({len(requests):,})" for name, requests in self._requests.items())
        return [("tasks", f"{asked}, asked at each validation")] if asked else []

    def __call__(self, model: Transformer, tokenizer: Tokenizer, strategy: Strategy) -> dict[str, float]:
        """The metrics of all tasks, on every rank. Rank 0 asks. None of a task whose logits are not finite."""
        metrics: dict[str, float] = {}
        for name, task in self.suite.tasks.items():
            requests, graded = self._requests[name], list[Graded]()
            for first in range(0, len(requests), REQUESTS_PER_SYNC):
                if strategy.rank == 0 and len(graded) == first:
                    try:
                        graded += self._grade(task, requests[first : first + REQUESTS_PER_SYNC], model, tokenizer)
                    except NotFiniteError as error:  # training decides what becomes of it
                        warnings.warn(f"{name} has no score: {error.line()}", stacklevel=2)
                strategy.any(False)  # waiting longer would exceed the collective timeout
            if len(graded) == len(requests):
                metrics[f"val_acc_{name}"] = accuracy(graded)
                metrics |= {f"val_{name}_{figure}": value for figure, value in task.figures(graded).items()}
        return dict(strategy.broadcast(metrics))
