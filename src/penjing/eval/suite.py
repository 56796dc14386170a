"""Several tasks, made by their names and asked of a model."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penjing.base.errors import UserError
from penjing.base.registry import look_up
from penjing.eval import TASKS
from penjing.eval.task import Task


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Tasks by name. data: the folder of the benchmarks. questions: the file of the task `questions`. shots: solved
    examples before each request; None: as many as usual. limit: requests of each task, spread over all; 0: all."""

    names: Sequence[str]
    data: Path | None = None
    questions: Path | None = None
    shots: int | None = None
    limit: int = 0
    tasks: dict[str, Task] = field(init=False)

    def __post_init__(self) -> None:
        """Raises UserError for a name that is none, or files that are missing."""
        object.__setattr__(self, "tasks", {name: self._make(name) for name in dict.fromkeys(self.names)})

    def _make(self, name: str) -> Task:
        kind: type[Task] = look_up(TASKS, name, what="task")
        return kind({"data": self.data, "questions": self.questions}[kind.option], shots=self.shots)

    def requests(self, name: str) -> list[Any]:
        """What the task asks: all, or `limit` at equal distances."""
        requests = list(self.tasks[name].requests())
        if not requests:
            raise UserError("asks nothing", where=f"task {name}")
        if not 0 < self.limit < len(requests):
            return requests
        return [requests[number * len(requests) // self.limit] for number in range(self.limit)]
