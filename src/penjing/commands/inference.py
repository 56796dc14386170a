"""penjing chat, serve, generate and eval: use a trained model."""

import os
from pathlib import Path
from typing import Annotated

import typer

from penjing.base.errors import UserError
from penjing.commands import arguments as given
from penjing.commands.arguments import console, say, words

KEY = "PENJING_API_KEY"


def chat(
    run: given.RunPath,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Ask once, print the answer, and exit.")] = None,
    temperature: given.Temperature = 0.0,
    top_p: given.TopP = 1.0,
    max_tokens: given.MaxTokens = 200,
    seed: given.SampleSeed = 0,
    adapter: given.Adapters = None,
    think: given.Thinking = None,
    tools: given.ToolNames = "",
    device: given.DeviceName = "auto",
    dtype: given.DtypeName = "auto",
    weights: given.WeightsName = "auto",
) -> None:
    """Chat with a model. A model that was only pretrained continues your text instead of answering.

    /help lists the commands of a conversation; Ctrl-C stops an answer, Ctrl-D ends.

    [bold]Examples[/]
    penjing chat runs/quickstart
    penjing chat runs/quickstart --prompt "Tell a story about Tom and a kite."
    penjing chat runs/sft --adapter runs/lora --adapter other=downloads/adapter
    penjing chat runs/agent --tools calculator,python --think
    """
    from penjing.agent_tools.box import Toolbox
    from penjing.commands.chat import chat as start_chat
    from penjing.infer.conversation import GenerationOptions
    from penjing.infer.sample import Sampling

    options = GenerationOptions(
        sampling=Sampling(temperature=temperature, top_p=top_p),
        max_tokens=max_tokens,
        seed=seed,
        thinking=think,
        toolbox=Toolbox(words(tools)),
    )
    start_chat(
        run, console, options, prompt=prompt, adapters=adapter or (), device=device, dtype=dtype, weights=weights
    )


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
    slots: Annotated[
        int, typer.Option(help="Answers written at once by each model; others wait.", min=1, max=1024)
    ] = 16,
    max_tokens: given.MaxTokens = 1024,
    context: Annotated[
        int, typer.Option(help="Longest prompt with its answer, in tokens; 0: as long as in training.", min=0)
    ] = 0,
    weights: given.WeightsName = "auto",
    device: given.DeviceName = "auto",
    dtype: given.DtypeName = "auto",
) -> None:
    """Serve models: OpenAI's API at /v1, and a chat page at /. Listens for this machine only, unless told otherwise.

    It prints both addresses, and a first request for the API.

    [bold]Examples[/]
    penjing serve runs/quickstart
    penjing serve runs/pretrain@1200 runs/sft runs/dpo --tools calculator
    penjing serve runs/sft --adapter mine=runs/lora
    PENJING_API_KEY=... penjing serve runs/sft --host 0.0.0.0
    """
    from penjing.workflows.serve import start
    from penjing.workflows.serve_models import ServeOptions

    if api_key and KEY in os.environ and api_key != os.environ[KEY]:
        raise UserError("is not what --api-key says", where=KEY)
    options = ServeOptions(
        host=host,
        port=port,
        key=api_key or os.environ.get(KEY, ""),
        adapters=tuple(adapter or ()),
        tools=tuple(words(tools)),
        slots=slots,
        max_tokens=max_tokens,
        context=context,
        weights=weights,
        device=device,
        dtype=dtype,
    )
    start(runs, options, console)


def generate(
    run: given.RunPath,
    prompts: Annotated[
        list[Path], typer.Option(help="Conversations that end with a question or an answer; may be given again.")
    ],
    out: Annotated[Path, typer.Option(help="JSONL file to write; the same command again continues it.")],
    answers: Annotated[int, typer.Option(help="Answers per prompt; all are in memory at once.", min=1, max=10_000)] = 1,
    temperature: given.Temperature = 0.0,
    top_p: given.TopP = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from the k likeliest tokens; 0 = all.", min=0)] = 0,
    max_tokens: given.MaxTokens = 256,
    seed: given.SampleSeed = 0,
    thinking: given.Thinking = None,
    keep_cut: Annotated[bool, typer.Option("--keep-cut", help="Keep answers truncated at --max-tokens.")] = False,
    every_turn: Annotated[
        bool, typer.Option("--every-turn", help="Answer every question of a conversation in turn, not only the last.")
    ] = False,
    device: given.DeviceName = "auto",
    dtype: given.DtypeName = "auto",
    weights: given.WeightsName = "auto",
) -> None:
    """Answer a file of prompts. The output is a file of conversations, on which another model can be trained.

    [bold]Examples[/]
    penjing generate runs/large --prompts prompts.jsonl --out answers.jsonl
    penjing generate runs/large --prompts prompts.jsonl --out answers.jsonl --answers 4 --temperature 0.8 --seed 1
    """
    from penjing.workflows.generate import AnswerOptions, generate_file

    options = AnswerOptions(
        answers=answers,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        max_tokens=max_tokens,
        seed=seed,
        thinking="auto" if thinking is None else "on" if thinking else "off",
        cut="keep" if keep_cut else "drop",
        turns="all" if every_turn else "last",
        weights=weights,
    )
    done = generate_file(run, prompts, out, console, options, device=device, dtype=dtype)
    say(f"{out}: {done.written:,} conversations; {done.left_out:,} answers dropped (truncated, empty, or too long)")
    if done.not_asked:
        say(f"  {done.not_asked:,} conversations of the prompts have an empty answer and were not asked")


ASKED, SHOWN = "What is asked", "What is shown"  # groups in the help of `eval`


def evaluate(
    runs: Annotated[
        list[Path] | None, typer.Argument(metavar="RUN...", help="As of `penjing chat`; several are compared.")
    ] = None,
    tasks: Annotated[
        str, typer.Option(rich_help_panel=ASKED, metavar="NAME,...", help="Tasks to score; --list shows them.")
    ] = "",
    data: Annotated[
        Path | None, typer.Option(rich_help_panel=ASKED, metavar="DIR", help="Folder with the files of the tasks.")
    ] = None,
    questions: Annotated[
        Path | None, typer.Option(rich_help_panel=ASKED, help="JSONL of conversations with `answer`; exact match.")
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            rich_help_panel=ASKED,
            help="Text: bits per byte, beside zstd -19, and perplexity by position; several: each, and all.",
        ),
    ] = None,
    shots: Annotated[
        int | None, typer.Option(rich_help_panel=ASKED, min=0, help="Solved examples before each request.")
    ] = None,
    limit: Annotated[
        int, typer.Option(rich_help_panel=ASKED, min=0, help="Requests of each task, spread over all; 0: all.")
    ] = 0,
    think: given.Thinking = None,
    max_tokens: Annotated[
        int, typer.Option(min=0, help="Most new tokens of an answer; 0: 64, of a story 160, with --think 192 more.")
    ] = 0,
    device: given.DeviceName = "auto",
    dtype: given.DtypeName = "auto",
    details: Annotated[
        bool, typer.Option("--details", rich_help_panel=SHOWN, help="Also every kind of request, such as a paradigm.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", rich_help_panel=SHOWN, help="Print one JSON object.")] = False,
    show_list: Annotated[
        bool, typer.Option("--list", rich_help_panel=SHOWN, help="List the tasks, and the files that they read.")
    ] = False,
) -> None:
    """Evaluate models on tasks with known answers, or on text; several models beside each other.

    [bold]Examples[/]
    penjing eval runs/quickstart --questions runs/quickstart/data/eval.jsonl
    penjing eval runs/quickstart --text my.txt
    penjing eval runs/base runs/chat --tasks blimp,arc_easy --data eval
    """
    from penjing.eval.suite import Suite
    from penjing.workflows import evaluate

    if show_list:
        evaluate.print_tasks(console)
        return
    names = [*words(tasks), *(["questions"] if questions else [])]
    suite = Suite(names=names, data=data, questions=questions, shots=shots, limit=limit)
    if not runs:
        raise UserError("no model is given", wanted="a run's folder, such as runs/quickstart")
    options = evaluate.EvalOptions(
        thinking=think, max_tokens=max_tokens, device=device, dtype=dtype, details=details, as_json=as_json
    )
    evaluate.evaluate(runs, suite, text or (), console, options)
