"""penjing bench: speed and memory of this machine, measured and predicted."""

from pathlib import Path
from typing import Annotated

import typer

from penjing.base import config
from penjing.base.errors import UserError
from penjing.commands.arguments import Recipe, Settings, console, resolved

app = typer.Typer(
    no_args_is_help=True,
    help="Measure speed and memory of this machine. Comparisons with other programs: benchmarks/ of the source.",
)


@app.command("scale")
def bench_scale(
    recipe: Recipe,
    settings: Settings = None,
    ranks: Annotated[str, typer.Option(help="Numbers of processes, each compared with one.")] = "2",
    strategies: Annotated[str, typer.Option(help="Strategies to compare, as parallel.strategy.")] = "ddp",
    weak: Annotated[bool, typer.Option("--weak", help="Weak scaling: each rank has the batch of one alone.")] = False,
    steps: Annotated[int, typer.Option(help="Steps of each training; the first two do not count.", min=4)] = 6,
    rounds: Annotated[int, typer.Option(help="Trainings of each; the median speed-up counts.", min=1)] = 3,
    out: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
) -> None:
    """Tokens per second of a training on one device and on several, in turn: the speed-up of each strategy.

    On a CPU each process stays on a core of its own.

    [bold]Example[/]

    penjing bench scale pretrain model=26m batch.size=8 batch.micro_size=2 data.seq_len=256 --strategies ddp,fsdp2
    """
    from penjing.workflows.bench_scale import ScaleOptions, measure_scaling

    options = ScaleOptions(
        ranks=numbers(ranks, "--ranks"),
        strategies=config.convert(tuple[str, ...], strategies, "--strategies"),
        weak=weak,
        batch_size=resolved(recipe, settings).batch.size,
        steps=steps,
        rounds=rounds,
    )
    measure_scaling(recipe, settings or [], options, out, console)


@app.command("matmul", hidden=True, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@app.command("sweep", hidden=True, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@app.command("train", hidden=True, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@app.command("decode", hidden=True, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def moved(context: typer.Context) -> None:
    name = context.info_name
    command = "penjing plan profile`." if name == "matmul" else f"python benchmarks/{name}.py` of penjing's source."
    raise UserError("moved", where=f"bench {name}", next_step=f"Run `{command}")


def numbers(text: str, where: str) -> tuple[int, ...]:
    numbers: tuple[int, ...] = config.convert(tuple[int, ...], text, where)
    if any(number < 1 for number in numbers):
        raise UserError("not above zero", where=where, got=min(numbers))
    return numbers
