"""penjing tokenizer: train one, extend one, or report on one."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from penjing.base.errors import UserError
from penjing.base.files import make_folder, read_parsed
from penjing.base.formatting import count, listing, megabytes
from penjing.base.markup import print_table
from penjing.data.corpus import Corpus, DataSettings
from penjing.data.tokenizer.extend import add_words, learn_merges
from penjing.data.tokenizer.report import PUBLISHED, measure
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.data.tokenizer.train import train_tokenizer
from penjing.data.tokenizer.training_sample import Sample, sample_texts
from penjing.track.run_dir import RunDir, is_run_or_checkpoint, stage_folder


class ReadingBar:
    """A bar on a terminal while a corpus is read; nothing elsewhere."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        self.progress = Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal)
        self._task = self.progress.add_task("reading", total=1.0)

    def show(self, fraction: float, num_bytes: int) -> None:
        self.progress.update(self._task, completed=fraction)

    def end(self) -> None:
        self.show(1.0, 0)
        self.progress.stop()


def _corpus(files: list[Path], bar: ReadingBar) -> Corpus:
    return Corpus(DataSettings(train=tuple(map(str, files)), max_bad_fraction=1), bar.show)


def train(files: list[Path], out: Path, vocab_size: int, max_han_per_token: int, console: Console) -> None:
    """Train a tokenizer on documents and save it; on a terminal with bars."""
    make_folder(out)
    bar = ReadingBar(console)
    corpus = _corpus(files, bar)
    bad_records = corpus.counts()
    with bar.progress:
        tokenizer: Tokenizer = train_tokenizer(
            corpus.texts(bad_records),
            vocab_size,
            max_han_per_token=max_han_per_token,
            note=lambda note: console.print(note, soft_wrap=True),
            sampled=bar.end,
            show_progress=console.is_terminal,
        )
    tokenizer.save(out)
    if bad_records.bad:
        console.print(f"{bad_records.note()}; `penjing data look` names the first", soft_wrap=True)
    console.print(f"{out}: {tokenizer.size:,} ids", soft_wrap=True)


def load(path: Path) -> Tokenizer:
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
    old = tokenizer = load(path)
    if files:
        bar = ReadingBar(console)
        with bar.progress:
            texts = _corpus(files, bar).texts()
            tokenizer = learn_merges(tokenizer, texts, vocab_size, max_han_per_token, sampled=bar.end)
    tokenizer = add_words(tokenizer, [word for value in add for word in _words(value)])
    if tokenizer.size == old.size:
        raise UserError("nothing to add: each is one token already", where="--add")
    tokenizer.save(out)
    examples = listing(
        [repr(tokenizer.token(index)) for index in range(old.size, min(tokenizer.size, old.size + 8))], 8
    )
    console.print(f"{out}: {tokenizer.size:,} ids, {tokenizer.size - old.size:,} new: {examples}", soft_wrap=True)
    console.print(f"Continue a model with it: init_from=MODEL tokenizer.path={out}", soft_wrap=True)


def _words(value: str) -> list[str]:
    """The words of a file, one a line; else the word itself."""
    if not Path(value).is_file():
        return [value] if value.strip() else []
    return [line.strip() for line in read_parsed(Path(value), "text", str).splitlines() if line.strip()]


def report(path: Path, files: list[Path], as_json: bool, console: Console) -> None:
    """Print what a tokenizer makes of the files, and what its ids cost."""
    tokenizer = load(path)
    sample = Sample([])
    if files:
        bar = ReadingBar(Console(quiet=True) if as_json else console)
        with bar.progress:
            sample = sample_texts(_corpus(files, bar).texts())
            bar.end()
    measured = measure(tokenizer, sample.texts)
    facts = measured.to_dict(tokenizer)
    if as_json:
        console.print(json.dumps(facts, ensure_ascii=False), soft_wrap=True)
        return
    console.print(f"{measured.size:,} ids, {measured.control} of them control tokens", soft_wrap=True)
    if sample.note:
        console.print(sample.note, soft_wrap=True)
    if files:
        rows = [
            (name, megabytes(part.bytes), *(f"{ratio:.2f}" for ratio in part.ratios().values()))
            for name, part in measured.scripts.items()
        ]
        print_table(console, ("", "text>", "bytes per token>", "characters per token>", "tokens per word>"), rows)
        console.print("Of Chinese and Japanese a character counts as a word.\n")
        print_table(console, ("published, of other texts", "", "characters per token>", "source"), PUBLISHED)
        shown = listing([repr(token) for token in facts["unused"]], len(facts["unused"]))
        share = len(measured.unused) / max(1, measured.size)
        console.print(
            f"\n{len(measured.unused):,} ids ({share:.1%}) are not used{': ' if shown else ''}{shown}", soft_wrap=True
        )
    console.print("\nparameters of embedding and head")
    costs = [(width, count(cost["tied"]), count(cost["untied"])) for width, cost in facts["parameters"].items()]
    print_table(console, ("hidden size>", "tied>", "untied>"), costs)
