"""Generate with the same model in penjing and in other engines: `python benchmarks/decode.py --help`."""

from __future__ import annotations

from typing import Annotated

import typer
from compare.options import Baseline, Out, Resume, Threads, Trials
from compare.run import compare, main


def decode(
    baseline: Baseline = "all",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer tokens, one trial each.")] = False,
    trials: Trials = 0,
    threads: Threads = 0,
    out: Out = None,
    resume: Resume = False,
) -> None:
    """Generate with the same model in penjing and in other engines: time to first token, tokens/s by batch, memory.

    Two models with random weights, of 26M and 1M parameters, on the CPU; penjing also through its own server.

    [bold]Examples[/]

    python benchmarks/decode.py --quick

    python benchmarks/decode.py --baseline llama.cpp-f16,llama.cpp-q8_0 --out results/decode.json
    """
    compare(
        out,
        resume,
        method="decode",
        baseline=baseline,
        quick=quick,
        trials=trials or (1 if quick else 3),
        threads=threads,
    )


if __name__ == "__main__":
    main(decode)
