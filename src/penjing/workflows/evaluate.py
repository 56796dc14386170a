"""penjing eval: accuracy on questions, bits per byte of text.

Training skips broken records; evaluation stops at the first one, so that every figure covers the full file.
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
WRONG_SHOWN, LONGEST_SHOWN = 5, 100  # wrong answers that are printed, and characters of each of their texts


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
    """Print a model's accuracy on questions and its bits per byte of a text. thinking, max_tokens: see `questions.ask`.

    Raises UserError if neither is given.
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


def print_accuracy(graded: list[asking.GradedAnswer], console: Console) -> None:
    """Accuracy by exact match per kind and language, with its 95 % interval and the chance level."""
    scores = scores_from_rows(asking.score_rows("", graded), ())
    cells = []
    for (_, kind, language), score in (*scores.items(), (("", "all", ""), pool(scores.values()))):
        low, high = score.interval
        counts = (score.correct, score.total, f"{score.fraction:.0%}", f"{low:.0%}-{high:.0%}")
        cells.append((kind, language, *counts, f"{score.chance or 0:.0%}"))
    print_table(console, ("kind", "language", "right>", "asked>", "accuracy>", "95 %>", "chance>"), cells)
    wrong = [answer for answer in graded if not answer.is_correct]
    for answer in wrong[:: max(1, -(-len(wrong) // WRONG_SHOWN))]:  # spread over the file, and so over the kinds
        question = answer.question
        wanted = question.answer or f"a text with {', '.join(question.must_contain)}"
        line = f"{_short(question.text)} -> {_short(answer.text) or 'nothing'}; wanted {_short(wanted)}"
        console.print(escape_markup("wrong", line, indent=""), soft_wrap=True)
    if truncated := sum(answer.is_truncated for answer in graded):
        note = f"{truncated} of {len(graded)} answers were truncated; raise --max-tokens"
        console.print(escape_markup("note", note, indent=""))


def _short(text: str) -> str:
    """A text on one line, its end if it is long."""
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_SHOWN else "..." + line[3 - LONGEST_SHOWN :]


def print_bits(trained: LoadedModel, text: Path, console: Console) -> None:
    """Print bits per byte of a text, for the model and for zstd -19."""
    texts = [document.text for document in records.read_documents([text])]
    # Runs on few conversations have short rows, and external models have no row length.
    seq_len = max(trained.run.data.seq_len, min(ROW_TOKENS, trained.context_tokens))
    bits, num_bytes = bits_per_byte(trained.model, trained.tokenizer, texts, seq_len=seq_len)
    zstd = zstd_bits_per_byte("\n".join(texts))
    console.print(
        f"{text}: {units.megabytes(num_bytes)}, {bits:.4f} bits per byte; zstd -19: {zstd:.4f}", highlight=False
    )
