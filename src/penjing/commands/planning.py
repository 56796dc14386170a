"""penjing plan: time, memory, data and cost of a run, before it starts and after it ends."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from penjing.base import config
from penjing.base.errors import UserError
from penjing.base.formatting import gibibytes
from penjing.base.markup import escape_markup, print_table
from penjing.commands.arguments import Recipe, Settings, console, resolved, say

if TYPE_CHECKING:
    from penjing.train.config import Run

EXIT_DOES_NOT_FIT = 3


class _PlanGroup(typer.core.TyperGroup):
    """`penjing plan pretrain` is `penjing plan run pretrain`: a word that is not a subcommand of `plan` is a recipe."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            args = ["run", *args]
        return super().resolve_command(ctx, args)


app = typer.Typer(
    no_args_is_help=True, cls=_PlanGroup, help="Plan a run: time, memory, data, cost. Compare plans with results."
)

Planned = Annotated[
    str, typer.Argument(metavar="RECIPE|FILE.toml|config.json", help="What to plan; a Hugging Face model too.")
]
Gpu = Annotated[str, typer.Option(help="A GPU by name, such as 'RTX 3090'; empty: this machine.")]
Gpus = Annotated[int, typer.Option(help="Number of GPUs.", min=1)]
Strategy = Annotated[str, typer.Option(help="Parallelism, as parallel.strategy; empty: that of the settings.")]
Nodes = Annotated[int, typer.Option(help="Machines that the GPUs are in; 0: eight GPUs each.", min=0)]
Network = Annotated[float, typer.Option(help="Gbit/s between machines, of one; 0: an estimate.", min=0, max=1e6)]

Unique = Annotated[str, typer.Option(help="Unique tokens in the data, such as 1.2B.")]


@app.command("run")
def plan_run(
    recipe: Planned,
    settings: Settings = None,
    gpu: Gpu = "",
    gpus: Gpus = 1,
    strategy: Strategy = "",
    nodes: Nodes = 0,
    network: Network = 0.0,
    budget: Annotated[str, typer.Option(help="Limits: 3h, 24GB, 20CNY; several with commas.")] = "",
    tokens: Annotated[str, typer.Option(help="Training tokens, such as 10B; auto: compute-optimal.")] = "",
    unique: Unique = "",
    price: Annotated[str, typer.Option(help="Price of one device per hour, such as 2.5USD.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Print each formula with its numbers.")] = False,
    rough: Annotated[bool, typer.Option("--rough", help="Memory by formula (+-20 %), not by a trace: quick.")] = False,
) -> None:
    """Estimate a run on one page. With data.train and no --gpu, a few real steps are timed on this machine; with --gpu,
    the tokens of the files are estimated.

    Exit code 3 if it does not fit the GPU or the budget.

    [bold]Examples[/]
    penjing plan pretrain --gpu "RTX 3090"
    penjing plan pretrain model=26m data.train=corpus.jsonl
    penjing plan downloads/SmolLM2-135M/config.json --gpu A100 --gpus 2 --unique 1.2B
    """
    from penjing.planner.inputs import PlanOptions
    from penjing.planner.page import print_page
    from penjing.planner.report import make_report

    machines = {"gpu": gpu, "gpus": gpus, "nodes": nodes, "network": network}
    options = PlanOptions(**machines, budget=budget, tokens=tokens, unique=unique, price=price)  # type: ignore[arg-type]
    run = _planned(recipe, settings, strategy)
    if run.data.train and not gpu:
        unused = {"--tokens": tokens, "--unique": unique, "--gpus": gpus > 1, "--nodes": nodes, "--network": network}
        unused |= {"--strategy": strategy, "--explain": explain, "--rough": rough}
        if names := [name for name, given in unused.items() if given]:
            hint = "Add --gpu NAME, or max_steps=N."
            raise UserError("has no effect with data.train", where=", ".join(names), next_step=hint)
        _plan_measured(run, options, as_json)
        return
    page = make_report(recipe, run, options, trace=not rough)
    if as_json:
        console.print_json(data=asdict(page))
    else:
        print_page(page, console, explain=explain)
    if page.fits is False or page.over_budget:
        raise typer.Exit(EXIT_DOES_NOT_FIT)


def _plan_measured(run: Run, options: Any, as_json: bool) -> None:
    """The plan with steps timed on this machine."""
    from penjing.plan import cost
    from penjing.planner.report import over_budget
    from penjing.workflows.train import plan_only

    estimate = plan_only(run, Console(quiet=True) if as_json else console)
    seconds = estimate.predicted_seconds
    over = over_budget(options, seconds, estimate.predicted_peak_memory_bytes, estimate.machine)
    if as_json:
        console.print_json(data={**asdict(estimate), "over_budget": over})
    else:
        if options.price:
            hour = cost.read_money(options.price, "--price")
            say(f"  cost {cost.Money(hour.amount * seconds / 3600, hour.currency)} at {hour} an hour (--price)")
        for line in over:
            console.print(escape_markup("over budget", line, style="red"))
    if over:
        raise typer.Exit(EXIT_DOES_NOT_FIT)


def _planned(recipe: str, settings: list[str] | None, strategy: str) -> Run:
    """The run of a recipe or of a Hugging Face model."""
    from penjing.planner.report import is_external, read_external

    settings = [*(settings or []), *([f"parallel.strategy={strategy}"] if strategy else [])]
    if is_external(recipe):
        return read_external(Path(recipe), config.parse_overrides(settings))
    return resolved(recipe, settings)


@app.command("memory")
def plan_memory(
    recipe: Planned,
    settings: Settings = None,
    gpu: Gpu = "",
    gpus: Gpus = 1,
    strategy: Strategy = "",
    nodes: Nodes = 0,
    network: Network = 0.0,
    waterfall: Annotated[bool, typer.Option("--waterfall", help="Show the components of the peak.")] = False,
) -> None:
    """Trace a training step and show its peak memory. Exit code 3 if it does not fit.

    [bold]Example[/]
    penjing plan memory pretrain model=104m --gpu "RTX 3090" --waterfall
    """
    from penjing.planner.inputs import PlanOptions
    from penjing.planner.search import print_memory

    options = PlanOptions(gpu=gpu, gpus=gpus, nodes=nodes, network=network)
    if print_memory(_planned(recipe, settings, strategy), options, console, waterfall=waterfall) is False:
        raise typer.Exit(EXIT_DOES_NOT_FIT)


@app.command("dry-run")
def plan_dry_run(
    recipe: Planned, settings: Settings = None, gpus: Gpus = 8, strategy: Strategy = "fsdp2", nodes: Nodes = 0
) -> None:
    """Build and step a layout in this process, beside ranks that do not exist, and compare it with its plan.

    [bold]Example[/]
    penjing plan dry-run pretrain model=26m --gpus 64 --strategy fsdp2
    """
    from penjing.planner.dry_run import dry_run
    from penjing.planner.inputs import PlanOptions

    run = _planned(recipe, settings, strategy)
    figures = dry_run(run, PlanOptions(gpus=gpus, nodes=nodes).layout(run))
    rows = [(name, *map(gibibytes, sizes), f"{sizes[0] / sizes[1] - 1:+.1%}") for name, sizes in figures.items()]
    print_table(console, (f"rank 0 of {gpus}", "dry run>", "plan>", "difference>"), rows)


@app.command("search")
def plan_search(
    recipe: Planned,
    settings: Settings = None,
    fit: Annotated[str, typer.Option(help="Memory to fit into, such as 24GB; empty: the GPU's.")] = "",
    gpu: Gpu = "",
    gpus: Gpus = 1,
    strategy: Strategy = "",
    nodes: Nodes = 0,
    network: Network = 0.0,
    lengths: Annotated[str, typer.Option(help="Sequence lengths to try, such as 512,1024; empty: the run's.")] = "",
    every: Annotated[bool, typer.Option("--all", help="Show every traced configuration, not only the best.")] = False,
) -> None:
    """Trace micro-batch sizes, sequence lengths and activation checkpointing, and show the best that fit.

    [bold]Example[/]
    penjing plan search pretrain model=104m --gpu "RTX 3090" --fit 24GB
    """
    from penjing.planner.inputs import PlanOptions
    from penjing.planner.search import search

    rows = config.convert(tuple[int, ...], lengths, "--lengths")
    options = PlanOptions(gpu=gpu, gpus=gpus, nodes=nodes, network=network)
    if not search(_planned(recipe, settings, strategy), options, fit, rows, console, every=every):
        raise typer.Exit(EXIT_DOES_NOT_FIT)


@app.command("tokens")
def plan_tokens(
    params: Annotated[str, typer.Option(help="All parameters of the model, such as 64M.")],
    unique: Unique = "",
    hours: Annotated[str, typer.Option(help="Training time, such as 2h or 90min.")] = "",
    gpu: Gpu = "",
    gpus: Gpus = 1,
) -> None:
    """Compute-optimal tokens for a model size, the value of repeated epochs, and the tokens that a time allows.

    [bold]Example[/]
    penjing plan tokens --params 64M --unique 1.2B --hours 2 --gpu "RTX 3090"
    """
    from penjing.planner.counts import print_tokens

    print_tokens(params, unique, hours, gpu, gpus, console)


@app.command("estimate")
def plan_estimate(
    params: Annotated[str, typer.Option(help="Parameters of the model, such as 26M.")],
    tokens: Annotated[str, typer.Option(help="Training tokens, such as 10B.")],
    tflops: Annotated[float, typer.Option(help="The GPU's peak TFLOPS, for the formula.", min=0, max=1e6)] = 0.0,
    gpu: Gpu = "",
) -> None:
    """Compare the common formula 6 N D / peak with our estimate.

    [bold]Example[/]
    penjing plan estimate --params 26M --tokens 10B --tflops 75
    """
    from penjing.planner.counts import print_estimate

    print_estimate(params, tokens, tflops, gpu, console)


@app.command("forecast")
def plan_forecast(
    recipe: Recipe,
    settings: Settings = None,
    budget: Annotated[str, typer.Option(help="Approximate time for the small runs.")] = "30min",
) -> None:
    """Predict a run's loss: train a few tiny models on the same data, and fit a scaling law.

    [bold]Example[/]
    penjing plan forecast pretrain model=tiny data.train=corpus.jsonl max_steps=5000 --budget 20min
    """
    from penjing.workflows.forecast import forecast_loss

    forecast_loss(resolved(recipe, settings), budget, console)


@app.command("verify")
def plan_verify(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, finished or stopped.")],
) -> None:
    """Compare the plan of a run with its results: predicted and actual.

    [bold]Example[/]
    penjing plan verify runs/quickstart
    """
    from penjing.planner.history import verify

    verify(run, console)


@app.command("history")
def plan_history(last: Annotated[int, typer.Option(help="Runs to show.", min=1)] = 20) -> None:
    """Show how accurate the plans on this machine have been.

    [bold]Example[/]
    penjing plan history --last 5
    """
    from penjing.planner.history import print_history

    print_history(console, last)


@app.command("profile")
def plan_profile(
    recipe: Annotated[str, typer.Argument(metavar="[RECIPE]", help="Also measure the matmul shapes of this run.")] = "",
    settings: Settings = None,
    seconds: Annotated[float, typer.Option(help="Approximate time to measure.", min=1, max=86_400)] = 60.0,
) -> None:
    """Measure this machine once: matmul, attention, copies, kernel launches. Plans then use it (level L1).

    [bold]Examples[/]
    penjing plan profile
    penjing plan profile pretrain model=64m --seconds 20
    """
    from penjing.planner.profile import profile

    profile(resolved(recipe, settings) if recipe else None, seconds, console)
