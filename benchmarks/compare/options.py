"""Options of both comparisons."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penjing.base import config
from penjing.base.errors import UserError

Baseline = Annotated[str, typer.Option(help="Another program; several with commas; all, or none.")]
Trials = Annotated[int, typer.Option(help="Processes of each program; 0 = 3, with --quick 1.", min=0)]
Threads = Annotated[int, typer.Option(help="CPU threads; 0 = physical cores.", min=0)]
Out = Annotated[Path | None, typer.Option(help="JSON file, written after each trial.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the trials in --out, or add to them.")]


def numbers(text: str, where: str) -> tuple[int, ...]:
    """The numbers between commas. Raises UserError for one below 1."""
    numbers: tuple[int, ...] = config.convert(tuple[int, ...], text, where)
    if any(number < 1 for number in numbers):
        raise UserError("not above zero", where=where, got=min(numbers))
    return numbers
