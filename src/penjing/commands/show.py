"""Look at things: recipes, shapes, runs, corpora, tokenizers, this machine."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penjing import __version__
from penjing.base import config
from penjing.base import formatting as units
from penjing.base.config import Layer
from penjing.base.errors import UserError, suggest
from penjing.base.files import printable
from penjing.base.markup import marked
from penjing.commands.train import resolve_run
from penjing.data import dataset_stats as survey
from penjing.data import formats as records
from penjing.data.formats import Kind
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.model import presets
from penjing.model.config import ModelConfig
from penjing.plan import hardware
from penjing.plan.flops import parameters
from penjing.recipes import RECIPES
from penjing.report.load_run import read_record
from penjing.report.terminal import print_summary
from penjing.train.run_dir import RunFolder, set_threads, stage_folder

FILES_NAMED = 5  # of one kind
AnySurvey = survey.Survey | survey.ChatSurvey | survey.PreferenceSurvey | survey.PromptSurvey


def show(what: str, overrides: Layer, console: Console) -> None:
    """A recipe resolved, the shapes, the recipes, or a run."""
    if what == "models":
        _models(console)
    elif what == "recipes":
        for name in RECIPES:
            console.print(name, highlight=False)
    elif what.partition(":")[0] in RECIPES:
        console.print(config.to_toml(resolve_run(what, overrides)), highlight=False, end="", markup=False)
    elif (Path(what) / "quickstart.json").is_file():
        print_summary(read_record([Path(what)]), console)
    elif Path(what).exists():
        folder = RunFolder(stage_folder(Path(what)))
        console.print(folder.settings.read_text(encoding="utf-8"), highlight=False, end="", markup=False)
        if folder.outcome.is_file():
            console.print(folder.outcome.read_text(encoding="utf-8"), highlight=False, end="", markup=False)
    else:
        raise UserError(
            f"nothing is called {what!r}",
            wanted="a recipe, a run's folder, models or recipes",
            next_step=suggest(what, [*RECIPES, "models", "recipes"]),
        )


def _models(console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    columns = (
        "name",
        "parameters",
        "active",
        "without embedding",
        "layout",
        "width",
        "layers",
        "heads",
        "kv",
        "head",
        "mlp",
        "vocabulary",
    )
    for heading in columns:
        table.add_column(heading, justify="left" if heading in ("name", "layout") else "right")
    for name in presets.names():
        shape = config.resolve(ModelConfig, {"preset": name})
        count = parameters(shape)
        figures: list[Any] = [shape.hidden_size, shape.num_layers, shape.num_heads, shape.num_kv_heads]
        figures += [shape.head_size, shape.mlp_size, shape.vocabulary_size]
        table.add_row(
            name,
            f"{count.total:,}",
            f"{count.active:,}" if shape.is_mixture else "",
            f"{count.without_embedding:,}",
            shape.architecture,
            *(str(value) for value in figures),
        )
    console.print(table)
    console.print("ladder-SIZE is any size from 500k to 3b; `penjing train ladder:SIZE` derives rate, batch and steps.")


def corpus_report(files: list[Path], console: Console) -> None:
    """Print a survey of each kind of data among the files: texts, conversations, preferences, prompts."""
    of_kind: dict[Kind, list[Path]] = {}
    for path in records.list_files(files):
        of_kind.setdefault(survey.file_kind(path), []).append(path)
    for place, kind in enumerate(sorted(of_kind)):
        if place:
            console.print()
        names = [printable(path) for path in of_kind[kind]]
        more = f" and {len(names) - FILES_NAMED} more" if len(names) > FILES_NAMED else ""
        heading = f"{kind}: {', '.join(names[:FILES_NAMED])}{more}"
        console.print(Text(heading, style="bold"), soft_wrap=True)
        _print_survey(survey.survey_files(of_kind[kind], kind), console)


def _print_survey(counted: AnySurvey, console: Console) -> None:
    """A table of counts, a table of lengths with a column for each quantile, then the warnings."""
    counts = Table(box=None, pad_edge=False, show_header=False)
    counts.add_column(style="dim", no_wrap=True)
    counts.add_column(overflow="fold")
    for name, value in _counts(counted):
        counts.add_row(name, Text(_plain(value)))
    console.print(counts)
    lengths = [(name, quantiles) for name, quantiles in _lengths(counted) if quantiles["max"]]
    if lengths:
        table = Table("length", box=None, pad_edge=False)
        for heading in survey.QUANTILES:
            shown = {"p50": "median"}.get(heading, f"{heading[1:]} %" if heading[0] == "p" else heading)
            table.add_column(shown, justify="right")
        for name, quantiles in lengths:
            table.add_row(name, *(f"{quantiles[heading]:,}" for heading in survey.QUANTILES))
        console.print(table)
    if not counted.lengths_exact:
        console.print(f"all but min and max: of a random sample of {survey.NUM_LENGTHS_KEPT:,}", highlight=False)
    for warning in counted.warnings:
        console.print(marked("warning", _plain(warning), indent=""))


def _counts(counted: AnySurvey) -> Iterator[tuple[str, str]]:
    match counted:
        case survey.Survey():
            yield "documents", f"{counted.num_documents:,}"
        case survey.ChatSurvey():
            yield "conversations", f"{counted.num_chats:,}"
        case survey.PreferenceSurvey():
            yield "pairs", f"{counted.num_pairs:,}"
            yield "single rated answers", f"{counted.num_judged:,}"
        case survey.PromptSurvey():
            yield "prompts", f"{counted.num_prompts:,}"
    yield "broken records", f"{counted.num_broken:,}"
    if not isinstance(counted, survey.PromptSurvey):
        for reason, number in counted.left_out.items():
            yield "left out", f"{number:,}: {reason}"
    yield "exact duplicates", f"{counted.num_duplicates:,}"
    match counted:
        case survey.Survey():
            yield from _text_counts(counted)
        case survey.ChatSurvey():
            yield "messages by role", _listed(counted.roles)
            yield "size of answers", units.megabytes(counted.num_answer_bytes)
            yield "tool calls", f"{counted.num_tool_calls:,}"
            yield "with reasoning", f"{counted.num_with_reasoning:,}"
        case survey.PreferenceSurvey() if counted.num_pairs:
            yield "chosen is longer", f"{_percent(counted.chosen_longer_fraction)} of pairs"
        case survey.PromptSurvey() if counted.fields:
            yield "other fields", _listed(counted.fields)
    if isinstance(counted, survey.ChatSurvey | survey.PromptSurvey):
        yield "with a system message", f"{counted.num_with_system:,}"
        yield "with tools", f"{counted.num_with_tools:,}"


def _text_counts(counted: survey.Survey) -> Iterator[tuple[str, str]]:
    yield "size", units.megabytes(counted.num_bytes)
    yield "characters", f"{counted.num_characters:,}, {counted.num_distinct_characters:,} distinct"
    scripts = ("Latin", counted.latin_fraction), ("Han", counted.han_fraction), ("digits", counted.digit_fraction)
    yield (
        "scripts",
        ", ".join(f"{name} {_percent(share)}" for name, share in (*scripts, ("other", counted.other_fraction))),
    )
    common = (character for character, _ in counted.common_characters)
    yield "most frequent", " ".join(each if each.isprintable() else f"U+{ord(each):04X}" for each in common)
    for line in counted.longest_lines:
        yield "long line", f"{line.num_characters:,} characters, {line.source}:{line.line}"


def _lengths(counted: AnySurvey) -> Iterator[tuple[str, dict[str, int]]]:
    match counted:
        case survey.Survey():
            yield "document, bytes", counted.length_bytes
        case survey.ChatSurvey():
            yield "conversation, messages", counted.turns_per_chat
            yield "answer, bytes", counted.answer_bytes
        case survey.PreferenceSurvey():
            yield "prompt, bytes", counted.prompt_bytes
            yield "chosen, bytes", counted.chosen_bytes
            yield "rejected, bytes", counted.rejected_bytes
        case survey.PromptSurvey():
            yield "prompt, messages", counted.turns_per_prompt
            yield "prompt, bytes", counted.prompt_bytes


def _percent(share: float) -> str:
    return f"{share * 100:.1f} %"


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {number:,}" for name, number in counts.items())


def _plain(text: str) -> str:
    """Text that can be printed: what is quoted from a file, or its name, may hold half a character."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def tokens(path: Path, text: str, console: Console) -> None:
    """Print a text cut into tokens, with their ids and how many characters one token holds."""
    folder = path if (path / "tokenizer.json").is_file() else RunFolder(stage_folder(path)).tokenizer
    tokenizer = Tokenizer.load(folder)
    if text != _plain(text):
        raise UserError("not valid UTF-8", where="the text", got=_plain(text)[:40])
    ids = tokenizer.encode(text)
    console.print(" ".join(f"{tokenizer.token(index)!r}:{index}" for index in ids), highlight=False, markup=False)
    console.print(f"{len(ids)} tokens, {len(text) / max(1, len(ids)):.2f} characters each", highlight=False)


EXTRAS = {"transformers": "hf", "wandb": "wandb", "huggingface_hub": "hub"}


def doctor(console: Console) -> None:
    """What penjing finds on this machine."""
    set_threads(0, 1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = hardware.compute_dtype("auto", device)
    peak = hardware.peak(device, dtype)
    facts = hardware.describe(device, dtype)
    rate = "unknown" if peak.flops_per_second is None else f"{peak.flops_per_second / 1e12:.3g} TFLOPS ({peak.source})"
    lines = {
        "penjing": __version__,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cpu": f"{facts['cpu']}, {facts['cores']} cores, {facts['threads']} threads",
        "memory": units.gibibytes(float(str(facts["memory_bytes"]))),
        "device": facts["device"],
        "matrix products in": f"{facts['compute_dtype']}, {rate}",
    }
    for name, value in lines.items():
        console.print(f"{name:<20} {value}", highlight=False)
    for package, extra in EXTRAS.items():
        try:  # a folder `wandb` of runs could be imported too, and is no library
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found = f'not installed; pip install "penjing[{extra}]"'
        console.print(Text(f"{package:<20} {found}"))
