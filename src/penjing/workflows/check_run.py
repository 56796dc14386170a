"""penjing doctor RUN: check a run's folder, and find the step from which it resumes.

It reads every byte that a resumed run would read, and changes nothing.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from penjing.base import formatting as units
from penjing.base.errors import UserError
from penjing.base.lock import is_locked, owner
from penjing.base.markup import escape_markup
from penjing.checkpoint.manifest import damage, folder_name
from penjing.data.token_shards import META, TokenShards
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.track.run_record import RunRecord, find_runs
from penjing.train.load_model import read_settings


@dataclass
class Findings:
    """Findings in one run's folder. `errors` is empty if the folder is intact."""

    folder: Path
    resumes_from: int | None = None  # step; None: nothing to resume from
    finished: bool = False
    intact: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """What the same training command would do."""
        if self.resumes_from is None:
            return "nothing to resume from" if self.errors else "no checkpoint yet: the same command starts from step 0"
        if self.finished:
            return f"finished at step {self.resumes_from}: the same command shows the results"
        return f"the same command continues after step {self.resumes_from}"

    @contextmanager
    def part(self, name: str) -> Iterator[list[str]]:
        """Check a part of the folder: it is intact, with the details that the body adds, unless it raises UserError."""
        details: list[str] = []
        try:
            yield details
        except UserError as error:
            self.errors.append(f"{name}: {error.what}")
        else:
            self.intact.append(", ".join([name, *details]))


def check_runs(path: Path, console: Console) -> bool:
    """Check a run, or all runs of a quickstart, and print the findings; returns whether they are intact. Raises
    UserError if there is no run."""
    findings = [examine(run.folder.path) for run in find_runs(path)]
    for run in findings:
        console.print(escape_markup(str(run.folder), run.verdict, style="bold", indent=""))
        for mark, style, lines in (
            ("ok   ", "green", run.intact),
            ("error", "red", run.errors),
            ("note ", "", run.notes),
        ):
            for line in lines:
                console.print(escape_markup(mark, line, style=style, sep="  "), soft_wrap=True)
    return not any(run.errors for run in findings)


def examine(path: Path) -> Findings:
    """Check one run's folder, without training."""
    record, findings = RunRecord(path), Findings(path)
    _checkpoints(record, findings)
    _files(record, findings)
    for name in ("train", "validation"):
        if (record.folder.shards / name / META).is_file():
            with findings.part(f"{name} shards, every byte"):
                TokenShards(record.folder.shards / name).verify()
    if is_locked(path):
        findings.notes.append(f"in use by {owner(path)}")
    return findings


def _checkpoints(record: RunRecord, findings: Findings) -> None:
    folder = record.folder
    for step in record.checkpoints:
        checkpoint = folder.checkpoints / folder_name(step)
        problem = damage(checkpoint)
        if problem is not None:
            findings.errors.append(f"checkpoint {checkpoint.name}: {problem}")
            continue
        size = sum(file.stat().st_size for file in checkpoint.iterdir())
        findings.intact.append(f"checkpoint {checkpoint.name}, {units.count(size)}B, every byte")
        if findings.resumes_from is None:
            findings.resumes_from = step
    partial = list(folder.checkpoints.glob(".step-*.partial")) if folder.checkpoints.is_dir() else []
    if partial:
        findings.notes.append(f"{len(partial)} partially written checkpoint; the next save removes it")
    if findings.resumes_from is None and any(line.startswith("checkpoint") for line in findings.errors):
        findings.notes.append("every checkpoint is damaged: training here is refused, never silently restarted")


def _files(record: RunRecord, findings: Findings) -> None:
    folder = record.folder
    with findings.part("run.toml"):
        read_settings(folder.path)
    if folder.tokenizer.is_dir():
        with findings.part("tokenizer"):
            Tokenizer.load(folder.tokenizer)
    if folder.metrics.exists():
        with findings.part("metrics.jsonl") as details:
            details.append(f"{len(record.metrics)} lines; the run reached step {record.last_step}")
    with suppress(UserError):  # it is named where it is read
        if why := record.ending(record.last_step).text("why"):
            findings.notes.append(f"{record.ended.text('ended')}: {why}")
    if folder.plan.is_file():
        with findings.part("plan.json"):
            planned = record.outcome.number("steps_done") or record.plan.number("steps")
            findings.finished = findings.resumes_from == planned
    if folder.incidents.exists():
        with findings.part("incidents.jsonl") as details:
            kinds = Counter(incident.text("kind") for incident in record.incidents)
            details += [f"{count} x {kind}" for kind, count in sorted(kinds.items())]
    if folder.bad_records.is_file():
        count = sum(1 for _ in open(folder.bad_records, "rb"))
        findings.notes.append(f"bad_records.jsonl: {count} records left out")
