"""penjing data and penjing tokenizer."""

import json
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from penjing.base import formatting as units
from penjing.base.errors import UserError
from penjing.base.markup import print_table
from penjing.commands.arguments import console, say, words
from penjing.data.formats.schema import Kind

data_app = typer.Typer(no_args_is_help=True, help="Get, make and inspect data.")
tokenizer_app = typer.Typer(
    no_args_is_help=True, help="Train, extend, measure a tokenizer, or show how one splits text."
)

Records = Annotated[list[Path], typer.Argument(help="Files or folders of texts, conversations, pairs or prompts.")]
Columns = Annotated[
    str, typer.Option(metavar="FIELD:NAME,...", help="Fields by our names, such as ask:question,reply:answer.")
]
MaxHan = Annotated[int, typer.Option(help="Maximum number of Chinese characters in one token.")]
TokenizerPath = Annotated[Path, typer.Argument(metavar="TOKENIZER", help="A tokenizer's, model's or run's folder.")]


@data_app.command("list")
def data_list() -> None:
    """List the corpora that `penjing data get` knows, with size, tokens and licence.

    [bold]Example[/]
    penjing data list
    """
    from penjing.data.catalog.registry import CATALOGUE

    rows = []
    for each in CATALOGUE.values():
        size = units.megabytes(each.source.num_bytes)
        rows.append((each.name, each.title, each.kind, each.language, size, units.count(each.num_tokens), each.licence))
    print_table(console, ("name", "what", "kind", "language", "download>", "tokens (est.)>", "licence"), rows)


@data_app.command("get")
def data_get(
    name: Annotated[str, typer.Argument(help="A name of `penjing data list`.")],
    out: Annotated[Path, typer.Option(help="Parent folder.")] = Path("data"),
) -> None:
    """Download a corpus by name and verify its checksum. An interrupted download leaves nothing behind.

    [bold]Examples[/]
    penjing data get sanguo
    penjing data get tinystories --out corpora
    penjing data get blimp --out eval
    """
    from penjing.data.catalog.registry import CATALOGUE, get

    folder = get(name, out, progress=lambda text: console.print(f"  {text}", highlight=False))
    is_benchmark = CATALOGUE[name].kind == "benchmark"
    use = f"penjing eval --data {shlex.quote(str(out))}" if is_benchmark else f"data.train={shlex.quote(str(folder))}"
    say(f"{folder}: ready for {use}")


@data_app.command("toyworld")
def data_toyworld(
    out: Annotated[Path, typer.Option(help="Folder to write.")] = Path("data/toyworld"),
    documents: Annotated[int, typer.Option(help="Texts for pretraining.", min=1)] = 50_000,
    conversations: Annotated[int, typer.Option(help="Conversations for SFT.", min=1)] = 20_000,
    preferences: Annotated[int, typer.Option(help="Pairs for preference tuning.", min=1)] = 5_000,
    prompts: Annotated[int, typer.Option(help="Prompts with reference answers for RL.", min=1)] = 5_000,
    questions: Annotated[int, typer.Option(help="Held-out questions per kind and language.", min=1)] = 20,
    tools: Annotated[int, typer.Option(help="Conversations with a calculator; a quarter as many prompts.", min=0)] = 0,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 1,
) -> None:
    """Generate the toy world: short stories in Chinese and English from a simulation, with checkable questions.

    [bold]Example[/]
    penjing data toyworld --out data/toyworld --documents 100000
    """
    from penjing.data import synthetic

    files = synthetic.write(
        out,
        seed=seed,
        documents=documents,
        conversations=conversations,
        preferences=preferences,
        prompts=prompts,
        questions_per_kind=questions,
        tools=tools,
    )
    for name, written in files.items():
        rate = written["bytes"] / max(1e-9, written["seconds"])
        size = units.megabytes(written["bytes"])
        say(f"{out / name}: {written['rows']:,} rows, {size}, {units.megabytes(rate)}/s")


@data_app.command("look")
def data_look(
    files: Records,
    columns: Columns = "",
    tokenizer: Annotated[
        Path | None, typer.Option(help="A tokenizer's or run's folder, for its template and its tokens.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Look at data before training on it: what is understood, three records as the trainer sees them with the loss
    mask, lengths, tokens, languages, and what cannot be read.

    [bold]Examples[/]
    penjing data look chats.jsonl
    penjing data look my.csv --columns ask:question,reply:answer
    """
    from penjing.workflows.data_look import data_look

    data_look(files, console, columns=words(columns), tokenizer=tokenizer, as_json=as_json)


@data_app.command("clean")
def data_clean(
    files: Records,
    out: Annotated[Path | None, typer.Option(help="Folder to write; then data.train=FOLDER trains on it.")] = None,
    pipeline: Annotated[
        list[str] | None, typer.Option(help="A TOML file of rules, a shipped pipeline, or a rule; may be given again.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what the rules do, and write nothing.")] = False,
    kind: Annotated[Kind | None, typer.Option("--format", help="What the files hold; else it is found out.")] = None,
    columns: Columns = "",
    workers: Annotated[int, typer.Option(help="Processes; 0: as many as cores and memory allow.", min=0)] = 0,
    memory_gb: Annotated[float, typer.Option(help="Memory of all processes together, in GB.", min=0.5, max=1e6)] = 2.0,
    cluster: Annotated[
        Path | None,
        typer.Option(help="TOML file with a table ray, slurm or local: datatrove's executor and its settings."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the counts and the examples as JSON.")] = False,
) -> None:
    """Clean a corpus by rules: repair and drop records, remove duplicates, and report on all of it.

    A run that was killed continues; if nothing changed since the last run, nothing is done. FOLDER/_cleaning holds
    the report, the rules with all settings, and a trace of every record that was dropped or changed.

    [bold]Examples[/]
    penjing data clean corpus.jsonl --out data/clean
    penjing data clean crawl books --out data/clean --pipeline rules.toml
    penjing data clean corpus.jsonl --dry-run --pipeline default --pipeline near_duplicates
    """
    from penjing.workflows.clean_corpus import clean_corpus

    if (out is None) != dry_run:
        raise UserError("give one of the two", where="penjing data clean", wanted="--out FOLDER or --dry-run")
    rules = pipeline or ["default"]
    size: dict[str, Any] = {"workers": workers, "memory_gb": memory_gb, "cluster": cluster}
    shown = Console(quiet=True) if as_json else console
    counts = clean_corpus(files, out, shown, pipeline=rules, kind=kind, columns=words(columns), **size)
    if as_json:
        print(json.dumps({"cleaned": counts}))


@data_app.command("ablate")
def data_ablate(
    sources: Annotated[list[str], typer.Argument(metavar="SOURCE... [KEY=VALUE]...", help="Files or folders of text.")],
    held_out: Annotated[str, typer.Option(help="Texts to be good at; several with commas.")],
    budget: Annotated[str, typer.Option(help="Approximate time for all runs.")] = "10min",
    rules: Annotated[str, typer.Option(help="Cleaning rules or pipelines to try as well, such as default.")] = "",
    seeds: Annotated[int, typer.Option(help="Runs of each kind.", min=2, max=10)] = 3,
    out: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs/ablate"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Train tiny models of equal compute: by how much does each source, or each cleaning rule, lower the held-out loss?

    Stopped and started again, it goes on. KEY=VALUE are settings of the runs (recipe tiny).

    [bold]Example[/]
    penjing data ablate web.jsonl books.jsonl --held-out good.jsonl --budget 10min
    """
    from dataclasses import asdict

    from penjing.workflows.ablate import ablate, print_ablation

    settings = [word for word in sources if "=" in word and not Path(word).exists()]
    made = ablate(
        [word for word in sources if word not in settings],
        words(held_out),
        rules=words(rules),
        seeds=seeds,
        budget=budget,
        out=out,
        settings=settings,
        console=Console(quiet=True) if as_json else console,
    )
    if as_json:
        effects = [{**asdict(one), "verdict": one.verdict} for one in made.effects]
        console.print_json(data={**asdict(made), "effects": effects})
    else:
        print_ablation(made, console)


@tokenizer_app.command("train")
def tokenizer_train(
    files: Records,
    out: Annotated[Path, typer.Option(help="Folder to write.")] = Path("tokenizer"),
    vocabulary: Annotated[int, typer.Option(help="Vocabulary size.")] = 6400,
    max_han_per_token: MaxHan = 4,
) -> None:
    """Train a byte-level BPE tokenizer with ChatML control tokens, in the format of `tokenizers`.

    [bold]Example[/]
    penjing tokenizer train corpus.jsonl --vocabulary 6400 --out tokenizer
    """
    from penjing.workflows.tokenizers import train

    train(files, out, vocabulary, max_han_per_token, console)


@tokenizer_app.command("extend")
def tokenizer_extend(
    path: TokenizerPath,
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    add: Annotated[list[str] | None, typer.Option(help="A word, or a file with one on each line; repeatable.")] = None,
    train: Annotated[list[Path] | None, typer.Option(help="A file or folder to learn tokens from; repeatable.")] = None,
    vocabulary: Annotated[int, typer.Option(help="With --train: vocabulary size, old ids included.")] = 0,
    max_han_per_token: MaxHan = 4,
) -> None:
    """Add tokens to a tokenizer; all others keep their ids. A model is continued with it by init_from=MODEL
    tokenizer.path=DIR: each new token starts as the mean of its pieces.

    [bold]Examples[/]
    penjing tokenizer extend models/qwen --add 量子纠缠 --add words.txt --out extended
    penjing tokenizer extend runs/base --train papers.jsonl --vocabulary 8000 --out extended
    """
    from penjing.workflows.tokenizers import extend

    extend(path, out, add or [], train or [], vocabulary, max_han_per_token, console)


@tokenizer_app.command("report")
def tokenizer_report(
    path: TokenizerPath,
    files: Annotated[list[Path] | None, typer.Argument(help="Files or folders to measure it on.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Report how well a tokenizer compresses texts of each script, which ids are unused, and what its ids cost.

    [bold]Example[/]
    penjing tokenizer report runs/quickstart corpus.jsonl
    """
    from penjing.workflows.tokenizers import report

    report(path, files or [], as_json, console)


@tokenizer_app.command("show")
def tokenizer_show(
    path: Annotated[Path, typer.Argument(help="A tokenizer's or run's folder.")],
    text: Annotated[str, typer.Argument(help="Text to split.")],
) -> None:
    """Show how a tokenizer splits a text.

    [bold]Example[/]
    penjing tokenizer show runs/quickstart "Mia has 3 apples."
    """
    from penjing.workflows.tokenizers import show

    show(path, text, console)
