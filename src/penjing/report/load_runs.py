"""What a report shows of runs and quickstarts, for the page and the terminal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from penjing.base.accuracy import AFTER, BEFORE, Scores, scores_from_rows
from penjing.base.untrusted import Fields, text
from penjing.track.run_dir import STAGES as TRAININGS
from penjing.track.run_record import RunRecord, no_run

QUICKSTART = "quickstart.json"
NAME_LENGTH = 40  # maximum characters of a run's name, from the end


class ReportedRun(RunRecord):
    """One training run, read at once, so that `problems` is complete."""

    def __init__(self, path: Path, problems: list[Path]) -> None:
        super().__init__(path, problems)
        self.name = text(path.resolve().name)
        self.defaults: Mapping[str, str] = {}  # of its recipe; empty if the recipe is unknown
        _ = self.settings, self.plan, self.outcome, self.figures, self.samples, self.questions, self.incidents

    @cached_property
    def task(self) -> str:
        """objective.name, or data.format for next-token prediction; empty if unknown."""
        task = self.settings.get("objective.name", "")
        return self.settings.get("data.format", task) if task == "next_token" else task

    @cached_property
    def done(self) -> Fields:
        """What it took: the outcome, or of a run that ended before its last step what it took until then."""
        return Fields() if self.is_running else self.outcome or self.ending(self.last_step)

    @cached_property
    def questions(self) -> Scores:
        rows = (self.answers.fields(when).items("rows") for when in (BEFORE, AFTER))
        return scores_from_rows(*([row.raw for row in part] for part in rows))


@dataclass(frozen=True, kw_only=True)
class Quickstart:
    """Files of a quickstart besides its runs: quickstart.json, evaluation.json and compression.json."""

    facts: Fields
    evaluation: Fields
    compression: Fields


@dataclass(frozen=True, kw_only=True)
class ReportData:
    """Everything a report shows. `problems`: sentences about unreadable files."""

    folder: str
    runs: tuple[ReportedRun, ...]
    quickstart: Quickstart | None  # of a report on one quickstart
    problems: tuple[str, ...]


def read_quickstart(folder: Path, problems: list[Path]) -> tuple[Quickstart, list[ReportedRun]]:
    """A quickstart's folder. The answers of both models belong to the last run."""
    files = RunRecord(folder, problems)
    quickstart = Quickstart(
        facts=files.fields(folder / QUICKSTART),
        evaluation=files.fields(folder / "evaluation.json"),
        compression=files.fields(folder / "compression.json"),
    )
    runs = [run for name in reversed(TRAININGS) if (run := ReportedRun(folder / name, problems)).exists]
    for run in runs:
        run.task = run.task or {"pretrain": "documents", "sft": "chats"}.get(run.name, run.name)
    if runs and (rows := quickstart.evaluation.items("rows")):
        before = [row.raw for row in rows if row.text("stage") == "pretrain"]
        after = [row.raw for row in rows if row.text("stage") == runs[-1].name != "pretrain"]
        runs[-1].questions = scores_from_rows(before, after)
    return quickstart, runs


def name_by_difference(runs: Sequence[ReportedRun]) -> None:
    """Name the runs by the shortest ends of their paths that differ."""
    parts = [run.folder.path.resolve().parts for run in runs]
    length, longest = 1, max(map(len, parts), default=1)
    while length < longest and len({path[-length:] for path in parts}) < len(parts):
        length += 1
    for run, path in zip(runs, parts, strict=True):
        run.name = text("/".join(path[-length:]))[-NAME_LENGTH:]


def read_record(folders: Sequence[Path]) -> ReportData:
    """Read runs and quickstarts. Raises UserError for a folder that is neither."""
    problems: list[Path] = []
    runs: list[ReportedRun] = []
    quickstarts = []
    for folder in dict.fromkeys(map(Path, folders)):
        if RunRecord(folder).exists:
            runs.append(ReportedRun(folder, problems))
        elif (folder / QUICKSTART).is_file() or any(RunRecord(folder / name).exists for name in TRAININGS):
            quickstart, found = read_quickstart(folder, problems)
            quickstarts.append(quickstart)
            runs += found
        else:
            raise no_run(folder)
    runs = list({run.folder.path: run for run in runs}.values())
    name_by_difference(runs)
    unreadable = (f"{path.parent.name}/{path.name} cannot be read, so it is left out." for path in problems)
    return ReportData(
        folder=", ".join(text(folder) for folder in folders),
        runs=tuple(runs),
        quickstart=quickstarts[0] if quickstarts and len(folders) == 1 else None,
        problems=tuple(map(text, unreadable)),
    )
