"""Resolve the options of train.py and decode.py, run the comparison, and save the record after each trial."""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from compare import BENCHMARKS
from compare.comparison import BASELINES, BenchmarkRequest, Options, RunTrial, TrialComparison
from compare.resume import check_writable, has_trials, read_earlier
from compare.trial_process import run_trial
from penjing import cli
from penjing.base import config
from penjing.base.config import Layer
from penjing.base.errors import UserError
from penjing.base.files import write_json
from penjing.base.registry import look_up
from penjing.commands.arguments import console, say
from penjing.train.config import Run
from penjing.workflows.train import resolve_run


def run_comparison(
    console: Console,
    *,
    method: str,
    run: Path | None = None,
    data: Path | None = None,
    baseline: str,
    quick: bool,
    settings: Sequence[str] = (),
    save: Callable[[dict[str, Any]], None] = lambda record: None,
    earlier: Path | None = None,
    trial: RunTrial = run_trial,
    **options: Any,
) -> dict[str, Any]:
    """The record of a comparison. method: default pretrain, with a run dpo. earlier: file of a record to continue, if
    it exists. options: see `Options`."""
    if run is not None and "=" in str(run) and not run.exists():  # without RUN the first setting takes its place
        run, settings = None, (str(run), *settings)
    method = method or ("pretrain" if run is None else "dpo")
    benchmark = look_up(BENCHMARKS, method, what="method")()
    overrides = config.parse_overrides(list(settings))

    def resolve(layer: Layer) -> Run:
        return resolve_run(method, layer, overrides)

    request = BenchmarkRequest(
        options=Options(baselines=baselines_of(method, baseline), **options),
        resolve=resolve,
        overrides=overrides,
        start=run,
        data=data,
        quick=quick,
    )
    record = read_earlier(earlier) if earlier is not None else None
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        prepared = benchmark.prepare(work, request)
        for line in prepared.lines:
            console.print(line, highlight=False)
        return TrialComparison(
            benchmark=benchmark,
            prepared=prepared,
            folder=work / "trials",
            console=console,
            run_trial=trial,
            save=save,
            earlier=record,
        ).run()


def baselines_of(method: str, names: str) -> tuple[str, ...]:
    """names: comma-separated, `all` or `none`. Raises UserError for an unknown one."""
    known = BASELINES.get(method, {})
    baselines = {"all": tuple(known), "none": ()}.get(names, tuple(names.split(",")))
    for name in baselines:
        if name not in known:
            raise UserError("no such baseline", where="--baseline", got=name, wanted=", ".join(["all", "none", *known]))
    return baselines


def save_record(record: dict[str, Any], out: Path, command: Sequence[str]) -> bool:
    """Write the record so far; returns whether it has a trial. Before the first trial an existing `out` is kept, and
    only checked to be writable. Raises DiskError."""
    if has_trials(record) or not out.exists():
        write(record, out, command)
    else:
        check_writable(out)
    return has_trials(record)


def compare(out: Path | None, resume: bool, **options: Any) -> None:
    """Run a comparison and write its record after each trial. options: see `run_comparison`."""
    if resume and out is None:
        raise UserError("there is no file to continue from", where="--resume", wanted="--out FILE")
    command, has_trials = ["python", *sys.argv], False

    def save(record: dict[str, Any]) -> None:
        nonlocal has_trials
        has_trials = out is not None and save_record(record, out, command)

    try:
        record = run_comparison(console, save=save, earlier=out if resume else None, **options)
    except KeyboardInterrupt:
        if has_trials:
            say(f"{out}: the finished trials; `--resume` continues")
        raise
    if out is not None:
        write(record, out, command)
        say(f"{out}: every trial's figures")


def main(command: Callable[..., None]) -> None:
    """Run a script of one command, whose errors look like those of `penjing`."""
    program = typer.Typer(
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    program.command()(command)
    cli.main(program)


def write(record: Mapping[str, Any], out: Path, command: Sequence[str]) -> None:
    """Write the record to a file, with the command that made it."""
    write_json(out, {"command": shlex.join(command), **record})
