"""penjing serve: the verb. Imports no torch; workflows/serve.py does the work."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from penjing.base.errors import UserError
from penjing.commands import arguments as given
from penjing.commands.arguments import console, words

KEY = "PENJING_API_KEY"


def serve(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...",
            help="Runs, checkpoints (RUN@STEP), Hugging Face directories or hub names; NAME=RUN names one.",
        ),
    ],
    host: Annotated[
        str, typer.Option(help="Address to listen on; one that others can reach needs a key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any free one.", min=0, max=65535)] = 8000,
    api_key: Annotated[
        str, typer.Option(help=f"Clients must send it. Better set {KEY}: arguments are seen by all who list processes.")
    ] = "",
    adapter: given.Adapters = None,
    tools: given.ToolNames = "",
    table: given.ToolTable = "",
    slots: Annotated[
        int, typer.Option(help="Answers written at once by each model; others wait.", min=1, max=1024)
    ] = 16,
    max_tokens: given.MaxTokens = 1024,
    weights: given.WeightsName = "auto",
    device: given.DeviceName = "auto",
    dtype: given.DtypeName = "auto",
) -> None:
    """Serve models: OpenAI's API at /v1, and a chat page at /. Listens for this machine only, unless told otherwise.

    [bold]Examples[/]
    penjing serve runs/quickstart
    penjing serve runs/pretrain@1200 runs/sft runs/dpo --tools calculator,dates
    penjing serve runs/sft --adapter mine=runs/lora
    PENJING_API_KEY=... penjing serve runs/sft --host 0.0.0.0

    [bold]Ask it[/]
    curl http://127.0.0.1:8000/v1/completions --json '{"model": "quickstart", "prompt": "Tom"}'
    """
    from penjing.workflows.serve import ServeOptions, start

    if api_key and KEY in os.environ and api_key != os.environ[KEY]:
        raise UserError("is not what --api-key says", where=KEY)
    options = ServeOptions(
        host=host,
        port=port,
        key=api_key or os.environ.get(KEY, ""),
        adapters=tuple(adapter or ()),
        tools=tuple(words(tools)),
        table=table,
        slots=slots,
        max_tokens=max_tokens,
        weights=weights,
        device=device,
        dtype=dtype,
    )
    start(runs, options, console)
