"""Small datasets: fewer and shorter rows per step, so that a run takes enough steps; warnings if it does not."""

from __future__ import annotations

import math
from dataclasses import replace

from penjing.train.config import Run

EPOCH_STEPS = 25  # least steps of an epoch, if there are that many rows
FEW_STEPS = 50  # a run with fewer steps gives a warning
ROW_MULTIPLE = 8


def fit_batch(run: Run, units_per_epoch: int, world: int = 1) -> Run:
    """The run with as many rows per step as its data allow, and `batch.min_steps` resolved to 0.

    units_per_epoch: rows (pairs, prompts) to learn from. world: devices; the batch size does not depend on it, except
    that each device gets a row. A resumed run keeps its batch size, and so does a run with `max_steps`.
    """
    batch = run.batch
    if not batch.min_steps or run.max_steps:
        return replace(run, batch=replace(batch, min_steps=0))
    rows = step_rows(
        batch.size,
        units_per_epoch,
        steps_of_batch_1=run.epochs * units_per_epoch,
        min_steps=batch.min_steps,
        multiple=_multiple(run, world),
    )
    return replace(run, batch=replace(batch, size=rows, min_steps=0))


def fit_rows(run: Run, num_tokens: int, longest: int) -> Run:
    """The run with rows so short that few conversations fill several of them, and `data.min_seq_len` resolved to 0.

    num_tokens: of all training conversations. longest: tokens of the longest conversation, including held-out ones.
    """
    data = run.data
    if not data.min_seq_len or data.format != "chats" or run.max_steps:
        return replace(run, data=replace(data, min_seq_len=0))
    fill = int(num_tokens / max(EPOCH_STEPS, run.batch.min_steps / run.epochs))
    shortest = -(-(longest + 1) // ROW_MULTIPLE) * ROW_MULTIPLE
    length = max(data.min_seq_len, fill // ROW_MULTIPLE * ROW_MULTIPLE, shortest)
    return replace(run, data=replace(data, seq_len=min(data.seq_len, length), min_seq_len=0))


def step_rows(largest: int, units_per_epoch: int, *, steps_of_batch_1: float, min_steps: int, multiple: int = 1) -> int:
    """Rows of an optimizer step: `largest`, or the largest power of two with which a run takes `min_steps` steps and an
    epoch EPOCH_STEPS; at least 1, and a multiple of `multiple`."""
    fit = min(units_per_epoch // EPOCH_STEPS, steps_of_batch_1 / min_steps)
    if fit >= largest:
        return largest
    rows = 1 << (max(1, int(fit)).bit_length() - 1)
    return min(largest, math.ceil(rows / multiple) * multiple)


def _multiple(run: Run, world: int) -> int:
    """The batch size must be a multiple of this: the rows of one pass on every device."""
    indivisible = run.objective.indivisible_units
    return world * (run.batch.micro_size or (2 * indivisible if indivisible > 1 else 1))  # 2: the passes on a CPU


def data_warnings(steps: int, rows: int, units_per_epoch: float, unit: str) -> list[str]:
    """Warnings about a run that will learn little, one line each. units_per_epoch: infinite if unknown."""
    lines = []
    if steps < FEW_STEPS:
        lines.append(f"only {steps} optimizer steps, which teach little: use more epochs or a smaller batch.size")
    if rows > units_per_epoch:
        lines.append(
            f"a batch of {rows} {unit} is larger than an epoch of {units_per_epoch:.0f}: each step repeats the same "
            f"{unit}; use a smaller batch.size"
        )
    return lines


def start_warnings(loss: float | None, vocab_size: int) -> list[str]:
    """A warning if the start model is worse than guessing. loss: nats per token of held-out rows before step 1."""
    uniform = math.log(vocab_size)
    if loss is None or loss <= uniform:
        return []
    return [
        f"held-out loss starts at {loss:.2f} nats per token, above {uniform:.2f} of guessing among {vocab_size:,} "
        "ids: tokenizer, template or language of the data may not fit the model"
    ]
