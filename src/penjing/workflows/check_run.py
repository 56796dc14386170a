"""penjing doctor RUN: check a run's folder, and find the step from which it resumes.

It reads every byte that a resumed run would read, and changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from penjing.base import formatting as units
from penjing.base.errors import UserError
from penjing.base.files import read_json
from penjing.base.lock import is_locked, owner
from penjing.base.markup import escape_markup
from penjing.checkpoint.manifest import damage, folder_name, steps
from penjing.data.token_shards import META, TokenShards
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.track.jsonl import read_lines
from penjing.train.load_model import read_settings
from penjing.train.run_dir import RunDir


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
    def part(self, name: str) -> Iterator[None]:
        """Check a part of the folder: it is intact unless the body raises a UserError."""
        try:
            yield
        except UserError as error:
            self.errors.append(f"{name}: {error.what}")
        else:
            self.intact.append(name)


def check_runs(path: Path, console: Console) -> bool:
    """Check a run, or all runs of a quickstart, and print the findings; returns whether they are intact.

    Raises UserError if there is no run.
    """
    findings = [examine(folder) for folder in run_folders(path)]
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


def run_folders(path: Path) -> list[Path]:
    """`path`, or the runs directly below it. Raises UserError if there are none."""
    candidates = [path, *sorted(folder for folder in path.iterdir() if folder.is_dir())] if path.is_dir() else []
    runs = [folder for folder in candidates if RunDir(folder).settings.is_file() or RunDir(folder).checkpoints.is_dir()]
    if not runs:
        raise UserError("no run here", where=path, wanted="a folder made by `penjing train` or `penjing quickstart`")
    return runs


def examine(path: Path) -> Findings:
    """Check one run's folder, without training."""
    folder, findings = RunDir(path), Findings(path)
    _checkpoints(folder, findings)
    _files(folder, findings)
    for name in ("train", "validation"):
        if (folder.shards / name / META).is_file():
            with findings.part(f"{name} shards, every byte"):
                TokenShards(folder.shards / name).verify()
    if is_locked(path):
        findings.notes.append(f"in use by {owner(path)}")
    return findings


def _checkpoints(folder: RunDir, findings: Findings) -> None:
    for step in steps(folder.checkpoints):
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


def _files(folder: RunDir, findings: Findings) -> None:
    with findings.part("run.toml"):
        read_settings(folder.path)
    if folder.tokenizer.is_dir():
        with findings.part("tokenizer"):
            Tokenizer.load(folder.tokenizer)
    if folder.metrics.is_file():
        lines = read_lines(folder.metrics)
        last = max((line["step"] for line in lines), default=0)
        findings.intact.append(f"metrics.jsonl, {len(lines)} lines up to step {last}")
    if folder.plan.is_file() and findings.resumes_from is not None:
        try:
            plan = read_json(folder.plan)
            findings.finished = isinstance(plan, dict) and findings.resumes_from == plan.get("steps")
        except UserError as error:
            findings.errors.append(f"{folder.plan.name}: {error.what}")
    if folder.incidents.is_file():
        kinds = Counter(str(line.get("kind")) for line in read_lines(folder.incidents))
        findings.notes += [f"incidents.jsonl: {count} x {kind}" for kind, count in sorted(kinds.items())]
    if folder.bad_records.is_file():
        count = sum(1 for _ in open(folder.bad_records, "rb"))
        findings.notes.append(f"bad_records.jsonl: {count} records left out")
