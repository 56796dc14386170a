"""Clean the pieces of a corpus on many machines: datatrove's executors schedule the tasks, the rules are ours.

All machines see the same folders. Slurm was not tried on a real cluster.
"""

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penjing.base.config import read_toml
from penjing.base.errors import UserError, import_extra
from penjing.data.clean.pipeline import Pipeline

_EXECUTORS = {"local": "LocalPipelineExecutor", "ray": "RayPipelineExecutor", "slurm": "SlurmPipelineExecutor"}
_POLL_SECONDS = 2.0


@dataclass(frozen=True)
class Task:
    """datatrove's step: `work(rules, *arguments[rank])`, in any process on any machine."""

    work: Callable[..., Any]
    rules: dict[str, Any]  # the settings of each
    arguments: Sequence[tuple[Any, ...]]

    def __call__(self, data: object, rank: int, world_size: int) -> Iterator[Any]:
        self.work(Pipeline(self.rules).make_rules(), *self.arguments[rank])
        return iter(())


@dataclass(frozen=True)
class Cluster:
    """An executor of datatrove. where: the file that names it.

    settings: those of datatrove's executor, such as `workers`, or `partition` and `time` for Slurm.
    """

    where: Path
    executor: str
    settings: Mapping[str, Any]

    @classmethod
    def load(cls, path: Path) -> "Cluster":
        """From a TOML file with one table: [local], [ray] or [slurm]. Raises UserError."""
        tables = read_toml(path)
        name = next(iter(tables), "")
        if len(tables) != 1 or name not in _EXECUTORS or not isinstance(tables[name], dict):
            wanted = "one table: [local], [ray] or [slurm]"
            raise UserError("not a cluster", where=path, got=", ".join(tables) or "no table", wanted=wanted)
        return cls(path, name, tables[name])

    def run(self, task: Task, logs: Path) -> Iterator[int]:
        """Run the tasks, and yield the number of each that is done. logs: a folder of datatrove's.

        Raises UserError if datatrove is not installed, does not know a setting, or a task failed.
        """
        executors = import_extra("datatrove.executor", "data,cluster")
        shutil.rmtree(logs, ignore_errors=True)
        given = {"pipeline": [task], "tasks": len(task.arguments), "logging_dir": str(logs), "skip_completed": False}
        try:
            executor = getattr(executors, _EXECUTORS[self.executor])(**self.settings, **given)
        except TypeError as error:
            raise UserError(f"not settings of datatrove's executor: {error}", where=self.where) from None
        executor.run()
        done: set[int] = set()
        while True:
            runs_still = self._runs(executor)
            new = {int(path.name) for path in (logs / "completions").glob("*")} - done
            yield from sorted(new)
            done |= new
            if len(done) == len(task.arguments):
                return
            if not runs_still:
                got = f"{len(done)} of {len(task.arguments)} tasks were completed"
                raise UserError("tasks failed", where=logs, got=got, next_step="Run it again: it continues.")
            time.sleep(_POLL_SECONDS)

    def _runs(self, executor: Any) -> bool:
        """Whether tasks may still be completed. Slurm alone goes on after `run`."""
        if self.executor != "slurm":
            return False
        listed = subprocess.run(["squeue", "--noheader", "--jobs", str(executor.job_id)], capture_output=True)
        return bool(listed.stdout.strip())
