"""penjing export, adapter and average: models in other formats, LoRA adapters merged or exported, averages."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penjing import __version__
from penjing.base import config
from penjing.commands.arguments import RunPath, say

if TYPE_CHECKING:
    from penjing.train.load_model import LoadedModel

export_app = typer.Typer(no_args_is_help=True, help="Export a model for other programs, verified against our logits.")
adapter_app = typer.Typer(no_args_is_help=True, help="Merge LoRA adapters into their base model, or export them.")


def model_name(run: Path) -> str:
    """The name of the model, from a run's folder, a file or a hub name."""
    return run.resolve().name.removesuffix(".pth")


def default_path(run: Path, trained: LoadedModel, name: str) -> Path:
    """`name` in the run's folder, also for a checkpoint, since old checkpoints are deleted. The export of an external
    model goes into the working directory, since a hub name or a file is not a folder."""
    from penjing.train.load_model import checkpoint_at

    if trained.external:
        return Path(name if name.startswith(model_name(run)) else f"{model_name(run)}-{name}")
    checkpoint = checkpoint_at(run)
    return (checkpoint.folder.parent.parent if checkpoint else run) / name


@export_app.command("hf")
def export_hf(
    run: RunPath,
    out: Annotated[
        Path | None, typer.Argument(help="Folder to write; default: RUN/export, for an external model NAME-export.")
    ] = None,
) -> None:
    """Write a Hugging Face directory that stock `transformers` loads, verified against penjing's logits and text.

    [bold]Example[/]
    penjing export hf runs/quickstart my-model
    """
    from penjing.export.hf import export
    from penjing.export.model_card import model_card
    from penjing.train.load_model import load_trained

    trained = load_trained(run, adapters="merged")
    path = out or default_path(run, trained, "export")
    exported = export(trained.model, trained.tokenizer, path, card=model_card(trained, run))
    say(f"{exported.path}: {exported.note}")


@export_app.command("gguf")
def export_gguf(
    run: RunPath,
    out: Annotated[
        Path | None,
        typer.Argument(
            metavar="[OUT.gguf]",
            help="File to write; default: RUN/NAME-TYPE.gguf, for an external model NAME-TYPE.gguf.",
        ),
    ] = None,
    kind: Annotated[
        str, typer.Option("--dtype", help="Weight format: f32, f16, bf16, q8_0, q5_1, q5_0, q4_1 or q4_0.")
    ] = "f16",
    name: Annotated[str, typer.Option(help="Model name in the file; default: the run's name.")] = "",
    licence: Annotated[str, typer.Option(help="Licence of the weights, such as apache-2.0; check your data's.")] = "",
    language: Annotated[list[str] | None, typer.Option(help="Two-letter code; may be given again.")] = None,
) -> None:
    """Write a GGUF file for llama.cpp and Ollama. Verify it: read it back, and run llama-cpp-python if installed.

    Also writes a Modelfile for Ollama next to it.

    [bold]Examples[/]
    penjing export gguf runs/quickstart
    penjing export gguf runs/quickstart my-model-q8_0.gguf --dtype q8_0 --licence apache-2.0 --language zh
    """
    from penjing.export.gguf import export
    from penjing.train.load_model import load_trained

    trained = load_trained(run, adapters="merged")
    name = name or model_name(run)
    description = f"made with penjing {__version__}, stage {trained.run.stage}, step {trained.checkpoint.step}"
    about = {"name": name, "description": description, "license": licence, "languages": language or []}
    path = out or default_path(run, trained, f"{model_name(run)}-{kind}.gguf")
    exported = export(trained.model, trained.tokenizer, path, kind=kind, about=about, answers=trained.answers)
    say(f"{exported.path}: {exported.note}")
    command = shlex.join(["ollama", "create", name, "-f", str(exported.modelfile)])
    say(f"{exported.modelfile}: for `{command}`")


@export_app.command("onnx")
def export_onnx(
    run: RunPath,
    out: Annotated[
        Path | None, typer.Argument(help="Folder to write; default: RUN/onnx, for an external model NAME-onnx.")
    ] = None,
    kind: Annotated[str, typer.Option("--dtype", help="Weight format: f32 or int8.")] = "f32",
) -> None:
    """Write an ONNX graph (token ids to logits) and its tokenizer, verified with onnxruntime against penjing's logits.

    [bold]Example[/]
    penjing export onnx runs/quickstart my-model-onnx
    """
    from penjing.export.onnx import export
    from penjing.train.load_model import load_trained

    trained = load_trained(run, adapters="merged")
    exported = export(trained.model, trained.tokenizer, out or default_path(run, trained, "onnx"), kind=kind)
    say(f"{exported.path}: {exported.note}")


AdapterPaths = Annotated[
    list[str] | None,
    typer.Option(metavar="[NAME=]PATH", help="A folder of peft, a run, RUN@STEP or MiniMind's LoRA; default: RUN's."),
]


@adapter_app.command("merge")
def adapter_merge(
    run: RunPath, out: Annotated[Path, typer.Option(help="Folder to write.")], adapter: AdapterPaths = None
) -> None:
    """Merge an adapter into its base: write a Hugging Face directory, verified against penjing's logits and text.

    [bold]Examples[/]
    penjing adapter merge runs/lora --out merged
    penjing adapter merge runs/sft --adapter downloads/adapter --out merged
    """
    from penjing.export.adapter import merge_adapter

    exported = merge_adapter(run, adapter or (), out)
    say(f"{exported.path}: {exported.note}")


@adapter_app.command("export")
def adapter_export(
    run: RunPath, out: Annotated[Path, typer.Argument(help="Folder to write.")], adapter: AdapterPaths = None
) -> None:
    """Write the adapter that a run trained, or another one of a base model, in the format of `peft`.

    [bold]Examples[/]
    penjing adapter export runs/lora my-adapter
    penjing adapter export full_sft_768.pth my-adapter --adapter lora_medical_768.pth
    """
    from penjing.export.adapter import export_adapter

    export_adapter(run, adapter or (), out)
    say(f"{out}: loads with peft.PeftModel.from_pretrained(base, {str(out)!r})")


def average(
    models: Annotated[list[Path], typer.Argument(metavar="MODEL...", help="Runs, checkpoints, external models.")],
    out: Annotated[Path, typer.Option(help="Run folder to write, for chat, eval, export and init_from=.")],
    weights: Annotated[str, typer.Option(help="Weight of each model, such as 1,2,1; default: equal.")] = "",
    last: Annotated[int, typer.Option(help="Average the newest N checkpoints of one run.", min=0)] = 0,
) -> None:
    """Average the weights of models with the same shape.

    [bold]Examples[/]
    penjing average runs/pretrain --last 3 --out runs/mean
    penjing average runs/a runs/b --weights 2,1 --out runs/mean
    """
    from penjing.train.average import average_models

    shares = config.convert(tuple[float, ...], weights, "--weights")
    names = average_models(models, out, weights=shares, last=last)
    say(f"{out}: the average of {len(names)} models")
