"""penjing tokenizer: train one."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from penjing.base.files import make_folder
from penjing.data.corpus import Corpus, DataSettings
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.data.tokenizer.train import train_tokenizer


def train(files: list[Path], out: Path, vocab_size: int, max_han_per_token: int, console: Console) -> None:
    """Train a tokenizer on documents and save it; on a terminal with bars."""

    def say(text: str) -> None:
        console.print(text, soft_wrap=True)

    make_folder(out)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    progress = Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal)
    task = progress.add_task("reading", total=1.0)
    settings = DataSettings(train=tuple(map(str, files)), max_bad_fraction=1)
    corpus = Corpus(settings, lambda fraction, num_bytes: progress.update(task, completed=fraction))
    bad_records = corpus.counts()

    def end_reading() -> None:
        progress.update(task, completed=1.0)
        progress.stop()
        if bad_records.bad:
            say(f"{bad_records.note()}; `penjing data report` names the first")

    with progress:
        tokenizer: Tokenizer = train_tokenizer(
            corpus.texts(bad_records),
            vocab_size,
            max_han_per_token=max_han_per_token,
            note=say,
            sampled=end_reading,
            show_progress=console.is_terminal,
        )
    tokenizer.save(out)
    say(f"{out}: {tokenizer.size:,} ids")
