"""penjing launch."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from penjing.commands.arguments import Nodes, Recipe, Settings, say

app = typer.Typer(no_args_is_help=True, help="Write the file with which a cluster trains, and submit it.")

PerNode = Annotated[int, typer.Option(help="GPUs of each machine; with compute.device=cpu processes.", min=1)]
Lines = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="KEY=VALUE", help="A further line, such as partition=gpu; may be given again."),
]
Submit = Annotated[bool, typer.Option("--submit", help="Also submit it.")]


@app.command()
def slurm(
    recipe: Recipe,
    settings: Settings = None,
    file: Annotated[Path, typer.Option(help="The file to write.")] = Path("penjing.sbatch"),
    nnodes: Nodes = 1,
    gpus: PerNode = 1,
    option: Lines = None,
    submit: Submit = False,
) -> None:
    """A batch script of Slurm. Before its time is over, the run saves and the job is queued again.

    [bold]Examples[/]
    penjing launch slurm pretrain model=104m data.train=corpus.jsonl --nnodes 2 --gpus 8 --option time=8:00:00
    """
    from penjing.workflows.cluster_files import ClusterJob, write_and_submit

    job = ClusterJob(words=(recipe, *(settings or ())), nnodes=nnodes, gpus=gpus, options=tuple(option or ()))
    write_and_submit(file, job.slurm(), ["sbatch"] if submit else None)
    say(f"wrote {file}" + ("" if submit else f": sbatch {shlex.quote(str(file))}"))


@app.command()
def skypilot(
    recipe: Recipe,
    settings: Settings = None,
    file: Annotated[Path, typer.Option(help="The file to write.")] = Path("penjing.sky.yaml"),
    gpu: Annotated[str, typer.Option(help="SkyPilot's name of the GPU.")] = "H100",
    nnodes: Nodes = 1,
    gpus: PerNode = 1,
    option: Lines = None,
    submit: Submit = False,
) -> None:
    """A task of SkyPilot, as a managed job: machines that are taken away are replaced, and the run continues.

    [bold]Examples[/]
    penjing launch skypilot pretrain model=104m data.train=corpus.jsonl --gpu A100 --gpus 8 --option use_spot=true
    """
    from penjing.workflows.cluster_files import ClusterJob, write_and_submit

    job = ClusterJob(words=(recipe, *(settings or ())), nnodes=nnodes, gpus=gpus, options=tuple(option or ()))
    write_and_submit(file, job.skypilot(gpu), ["sky", "jobs", "launch", "--yes"] if submit else None)
    say(f"wrote {file}" + ("" if submit else f": sky jobs launch {shlex.quote(str(file))}"))
