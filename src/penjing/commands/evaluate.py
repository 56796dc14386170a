"""penjing eval: accuracy on questions, bits per byte of text.

Training leaves broken records out; evaluation stops at the first, so that every figure is of the whole file.
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from penjing.base import formatting as units
from penjing.base.accuracy import pool, scores_from_rows
from penjing.base.errors import UserError
from penjing.base.markup import escape_markup, print_table
from penjing.data import formats as records
from penjing.eval import questions as asking
from penjing.eval.text import bits_per_byte, zstd_bits_per_byte
from penjing.train.load_model import LoadedModel, load_trained, set_threads, use_device

ROW_TOKENS = 1024  # rows of a text are at least this long, if the context of the model is


def evaluate(
    path: Path,
    questions: Path | None,
    text: Path | None,
    console: Console,
    *,
    thinking: bool | None = None,
    max_tokens: int = 0,
    device: str = "auto",
    dtype: str = "auto",
) -> None:
    """Print how a model answers questions, and how well it predicts a text. thinking, max_tokens: see `questions.ask`.

    Raises UserError where there is neither.
    """
    if questions is None and text is None:
        raise UserError("nothing to evaluate on", next_step="Give --questions FILE or --text FILE.")
    set_threads(0, 1)
    trained = load_trained(path)
    use_device(trained.model, device, dtype)
    if questions is not None:
        loaded = asking.read_questions(questions)
        print_accuracy(
            asking.answer_questions(trained.model, trained.tokenizer, loaded, thinking=thinking, max_tokens=max_tokens),
            console,
        )
    if text is not None:
        print_bits(trained, text, console)


def print_accuracy(answered: list[asking.GradedAnswer], console: Console) -> None:
    """Accuracy by exact match per kind and language, with its 95 % interval and the chance level."""
    scores = scores_from_rows(asking.score_rows("", answered), ())
    cells = []
    for (_, kind, language), score in (*scores.items(), (("", "all", ""), pool(scores.values()))):
        low, high = score.interval
        counts = (score.correct, score.total, f"{score.fraction:.0%}", f"{low:.0%}-{high:.0%}")
        cells.append((kind, language, *counts, f"{score.chance or 0:.0%}"))
    print_table(console, ("kind", "language", "right>", "asked>", "accuracy>", "95 %>", "chance>"), cells)
    if cut := sum(one.is_truncated for one in answered):
        note = f"{cut} of {len(answered)} answers were truncated; raise --max-tokens"
        console.print(escape_markup("note", note, indent=""))


def print_bits(trained: LoadedModel, text: Path, console: Console) -> None:
    """Bits per byte of a text, beside that of zstd -19."""
    texts = [document.text for document in records.read_documents([text])]
    # Rows of few conversations are short, and of a model from elsewhere there are none.
    seq_len = max(trained.run.data.seq_len, min(ROW_TOKENS, trained.context_tokens))
    bits, num_bytes = bits_per_byte(trained.model, trained.tokenizer, texts, seq_len=seq_len)
    zstd = zstd_bits_per_byte("\n".join(texts))
    console.print(
        f"{text}: {units.megabytes(num_bytes)}, {bits:.4f} bits per byte; zstd -19: {zstd:.4f}", highlight=False
    )
