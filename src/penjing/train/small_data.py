"""Small files: fewer and shorter rows in a step, so that a run takes enough of them; what to say where it does not."""

from __future__ import annotations

import math
from dataclasses import replace

from penjing.train.config import Run

EPOCH_STEPS = 25  # that an epoch has at least, where there are so many rows
FEW_STEPS = 50  # a run of fewer is warned of
ROW_MULTIPLE = 8


def fit_batch(run: Run, units_per_epoch: int, world: int = 1) -> Run:
    """The run with as many rows in a step as its data allow, and `batch.min_steps` 0: from here on a plain number.

    units_per_epoch: rows (pairs, prompts) to learn from. world: devices; the number is the same for any, unless it has
    to be raised so that each of them has a row. A run that is continued takes the number it was begun with, and one
    that is asked for a number of steps the batch as it is.
    """
    how = run.batch
    if not how.min_steps or run.max_steps:
        return replace(run, batch=replace(how, min_steps=0))
    rows = step_rows(
        how.size,
        units_per_epoch,
        steps_of_batch_1=run.epochs * units_per_epoch,
        min_steps=how.min_steps,
        multiple=_multiple(run, world),
    )
    return replace(run, batch=replace(how, size=rows, min_steps=0))


def fit_rows(run: Run, num_tokens: int, longest: int) -> Run:
    """The run with rows short enough that few conversations fill several of them, and `data.min_seq_len` 0.

    num_tokens: of all conversations to learn from. longest: tokens of the longest one, held-out ones among them.
    """
    how = run.data
    if not how.min_seq_len or how.format != "chats" or run.max_steps:
        return replace(run, data=replace(how, min_seq_len=0))
    fill = int(num_tokens / max(EPOCH_STEPS, run.batch.min_steps / run.epochs))
    length = max(how.min_seq_len, fill // ROW_MULTIPLE * ROW_MULTIPLE, -(-(longest + 1) // ROW_MULTIPLE) * ROW_MULTIPLE)
    return replace(run, data=replace(how, seq_len=min(how.seq_len, length), min_seq_len=0))


def step_rows(most: int, units_per_epoch: int, *, steps_of_batch_1: float, min_steps: int, multiple: int = 1) -> int:
    """Rows of an optimizer step: `most`, or the largest power of two with which a run takes `min_steps` steps and an
    epoch EPOCH_STEPS; at least 1, and a multiple of `multiple`."""
    fit = min(units_per_epoch // EPOCH_STEPS, steps_of_batch_1 / min_steps)
    if fit >= most:
        return most
    rows = 1 << (max(1, int(fit)).bit_length() - 1)
    return min(most, math.ceil(rows / multiple) * multiple)


def _multiple(run: Run, world: int) -> int:
    """What a step's rows must be a multiple of: the rows of a pass on every device."""
    together = run.objective.indivisible_units
    return world * (run.batch.micro_size or (2 * together if together > 1 else 1))  # a CPU takes a step in two passes


def data_warnings(steps: int, rows: int, units_per_epoch: float, unit: str) -> list[str]:
    """Warnings about a run that will learn little, a line each. units_per_epoch: infinite where it is not known."""
    lines = []
    if steps < FEW_STEPS:
        lines.append(f"only {steps} optimizer steps, which teach little: take more epochs or a smaller batch.size")
    if rows > units_per_epoch:
        lines.append(
            f"a batch of {rows} {unit} is larger than an epoch of {units_per_epoch:.0f}: the same ones come several "
            "times in each step; take a smaller batch.size"
        )
    return lines


def start_warnings(loss: float | None, vocab_size: int) -> list[str]:
    """A warning where a model that is to be taught further knows less than one that guesses. loss: nats per token of
    held-out rows before step 1."""
    guessed = math.log(vocab_size)
    if loss is None or loss <= guessed:
        return []
    return [
        f"held-out loss begins at {loss:.2f} nats per token, above {guessed:.2f} of guessing among {vocab_size:,} "
        "ids: tokenizer, template or language of these data may not fit the model"
    ]
