"""penjing eval: scores on tasks, bits per byte of text.

Training skips broken records; evaluation stops at the first one, so that every figure covers the full file.
"""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from penjing.base import formatting as units
from penjing.base.accuracy import Score
from penjing.base.errors import UserError
from penjing.base.markup import escape_markup, print_table
from penjing.base.registry import look_up
from penjing.data import formats as records
from penjing.eval import TASKS
from penjing.eval.scorer import Graded, grade, groups, standard_error
from penjing.eval.task import Task
from penjing.eval.text import bits_per_byte, zstd_bits_per_byte
from penjing.train.load_model import LoadedModel, load_trained, set_threads, use_device

ROW_TOKENS = 1024  # rows of a text are at least this long, if the context of the model is
WRONG_SHOWN, LONGEST_SHOWN = 5, 100  # wrong answers that are printed, and characters of each of their texts


def evaluate(
    path: Path,
    tasks: Sequence[str],
    questions: Path | None,
    text: Path | None,
    console: Console,
    *,
    thinking: bool | None = None,
    max_tokens: int = 0,
    device: str = "auto",
    dtype: str = "auto",
) -> None:
    """Print a model's scores on tasks and its bits per byte of a text. thinking, max_tokens: see `scorer.grade`.
    questions: the file of the task `questions`. Raises UserError if nothing is given."""
    names = dict.fromkeys([*tasks, *(["questions"] if questions else [])])
    if not names and text is None:
        next_step = "Give --tasks NAME,..., --questions FILE or --text FILE."
        raise UserError("nothing to evaluate on", next_step=next_step)
    made: dict[str, Task] = {
        name: look_up(TASKS, name, what="task")(questions if name == "questions" else None) for name in names
    }
    set_threads(0, 1)
    trained = load_trained(path)
    use_device(trained.model, device, dtype)
    for name, task in made.items():
        graded = grade(
            task, task.requests(), trained.model, trained.tokenizer, thinking=thinking, max_tokens=max_tokens
        )
        print_scores(name, graded, console)
    if text is not None:
        print_bits(trained, text, console)


def print_scores(name: str, graded: list[Graded], console: Console) -> None:
    """The mean score per kind and language, with its 95 % interval and standard error, and the chance level."""
    by_kind = groups(graded)
    counted = [one for group in by_kind.values() for one in group]
    cells = []
    for (kind, language), group in (*by_kind.items(), (("all", ""), counted)):
        right, chance = sum(one.score for one in group), sum(one.request.chance for one in group)
        score = Score(total=len(group), correct=right, chance=chance / max(1, len(group)))
        low, high = score.interval
        counts = (f"{right:g}", len(group), f"{score.fraction:.0%}", f"{low:.0%}-{high:.0%}")
        error = standard_error(group)
        cells.append((kind, language, *counts, "" if error is None else f"{error:.1%}", f"{score.chance:.0%}"))
    headings = ("kind", "language", "right>", "asked>", "accuracy>", "95 %>", "standard error>", "chance>")
    print_table(console, headings, cells, title=name)
    wrong = [answer for answer in graded if not answer.is_correct]
    for answer in wrong[:: max(1, -(-len(wrong) // WRONG_SHOWN))]:  # spread over the requests, and so over the kinds
        asked, said, wanted = map(_short, (answer.request.text, answer.text, answer.request.wanted))
        line = f"{asked} -> {said or 'nothing'}; wanted {wanted}"
        console.print(escape_markup("wrong", line, indent=""), soft_wrap=True)
    if truncated := sum(answer.result.is_truncated for answer in graded):
        note = f"{truncated} of {len(graded)} answers were truncated; raise --max-tokens"
        console.print(escape_markup("note", note, indent=""))
    if ties := sum(answer.result.num_best > 1 for answer in graded):
        note = f"{ties / len(graded):.1%} of the choices tie for the highest probability; each of k counts 1/k"
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
