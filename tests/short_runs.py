"""Short trainings in the tests' own process, and what they leave behind."""

import io
import shutil

import safetensors.torch
from rich.console import Console

from penjing.base.config import parse_overrides
from penjing.workflows.train import execute, resolve_run


def train(recipe, *words):
    """`penjing train` without a new process; returns what it said."""
    said = io.StringIO()
    execute(resolve_run(recipe, parse_overrides(words)), Console(file=said, width=300))
    return said.getvalue()


def newest(folder):
    return sorted((folder / "checkpoints").iterdir())[-1]


def weights_of(folder):
    return safetensors.torch.load_file(newest(folder) / "model.safetensors")


def cut_back(whole, folder, step):
    """A copy of a run as it was when it had only come to `step`."""
    shutil.copytree(whole, folder)
    shutil.rmtree(folder / "adapter", ignore_errors=True)
    (folder / "outcome.json").unlink()
    for checkpoint in (folder / "checkpoints").iterdir():
        if not checkpoint.name.endswith(f"{step:08d}"):
            shutil.rmtree(checkpoint)
