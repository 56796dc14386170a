"""Default names and paths of exports."""

from __future__ import annotations

from pathlib import Path

from penjing.train.load_model import LoadedModel, checkpoint_at


def model_name(run: Path) -> str:
    """The name of the model, from a run's folder, a file or a hub name."""
    return run.resolve().name.removesuffix(".pth")


def default_path(run: Path, trained: LoadedModel, name: str) -> Path:
    """`name` in the run's folder, also for a checkpoint, since old checkpoints are deleted. The export of an external
    model goes into the working directory, since a hub name or a file is not a folder."""
    if trained.external:
        return Path(name if name.startswith(model_name(run)) else f"{model_name(run)}-{name}")
    checkpoint = checkpoint_at(run)
    return (checkpoint.folder.parent.parent if checkpoint else run) / name
