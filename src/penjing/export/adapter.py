"""LoRA adapters after training: convert to `peft`'s format, merge into the weights, attach to a base model."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from penjing.base.errors import UserError
from penjing.convert.peft import CONFIG, PeftAdapter, attach_peft, read_peft, write_peft
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.export import hf
from penjing.export.equivalence_check import VerifiedFolder
from penjing.export.model_card import model_card
from penjing.model.lora import DEFAULT, fingerprint, merge, names, set_adapter
from penjing.model.transformer import Transformer
from penjing.track.run_dir import is_run_or_checkpoint
from penjing.train.config import Run
from penjing.train.load_model import LoadedModel, added_pieces, load_trained

FOLDER = "adapter"  # in the run's folder


def save_run_adapter(
    run: Run, model: Transformer, tokenizer: Tokenizer, base: dict[str, str], step: int, out: Path | None = None
) -> Path:
    """Write the adapter that a run trained in `peft`'s format, by default to RUN/adapter.

    base: `init_from` and `sha256` from the checkpoint. Raises UserError if the base has no rows for new tokens: then
    only the merged model can be used elsewhere.
    """
    folder = out or Path(run.out) / FOLDER
    if run.tokenizer.path and added_pieces(run, tokenizer, Path(base["init_from"])):
        hint = f"Export the merged model: penjing export hf {shlex.quote(run.out)}"
        raise UserError("its base has been given tokens that the one elsewhere lacks", where=folder, next_step=hint)
    extra = {"run": Path(run.out).name, "step": step, "learned_from": run.data.format}
    base_name = _base_name(run.init_from)
    write_peft(folder, model, DEFAULT, base_name=base_name, base_sha256=base["sha256"], extra=extra)
    return folder


def _base_name(name: str) -> str:
    return str(Path(name).resolve()) if Path(name).exists() else name  # a hub name is kept


def export_adapter(path: Path, adapters: Sequence[str], out: Path) -> None:
    """Write an adapter (the run's, or one of those that `attach_adapters` reads) to `out`, in `peft`'s format. Raises
    UserError for no adapter, or more than one."""
    trained = load_trained(path)
    attached = attach_adapters(trained, adapters)
    name = _only_adapter(path, trained.model)
    if not attached:
        base = trained.checkpoint.state()["base"]
        save_run_adapter(trained.run, trained.model, trained.tokenizer, base, trained.checkpoint.step, out)
        return
    sha256, extra = fingerprint(trained.model), attached[name].metadata
    write_peft(out, trained.model, name, base_name=_base_name(str(path)), base_sha256=sha256, extra=extra)


def merge_adapter(path: Path, adapters: Sequence[str], out: Path) -> VerifiedFolder:
    """Merge an adapter (the run's, or one that `attach_adapters` reads) into its base: write a Hugging Face directory.
    Raises UserError for no adapter, or more than one."""
    trained = load_trained(path)
    attach_adapters(trained, adapters)
    merge(trained.model, _only_adapter(path, trained.model))
    return hf.export(trained.model, trained.tokenizer, out, card=model_card(trained, path))


def _only_adapter(path: Path, model: Transformer) -> str:
    """The name of the model's adapter. Raises UserError for none, or more than one."""
    adapter_names = names(model)
    if not adapter_names:
        next_step = "Give one with --adapter, or train one with `penjing train lora init_from=...`."
        raise UserError("this model has no adapter", where=path, next_step=next_step)
    if len(adapter_names) > 1:
        raise UserError("only one adapter at a time", where=path, got=", ".join(adapter_names))
    return adapter_names[0]


def attach_adapters(trained: LoadedModel, specs: Sequence[str]) -> dict[str, PeftAdapter]:
    """Attach adapters to a model, each given as PATH or NAME=PATH; returns them by name. The first becomes active.

    PATH: a folder with adapter_config.json, a run that trained an adapter or one of its checkpoints, or a LoRA file of
    MiniMind.
    Raises UserError for an adapter whose recorded base hash differs.
    """
    attached: dict[str, PeftAdapter] = {}
    base = ""
    for spec in specs:
        name, path = _parse_spec(spec)
        adapter = _trained_adapter(path) if is_run_or_checkpoint(path) else read_peft(path)
        if adapter.base_sha256:
            base = base or fingerprint(trained.model)
            if adapter.base_sha256 != base:
                what, got = "this adapter was trained on another base", f"a base with hash {base[:12]}"
                wanted = f"{adapter.base_sha256[:12]} ({adapter.base_name})"
                raise UserError(what, where=adapter.folder, got=got, wanted=wanted)
        if name in names(trained.model):
            raise UserError("two adapters have the same name", where=spec, got=name, next_step="Write NAME=PATH.")
        attach_peft(trained.model, name, adapter)
        attached[name] = adapter
    if attached:
        set_adapter(trained.model, next(iter(attached)))
    trained.model.eval()
    return attached


def _trained_adapter(path: Path) -> PeftAdapter:
    """The adapter of a run or a checkpoint, which is exported for it."""
    with TemporaryDirectory() as folder:
        export_adapter(path, (), Path(folder))
        return replace(read_peft(Path(folder)), folder=path)


def _parse_spec(spec: str) -> tuple[str, Path]:
    name, equals, folder = ("", "", "") if Path(spec).exists() else spec.partition("=")
    path = Path(folder if equals else spec)
    if not (path / CONFIG).is_file() and (path / FOLDER / CONFIG).is_file():
        path = path / FOLDER
    if equals:
        return name, path
    source = path.resolve()
    source = source.parent if source.name == FOLDER else source
    stem = source.stem if source.is_file() else source.name
    characters = (character if re.match("[A-Za-z0-9_-]", character) else "_" for character in stem)
    return "".join(characters).lstrip("-_") or "adapter", path
