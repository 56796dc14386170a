"""Load a run's model, tokenizer and settings, or those of an external model."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from penjing.base import config
from penjing.base.errors import UserError
from penjing.base.malloc_tuning import tune_malloc
from penjing.base.seeds import derive
from penjing.checkpoint.load import Checkpoint, newest
from penjing.checkpoint.manifest import MANIFEST, WEIGHTS, damage
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.model.config import ModelConfig
from penjing.model.lora import DEFAULT, add_adapter, fingerprint, merge, trainable_state_dict
from penjing.model.resize_embeddings import resize_embeddings
from penjing.model.transformer import Transformer
from penjing.parallel.base import local_device
from penjing.plan.hardware import physical_cores
from penjing.train.config import ComputeSettings, DataSettings, Run
from penjing.train.external_models import ExternalModel, read_external_model
from penjing.train.precision import SLOW_FLOAT16, Precision
from penjing.train.run_dir import RunDir, is_run, is_run_or_checkpoint, stage_folder

EXTERNAL_TOKENS = 2048  # that a model from outside is taken to read together, where its positions allow


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A trained model, ready to use: weights in float32 on the CPU, tokenizer, and where both came from."""

    model: Transformer
    tokenizer: Tokenizer
    run: Run  # of a model from outside: its shape, where it lies, and defaults
    checkpoint: Checkpoint  # of a model from outside: its folder, step 0

    @property
    def answers(self) -> bool:
        """Whether it was trained on conversations, and does not only continue texts."""
        return self.run.data.format != "documents"

    @property
    def context_tokens(self) -> int:
        """Tokens that it has learned to read together."""
        return context_tokens(self.checkpoint.folder.parent.parent, self.run)


def whole_checkpoint(path: Path) -> Checkpoint | None:
    """The checkpoint meant by `path`, if it is the folder of one (RUN/checkpoints/step-00000500), else None.

    Raises UserError if it is damaged, or does not lie in a run.
    """
    path = path.resolve()
    if not (path / MANIFEST).is_file():
        return None
    wrong = damage(path)
    if wrong is not None:
        raise UserError(f"this checkpoint is damaged: {wrong}", where=path)
    if not RunDir(path.parent.parent).settings.is_file():
        raise UserError("this checkpoint is not in the folder of a run", where=path, wanted="RUN/checkpoints/step-...")
    return Checkpoint(path, int(path.name.removeprefix("step-")), ())


def read_settings(path: Path) -> Run:
    """The resolved settings a run was started with."""
    return config.resolve(Run, config.read_toml(RunDir(path).settings))


def context_tokens(folder: Path, run: Run) -> int:
    """Tokens that a model has learned to read: rows of the run in `folder` or of those it began with, as rows are made
    shorter for few conversations."""
    longest = run.data.seq_len
    if run.init_from:
        beside = folder / os.path.relpath(run.init_from, run.out)  # where the runs were moved together
        began = next((each for each in (beside, Path(run.init_from)) if is_run_or_checkpoint(each)), None)
        if began is None:
            return max(longest, min(EXTERNAL_TOKENS, run.model.max_position_embeddings))
        longest = max(longest, context_tokens(stage_folder(began), read_settings(stage_folder(began))))
    return min(longest, run.model.max_position_embeddings)


def load_trained(
    path: Path,
    *,
    adapters: Literal["beside", "merged"] = "beside",
    hints: Mapping[str, Any] | None = None,
    tokenizer_folder: Path | None = None,
) -> LoadedModel:
    """Read a model: a run's newest whole checkpoint, one checkpoint's folder, or a model from outside.

    adapters: of a run that trained one, whether it stays beside the base, in use, or is worked into plain weights.
    hints, tokenizer_folder: for MiniMind's weights, what they do not show of their shape, and where their tokenizer is.
    Raises UserError if there is none, or it does not fit its settings.
    """
    chosen, external = _find(path, hints)
    if external is not None:
        return _load_external(external, tokenizer_folder)
    folder = RunDir(stage_folder(Path(path)))
    run = read_settings(folder.path)
    checkpoint = chosen or newest(folder.checkpoints)
    if checkpoint is None:
        raise UserError("the run has no checkpoint yet", where=folder.path)
    if run.lora.rank:
        model, _ = build_adapted(run, checkpoint)
    else:
        check_size(run.model, (checkpoint.folder / WEIGHTS).stat().st_size, checkpoint.folder)
        model = Transformer(run.model)
    _fill(model, _of_model(checkpoint.weights()), checkpoint.folder)
    if run.lora.rank and adapters == "merged":
        merge(model, DEFAULT)
    return LoadedModel(model.eval(), Tokenizer.load(folder.tokenizer), run, checkpoint)


DTYPES = ("auto", "bfloat16", "float16", "float32")


def use_device(model: torch.nn.Module, device: str = "auto", dtype: str = "auto") -> tuple[torch.device, torch.dtype]:
    """Move a model to where it answers or is measured, and set the dtype of its matmuls; the one rule for all callers.

    device: as `compute.device` (auto: a GPU where there is one). dtype: as `compute.dtype`, but that `auto` stays at
    float32 on a CPU, so that figures do not depend on the processor. Raises UserError if it is not there.
    """
    place = local_device(device)
    if dtype not in DTYPES:
        raise UserError("no such dtype", where="--dtype", got=repr(dtype), wanted=", ".join(DTYPES))
    setting = "float32" if dtype == "auto" and place.type == "cpu" else dtype
    precision = Precision.resolve(ComputeSettings(dtype=setting), place)  # type: ignore[arg-type]  # one of DTYPES
    if place.type == "cpu" and precision.dtype == torch.float16:
        warnings.warn(f"{SLOW_FLOAT16}; use --dtype float32", stacklevel=2)
    model.to(place)
    precision.apply(model)
    return place, precision.dtype


def check_size(config: ModelConfig, num_bytes: int, where: object) -> None:
    """Raise UserError for a shape that asks for more weights than there are bytes, before any memory is taken for it.

    The least that such a model has: its embedding, and of each layer the queries' matrix and the gains.
    """
    width = config.hidden_size
    least = config.vocab_size * width + config.num_hidden_layers * width * (
        2 + config.num_attention_heads * config.head_dim
    )
    if least > num_bytes:
        raise UserError(
            "the shape does not fit the weights",
            where=where,
            got=f"a shape of at least {least:,} parameters",
            wanted=f"at most one for each of the {num_bytes:,} bytes of weights",
        )


def _bytes_of_weights(path: Path) -> int:
    files = [path] if path.is_file() else [*path.glob("*.safetensors")]
    return sum(file.stat().st_size for file in files)


def _load_external(external: ExternalModel, tokenizer_folder: Path | None) -> LoadedModel:
    check_size(external.config, _bytes_of_weights(external.path), external.path)
    model = Transformer(external.config)
    _fill(model, external.read_weights(), external.path)
    tokenizer = Tokenizer.load(tokenizer_folder) if tokenizer_folder else external.tokenizer()
    kind: Literal["chats", "documents"] = "chats" if tokenizer.template else "documents"
    data = DataSettings(format=kind, seq_len=min(EXTERNAL_TOKENS, model.config.max_position_embeddings))
    run = Run(stage="external", out=str(external.path), model=external.config, data=data)
    return LoadedModel(model.eval(), tokenizer, run, Checkpoint(external.path, 0, ()))


def start_shape(start: str, hints: Mapping[str, Any] | None = None) -> ModelConfig:
    """The shape of what a run begins with: another run, one of its checkpoints, or a model from outside.

    hints: settings of `model.*` that were asked for, for weights that do not show their whole shape.
    """
    _, external = _find(start, hints)
    return external.config if external else read_settings(stage_folder(Path(start))).model


def _find(name: str | Path, hints: Mapping[str, Any] | None) -> tuple[Checkpoint | None, ExternalModel | None]:
    """The checkpoint that `name` is the folder of, or the model from outside that it means; of a run neither."""
    checkpoint = whole_checkpoint(Path(name))
    return checkpoint, None if checkpoint or is_run(Path(name)) else read_external_model(name, hints)


def start_tokenizer(run: Run) -> Tokenizer | None:
    """The tokenizer that a new run takes along: the one it names, or that of `init_from`; None if it is to train one.

    One without a chat template gets ours where conversations are learned, and the control tokens for it.
    """
    if run.tokenizer.path:
        tokenizer = Tokenizer.load(Path(run.tokenizer.path))
    elif not run.init_from:
        return None
    else:
        _, external = _find(run.init_from, config.to_dict(run.model))
        if external:
            tokenizer = external.tokenizer()
        else:
            tokenizer = Tokenizer.load(RunDir(stage_folder(Path(run.init_from))).tokenizer)
    if run.data.format == "documents" or tokenizer.template:
        return tokenizer
    if run.lora.rank and tokenizer.missing_chatml:
        raise UserError(
            f"the tokenizer has no chat template and no {tokenizer.missing_chatml[0]}, which adapters cannot learn",
            where=run.init_from or run.tokenizer.path,
            next_step="Train all weights on conversations first: penjing train sft init_from=...",
        )
    return tokenizer.with_chatml(visible=not run.lora.rank)


def load_start(run: Run) -> Transformer:
    """The model that `init_from` names, adapters merged, in the shape that the run asks for.

    Rows are added to embedding and head where the run's vocabulary is larger.
    """
    folder = Path(run.tokenizer.path) if run.tokenizer.path else RunDir(Path(run.out)).tokenizer
    known = folder if (folder / "tokenizer.json").is_file() else None
    begun = load_trained(
        Path(run.init_from), adapters="merged", hints=config.to_dict(run.model), tokenizer_folder=known
    )
    if begun.model.config == run.model:
        return begun.model.train()
    model = Transformer(run.model)
    _fill(model, resize_embeddings(begun.model.state_dict(), run.model.vocab_size), run.init_from)
    return model


def build_adapted(run: Run, checkpoint: Checkpoint | None) -> tuple[Transformer, dict[str, str]]:
    """The base that `init_from` names with a fresh adapter in use, and what a checkpoint says of the base (`init_from`,
    `sha256`).

    checkpoint: what the run goes on from. Raises UserError if there is no base, or it is not the one that the adapter
    was begun on.
    """
    if not run.init_from:
        raise UserError(
            "adapters need a trained model to sit on",
            where="init_from",
            wanted="a run, or a Hugging Face directory",
            next_step="Give init_from=RUN, or lora.rank=0 to train all weights.",
        )
    known = dict(checkpoint.state().get("base", {})) if checkpoint is not None else {}
    where: object = run.init_from if checkpoint is None else checkpoint.folder
    if "init_from" in known and not Path(run.init_from).exists() and Path(known["init_from"]).exists():
        run = replace(run, init_from=known["init_from"])  # it was named from another working folder
    try:
        model = load_start(run)
    except UserError as error:
        if checkpoint is None:
            raise
        raise UserError(
            f"the base of this adapter is not there ({error.line()})",
            where=where,
            wanted=known.get("init_from"),
            next_step="Put it back, or train anew.",
        ) from None
    start = Path(run.init_from)  # or a hub name
    base = {"init_from": str(start.resolve()) if start.exists() else run.init_from, "sha256": fingerprint(model)}
    if known and known["sha256"] != base["sha256"]:
        raise UserError(
            "the base of this adapter has changed since",
            where=where,
            got=f"{run.init_from} with hash {base['sha256'][:12]}",
            wanted=known["sha256"][:12],
            next_step="Put the old weights back, or train anew with another out=.",
        )
    add_adapter(model, run.lora, seed=derive(run.seed, "lora"))
    return model, base


def load_weights(module: nn.Module, checkpoint: Checkpoint) -> None:
    """Copy a checkpoint's weights into what was trained; every name and shape must match, a frozen base apart."""
    _fill(module, checkpoint.weights(), checkpoint.folder)


def _of_model(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The model's weights alone, where it was trained inside a module with a head of its own."""
    inner = {name.removeprefix("model."): value for name, value in weights.items() if name.startswith("model.")}
    return inner or weights


def _fill(model: nn.Module, weights: dict[str, torch.Tensor], where: object) -> None:
    """Copy weights into a model. Where adapters are among them, they are all that there is beside a frozen base."""
    adapters = any(".adapters." in name for name in weights)
    wanted = trainable_state_dict(model) if adapters else model.state_dict()
    expected_shapes = {name: tuple(value.shape) for name, value in wanted.items()}
    found = {name: tuple(value.shape) for name, value in weights.items()}
    if expected_shapes != found:
        names = expected_shapes.keys() | found.keys()
        first = min(name for name in names if expected_shapes.get(name) != found.get(name))
        raise UserError(
            "the weights are of another shape of model",
            where=where,
            got=f"{first} {found.get(first)}",
            wanted=f"{first} {expected_shapes.get(first)}",
        )
    model.load_state_dict(weights, strict=not adapters)


def set_threads(setting: int, world: int) -> int:
    """Set torch's CPU threads for this process; returns how many.

    0: OMP_NUM_THREADS where it is set (torchrun sets it to 1), else the physical cores shared among local ranks. More
    threads than cores is slower by far: 100 steps took 15 s on two free cores and 143 s on two busy ones.
    Raises UserError where OMP_NUM_THREADS is no number.
    """
    count = setting or _openmp_threads() or max(1, physical_cores() // world)
    torch.set_num_threads(count)
    tune_malloc()
    return count


def _openmp_threads() -> int:
    """The first number of OMP_NUM_THREADS, which may list one for each level of nesting; 0 where it says nothing."""
    setting = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if setting and not setting.isdecimal():
        raise UserError("not a number of threads", where="OMP_NUM_THREADS", got=repr(setting), wanted="such as 4")
    return int(setting or 0)
