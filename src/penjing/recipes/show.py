"""Look at things: recipes, shapes, runs, corpora, tokenizers, this machine."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penjing import __version__
from penjing.base import config, units
from penjing.base.config import Layer
from penjing.base.errors import UserError, suggest
from penjing.base.files import printable
from penjing.base.marked import marked
from penjing.model import presets
from penjing.model.config import ModelConfig
from penjing.plan import hardware
from penjing.plan.flops import parameters
from penjing.recipes import RECIPES
from penjing.recipes.execute import resolve_run
from penjing.report.summary import print_summary
from penjing.text import records, survey
from penjing.text.records import Kind
from penjing.text.tokenizer import Tokenizer
from penjing.train.folder import RunFolder, set_threads, stage_folder

FILES_NAMED = 5  # of one kind


def show(what: str, overrides: Layer, console: Console) -> None:
    """A recipe resolved, the shapes, the recipes, or a run."""
    if what == "models":
        _models(console)
    elif what == "recipes":
        for name in RECIPES:
            console.print(name, highlight=False)
    elif what.partition(":")[0] in RECIPES:
        console.print(config.to_toml(resolve_run(what, overrides)), highlight=False, end="", markup=False)
    elif (Path(what) / "quickstart.json").is_file():
        print_summary(Path(what), console)
    elif Path(what).exists():
        folder = RunFolder(stage_folder(Path(what)))
        console.print(folder.settings.read_text(encoding="utf-8"), highlight=False, end="", markup=False)
        if folder.outcome.is_file():
            console.print(folder.outcome.read_text(encoding="utf-8"), highlight=False, end="", markup=False)
    else:
        raise UserError(
            f"nothing is called {what!r}",
            wanted="a recipe, a run's folder, models or recipes",
            next_step=suggest(what, [*RECIPES, "models", "recipes"]),
        )


def _models(console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    columns = (
        "name",
        "parameters",
        "active",
        "without embedding",
        "layout",
        "width",
        "layers",
        "heads",
        "kv",
        "head",
        "mlp",
        "vocabulary",
    )
    for heading in columns:
        table.add_column(heading, justify="left" if heading in ("name", "layout") else "right")
    for name in presets.names():
        shape = config.resolve(ModelConfig, {"preset": name})
        count = parameters(shape)
        figures: list[Any] = [shape.hidden_size, shape.num_layers, shape.num_heads, shape.num_kv_heads]
        figures += [shape.head_size, shape.mlp_size, shape.vocabulary_size]
        table.add_row(
            name,
            f"{count.total:,}",
            f"{count.active:,}" if shape.is_mixture else "",
            f"{count.without_embedding:,}",
            shape.architecture,
            *(str(value) for value in figures),
        )
    console.print(table)
    console.print("ladder-SIZE is any size from 500k to 3b; `penjing train ladder:SIZE` derives rate, batch and steps.")


def corpus_report(files: list[Path], console: Console) -> None:
    """Print a survey of each kind of data among the files: texts, conversations, preferences, prompts."""
    of_kind: dict[Kind, list[Path]] = {}
    for path in records.list_files(files):
        of_kind.setdefault(survey.file_kind(path), []).append(path)
    for kind in sorted(of_kind):
        names = [printable(path) for path in of_kind[kind]]
        more = f" and {len(names) - FILES_NAMED} more" if len(names) > FILES_NAMED else ""
        heading = f"{kind}: {', '.join(names[:FILES_NAMED])}{more}"
        console.print(Text(heading, style="bold"), soft_wrap=True)
        _print_facts(survey.survey_files(of_kind[kind], kind).to_dict(), console)


def _print_facts(facts: dict[str, Any], console: Console, prefix: str = "") -> None:
    for name, value in facts.items():
        label = _plain(prefix + name if prefix else name.replace("_", " "))
        if isinstance(value, dict):
            _print_facts(value, console, label + ": ")
        elif isinstance(value, tuple) and name == "warnings":
            for warning in value:
                console.print(marked("warning", _plain(warning), indent=""))
        else:
            shown = (
                f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else str(value)
            )
            console.print(f"{label}: {shown}", highlight=False, markup=False)


def _plain(text: str) -> str:
    """Text that can be printed: what is quoted from a file, or its name, may hold half a character."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def tokens(path: Path, text: str, console: Console) -> None:
    """Print a text cut into tokens, with their ids and how many characters one token holds."""
    folder = path if (path / "tokenizer.json").is_file() else RunFolder(stage_folder(path)).tokenizer
    tokenizer = Tokenizer.load(folder)
    if text != _plain(text):
        raise UserError("not valid UTF-8", where="the text", got=_plain(text)[:40])
    ids = tokenizer.encode(text)
    console.print(" ".join(f"{tokenizer.token(index)!r}:{index}" for index in ids), highlight=False, markup=False)
    console.print(f"{len(ids)} tokens, {len(text) / max(1, len(ids)):.2f} characters each", highlight=False)


EXTRAS = {"transformers": "hf", "wandb": "wandb", "huggingface_hub": "hub"}


def doctor(console: Console) -> None:
    """What penjing finds on this machine."""
    set_threads(0, 1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = hardware.compute_dtype("auto", device)
    peak = hardware.peak(device, dtype)
    facts = hardware.describe(device, dtype)
    rate = "unknown" if peak.flops_per_second is None else f"{peak.flops_per_second / 1e12:.3g} TFLOPS ({peak.source})"
    lines = {
        "penjing": __version__,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cpu": f"{facts['cpu']}, {facts['cores']} cores, {facts['threads']} threads",
        "memory": units.gibibytes(float(str(facts["memory_bytes"]))),
        "device": facts["device"],
        "matrix products in": f"{facts['compute_dtype']}, {rate}",
    }
    for name, value in lines.items():
        console.print(f"{name:<20} {value}", highlight=False)
    for package, extra in EXTRAS.items():
        try:  # a folder `wandb` of runs could be imported too, and is no library
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found = f'not installed; pip install "penjing[{extra}]"'
        console.print(Text(f"{package:<20} {found}"))
