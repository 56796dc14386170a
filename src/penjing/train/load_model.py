"""Load a run's model, tokenizer and settings, or those of an external model."""

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from penjing import devices
from penjing.base import config
from penjing.base.errors import UserError
from penjing.base.malloc_tuning import tune_malloc
from penjing.base.seeds import derive
from penjing.checkpoint.load import Checkpoint, delivered
from penjing.checkpoint.manifest import MANIFEST, damage
from penjing.convert import hf, minimind
from penjing.data.corpus import DataSettings
from penjing.data.tokenizer.extend import new_pieces
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.devices.choose import local_device
from penjing.devices.host import physical_cores
from penjing.kernels.cpu import spinning
from penjing.model.config import ModelConfig
from penjing.model.lora import DEFAULT, add_adapter, fingerprint, merge, trainable_state_dict
from penjing.model.resize_embeddings import resize_embeddings
from penjing.model.transformer import Transformer
from penjing.track.run_dir import RunDir, checkpoint_path, is_run, is_run_or_checkpoint, stage_folder
from penjing.train.config import ComputeSettings, Run
from penjing.train.precision import SLOW_FLOAT16, Precision

EXTERNAL_TOKENS = 2048  # assumed context length of an external model, unless it has fewer positions


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A trained model, ready to use: weights in float32 on the CPU, tokenizer, and their origin."""

    model: Transformer
    tokenizer: Tokenizer
    run: Run  # of an external model: its shape and path, and defaults
    checkpoint: Checkpoint  # of an external model: its folder, step 0
    external: bool = False

    @property
    def answers(self) -> bool:
        """Whether it was trained to answer, and not only to continue texts."""
        return self.run.data.format != "documents"

    @property
    def context_tokens(self) -> int:
        """The context length that it was trained on, in tokens."""
        return context_tokens(self.checkpoint.folder.parent.parent, self.run)


def checkpoint_at(path: Path) -> Checkpoint | None:
    """The checkpoint at `path`, if that is one (RUN@500, or RUN/checkpoints/step-00000500), else None.

    Raises UserError if it is damaged or not inside a run's folder.
    """
    path = checkpoint_path(path).resolve()
    if not (path / MANIFEST).is_file():
        return None
    problem = damage(path)
    if problem is not None:
        raise UserError(f"this checkpoint is damaged: {problem}", where=path)
    if not RunDir(path.parent.parent).settings.is_file():
        raise UserError("this checkpoint is not in the folder of a run", where=path, wanted="RUN/checkpoints/step-...")
    return Checkpoint(path, int(path.name.removeprefix("step-")), ())


def read_settings(path: Path) -> Run:
    """The resolved settings a run was started with."""
    return config.resolve(Run, config.read_toml(RunDir(path).settings))


def starts(folder: Path, run: Run, recorded: str = "") -> Iterator[tuple[Path, Run | None]]:
    """What the run in `folder` started from, and what that started from: each path as of now, and its settings.

    A start is looked for where it lies if it was moved together with the run, then at `init_from`, then at `recorded`.
    The last one has no settings if it is an external model or missing; if runs were renamed so that only one that was
    there already has the name, that is the last.
    """
    seen = [folder.resolve()]
    while run.init_from:
        moved = seen[-1] / os.path.relpath(run.init_from, run.out)
        named = [Path(name) for name in (run.init_from, recorded) if name]
        candidates = [path.resolve() for path in (moved, *named) if path.exists()]
        folders = {path: stage_folder(path).resolve() for path in candidates if is_run_or_checkpoint(path)}
        path = next((path for path in candidates if folders.get(path) not in seen), next(iter(folders), None))
        if path not in folders:
            yield path or Path(run.init_from), None
            return
        run = read_settings(folders[path])
        yield path, run
        if folders[path] in seen:
            return
        seen.append(folders[path])


def context_tokens(folder: Path, run: Run) -> int:
    """The context length that a model was trained on, in tokens: the longest rows of the run in `folder` and of the
    runs that it started from (rows are shortened for few conversations)."""
    lengths = [start.data.seq_len if start else EXTERNAL_TOKENS for _, start in starts(folder, run)]
    return min(max(run.data.seq_len, *lengths, 0), run.model.max_position_embeddings)


def load_trained(
    path: Path,
    *,
    adapters: Literal["beside", "merged"] = "beside",
    hints: Mapping[str, Any] | None = None,
    tokenizer_folder: Path | None = None,
    to_score: bool = False,
) -> LoadedModel:
    """Read a model: of a run the newest or the best checkpoint (checkpoint/delivered.py), that of one checkpoint's
    folder, or an external one.

    adapters: a run's adapters stay active beside the base, or are merged into its weights. hints, tokenizer_folder: for
    MiniMind's weights, settings that they do not determine, and the folder of their tokenizer. to_score: the caller
    reads the head of a reward model.
    Raises UserError if there is no model, or it does not fit its settings.
    """
    spinning.control(torch.get_num_threads())  # who loads a model computes, and not every command sets the threads
    chosen, external = _find(path, hints)
    if external is not None:
        return _load_external(external, tokenizer_folder)
    folder = RunDir(stage_folder(Path(path)))
    run = read_settings(folder.path)
    checkpoint = chosen or delivered(folder.checkpoints)
    if checkpoint is None:
        raise UserError("the run has no checkpoint yet", where=folder.path)
    for skipped in checkpoint.skipped:
        warnings.warn(f"{path}: damaged checkpoint skipped, step {checkpoint.step} is used: {skipped}", stacklevel=2)
    if not (to_score or run.objective.generates_text):
        warnings.warn(f"{path} is a reward model, read without its head: it was not trained to write", stacklevel=2)
    if run.lora.rank:
        model, _ = build_adapted(run, checkpoint)
    else:
        check_size(run.model, sum(path.stat().st_size for path in checkpoint.weight_files()), checkpoint.folder)
        model = Transformer(run.model)
    _fill(model, _decoder_weights(checkpoint.weights()), checkpoint.folder)
    if run.lora.rank and adapters == "merged":
        merge(model, DEFAULT)
    tokenizer = Tokenizer.load(folder.tokenizer)
    if checkpoint.state().get("tokenizer", tokenizer.vocabulary_hash) != tokenizer.vocabulary_hash:
        warnings.warn(f"{folder.tokenizer} is not the tokenizer that the model was trained with", stacklevel=2)
    return LoadedModel(model.eval(), tokenizer, run, checkpoint)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExternalModel:
    """A model in another project's format. The weights are read lazily."""

    path: Path  # the directory, or the .pth file
    config: ModelConfig
    tokenizer_folder: Path | None  # None if none was found; a .pth file does not contain one
    read_weights: Callable[[], dict[str, torch.Tensor]]  # by Penjing's names, float32, on the CPU

    def tokenizer(self) -> Tokenizer:
        """Its tokenizer. Raises UserError if there is none."""
        if self.tokenizer_folder is None:
            raise no_tokenizer(self.path)
        return Tokenizer.load(self.tokenizer_folder)


def no_tokenizer(where: object) -> UserError:
    hint = "Give tokenizer.path=DIR in training, or put the tokenizer's files next to the weights."
    return UserError("no tokenizer.json next to these weights", where=where, next_step=hint)


def read_external_model(name: str | Path, hints: Mapping[str, Any] | None = None) -> ExternalModel | None:
    """The model called `name` if it is in another project's format, else None; a hub name is downloaded.

    hints: requested settings of `model.*`, for weights that do not determine their full shape.
    """
    path = Path(name)
    if path.is_file():
        if path.suffix not in minimind.SUFFIXES:
            wanted = "a run's folder, a Hugging Face directory or hub name, or a MiniMind .pth file"
            raise UserError("not a model", where=path, wanted=wanted)
        return _read_minimind(path, hints or {})
    folder = hf.find_hf(str(name))
    if folder is None:
        return None
    return ExternalModel(
        path=folder,
        config=hf.read_config(folder),
        tokenizer_folder=folder if (folder / "tokenizer.json").is_file() else None,
        read_weights=lambda: hf.read_hf(folder).weights,
    )


def _read_minimind(path: Path, hints: Mapping[str, Any]) -> ExternalModel:
    tensors = minimind.read_tensors(path)
    shape = minimind.infer_config(tensors, hints, path)
    return ExternalModel(
        path=path,
        config=shape,
        tokenizer_folder=minimind.tokenizer_folder(path),
        read_weights=lambda: minimind.from_minimind(tensors, shape, path)[0],
    )


DTYPES = ("auto", "bfloat16", "float16", "float32")


def use_device(model: torch.nn.Module, device: str = "auto", dtype: str = "auto") -> tuple[torch.device, torch.dtype]:
    """Move a model to the device of inference, and set the dtype of its matmuls; one rule for all callers.

    device: as `compute.device` (auto: a GPU if available). dtype: as `compute.dtype`, but `auto` is float32 on a CPU,
    so that metrics do not depend on the processor. Raises UserError if the device or dtype is not available.
    """
    target = local_device(device)
    if dtype not in DTYPES:
        raise UserError("no such dtype", where="--dtype", got=repr(dtype), wanted=", ".join(DTYPES))
    setting = "float32" if dtype == "auto" and devices.of(target).is_host else dtype
    precision = Precision.resolve(ComputeSettings(dtype=setting), target)  # type: ignore[arg-type]  # one of DTYPES
    if devices.of(target).is_host and precision.dtype == torch.float16:
        warnings.warn(f"{SLOW_FLOAT16}; use --dtype float32", stacklevel=2)
    model.to(target)
    precision.apply(model)
    return target, precision.dtype


def check_size(config: ModelConfig, num_bytes: int, where: object) -> None:
    """Raise UserError for a shape with more parameters than the file has bytes, before memory is allocated for it.

    Lower bound of the parameters: the embedding, and each layer's query matrix and norm gains.
    """
    width = config.hidden_size
    min_parameters = config.vocab_size * width + config.num_hidden_layers * width * (
        2 + config.num_attention_heads * config.head_dim
    )
    if min_parameters > num_bytes:
        what = "the shape does not fit the weights"
        wanted = f"at most one for each of the {num_bytes:,} bytes of weights"
        raise UserError(what, where=where, got=f"a shape of at least {min_parameters:,} parameters", wanted=wanted)


def _load_external(external: ExternalModel, tokenizer_folder: Path | None) -> LoadedModel:
    path = external.path
    files = [path] if path.is_file() else path.glob("*.safetensors")
    check_size(external.config, sum(file.stat().st_size for file in files), path)
    model = Transformer(external.config)
    _fill(model, external.read_weights(), external.path)
    tokenizer = Tokenizer.load(tokenizer_folder) if tokenizer_folder else external.tokenizer()
    if not tokenizer_folder and tokenizer.size > external.config.vocab_size:  # a named one may be of a start model
        what = "the tokenizer has more ids than the model"
        wanted = f"at most {external.config.vocab_size:,}"
        raise UserError(what, where=external.path, got=f"{tokenizer.size:,}", wanted=wanted)
    kind: Literal["chats", "documents"] = "chats" if tokenizer.template else "documents"
    data = DataSettings(format=kind, seq_len=min(EXTERNAL_TOKENS, model.config.max_position_embeddings))
    run = Run(stage="external", out=str(external.path), model=external.config, data=data)
    return LoadedModel(model.eval(), tokenizer, run, Checkpoint(external.path, 0, ()), external=True)


def start_shape(start: str, hints: Mapping[str, Any] | None = None) -> ModelConfig:
    """The shape of a run's start model: another run, one of its checkpoints, or an external model.

    hints: requested settings of `model.*`, for weights that do not determine their full shape.
    """
    _, external = _find(start, hints)
    return external.config if external else read_settings(stage_folder(Path(start))).model


def _find(name: str | Path, hints: Mapping[str, Any] | None) -> tuple[Checkpoint | None, ExternalModel | None]:
    """The checkpoint in the folder `name`, or the external model called `name`; neither for a run."""
    checkpoint = checkpoint_at(Path(name))
    return checkpoint, None if checkpoint or is_run(Path(name)) else read_external_model(name, hints)


def own_tokenizer(run: Run, start: Path | None = None) -> Tokenizer | None:
    """The tokenizer of `init_from` (where it lies now: `start`) itself; None if it has none."""
    _, external = _find(start or run.init_from, config.to_dict(run.model))
    if external:
        return external.tokenizer() if external.tokenizer_folder else None
    return Tokenizer.load(RunDir(stage_folder(start or Path(run.init_from))).tokenizer)


def added_pieces(run: Run, tokenizer: Tokenizer, start: Path | None = None) -> dict[int, list[int]]:
    """The ids of the run's tokenizer beyond that of `init_from`, each with its pieces (`new_pieces`)."""
    own = own_tokenizer(run, start) if run.init_from else None
    return new_pieces(own, tokenizer) if own is not None else {}


def start_tokenizer(run: Run) -> Tokenizer | None:
    """The tokenizer of a new run: the named one, or that of `init_from`; None if the run trains one.

    If the run learns conversations, a tokenizer without a chat template gets ChatML and its control tokens.
    """
    if run.tokenizer.path:
        tokenizer = Tokenizer.load(Path(run.tokenizer.path))
    elif not run.init_from:
        return None
    elif (own := own_tokenizer(run)) is not None:
        tokenizer = own
    else:
        raise no_tokenizer(run.init_from)
    if run.data.format == "documents" or tokenizer.template:
        return tokenizer
    if run.lora.rank and tokenizer.missing_chatml:
        what = f"the tokenizer has no chat template and no {tokenizer.missing_chatml[0]}, which adapters cannot learn"
        hint = "Train all weights on conversations first: penjing train sft init_from=..."
        raise UserError(what, where=run.init_from or run.tokenizer.path, next_step=hint)
    return tokenizer.with_chatml(visible=not run.lora.rank)


def load_start(run: Run, start: Path | None = None, own_folder: Path | None = None) -> Transformer:
    """The model of `init_from` (where it lies now: `start`) with merged adapters, in the run's shape.

    Rows are added to embedding and head if the run's vocabulary is larger; those of tokens that the run's tokenizer (in
    `own_folder`, by default run.out) has beyond that of `init_from` begin as the mean of their pieces.
    """
    own = RunDir(own_folder or Path(run.out)).tokenizer
    folders = [own, *([Path(run.tokenizer.path)] if run.tokenizer.path else [])]
    folder = next((path for path in folders if (path / "tokenizer.json").is_file()), None)
    path = start or Path(run.init_from)
    loaded = load_trained(path, adapters="merged", hints=config.to_dict(run.model), tokenizer_folder=folder).model
    pieces = added_pieces(run, Tokenizer.load(folder), path) if folder else {}
    if loaded.config == run.model and not any(pieces.values()):
        return loaded.train()
    model = Transformer(run.model)
    _fill(model, resize_embeddings(loaded.state_dict(), run.model.vocab_size, pieces), path)
    return model


def build_adapted(run: Run, checkpoint: Checkpoint | None) -> tuple[Transformer, dict[str, str]]:
    """The base model of `init_from` with a new, active adapter, and the base's identity for checkpoints (`init_from`,
    `sha256`).

    checkpoint: to resume from. Raises UserError if there is no base, or it is not the one that the adapter was trained
    on.
    """
    if not run.init_from:
        wanted = "a run, or a Hugging Face directory"
        hint = "Give init_from=RUN, or lora.rank=0 to train all weights."
        raise UserError("adapters need a trained base model", where="init_from", wanted=wanted, next_step=hint)
    saved = dict(checkpoint.state().get("base", {})) if checkpoint is not None else {}
    where: object = run.init_from if checkpoint is None else checkpoint.folder
    start, folder = Path(run.init_from), None  # or a hub name
    if checkpoint is not None:
        folder = checkpoint.folder.parent.parent
        start = _base_of(run, folder, saved.get("init_from", ""))
    try:
        model = load_start(run, start, folder)
    except UserError as error:
        if checkpoint is None:
            raise
        what = f"the base model of this adapter is missing ({error.line()})"
        hint = "Restore it, or train anew."
        raise UserError(what, where=where, wanted=saved.get("init_from"), next_step=hint) from None
    base = {"init_from": str(start.resolve()) if start.exists() else str(start), "sha256": fingerprint(model)}
    if saved and saved["sha256"] != base["sha256"]:
        what = "the base model of this adapter has changed"
        got = f"{start} with hash {base['sha256'][:12]}"
        hint = "Restore the old weights, or train anew with another out=."
        raise UserError(what, where=where, got=got, wanted=saved["sha256"][:12], next_step=hint)
    add_adapter(model, run.lora, seed=derive(run.seed, "lora"))
    return model, base


def _base_of(run: Run, folder: Path, recorded: str) -> Path:
    """The present path of the base of the run in `folder`, which has an adapter; a hub name stays.

    Raises UserError if runs were renamed, so that the adapter would be its own base.
    """
    chain = list(starts(folder, run, recorded))
    bases = [folder.resolve()]
    for path, start in chain:
        if start is None or not start.lora.rank:
            break
        if (base := stage_folder(path).resolve()) in bases:
            what = "the base model of this adapter is missing: its name belongs to a run that is adapted itself"
            got = f"{path}, which needs {start.init_from}"
            hint = "Give the base its old name again."
            raise UserError(what, where=folder, got=got, wanted=recorded or run.init_from, next_step=hint)
        bases.append(base)
    return chain[0][0] if chain[0][0].exists() else Path(run.init_from)


Place = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # `Strategy.place`


def load_weights(module: nn.Module, checkpoint: Checkpoint, place: Place = lambda full, like: full) -> None:
    """Copy a checkpoint's weights into the trained module; every name and shape must match, except a frozen base's."""
    _fill(module, checkpoint.weights(), checkpoint.folder, place)


def _decoder_weights(weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """The decoder's weights, without those of a module around it that has another head."""
    inner = {name.removeprefix("model."): value for name, value in weights.items() if name.startswith("model.")}
    return inner or weights


def _fill(
    model: nn.Module, weights: Mapping[str, torch.Tensor], where: object, place: Place = lambda full, like: full
) -> None:
    """Copy weights into a model. If they contain adapters, they contain only what is trained, without a frozen base."""
    adapters = any(".adapters." in name for name in weights)
    expected = trainable_state_dict(model) if adapters else model.state_dict()
    expected_shapes = {name: tuple(value.shape) for name, value in expected.items()}
    shapes = {name: tuple(value.shape) for name, value in weights.items()}
    if expected_shapes != shapes:
        names = expected_shapes.keys() | shapes.keys()
        first = min(name for name in names if expected_shapes.get(name) != shapes.get(name))
        what = "the weights have another shape than the model"
        wanted = f"{first} {expected_shapes.get(first)}"
        raise UserError(what, where=where, got=f"{first} {shapes.get(first)}", wanted=wanted)
    placed = {name: place(value, expected[name]) for name, value in weights.items()}
    model.load_state_dict(placed, strict=not adapters)


def set_threads(setting: int, world: int) -> int:
    """Set torch's CPU threads for this process; return their number.

    0: OMP_NUM_THREADS if set (torchrun sets it to 1), else the physical cores divided by the local ranks. More threads
    than free cores would be much slower, if `kernels/cpu/spinning.py` did not watch them.
    Raises UserError if OMP_NUM_THREADS is not a number.
    """
    count = setting or _openmp_threads() or max(1, physical_cores() // world)
    torch.set_num_threads(count)
    spinning.control(count)
    tune_malloc()
    return count


def _openmp_threads() -> int:
    """The first number of OMP_NUM_THREADS, which may list one per nesting level; 0 if it is not set."""
    setting = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if setting and not setting.isdecimal():
        raise UserError("not a number of threads", where="OMP_NUM_THREADS", got=repr(setting), wanted="such as 4")
    return int(setting or 0)
