"""penjing show, doctor, report, watch and ui."""

import io
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from penjing.base import config
from penjing.base.code_help import summary
from penjing.base.errors import UserError, suggest
from penjing.base.files import read_parsed
from penjing.base.markup import print_table
from penjing.base.registry import look_up
from penjing.commands.arguments import Settings, console, resolved, say


def show(
    what: Annotated[str, typer.Argument(help="A recipe, a run's folder, `models` or `recipes`.")],
    settings: Settings = None,
) -> None:
    """Print the settings of a recipe and what they mean, all recipes, the known model shapes, or a run's results.

    [bold]Examples[/]
    penjing show pretrain model=64m
    penjing show recipes
    penjing show models
    penjing show runs/quickstart
    """
    from penjing.recipes import RECIPES
    from penjing.track.run_dir import RunDir, stage_folder
    from penjing.track.run_record import RunRecord

    is_recipe = what in RECIPES
    if settings and not is_recipe:
        raise UserError("takes no settings", where=what, wanted="a recipe", next_step=suggest(what, RECIPES))
    if what == "models":
        _print_models()
    elif what == "recipes":
        print_table(console, (), ((name, summary(look_up(RECIPES, name, what="recipe"))) for name in RECIPES))
    elif is_recipe:
        run = resolved(what, settings)
        _print_file(config.to_toml(run, run.decisions, explain=True))
    elif (Path(what) / "quickstart.json").is_file():
        from penjing.report.load_runs import read_record
        from penjing.report.terminal import print_summary

        print_summary(read_record([Path(what)]), console)
    elif Path(what).exists():
        folder = RunDir(stage_folder(Path(what)))
        _print_file(read_parsed(folder.settings, "text", str))
        if outcome := RunRecord(folder.path).outcome:
            _print_file(json.dumps(outcome.raw, ensure_ascii=False, indent=2) + "\n")
    else:
        raise UserError(
            f"nothing is called {what!r}",
            wanted="a recipe, a run's folder, models or recipes",
            next_step=suggest(what, [*RECIPES, "models", "recipes"]),
        )


def _print_file(text: str) -> None:
    console.print(text, highlight=False, end="", soft_wrap=True)


def _print_models() -> None:
    from penjing.model import presets
    from penjing.model.config import ModelConfig
    from penjing.plan.flops import parameters

    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    widths = ("intermediate_size", "vocab_size")
    rows = []
    for name in presets.names():
        shape = config.resolve(ModelConfig, {"preset": name})
        count = parameters(shape)
        active = f"{count.active:,}" if shape.is_mixture else ""
        counts = (f"{count.total:,}", active, f"{count.without_embedding:,}", shape.architecture)
        rows.append((name, *counts, *(getattr(shape, size) for size in (*sizes, *widths))))
    numbers = ("width>", "layers>", "heads>", "kv>", "head>", "mlp>", "vocabulary>")
    print_table(console, ("name", "parameters>", "active>", "without embedding>", "layout", *numbers), rows)
    console.print("ladder-SIZE is any size from 500k to 3b.")


def ui(
    folder: Annotated[
        Path, typer.Argument(metavar="[FOLDER]", help="Its runs are shown; paths stay inside it.")
    ] = Path("."),
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any free one.", min=0, max=65535)] = 7861,
) -> None:
    """Open one page for everything: plan, data, training, runs with live curves, chat.

    The page needs the address that is printed: its token lets it start programs. Runs go on without the page.

    [bold]Examples[/]
    penjing ui
    penjing ui ~/work --port 9000
    """
    from penjing.ui.start import start

    start(folder, host, port, console)


def doctor(
    run: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="A run's or quickstart's folder, to check instead.")
    ] = None,
) -> None:
    """Check this machine: devices, matmul speed, and missing packages.

    With RUN: check every byte that a resumed run would read, and show where it resumes. Changes nothing.

    [bold]Examples[/]
    penjing doctor
    penjing doctor runs/quickstart
    """
    if run is not None:
        from penjing.workflows.check_run import check_runs

        raise typer.Exit(0 if check_runs(run, console) else 1)
    from penjing.workflows.check_machine import check_machine

    check_machine(console)


def watch(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, or of a quickstart.")],
    seconds: Annotated[float, typer.Option(min=0.1, max=86_400, help="Time between two looks at the files.")] = 1.0,
) -> None:
    """Watch runs train: loss, speed, memory, time left beside the plan, newest samples and incidents.

    It reads the folders that other processes write, so it works over ssh, and ends when the runs do; Ctrl-C leaves it
    and stops no run. A run that is over, or a pipe as output: they are printed once.

    [bold]Examples[/]
    penjing watch runs/quickstart
    penjing watch runs/dpo runs/dpo-ipo
    """
    from penjing.workflows import watch as live

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the model's texts may hold what the terminal does not show
    live.watch(runs, console, seconds=seconds)


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders of runs or quickstarts, finished or not.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="File to write; else report.html in the one RUN, or here for several.")
    ] = None,
) -> None:
    """Draw a run, or compare several, on one HTML page: curves, settings, predicted and actual, answers, samples.

    The page is one file that needs no network.

    [bold]Examples[/]
    penjing report runs/quickstart
    penjing report runs/dpo runs/dpo-ipo runs/dpo-lora --out dpo.html
    """
    from penjing.workflows.report import write_page

    _, page = write_page(runs, out)
    say(f"report: {page}")
