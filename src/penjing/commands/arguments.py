"""Shared by several verbs: argument types, the console, and the resolution of a recipe with settings to a run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from penjing.agent_tools import TOOLS
from penjing.base import config
from penjing.base.markup import Terminal

if TYPE_CHECKING:
    from penjing.train.config import Run

# A pipe or a file has no width but $COLUMNS; rich's default of 80 would cut tables. Paths, settings and errors are not
# markup.
_columns = os.environ.get("COLUMNS", "")
_width = (int(_columns) if _columns.isdecimal() else 0) or 160
console = Terminal(width=None if os.isatty(1) else _width, markup=False, highlight=False)

Settings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="Settings, such as batch.size=32; `penjing show RECIPE` explains them."
    ),
]
Recipe = Annotated[
    str, typer.Argument(metavar="RECIPE|FILE.toml", help="One of `penjing show recipes`, or a TOML file of settings.")
]
RunPath = Annotated[
    Path,
    typer.Argument(
        metavar="RUN",
        help="A run's folder; RUN@STEP, one of its checkpoints; a Hugging Face directory or hub name; a MiniMind .pth.",
    ),
]
DeviceName = Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu, cuda, cuda:0 or mps.")]
DtypeName = Annotated[
    str, typer.Option(help="auto, bfloat16, float16 or float32; auto: as in training on a GPU, float32 on a CPU.")
]
Adapters = Annotated[
    list[str] | None,
    typer.Option("--adapter", metavar="[NAME=]PATH", help="Adapter of the first RUN, or its run; may be given again."),
]
MaxTokens = Annotated[int, typer.Option(help="Most new tokens of an answer.", min=1)]
Temperature = Annotated[float, typer.Option(help="0: greedy.", min=0)]
Thinking = Annotated[
    bool | None, typer.Option("--think/--no-think", help="Reason before each answer or not; else the model decides.")
]
ToolNames = Annotated[
    str, typer.Option("--tools", metavar="NAME,...", help=f"The model may call: {', '.join(TOOLS)}, MOD:CLASS.")
]
TopP = Annotated[float, typer.Option(help="Nucleus sampling: the most likely tokens with this total probability.")]
SampleSeed = Annotated[int, typer.Option(help="Sampling seed (used when temperature > 0).", min=0)]
Gpus = Annotated[int, typer.Option(help="Train on so many GPUs of this machine, a process for each.", min=0)]
Processes = Annotated[int, typer.Option(help="The same with processes on the CPU: compute.device=cpu.", min=0)]
Nodes = Annotated[int, typer.Option(help="Machines; start the same command on each.", min=1)]
Rendezvous = Annotated[str, typer.Option(metavar="HOST:PORT", help="One of the machines, where all of them meet.")]
Restarts = Annotated[int, typer.Option(help="Continue so often by itself when a process fails.", min=0)]
WeightsName = Annotated[
    Literal["auto", "int8"], typer.Option(help="int8: quantise the weights while loading; faster, a little less exact.")
]


def words(text: str) -> list[str]:
    """The words between commas."""
    return [word for word in text.split(",") if word]


def say(text: str) -> None:
    """Print a line without wrapping or markup."""
    console.print(text, soft_wrap=True)


def resolved(recipe: str, settings: list[str] | None) -> Run:
    """The run of a recipe or a TOML file, overridden by settings of the command line."""
    from penjing.workflows.train import named_run

    return named_run(recipe, config.parse_overrides(settings or []))
