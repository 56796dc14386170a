"""penjing tokenizer show: how a tokenizer splits a text."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from penjing.base.errors import UserError
from penjing.data.tokenizer.tokenizer import Tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of its own or a run's folder."""
    if not (path / "tokenizer.json").is_file():
        from penjing.track.run_dir import RunDir, stage_folder  # imports torch

        path = RunDir(stage_folder(path)).tokenizer
    return Tokenizer.load(path)


def print_tokens(path: Path, text: str, console: Console) -> None:
    """Print a text split into tokens, with their ids, and the mean characters per token."""
    tokenizer = load_tokenizer(path)
    printable = text.encode("utf-8", "backslashreplace").decode("utf-8")
    if text != printable:
        raise UserError("not valid UTF-8", where="the text", got=printable[:40])
    ids = tokenizer.encode(text)
    console.print(" ".join(f"{tokenizer.token(index)!r}:{index}" for index in ids), highlight=False, markup=False)
    console.print(f"{len(ids)} tokens, {len(text) / max(1, len(ids)):.2f} characters each", highlight=False)
