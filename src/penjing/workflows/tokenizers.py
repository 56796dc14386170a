"""penjing tokenizer: train one, extend one, report on one, or show how it splits a text."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn

from penjing.base.errors import UserError
from penjing.base.files import make_folder, read_parsed
from penjing.base.formatting import count, listing, megabytes
from penjing.base.markup import print_table
from penjing.data.corpus import Corpus, DataSettings
from penjing.data.formats import BadRecords
from penjing.data.formats.read import files_by_kind
from penjing.data.tokenizer.extend import add_words, learn_merges
from penjing.data.tokenizer.report import PUBLISHED, measure
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.data.tokenizer.train import train_tokenizer
from penjing.data.tokenizer.training_sample import Sample, sample_texts
from penjing.track.run_dir import RunDir, is_run_or_checkpoint, stage_folder


@contextmanager
def _reading(console: Console, files: list[Path]) -> Iterator[tuple[Iterator[str], Callable[[], None]]]:
    """The texts of files of any kind, with a bar on a terminal while they are read; and what to call at their end. At
    last a line says what could not be read."""
    counts = BadRecords(max_bad_fraction=1)
    columns = (*Progress.get_default_columns(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading", total=1.0)

        def end() -> None:
            bar.update(task, completed=1.0)
            bar.stop()

        kinds = files_by_kind(files).items()
        settings = [DataSettings(train=tuple(map(str, names)), format=kind) for kind, names in kinds]
        corpora = [Corpus(each, lambda fraction, _: bar.update(task, completed=fraction)) for each in settings]
        yield chain.from_iterable(corpus.texts(counts) for corpus in corpora), end
    if counts.bad:
        console.print(f"{counts.note()}; `penjing data look` names the first", soft_wrap=True)


def train(files: list[Path], out: Path, vocab_size: int, max_han_per_token: int, console: Console) -> None:
    """Train a tokenizer on texts, or those of conversations, and save it; on a terminal with bars."""
    make_folder(out)
    with _reading(console, files) as (texts, end):
        tokenizer = train_tokenizer(
            texts,
            vocab_size,
            max_han_per_token=max_han_per_token,
            note=lambda note: console.print(note, soft_wrap=True),
            sampled=end,
            show_progress=console.is_terminal,
        )
    tokenizer.save(out)
    fewer = f", not {vocab_size:,}: the text has no more pairs to merge" * (tokenizer.size < vocab_size)
    console.print(f"{out}: {tokenizer.size:,} ids{fewer}", soft_wrap=True)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in a folder, or of a run."""
    if not (path / "tokenizer.json").is_file() and is_run_or_checkpoint(path):
        path = RunDir(stage_folder(path)).tokenizer
    return Tokenizer.load(path)


def extend(
    path: Path, out: Path, add: list[str], files: list[Path], vocab_size: int, max_han_per_token: int, console: Console
) -> None:
    """Add words, or merges learned from files, to a tokenizer, and save the result."""
    if not add and not files:
        raise UserError("nothing to add", where="--add, --train", next_step="Give words, or files to learn from.")
    old = tokenizer = load_tokenizer(path)
    if files:
        with _reading(console, files) as (texts, end):
            tokenizer = learn_merges(tokenizer, texts, vocab_size, max_han_per_token, sampled=end)
    tokenizer = add_words(tokenizer, [word for value in add for word in _words(value)])
    if tokenizer.size == old.size:
        raise UserError("nothing to add: each is one token already", where="--add")
    tokenizer.save(out)
    examples = listing([repr(tokenizer.token(index)) for index in range(old.size, tokenizer.size)[:8]], 8)
    console.print(f"{out}: {tokenizer.size:,} ids, {tokenizer.size - old.size:,} new: {examples}", soft_wrap=True)
    console.print(f"Continue a model with it: init_from=MODEL tokenizer.path={out}", soft_wrap=True)


def _words(value: str) -> list[str]:
    """The words of a file, one a line; else the word itself."""
    if not Path(value).is_file():
        return [value] if value.strip() else []
    return [line.strip() for line in read_parsed(Path(value), "text", str).splitlines() if line.strip()]


def report(path: Path, files: list[Path], as_json: bool, console: Console) -> None:
    """Print what a tokenizer makes of the files, and what its ids cost."""
    tokenizer, sample = load_tokenizer(path), Sample([])
    if files:
        with _reading(Console(quiet=True) if as_json else console, files) as (texts, _):
            sample = sample_texts(texts)
    facts = measure(tokenizer, sample.texts)
    if as_json:
        console.print(json.dumps(facts, ensure_ascii=False), soft_wrap=True)
        return
    console.print(f"{facts['ids']:,} ids, {facts['control_tokens']} of them control tokens", soft_wrap=True)
    if sample.note:
        console.print(sample.note, soft_wrap=True)
    if files:
        ratios = ("bytes_per_token", "characters_per_token", "tokens_per_word")
        rows = [
            (name, megabytes(counts["bytes"]), *(f"{counts[ratio]:.2f}" for ratio in ratios))
            for name, counts in facts["compression"].items()
        ]
        print_table(console, ("", "text>", *(f"{ratio.replace('_', ' ')}>" for ratio in ratios)), rows)
        console.print("Of Chinese and Japanese a character counts as a word.\n")
        print_table(console, ("published, of other texts", "", "characters per token>", "source"), PUBLISHED)
        shown = listing([repr(token) for token in facts["unused"]], len(facts["unused"]))
        share = f"{facts['unused_ids']:,} ids ({facts['unused_ids'] / max(1, facts['ids']):.1%})"
        console.print(f"\n{share} are not used{': ' if shown else ''}{shown}", soft_wrap=True)
    console.print("\nparameters of embedding and head")
    costs = [(width, count(cost["tied"]), count(cost["untied"])) for width, cost in facts["parameters"].items()]
    print_table(console, ("hidden size>", "tied>", "untied>"), costs)


def show(path: Path, text: str, console: Console) -> None:
    """Print a text split into tokens, with their ids, and the mean characters per token."""
    tokenizer = load_tokenizer(path)
    if text != (printable := text.encode("utf-8", "backslashreplace").decode("utf-8")):
        raise UserError("not valid UTF-8", where="the text", got=printable[:40])
    ids = tokenizer.encode(text)
    console.print(" ".join(f"{tokenizer.token(index)!r}:{index}" for index in ids), highlight=False, markup=False)
    console.print(f"{len(ids)} tokens, {len(text) / max(1, len(ids)):.2f} characters each", highlight=False)
