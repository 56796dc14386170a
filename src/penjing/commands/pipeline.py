"""penjing quickstart, penjing evening and penjing train."""

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from penjing.base import formatting as units
from penjing.base.markup import Terminal
from penjing.commands import arguments as given
from penjing.commands.arguments import Settings, console, resolved, say


def quickstart(
    data: Annotated[
        str, typer.Option(help="toyworld, a name of `penjing data list`, or files, separated by commas.")
    ] = "toyworld",
    out: Annotated[Path, typer.Option(help="Output folder.")] = Path("runs/quickstart"),
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete the folder's content and start again.")] = False,
    short: Annotated[bool, typer.Option("--short", help="A few steps only: a check that everything works.")] = False,
    settings: Settings = None,
    minutes: Annotated[
        float,
        typer.Option(
            min=0.1, max=100_000, help="Of training; on your own data they also decide the size of the model."
        ),
    ] = 5.75,
    gpus: given.Gpus = 0,
    nproc_per_node: given.Processes = 0,
    max_restarts: given.Restarts = 0,
) -> None:
    """From raw text to a model that answers: data, tokenizer, pretraining, SFT, evaluation, export, report.

    If it was killed, the same command continues. If it has finished, the same command shows the results.

    [bold]Examples[/]
    penjing quickstart
    penjing quickstart --data my.txt --out runs/mine
    penjing quickstart --data sanguo max_steps=1000
    penjing quickstart max_steps=600 sft.max_steps=800
    """
    from penjing.workflows import quickstart as stages
    from penjing.workflows.launch import LaunchOptions

    launch = LaunchOptions(gpus=gpus, nproc_per_node=nproc_per_node, max_restarts=max_restarts)
    options = stages.QuickstartOptions(
        data=data, out=out, fresh=fresh, short=short, settings=tuple(settings or ()), minutes=minutes, launch=launch
    )
    Terminal.trains = True
    stages.quickstart(options, console)


def evening(
    data: Annotated[
        str, typer.Option(help="Names of `penjing data list`, files, or toyworld, separated by commas.")
    ] = "minimind-pretrain-mini,minimind-sft-mini,minimind-dpo",
    out: Annotated[Path, typer.Option(help="Output folder.")] = Path("runs/evening"),
    hours: Annotated[str, typer.Option(help="Time for all of it, such as 8 or 90min; 8 if no --price is given.")] = "",
    price: Annotated[str, typer.Option(help="What all of it may cost, such as 20CNY.")] = "",
    hourly: Annotated[str, typer.Option(help="Price of the card for an hour, such as 2CNY.")] = "",
    size: Annotated[str, typer.Option(help="Size of the model, such as 64m; empty: the best for the budget.")] = "",
    gpu: Annotated[str, typer.Option(help="Plan for this card, such as 'RTX 4090', instead of this machine.")] = "",
    rehearse: Annotated[bool, typer.Option("--rehearse", help="The same here, on a thousandth of the tokens.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Start without asking.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete the folder's content and start again.")] = False,
    settings: Settings = None,
) -> None:
    """A model of a real size in one evening on one card: the plan first, then data, training, evaluation and export.

    Trains a tokenizer and a model on the texts, then on the conversations (SFT), then on pairs of answers (DPO) or
    prompts with answers (GRPO), whichever the data have. The plan shows tokens, time, price, disk, memory and the
    expected loss of each stage; nothing is fetched or trained before you agree.

    If it was killed, the same command continues. Settings are for the pretraining; sft.a.b=c, dpo.a.b=c for the others.

    [bold]Examples[/]
    penjing evening --gpu "RTX 4090" --hours 8
    penjing evening --gpu "RTX 4090" --price 20CNY --rehearse --out runs/rehearsal
    penjing evening --size 64m --yes
    penjing evening --data books/,chats.jsonl,pairs.jsonl --hours 90min
    """
    from penjing.workflows import evening as pipeline

    options = pipeline.EveningOptions(
        data=data,
        out=out,
        fresh=fresh,
        settings=tuple(settings or ()),
        hours=hours,
        price=price,
        hourly=hourly,
        size=size,
        gpu=gpu,
        rehearse=rehearse,
        yes=yes,
    )
    Terminal.trains = True
    pipeline.evening(options, console)


def train(
    recipe: given.Recipe,
    settings: Settings = None,
    allow_change: Annotated[
        list[str] | None,
        typer.Option(metavar="FIELD", help="Resume although this has changed: a setting, data, tokenizer."),
    ] = None,
    gpus: given.Gpus = 0,
    nproc_per_node: given.Processes = 0,
    nnodes: given.Nodes = 1,
    rdzv_endpoint: given.Rendezvous = "",
    max_restarts: given.Restarts = 0,
) -> None:
    """Train a model. The same command again continues where it stopped.

    Settings come from the recipe, then the file, then key=value on this line.

    [bold]Examples[/]
    penjing train pretrain model=26m data.train=corpus.jsonl
    penjing train pretrain model=tiny model.num_hidden_layers=6 data.train=my.txt max_steps=300 out=runs/six
    penjing train sft init_from=runs/six data.train=chats.jsonl out=runs/six-sft
    penjing train lora init_from=runs/six data.train=chats.jsonl lora.rank=8 out=runs/six-lora
    penjing train sft init_from=downloads/SmolLM2-135M data.train=chats.jsonl out=runs/smol-sft
    penjing train runs/six/run.toml out=runs/again --gpus 2
    """
    from penjing.base.accuracy import scores_from_rows
    from penjing.report.terminal import print_changes
    from penjing.workflows.launch import LaunchOptions, launch
    from penjing.workflows.train import execute

    options = LaunchOptions(
        gpus=gpus, nproc_per_node=nproc_per_node, nnodes=nnodes, rdzv_endpoint=rdzv_endpoint, max_restarts=max_restarts
    )
    if options.starts_others():
        launch(sys.argv[1:], options)
        return
    run = resolved(recipe, settings)
    options.check_device(run.compute.device)
    Terminal.trains = True
    outcome = execute(run, console, allow_change or ())
    if os.environ.get("RANK", "0") != "0":
        return  # rank 0 prints for all
    line = f"{units.count(outcome['tokens'])} tokens in {units.duration(outcome['seconds'])}"
    if (loss := outcome.get("val_loss")) is not None:
        line += f", held-out loss {loss:.4f} nats per token"
    if (bits := outcome.get("val_bits_per_byte")) is not None:
        line += f", {bits:.4f} bits per byte"
    say(line)
    for name, first in outcome.get("before", {}).items():
        label = name.removeprefix("val_").replace("_", " ")
        say(f"  held-out {label}: {first:.4g} before, {outcome[name]:.4g} after")
    if asked := outcome.get("questions"):
        print_changes(scores_from_rows(asked["before"], asked["after"]), console)
    say(f"report: penjing report {shlex.quote(run.out)}")
