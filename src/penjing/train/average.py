"""Average the weights of models with the same shape: penjing average runs/a runs/b --out runs/mean

"Model soup", arXiv:2203.05482; of the checkpoints of one run, arXiv:1803.05407.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from penjing.base import config
from penjing.base.errors import UserError
from penjing.base.files import write_text
from penjing.base.lock import unfinished
from penjing.checkpoint.load import Checkpoint
from penjing.checkpoint.manifest import damage, folder_name, steps
from penjing.checkpoint.save import save
from penjing.model.lora import Lora
from penjing.track.run_dir import RunDir, is_run, stage_folder
from penjing.train.load_model import LoadedModel, load_trained, read_settings
from penjing.train.resolve import with_settings

Input = tuple[str, Callable[[], Mapping[str, Tensor]]]  # one model of an average: its name, and a function to read it


def average_models(paths: Sequence[Path], out: Path, *, weights: Sequence[float] = (), last: int = 0) -> list[str]:
    """Write the average as a run's folder, which chat, eval, export and `init_from=` accept; return the inputs' names.

    paths: runs, checkpoints, or external models. weights: one per input; empty: equal. last: average this many newest
    checkpoints of one run.
    Raises UserError if shapes or tokenizers differ, or `out` exists.
    """
    if out.exists():
        raise UserError("exists already", where=out, next_step="Choose another --out.")
    if last and len(paths) != 1:
        raise UserError("takes one run", where="--last", got=f"{len(paths)} models")
    first = load_trained(paths[0], adapters="merged", to_score=True)
    if not (last or first.run.objective.generates_text):
        next_step = "Average checkpoints of one run: --last N."
        raise UserError("a reward model's head is not averaged", where=paths[0], next_step=next_step)
    inputs = _newest(paths[0], last) if last else [_input(path, first) for path in paths]
    if len(inputs) < 2:
        raise UserError("nothing to average", got=f"{len(inputs)} model", wanted="at least two, or --last N")
    state = mean(inputs, weights)
    names = [name for name, _ in inputs]
    step = first.checkpoint.step
    with unfinished(out) as partial:
        folder = RunDir(partial)
        run = with_settings(first.run, {"out": str(out), "stage": "average", "init_from": "", "lora": Lora()})
        write_text(folder.settings, config.to_toml(run))
        first.tokenizer.save(folder.tokenizer)
        about = {"data": "averaged", "averaged": names, "weights": list(weights)}
        save(folder.checkpoints, step, weights=state, optimizers=[], state=about, texts={}, keep=1)
        partial.rename(out)
    return names


def mean(inputs: Sequence[Input], weights: Sequence[float] = ()) -> dict[str, Tensor]:
    """The mean of the inputs' weights, summed in float64, in the dtype of the first.

    Only one input is in memory at a time, besides the sum. weights: one per input, in any scale; empty: equal.
    Raises UserError for a wrong number of weights, a negative weight, or a sum of 0.
    """
    if weights and len(weights) != len(inputs):
        raise UserError("not one weight each", where="--weights", got=len(weights), wanted=len(inputs))
    counts = list(weights) or [1.0] * len(inputs)
    if not sum(counts) > 0 or min(counts) < 0:
        raise UserError("not weights", where="--weights", got=counts, wanted="0 or more each, not all 0")
    total: dict[str, Tensor] = {}
    dtypes: dict[str, torch.dtype] = {}
    for (_, read), count in zip(inputs, counts, strict=True):
        state = read()
        if not total:
            dtypes = {key: value.dtype for key, value in state.items()}
            total = {key: torch.zeros(value.shape, dtype=torch.float64) for key, value in state.items()}
        for key, value in state.items():
            total[key].add_(value.double(), alpha=count / sum(counts))
    return {key: value.to(dtypes[key]) for key, value in total.items()}


def _newest(path: Path, last: int) -> list[Input]:
    """The newest `last` checkpoints of a run. Raises UserError if there are fewer or one is damaged."""
    if not is_run(path):
        raise UserError("--last takes the folder of a run", where=path)
    folder = RunDir(stage_folder(path))
    if read_settings(folder.path).lora.rank:
        raise UserError("the checkpoints of this run hold an adapter only", where=path)
    newest = steps(folder.checkpoints)[:last]
    if len(newest) < last:
        what = "the run has fewer checkpoints"
        hint = "Train with checkpoint.keep_last=N to keep more."
        raise UserError(what, where=folder.path, got=len(newest), wanted=last, next_step=hint)
    inputs: list[Input] = []
    for step in newest:
        checkpoint = folder.checkpoints / folder_name(step)
        problem = damage(checkpoint)
        if problem is not None:
            raise UserError(f"this checkpoint is damaged: {problem}", where=checkpoint)
        inputs.append((str(checkpoint), Checkpoint(checkpoint, step, ()).weights))
    return inputs


def _input(path: Path, first: LoadedModel) -> Input:
    def read() -> dict[str, Tensor]:
        trained = load_trained(path, adapters="merged")
        _check_compatible(path, trained, first)
        return trained.model.state_dict()

    return str(path), read


def _check_compatible(path: Path, trained: LoadedModel, first: LoadedModel) -> None:
    """Raise UserError unless both models have the same shape and vocabulary."""
    shape, expected = config.to_dict(trained.run.model), config.to_dict(first.run.model)
    name = next((key for key in shape if key != "preset" and shape[key] != expected[key]), None)
    if name:
        got = f"{name} {shape[name]}"
        raise UserError("not the shape of the first model", where=path, got=got, wanted=expected[name])
    if trained.tokenizer.vocabulary_hash != first.tokenizer.vocabulary_hash:
        raise UserError("not the tokenizer of the first model: its ids mean other tokens", where=path)
