"""penjing show and doctor: recipes, model shapes, runs, this machine."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text

from penjing import __version__
from penjing.base import config
from penjing.base import formatting as units
from penjing.base.config import Layer
from penjing.base.errors import UserError, suggest
from penjing.base.markup import print_table
from penjing.commands.train import resolve_run
from penjing.model import presets
from penjing.model.config import ModelConfig
from penjing.plan import hardware
from penjing.plan.flops import parameters
from penjing.recipes import RECIPES
from penjing.report.load_run import read_record
from penjing.report.terminal import print_summary
from penjing.train.run_dir import RunFolder, set_threads, stage_folder


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
        print_summary(read_record([Path(what)]), console)
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
    rows = []
    for name in presets.names():
        shape = config.resolve(ModelConfig, {"preset": name})
        count = parameters(shape)
        rows.append(
            (
                name,
                f"{count.total:,}",
                f"{count.active:,}" if shape.is_mixture else "",
                f"{count.without_embedding:,}",
                shape.architecture,
                shape.hidden_size,
                shape.num_layers,
                shape.num_heads,
                shape.num_kv_heads,
                shape.head_size,
                shape.mlp_size,
                shape.vocabulary_size,
            )
        )
    numbers = ("width>", "layers>", "heads>", "kv>", "head>", "mlp>", "vocabulary>")
    print_table(console, ("name", "parameters>", "active>", "without embedding>", "layout", *numbers), rows)
    console.print("ladder-SIZE is any size from 500k to 3b; `penjing train ladder:SIZE` derives rate, batch and steps.")


EXTRAS = {"transformers": "hf", "wandb": "wandb", "huggingface_hub": "hub"}


def check_machine(console: Console) -> None:
    """Print what penjing finds on this machine."""
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
        "matmul": f"{facts['compute_dtype']}, {rate}",
    }
    for name, value in lines.items():
        console.print(f"{name:<20} {value}", highlight=False)
    for package, extra in EXTRAS.items():
        try:  # a folder `wandb` of runs could be imported too, and is no library
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found = f'not installed; pip install "penjing[{extra}]"'
        console.print(Text(f"{package:<20} {found}"))
