"""The paths in a run's folder. Imports no torch."""

from pathlib import Path

from penjing.base.errors import UserError
from penjing.checkpoint.manifest import MANIFEST, folder_name, steps


class RunDir:
    """Names inside a run's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.settings = path / "run.toml"
        self.plan = path / "plan.json"
        self.outcome = path / "outcome.json"
        self.ended = path / "ended.json"  # of a run that did not reach its last step: its progress, and the reason
        self.metrics = path / "metrics.jsonl"
        self.samples = path / "samples.jsonl"
        # The model's answers to eval.questions before the first step and after the last.
        self.questions = path / "questions.json"
        self.incidents = path / "incidents.jsonl"  # bad steps, spikes, what the disk refused
        self.bad_records = path / "bad_records.jsonl"  # skipped records: file, line and reason
        self.micro_size = path / "micro_size.json"  # after a rank ran out of memory
        self.checkpoints = path / "checkpoints"
        self.tokenizer = path / "tokenizer"
        self.shards = path / "shards"


STAGES = ("grpo", "dpo", "sft", "pretrain")  # trainings in the folder of a quickstart or an evening, the last one first


def _run_at(path: Path) -> Path | None:
    """`path` if it is a run's folder; for a quickstart's folder that of its last stage; else None."""
    folders = map(RunDir, (path, *(path / name for name in STAGES)))
    return next((run.path for run in folders if run.settings.is_file() and run.checkpoints.is_dir()), None)


def checkpoint_path(path: Path) -> Path:
    """The folder of the checkpoint RUN@STEP; any other path unchanged. Raises UserError if the run has no such step."""
    name, _, step = str(path).rpartition("@")
    run = None if path.exists() or not step.isdecimal() else _run_at(Path(name))
    if run is None:
        return path
    folder = RunDir(run).checkpoints / folder_name(int(step))
    if not folder.is_dir():
        known = ", ".join(map(str, sorted(steps(folder.parent)))) or "none is there"
        raise UserError("the run has no such checkpoint", where=path, got=step, wanted=known)
    return folder


def stage_folder(path: Path) -> Path:
    """The run's folder at `path`: itself, for a quickstart's folder that of its last stage, for a checkpoint its run.

    Raises UserError if there is no run.
    """
    path = checkpoint_path(path)
    if run := _run_at(path):
        return run
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
    """Whether `path` is a run's folder, a quickstart's, or one checkpoint."""
    return is_run(path) or (checkpoint_path(path) / MANIFEST).is_file()
