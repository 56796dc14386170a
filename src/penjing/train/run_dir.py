"""The folder of a run: what lies where. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penjing.base.errors import UserError
from penjing.checkpoint.manifest import MANIFEST


@dataclass(frozen=True, slots=True)
class RunDir:
    """Names inside a run's folder."""

    path: Path

    @property
    def settings(self) -> Path:
        return self.path / "run.toml"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def outcome(self) -> Path:
        return self.path / "outcome.json"

    @property
    def ended(self) -> Path:
        """Of a run that did not reach its last step: how far it came, and why."""
        return self.path / "ended.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def questions(self) -> Path:
        """What the model answered to the questions it is known by, before the first step and after the last."""
        return self.path / "questions.json"

    @property
    def incidents(self) -> Path:
        """Bad steps, spikes, what the disk refused: JSON lines."""
        return self.path / "incidents.jsonl"

    @property
    def bad_records(self) -> Path:
        """Records that were left out: JSON lines of file, line and reason."""
        return self.path / "bad_records.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tokenizer(self) -> Path:
        return self.path / "tokenizer"

    @property
    def shards(self) -> Path:
        return self.path / "shards"


def stage_folder(path: Path) -> Path:
    """The run folder meant by `path`: itself, or for a quickstart's folder its last stage.

    Raises UserError if there is no run.
    """
    for candidate in (path, path / "sft", path / "pretrain"):
        if RunDir(candidate).settings.is_file() and RunDir(candidate).checkpoints.is_dir():
            return candidate
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
    candidates = (path, path / "sft", path / "pretrain")
    return any(RunDir(each).settings.is_file() and RunDir(each).checkpoints.is_dir() for each in candidates)


def is_run_or_checkpoint(path: Path) -> bool:
    """Whether `path` is that, or the folder of one checkpoint."""
    return is_run(path) or (path / MANIFEST).is_file()
