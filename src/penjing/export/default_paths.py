"""What an export is called, and where it goes, when nobody says."""

from __future__ import annotations

from pathlib import Path

from penjing.train.load_model import LoadedModel, checkpoint_at


def called(run: Path) -> str:
    """The name of the model that was given as a run's folder, a file or a hub name."""
    return run.resolve().name.removesuffix(".pth")


def default_path(run: Path, trained: LoadedModel, name: str) -> Path:
    """`name` in the run's folder, of a checkpoint too: checkpoints are removed as a run goes on. What is made of a
    model from outside goes into the working folder, as a hub name or a file is no folder to write into."""
    if trained.run.stage == "external":
        return Path(name if name.startswith(called(run)) else f"{called(run)}-{name}")
    checkpoint = checkpoint_at(run)
    return (checkpoint.folder.parent.parent if checkpoint else run) / name
