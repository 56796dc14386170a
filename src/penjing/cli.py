"""The command line: verbs only. Each reads its arguments, calls one function, and prints what came of it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from penjing import __version__
from penjing.base import config
from penjing.base import formatting as units
from penjing.base.errors import EXIT_INTERRUPTED, EXIT_USER_ERROR, UserError, suggest
from penjing.base.markup import marked
from penjing.base.process_info import first_of_launch
from penjing.commands import benchmarks

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Make a small language model from nothing, on hardware you own. 盆景\n\n"
    "Begin with [bold]penjing quickstart[/]: a model that answers, in a few minutes, on a CPU.",
)
data_app = typer.Typer(no_args_is_help=True, help="Get, make, look at and tokenize text.")
tokenizer_app = typer.Typer(no_args_is_help=True, help="Train a tokenizer, or look at how one cuts text.")
export_app = typer.Typer(no_args_is_help=True, help="Hand a model to other programs, checked against our own logits.")
adapter_app = typer.Typer(no_args_is_help=True, help="Merge LoRA adapters into their base, or hand them out.")


class _PlanGroup(typer.core.TyperGroup):
    """`penjing plan pretrain` is `penjing plan run pretrain`: what is no verb of its own is something to train."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            args = ["run", *args]
        return super().resolve_command(ctx, args)


plan_app = typer.Typer(
    no_args_is_help=True, cls=_PlanGroup, help="Know what a run will take: time, memory, data, money. Trains nothing."
)
app.add_typer(data_app, name="data")
app.add_typer(tokenizer_app, name="tokenizer")
app.add_typer(export_app, name="export")
app.add_typer(adapter_app, name="adapter")
app.add_typer(benchmarks.app, name="bench")
app.add_typer(plan_app, name="plan")
# A pipe or a file has no width of its own; 80 columns would cut the tables.
# What paths, settings and errors say is never markup.
console = Console(width=None if sys.stdout.isatty() else 160, markup=False)

Settings = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Settings, such as batch.rows=32; `penjing show RECIPE` lists them."),
]
RunPath = Annotated[
    Path,
    typer.Argument(
        metavar="RUN",
        help="A run's folder, such as runs/quickstart; a Hugging Face directory or hub name; a MiniMind .pth file.",
    ),
]

DeviceName = Annotated[str, typer.Option(help="auto (a GPU where there is one), cpu, cuda, cuda:0 or mps.")]
DtypeName = Annotated[
    str, typer.Option(help="auto, bfloat16, float16 or float32; auto: as training on a GPU, float32 on a CPU.")
]


@app.command()
def quickstart(
    data: Annotated[
        str, typer.Option(help="toyworld, a name of `penjing data list`, or files, separated by commas.")
    ] = "toyworld",
    out: Annotated[Path, typer.Option(help="Folder of everything that is made.")] = Path("runs/quickstart"),
    fresh: Annotated[bool, typer.Option("--fresh", help="Start anew, forgetting what is in the folder.")] = False,
    short: Annotated[bool, typer.Option("--short", help="A few steps only: shows that everything works here.")] = False,
    settings: Settings = None,
) -> None:
    """From raw text to a model that answers: data, tokenizer, pretraining, SFT, evaluation, export, report.

    Killed anywhere, the same command continues; finished, it shows what it found.

    [bold]Examples[/]

    penjing quickstart

    penjing quickstart --data my.txt --out runs/mine

    penjing quickstart --data sanguo steps=1000
    """
    from penjing.commands.quickstart import Settings as Asked
    from penjing.commands.quickstart import quickstart as begin

    begin(Asked(data=data, out=out, fresh=fresh, short=short, settings=tuple(settings or ())), console)


@app.command()
def train(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE|FILE.toml", help="pretrain, sft, lora, or a TOML file of settings.")
    ],
    settings: Settings = None,
    allow_change: Annotated[
        list[str] | None,
        typer.Option(metavar="FIELD", help="Continue although this differs from before: a setting, data, tokenizer."),
    ] = None,
) -> None:
    """Train a model. The same command again continues where it stopped.

    Settings come from the recipe, then the file, then key=value on this line. On several devices:
    torchrun --nproc_per_node 2 -m penjing train ...

    [bold]Examples[/]

    penjing train pretrain model=26m data.train=corpus.jsonl

    penjing train pretrain model=tiny model.num_layers=6 data.train=my.txt steps=300 out=runs/six

    penjing train sft start=runs/six data.train=chats.jsonl out=runs/six-sft

    penjing train lora start=runs/six data.train=chats.jsonl lora.rank=8 out=runs/six-lora

    penjing train sft start=downloads/SmolLM2-135M data.train=chats.jsonl out=runs/smol-sft

    penjing train runs/six/run.toml out=runs/again
    """
    from penjing.commands.known_questions import print_changes
    from penjing.commands.train import execute

    outcome = execute(_resolved(recipe, settings), console, allow_change or ())
    if os.environ.get("RANK", "0") != "0":
        return  # the first of several says it for all
    loss = outcome.get("validation_loss_nats_per_token")
    judged = f", held-out loss {loss:.4f} nats per token" if loss is not None else ""
    bits = outcome.get("validation_bits_per_byte")
    judged += f", {bits:.4f} bits per byte" if bits is not None else ""
    _say(f"{units.count(outcome['tokens'])} tokens in {units.duration(outcome['seconds'])}{judged}")
    for name, first in outcome.get("before", {}).items():
        label = name.removeprefix("validation_").replace("_", " ")
        _say(f"  held-out {label}: {first:.4g} before, {outcome[name]:.4g} after")
    if outcome.get("questions"):
        print_changes(outcome["questions"], console)


Planned = Annotated[
    str, typer.Argument(metavar="RECIPE|FILE.toml|config.json", help="What would be trained; a Hugging Face model too.")
]
Gpu = Annotated[str, typer.Option(help="A card by name, such as 'RTX 3090'; empty: this machine.")]
Gpus = Annotated[int, typer.Option(help="How many of them.")]
Engine = Annotated[str, typer.Option(help="How several share the work: ddp, zero1, zero2, zero3, fsdp.")]


@plan_app.command("run")
def plan_run(
    recipe: Planned,
    settings: Settings = None,
    gpu: Gpu = "",
    gpus: Gpus = 1,
    engine: Engine = "",
    budget: Annotated[str, typer.Option(help="Most it may take: 3h, 24GB, 20CNY; several with commas.")] = "",
    tokens: Annotated[str, typer.Option(help="To train on, such as 10B; auto: compute-optimal.")] = "",
    unique: Annotated[str, typer.Option(help="Different tokens that there are, such as 1.2B.")] = "",
    price: Annotated[str, typer.Option(help="Of one device for an hour, such as 2.5USD.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Print each formula with its numbers.")] = False,
) -> None:
    """The whole bill on one page. With data.train and no --gpu, a few real steps are timed on this machine.

    Exit code 3 if it will not fit the card, or the budget.

    [bold]Examples[/]

    penjing plan pretrain --gpu "RTX 3090"

    penjing plan pretrain model=26m data.train=corpus.jsonl

    penjing plan downloads/SmolLM2-135M/config.json --gpu A100 --gpus 2 --unique 1.2B
    """
    from penjing.commands.plan import EXIT_DOES_NOT_FIT, is_foreign, make_page, read_foreign
    from penjing.commands.plan_print import print_page
    from penjing.commands.plan_run import Asked

    asked = Asked(gpu=gpu, gpus=gpus, engine=_engine(engine), budget=budget, tokens=tokens, unique=unique, price=price)
    overrides = config.parse_overrides(settings or [])
    run, foreign = read_foreign(Path(recipe), overrides) if is_foreign(recipe) else (_resolved(recipe, settings), None)
    if run.data.train and not gpu and foreign is None:
        from penjing.commands.plan import over_budget
        from penjing.commands.train import plan_only
        from penjing.plan import cost

        idle = {"--tokens": tokens, "--unique": unique, "--gpus": gpus > 1, "--engine": engine, "--explain": explain}
        if ignored := [name for name, given in idle.items() if given]:
            raise UserError(
                "has no effect with data.train", where=", ".join(ignored), next_step="Add --gpu NAME, or steps=N."
            )
        bill = plan_only(run, Console(quiet=True) if as_json else console)
        over = over_budget(asked, bill.predicted_seconds, bill.predicted_peak_memory_bytes, bill.machine)
        if as_json:
            console.print_json(data={**bill.to_dict(), "over_budget": over})
        elif price:
            paid = cost.read_money(price, "--price")
            spent = cost.Money(paid.amount * bill.predicted_seconds / 3600, paid.currency)
            _say(f"  cost {spent} at {paid} an hour, as given")
        for line in [] if as_json else over:
            console.print(marked("over budget", line, style="red"))
        if over:
            sys.exit(EXIT_DOES_NOT_FIT)
        return
    page = make_page(recipe, run, asked, foreign)
    if as_json:
        console.print_json(data=page.to_dict())
    else:
        print_page(page, console, explain=explain)
    if page.fits is False or page.over_budget:
        sys.exit(EXIT_DOES_NOT_FIT)


def _engine(name: str) -> Any:
    known = ("single", "ddp", "zero1", "zero2", "zero3", "fsdp")
    if name and name not in known:
        raise UserError("unknown way to share work", where="--engine", got=repr(name), next_step=suggest(name, known))
    return name


def _planned(recipe: str, settings: list[str] | None) -> Any:
    """The run of a recipe or of a Hugging Face model. Raises UserError for one whose step cannot be traced."""
    from penjing.commands.plan import is_foreign, read_foreign

    if not is_foreign(recipe):
        return _resolved(recipe, settings)
    run, foreign = read_foreign(Path(recipe), config.parse_overrides(settings or []))
    if foreign is not None:
        raise UserError("not a model that is trained here", where=recipe, next_step=f"Try `penjing plan {recipe}`.")
    return run


@plan_app.command("memory")
def plan_memory(
    recipe: Planned,
    settings: Settings = None,
    gpu: Gpu = "",
    gpus: Gpus = 1,
    engine: Engine = "",
    waterfall: Annotated[bool, typer.Option("--waterfall", help="Show what the peak is made of.")] = False,
) -> None:
    """Trace a training step and say how much memory it takes, and where. Exit code 3 if it will not fit.

    [bold]Example[/]

    penjing plan memory pretrain model=104m --gpu "RTX 3090" --waterfall
    """
    from penjing.commands.plan import EXIT_DOES_NOT_FIT
    from penjing.commands.plan_run import Asked
    from penjing.commands.plan_subcommands import print_memory

    asked = Asked(gpu=gpu, gpus=gpus, engine=_engine(engine))
    if print_memory(_planned(recipe, settings), asked, console, waterfall=waterfall) is False:
        sys.exit(EXIT_DOES_NOT_FIT)


@plan_app.command("search")
def plan_search(
    recipe: Planned,
    settings: Settings = None,
    fit: Annotated[str, typer.Option(help="Memory to fit into, such as 24GB; empty: the card's.")] = "",
    gpu: Gpu = "",
    gpus: Gpus = 1,
    engine: Engine = "",
    lengths: Annotated[str, typer.Option(help="Row lengths to look at, such as 512,1024; empty: the run's.")] = "",
    every: Annotated[bool, typer.Option("--all", help="Show all that was traced, not just the best.")] = False,
) -> None:
    """Trace the ways to cut a step - rows in a pass, length, recomputing - and show the best that fit.

    [bold]Example[/]

    penjing plan search pretrain model=104m --gpu "RTX 3090" --fit 24GB
    """
    from penjing.commands.plan import EXIT_DOES_NOT_FIT
    from penjing.commands.plan_run import Asked
    from penjing.commands.plan_subcommands import search

    rows = config.convert(tuple[int, ...], lengths, "--lengths") if lengths else ()
    asked = Asked(gpu=gpu, gpus=gpus, engine=_engine(engine))
    if not search(_planned(recipe, settings), asked, fit, rows, console, every=every):
        sys.exit(EXIT_DOES_NOT_FIT)


@plan_app.command("tokens")
def plan_tokens(
    params: Annotated[str, typer.Option(help="Size of the model, all parameters counted, such as 64M.")],
    unique: Annotated[str, typer.Option(help="Different tokens that there are, such as 1.2B.")] = "",
    hours: Annotated[str, typer.Option(help="Time that there is, such as 2h or 90min.")] = "",
    gpu: Gpu = "",
    gpus: Gpus = 1,
) -> None:
    """How many tokens a size wants, what repeating is worth, and what a time allows.

    [bold]Example[/]

    penjing plan tokens --params 64M --unique 1.2B --hours 2 --gpu "RTX 3090"
    """
    from penjing.commands.plan_run import Asked
    from penjing.commands.plan_subcommands import print_tokens

    print_tokens(params, unique, hours, Asked(gpu=gpu, gpus=gpus), console)


@plan_app.command("estimate")
def plan_estimate(
    params: Annotated[str, typer.Option(help="Size of the model, such as 26M.")],
    tokens: Annotated[str, typer.Option(help="To train on, such as 10B.")],
    tflops: Annotated[float, typer.Option(help="The card's rate as the formula takes it.")] = 0.0,
    gpu: Gpu = "",
) -> None:
    """The textbook formula 6 N D / peak, beside our own answer.

    [bold]Example[/]

    penjing plan estimate --params 26M --tokens 10B --tflops 75
    """
    from penjing.commands.plan_subcommands import print_estimate

    print_estimate(params, tokens, tflops, gpu, console)


@app.command("profile")
def profile_verb(
    recipe: Annotated[str, typer.Argument(metavar="[RECIPE]", help="Whose model's own products to measure too.")] = "",
    settings: Settings = None,
    seconds: Annotated[float, typer.Option(help="That measuring may take, about.", min=1)] = 60.0,
) -> None:
    """Measure this machine once: matrix products, attention, copies, launches. Plans then stand on level L1.

    [bold]Examples[/]

    penjing profile

    penjing profile pretrain model=64m --seconds 20
    """
    from penjing.commands.profile import profile

    profile(_resolved(recipe, settings) if recipe else None, seconds, console)


@app.command("scale")
def scale_verb(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE|FILE.toml", help="The run whose loss to foresee.")],
    settings: Settings = None,
    budget: Annotated[str, typer.Option(help="Time the small runs may take, about.")] = "30min",
) -> None:
    """Train a handful of tiny models of one family on the same data, and foresee the loss of the planned run.

    [bold]Example[/]

    penjing scale pretrain model=tiny data.train=corpus.jsonl steps=5000 --budget 20min
    """
    from penjing.commands.plan_forecast import scale

    scale(_resolved(recipe, settings), budget, console)


@app.command("verify")
def verify_verb(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, finished or stopped.")],
) -> None:
    """Hold the plan of a run against what came of it, term by term.

    [bold]Example[/]

    penjing verify runs/quickstart
    """
    from penjing.commands.plan_verify import verify

    verify(run, console)


@app.command("ledger")
def ledger_verb(
    last: Annotated[int, typer.Option(help="Runs to show.", min=1)] = 20,
) -> None:
    """How good the plans on this machine have been, and whether they drift.

    [bold]Example[/]

    penjing ledger --last 5
    """
    from penjing.commands.plan_verify import show_ledger

    show_ledger(console, last)


def _resolved(recipe: str, settings: list[str] | None):  # type: ignore[no-untyped-def]  # Run, imported late
    from penjing.commands.train import resolve_run
    from penjing.recipes import RECIPES

    overrides = config.parse_overrides(settings or [])
    if recipe.endswith(".toml") or Path(recipe).is_file():
        layer = config.read_toml(Path(recipe))
        stage = str(layer.get("stage", "pretrain"))  # a name of the user's own may stand there too
        return resolve_run(stage if stage in RECIPES else "pretrain", layer, overrides)
    return resolve_run(recipe, overrides)


@app.command()
def chat(
    run: RunPath,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Ask once, print the answer, and end.")] = None,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token each time.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens that hold this much probability.")] = 1.0,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.", min=1)] = 200,
    seed: Annotated[int, typer.Option(help="Of the draw, where temperature is above 0.")] = 0,
    adapter: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]DIR", help="A LoRA adapter to put beside the model; may be given again."),
    ] = None,
    think: Annotated[
        bool | None, typer.Option("--think/--no-think", help="Have it think first, or not; else as it likes.")
    ] = None,
    tools: Annotated[
        str,
        typer.Option(
            metavar="NAME,...", help="May be called: calculator, dates, units, count, lookup, python, MOD:CLASS"
        ),
    ] = "",
    table: Annotated[str, typer.Option(help="JSON file that the tool lookup reads.")] = "",
    device: DeviceName = "auto",
    dtype: DtypeName = "auto",
) -> None:
    """Talk to a model. A model that was only pretrained continues your text instead of answering.

    [bold]Examples[/]

    penjing chat runs/quickstart

    penjing chat runs/quickstart --prompt "Tell a story about Tom and a kite."

    penjing chat runs/sft --adapter runs/lora --adapter other=downloads/adapter

    penjing chat runs/agent --tools calculator,dates --think
    """
    from penjing.commands.chat import chat as talk
    from penjing.infer.sample import Sampling

    talk(
        run,
        console,
        prompt=prompt,
        sampling=Sampling(temperature=temperature, top_p=top_p),
        max_tokens=max_tokens,
        seed=seed,
        adapters=adapter or (),
        thinking=think,
        tools=[name for name in tools.split(",") if name],
        table=table,
        device=device,
        dtype=dtype,
    )


@app.command("generate")
def generate_answers(
    run: RunPath,
    prompts: Annotated[
        list[Path], typer.Option(help="Conversations that wait for an answer, or have one; may be given again.")
    ],
    out: Annotated[Path, typer.Option(help="JSONL file to write; the same command again goes on with it.")],
    answers: Annotated[int, typer.Option(help="Of each prompt.", min=1)] = 1,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token each time.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens that hold this much probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Draw from so many of the likeliest tokens; 0 = all.")] = 0,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.", min=1)] = 256,
    seed: Annotated[int, typer.Option(help="Of the draw, where temperature is above 0.")] = 0,
    thinking: Annotated[
        bool | None,
        typer.Option("--thinking/--no-thinking", help="Have it think before each answer, or not; else as it likes."),
    ] = None,
    keep_cut: Annotated[
        bool, typer.Option("--keep-cut", help="Keep answers that did not end within --max-tokens.")
    ] = False,
    every_turn: Annotated[
        bool, typer.Option("--every-turn", help="Answer every question of a conversation in turn, not only the last.")
    ] = False,
    device: DeviceName = "auto",
    dtype: DtypeName = "auto",
) -> None:
    """Have a model answer a file of prompts; what it writes is a file of conversations to train another model on.

    [bold]Examples[/]

    penjing generate runs/large --prompts prompts.jsonl --out answers.jsonl

    penjing generate runs/large --prompts prompts.jsonl --out answers.jsonl --answers 4 --temperature 0.8 --seed 1
    """
    from penjing.commands.generate import Asked, generate_file

    asked = Asked(
        answers=answers,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        max_tokens=max_tokens,
        seed=seed,
        thinking="auto" if thinking is None else "on" if thinking else "off",
        cut="keep" if keep_cut else "drop",
        turns="all" if every_turn else "last",
    )
    done = generate_file(run, prompts, out, console, asked, device=device, dtype=dtype)
    _say(f"{out}: {done.written:,} conversations; {done.left_out:,} answers left out (cut off, empty, or no room)")
    if done.not_asked:
        _say(f"  {done.not_asked:,} conversations of the prompts have an empty answer and were not asked")


@app.command("eval")
def evaluate(
    run: RunPath,
    questions: Annotated[Path | None, typer.Option(help="JSONL of conversations with `answer`; exact match.")] = None,
    text: Annotated[Path | None, typer.Option(help="Text to predict; bits per byte, beside zstd -19.")] = None,
    think: Annotated[
        bool | None, typer.Option("--think/--no-think", help="Have it think before it answers a question, or not.")
    ] = None,
    max_tokens: Annotated[
        int,
        typer.Option(
            min=0, help="Of an answer and its thought, at most; 0: 64, of a story 160, with --think 192 more."
        ),
    ] = 0,
    device: DeviceName = "auto",
    dtype: DtypeName = "auto",
) -> None:
    """Measure a model on questions with known answers, or on text.

    [bold]Examples[/]

    penjing eval runs/quickstart --questions runs/quickstart/data/eval.jsonl

    penjing eval runs/quickstart --text my.txt
    """
    from penjing.commands.evaluate import evaluate_questions, evaluate_text

    if questions is None and text is None:
        raise UserError("nothing to measure on", next_step="Give --questions FILE or --text FILE.")
    if questions is not None:
        evaluate_questions(run, questions, console, think, max_tokens, device=device, dtype=dtype)
    if text is not None:
        evaluate_text(run, text, console, device=device, dtype=dtype)


@export_app.command("hf")
def export_hf(
    run: RunPath,
    out: Annotated[
        Path | None,
        typer.Argument(help="Folder to write; by default RUN/export, for a model from outside NAME-export."),
    ] = None,
) -> None:
    """Write a Hugging Face directory that stock `transformers` loads, checked against our own logits and text.

    [bold]Example[/]

    penjing export hf runs/quickstart my-model
    """
    from penjing.export.default_paths import place
    from penjing.export.hf import export
    from penjing.export.model_card import model_card
    from penjing.train.run_dir import load_trained

    trained = load_trained(run, adapters="merged")
    path = out or place(run, trained, "export")
    done = export(trained.model, trained.tokenizer, path, card=model_card(trained, run))
    _say(f"{done.path}: {done.note}")


@export_app.command("gguf")
def export_gguf(
    run: RunPath,
    out: Annotated[
        Path | None,
        typer.Argument(
            metavar="[OUT.gguf]",
            help="File to write; by default RUN/NAME-TYPE.gguf, for a model from outside NAME-TYPE.gguf.",
        ),
    ] = None,
    kind: Annotated[
        str, typer.Option("--type", help="f32, f16, bf16, q8_0, q5_1, q5_0, q4_1 or q4_0: how weights are stored.")
    ] = "f16",
    name: Annotated[str, typer.Option(help="What the model calls itself; by default the run's name.")] = "",
    licence: Annotated[str, typer.Option(help="Of the weights, such as apache-2.0; it follows from the data.")] = "",
    language: Annotated[list[str] | None, typer.Option(help="Two-letter code; may be given more than once.")] = None,
) -> None:
    """Write a GGUF file for llama.cpp and Ollama, read back and, with llama-cpp-python there, run by llama.cpp itself.

    A Modelfile for Ollama is written beside it.

    [bold]Examples[/]

    penjing export gguf runs/quickstart

    penjing export gguf runs/quickstart my-model-q8_0.gguf --type q8_0 --licence apache-2.0 --language zh
    """
    from penjing.export.default_paths import called, place
    from penjing.export.gguf import About, export
    from penjing.train.run_dir import load_trained

    trained = load_trained(run, adapters="merged")
    named = name or called(run)
    about = About(
        name=named,
        description=f"made with penjing {__version__}, stage {trained.run.stage}, step {trained.checkpoint.step}",
        licence=licence,
        languages=tuple(language or ()),
    )
    path = out or place(run, trained, f"{called(run)}-{kind}.gguf")
    done = export(trained.model, trained.tokenizer, path, kind=kind, about=about)
    _say(f"{done.path}: {done.note}")
    _say(f"{done.modelfile}: for `ollama create {named} -f {done.modelfile}`")


@export_app.command("onnx")
def export_onnx(
    run: RunPath,
    out: Annotated[
        Path | None, typer.Argument(help="Folder to write; by default RUN/onnx, for a model from outside NAME-onnx.")
    ] = None,
    kind: Annotated[str, typer.Option("--type", help="f32 or int8: how matrices are stored.")] = "f32",
) -> None:
    """Write an ONNX graph, token ids to logits, with its tokenizer, checked with onnxruntime against our own logits.

    [bold]Example[/]

    penjing export onnx runs/quickstart my-model-onnx
    """
    from penjing.export.default_paths import place
    from penjing.export.onnx import export
    from penjing.train.run_dir import load_trained

    trained = load_trained(run, adapters="merged")
    done = export(trained.model, trained.tokenizer, out or place(run, trained, "onnx"), kind=kind)
    _say(f"{done.path}: {done.note}")


@app.command()
def show(
    what: Annotated[str, typer.Argument(help="A recipe, a run's folder, `models` or `recipes`.")],
    settings: Settings = None,
) -> None:
    """Print a recipe with every setting resolved, the model shapes known by name, or what a run came to.

    [bold]Examples[/]

    penjing show pretrain model=64m

    penjing show models

    penjing show runs/quickstart
    """
    from penjing.commands.show import show as display

    display(what, config.parse_overrides(settings or []), console)


@app.command()
def doctor(
    run: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="A run's folder, or a quickstart's, to look at instead.")
    ] = None,
) -> None:
    """Look at this machine: what will be used, how fast its matrix products are, and what is missing.

    With RUN: check every byte that continuing it would read, and say from where it continues. Changes nothing.

    [bold]Examples[/]

    penjing doctor

    penjing doctor runs/quickstart
    """
    if run is not None:
        from penjing.commands.check_run import doctor as examine_run

        raise typer.Exit(0 if examine_run(run, console) else 1)
    from penjing.commands.show import doctor as examine

    examine(console)


@app.command("average")
def average_verb(
    models: Annotated[list[Path], typer.Argument(metavar="MODEL...", help="Runs, checkpoints, other people's models.")],
    out: Annotated[Path, typer.Option(help="Folder to write: a run's, for chat, eval, export and start=.")],
    weights: Annotated[str, typer.Option(help="What each counts, such as 1,2,1; by default all the same.")] = "",
    last: Annotated[int, typer.Option(help="Of one run, average its newest so many checkpoints.", min=0)] = 0,
) -> None:
    """Average models of one shape into one.

    [bold]Examples[/]

    penjing average runs/pretrain --last 3 --out runs/mean

    penjing average runs/a runs/b --weights 2,1 --out runs/mean
    """
    from penjing.commands.average import average_models

    shares = config.convert(tuple[float, ...], weights, "--weights")
    names = average_models(models, out, weights=shares, last=last)
    _say(f"{out}: the average of {len(names)} models")


# --- adapters --------------------------------------------------------------------------------------------------------


@adapter_app.command("merge")
def adapter_merge(
    run: RunPath,
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    adapter: Annotated[
        list[str] | None, typer.Option(metavar="[NAME=]DIR", help="An adapter to merge; by default the run's own.")
    ] = None,
) -> None:
    """Work an adapter into its base: writes a Hugging Face directory, checked against our own logits and text.

    [bold]Examples[/]

    penjing adapter merge runs/lora --out merged

    penjing adapter merge runs/sft --adapter downloads/adapter --out merged
    """
    from penjing.commands.adapter import merge_adapter

    done = merge_adapter(run, adapter or (), out)
    _say(f"{done.path}: {done.note}")


@adapter_app.command("export")
def adapter_export(
    run: RunPath,
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
) -> None:
    """Write the adapter that a run trained, in the format of `peft`.

    [bold]Example[/]

    penjing adapter export runs/lora my-adapter
    """
    from penjing.commands.adapter import export_adapter

    export_adapter(run, out)
    _say(f"{out}: loads with peft.PeftModel.from_pretrained(base, {str(out)!r})")


# --- data ------------------------------------------------------------------------------------------------------------


@data_app.command("list")
def data_list() -> None:
    """List the corpora that `penjing data get` knows, with size, tokens and licence.

    [bold]Example[/]

    penjing data list
    """
    from penjing.data.catalog.registry import CATALOGUE

    table = Table(box=None, pad_edge=False)
    for heading in ("name", "what", "kind", "language", "download", "tokens (est.)", "licence"):
        table.add_column(heading, justify="right" if heading.startswith(("download", "tokens")) else "left")
    for entry in CATALOGUE.values():
        size = units.megabytes(entry.num_download_bytes) if entry.num_download_bytes else "none"
        table.add_row(
            entry.name, entry.title, entry.kind, entry.language, size, units.count(entry.num_tokens), entry.licence
        )
    console.print(table)


@data_app.command("get")
def data_get(
    name: Annotated[str, typer.Argument(help="A name of `penjing data list`.")],
    out: Annotated[Path, typer.Option(help="Folder to put it in.")] = Path("data"),
) -> None:
    """Fetch a corpus by name, verified by checksum; an interrupted one leaves nothing half.

    [bold]Examples[/]

    penjing data get sanguo

    penjing data get tinystories --out corpora
    """
    from penjing.data.catalog.registry import get

    folder = get(name, out, progress=lambda text: console.print(f"  {text}", highlight=False))
    _say(f"{folder}: ready for data.train={folder}")


@data_app.command("toyworld")
def data_toyworld(
    out: Annotated[Path, typer.Option(help="Folder to write.")] = Path("data/toyworld"),
    documents: Annotated[int, typer.Option(help="Texts for pretraining.", min=1)] = 50_000,
    conversations: Annotated[int, typer.Option(help="Conversations for SFT.", min=1)] = 20_000,
    preferences: Annotated[int, typer.Option(help="Pairs for preference tuning.", min=1)] = 5_000,
    prompts: Annotated[int, typer.Option(help="Prompts with reference answers for RL.", min=1)] = 5_000,
    questions: Annotated[int, typer.Option(help="Held-out questions of each kind and language.", min=1)] = 20,
    tools: Annotated[int, typer.Option(help="Conversations with a calculator; and a quarter as many prompts.")] = 0,
    seed: Annotated[int, typer.Option(help="Another seed, another world.")] = 1,
) -> None:
    """Make the toy world: short stories in Chinese and English from a simulation, with questions that can be checked.

    [bold]Example[/]

    penjing data toyworld --out data/toyworld --documents 100000
    """
    from penjing.data import synthetic as toyworld

    counts = toyworld.write(
        out,
        seed=seed,
        documents=documents,
        conversations=conversations,
        preferences=preferences,
        prompts=prompts,
        questions_per_kind=questions,
        tools=tools,
    )
    for file, facts in counts.items():
        speed = facts["bytes"] / max(1e-9, facts["seconds"])
        _say(f"{out / file}: {facts['rows']:,} rows, {units.megabytes(facts['bytes'])}, {units.megabytes(speed)}/s")


@data_app.command("report")
def data_report(
    files: Annotated[list[Path], typer.Argument(help="Files or folders of texts, conversations, pairs or prompts.")],
) -> None:
    """Look at a corpus before training on it: sizes, languages, lengths, duplicates, warnings.

    [bold]Example[/]

    penjing data report corpus.jsonl
    """
    from penjing.commands.show import corpus_report

    corpus_report(files, console)


# --- tokenizer -------------------------------------------------------------------------------------------------------


@tokenizer_app.command("train")
def tokenizer_train(
    files: Annotated[list[Path], typer.Argument(help="Files or folders of text.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")] = Path("tokenizer"),
    vocabulary: Annotated[int, typer.Option(help="Number of ids.")] = 6400,
    han_run: Annotated[int, typer.Option(help="Most Chinese characters in one token.")] = 4,
) -> None:
    """Train a byte-level BPE tokenizer with ChatML control tokens, in the format every engine reads.

    [bold]Example[/]

    penjing tokenizer train corpus.jsonl --vocabulary 6400 --out tokenizer
    """
    from penjing.base.files import make_folder
    from penjing.data.formats import Quarantine, list_files, read_documents
    from penjing.data.tokenizer.tokenizer import train_tokenizer

    paths, quarantine = list_files(files), Quarantine(max_bad=1.0)
    make_folder(out)
    texts = (document.text for document in read_documents(paths, quarantine=quarantine))
    tokenizer = train_tokenizer(texts, vocabulary, han_run=han_run)
    tokenizer.save(out)
    if quarantine.bad:
        _say(f"{quarantine.note()}; `penjing data report` names the first")
    _say(f"{out}: {tokenizer.size:,} ids")


@tokenizer_app.command("show")
def tokenizer_show(
    path: Annotated[Path, typer.Argument(help="A tokenizer's or run's folder.")],
    text: Annotated[str, typer.Argument(help="Text to cut.")],
) -> None:
    """Show how a tokenizer cuts a text.

    [bold]Example[/]

    penjing tokenizer show runs/quickstart "Mia has 3 apples."
    """
    from penjing.commands.show import tokens

    tokens(path, text, console)


def _say(text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True, markup=False)


def _fail(line: str, code: int) -> NoReturn:
    """One line on the error stream, from one process of those started together."""
    console = Console(stderr=True)
    first_of_launch(lambda: console.print(line, style="red", highlight=False, soft_wrap=True, markup=False))
    sys.exit(code)


def main() -> None:
    """Run the command line; what a user can put right is one line and exit code 2, never a traceback."""
    if "--version" in sys.argv[1:2]:
        print(f"penjing {__version__}")
        return
    if sys.platform == "win32":
        _fail("penjing: needs Linux or macOS; on Windows run it in WSL 2", EXIT_USER_ERROR)
    try:
        code = app(standalone_mode=False)
        if code == EXIT_INTERRUPTED:  # newer versions of typer return it, older ones raise
            raise KeyboardInterrupt
        sys.exit(code)
    except UserError as error:
        _fail(f"penjing: {error.line()}", EXIT_USER_ERROR)
    except KeyboardInterrupt:
        _fail("penjing: interrupted", EXIT_INTERRUPTED)
    except Exception as error:
        from penjing.train.signals import Stopped

        if isinstance(error, Stopped):
            _fail(f"penjing: {error}", error.exit_code)
        _fail_on_usage(error)
        raise


def _fail_on_usage(error: Exception) -> None:
    """An option or argument that is not there, is missing or of the wrong type: one line, and where to read on.

    Known by what it offers: newer versions of typer carry their own copy of click's classes.
    """
    if not hasattr(error, "format_message") or not hasattr(error, "ctx"):
        if type(error).__name__ == "Abort":
            _fail("penjing: interrupted", EXIT_INTERRUPTED)
        return
    name = type(error).__name__
    if name == "NoArgsIsHelpError":
        print(error.format_message())
        sys.exit(EXIT_USER_ERROR)
    where = error.ctx.command_path if error.ctx else "penjing"
    message = error.format_message().replace("\n", " ").rstrip(".")
    _fail(f"{where}: {message}{'' if message.endswith('?') else '.'} See `{where} --help`.", EXIT_USER_ERROR)
