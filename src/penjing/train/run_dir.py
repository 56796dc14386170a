"""The folder of a run: what lies where. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from penjing.base.errors import UserError
from penjing.checkpoint.manifest import MANIFEST


class RunDir:
    """Names inside a run's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.settings = path / "run.toml"
        self.plan = path / "plan.json"
        self.outcome = path / "outcome.json"
        self.ended = path / "ended.json"  # of a run that did not reach its last step: how far it came, and why
        self.metrics = path / "metrics.jsonl"
        self.samples = path / "samples.jsonl"
        # What the model answered to the questions it is known by, before the first step and after the last.
        self.questions = path / "questions.json"
        self.incidents = path / "incidents.jsonl"  # bad steps, spikes, what the disk refused
        self.bad_records = path / "bad_records.jsonl"  # those that were left out: file, line and reason
        self.checkpoints = path / "checkpoints"
        self.tokenizer = path / "tokenizer"
        self.shards = path / "shards"


def _run_at(path: Path) -> Path | None:
    """`path` where it is a run's folder; of a quickstart's folder the one of its last stage; None of any other."""
    folders = map(RunDir, (path, path / "sft", path / "pretrain"))
    return next((each.path for each in folders if each.settings.is_file() and each.checkpoints.is_dir()), None)


def stage_folder(path: Path) -> Path:
    """The run folder meant by `path`: itself, or for a quickstart's folder its last stage.

    Raises UserError if there is no run.
    """
    found = _run_at(path)
    if found is not None:
        return found
    if (path / MANIFEST).is_file() and RunDir(path.resolve().parent.parent).settings.is_file():
        return path.resolve().parent.parent
    what = "no such folder" if not path.exists() else "not the folder of a run"
    if (path / "config.json").is_file():
        what = "an external model, not a run"
    raise UserError(
        what, where=path, wanted="a folder made by `penjing train` or `penjing quickstart`, or a Hugging Face directory"
    )


def is_run(path: Path) -> bool:
    """Whether `path` is a run's folder, or a quickstart's."""
    return _run_at(path) is not None


def is_run_or_checkpoint(path: Path) -> bool:
    """Whether `path` is that, or the folder of one checkpoint."""
    return is_run(path) or (path / MANIFEST).is_file()
