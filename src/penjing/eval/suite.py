"""Several tasks, made by their names and asked of a model."""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from penjing.base.errors import UserError
from penjing.base.registry import look_up
from penjing.eval import TASKS
from penjing.eval.task import Task


class Suite:
    """Tasks by name. data: the folder of the benchmarks. questions: the file of the task `questions`. shots: solved
    examples before each request; None: as many as usual. limit: requests of each task, spread over all; 0: all."""

    def __init__(
        self,
        *,
        names: Iterable[str],
        data: Path | None = None,
        questions: Path | None = None,
        shots: int | None = None,
        limit: int = 0,
    ) -> None:
        """Raises UserError for a name that is none, or files that are missing."""
        kinds: dict[str, type[Task]] = {name: look_up(TASKS, name, what="task") for name in names}
        paths = {"data": data, "questions": questions}
        self.tasks = {name: kind(paths[kind.option], shots=shots) for name, kind in kinds.items()}
        self.limit = limit

    def requests(self, name: str) -> list[Any]:
        """What the task asks: all, or of each part `limit` at equal distances."""
        task, parts = self.tasks[name], defaultdict[str, list[Any]](list)
        for request in task.requests():
            parts[getattr(request, task.limit_by, "")].append(request)
        if not parts:
            raise UserError("asks nothing", where=f"task {name}")
        counts = ((part, min(self.limit or len(part), len(part))) for part in parts.values())
        return [part[number * len(part) // count] for part, count in counts for number in range(count)]
