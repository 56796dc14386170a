"""The folder of a run: what lies where, and reading a finished or half-finished one."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from penjing.base import config
from penjing.base.errors import UserError
from penjing.checkpoint.load import Checkpoint, newest
from penjing.model.config import ModelConfig
from penjing.model.transformer import Transformer
from penjing.plan.hardware import physical_cores
from penjing.text.tokenizer import Tokenizer
from penjing.train.run import Run


@dataclass(frozen=True, slots=True)
class RunFolder:
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
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tokenizer(self) -> Path:
        return self.path / "tokenizer"

    @property
    def shards(self) -> Path:
        return self.path / "shards"


@dataclass(frozen=True, slots=True)
class Trained:
    """A trained model, ready to use: weights in float32 on the CPU, tokenizer, and where both came from."""

    model: Transformer
    tokenizer: Tokenizer
    run: Run
    checkpoint: Checkpoint


def stage_folder(path: Path) -> Path:
    """The run folder meant by `path`: itself, or for a quickstart's folder its last stage.

    Raises UserError if there is no run.
    """
    for candidate in (path, path / "sft", path / "pretrain"):
        if RunFolder(candidate).settings.is_file() and RunFolder(candidate).checkpoints.is_dir():
            return candidate
    what = "no such folder" if not path.exists() else "not the folder of a run"
    raise UserError(what, where=path, wanted="a folder made by `penjing train` or `penjing quickstart`")


def read_settings(path: Path) -> Run:
    """The resolved settings a run was started with."""
    return config.resolve(Run, config.read_toml(RunFolder(path).settings))


def load_trained(path: Path) -> Trained:
    """Read the newest whole checkpoint of a run. Raises UserError if there is none, or it does not fit its settings."""
    folder = RunFolder(stage_folder(Path(path)))
    run = read_settings(folder.path)
    checkpoint = newest(folder.checkpoints)
    if checkpoint is None:
        raise UserError("the run has no checkpoint yet", where=folder.path)
    model = Transformer(run.model)
    load_weights(model, checkpoint)
    return Trained(model.eval(), Tokenizer.load(folder.tokenizer), run, checkpoint)


def load_weights(model: Transformer, checkpoint: Checkpoint) -> None:
    """Copy a checkpoint's weights into `model`; every name and shape must match."""
    weights = checkpoint.weights()
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in weights.items()}
    if expected != found:
        differing = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
        first = differing[0]
        raise UserError(
            "the weights are of another shape of model",
            where=checkpoint.folder,
            got=f"{first} {found.get(first)}",
            wanted=f"{first} {expected.get(first)}",
        )
    model.load_state_dict(weights)


def same_model(first: ModelConfig, second: ModelConfig) -> bool:
    """Whether two configurations are one shape (the preset they started from does not matter)."""
    return config.to_dict(first) | {"preset": ""} == config.to_dict(second) | {"preset": ""}


def set_threads(setting: int, world: int) -> int:
    """Set torch's CPU threads for this process; returns how many.

    0: OMP_NUM_THREADS where it is set (torchrun sets it to 1), else the physical cores shared among local ranks. More
    threads than cores is slower by far: 100 steps took 15 s on two free cores and 143 s on two busy ones.
    """
    count = setting or int(os.environ.get("OMP_NUM_THREADS", 0)) or max(1, physical_cores() // world)
    torch.set_num_threads(count)
    return count
