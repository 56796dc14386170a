"""Little text and little time: which model to train, and how long, from the bytes there are and the seconds.

The largest model wins that still sees TOKENS_PER_PARAMETER tokens in the time and has no more than PARAMETERS_PER_BYTE
parameters for the text. A larger one ends too early, a smaller one has learned all it can; docs/log.md, "Little data",
has the trials behind the numbers.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from penjing.base import formatting as units
from penjing.model.config import ModelConfig
from penjing.plan.flops import parameters

# Width, layers, heads, key/value heads, width of a head, inner width. Few wide heads, as in the preset `tiny`.
SIZES = (
    (96, 3, 1, 1, 96, 256),
    (128, 4, 2, 1, 128, 256),  # the preset `tiny`
    (192, 4, 2, 2, 96, 512),
    (256, 4, 2, 2, 128, 704),
    (320, 6, 3, 3, 128, 896),
    (448, 6, 4, 4, 128, 1216),
    (576, 8, 5, 5, 128, 1536),
)
TOKENS_PER_PARAMETER = 0.75  # least tokens of a training, repeated ones included
PARAMETERS_PER_BYTE = 3.5  # of the text
BYTES_PER_ID = 400  # of the text, for each id of the tokenizer
# More teach hardly anything, and the decay of the rate has to come before overfitting. Twice as many are for models
# with noise (see below) and fewer parameters per token than this.
MOST_EPOCHS, TWICE_BELOW = 16.0, 5.0
TRAINING_SHARE = 0.85  # of the seconds; the rest goes to tokenizer, probe, validations and checkpoints
ROWS, LEAST_STEPS = (16, 8, 4), 200  # rows of a step: as many as leave so many steps
VALIDATIONS, VALIDATION_SHARE = 12, 0.05  # of a run, and the share of its training time that they may take
PATIENCE = 3  # validations without a new lowest loss
# The noise below pays from so many parameters per token of the text on: a decay of 0.2 at 4.5 to 6 epochs gains 0.2 to
# 1.2 %, dropout and more decay 4 to 8 % at 12, where held-out loss without them rises after 4 to 7. A decay of 0.4
# costs 0.9 % at 3.9 epochs, dropout 0.4 to 2 % at 7.
NOISE_FROM, DECAY_EPOCHS, NOISE_EPOCHS = 2.5, 4.5, 9.0
DECAY = {"optimizer.weight_decay": 0.2}
NOISE = {"regularization.dropout": 0.2, "optimizer.weight_decay": 0.4}
# Other tokens each epoch in place of half of that dropout: 0.2 to 2.0 % fewer bits per byte at 19 and 33 epochs; more
# at 6, with 0.1. Not measured between.
BPE_EPOCHS, BPE_NOISE = 15.0, {"regularization.dropout": 0.1, "regularization.bpe_dropout": 0.2}
# Muon's momentum in so short a run: 0.1 to 1.2 % fewer bits per byte than 0.95 in one pass, nothing at 4 epochs.
SHORT_RUN_STEPS, SHORT_RUN_EPOCHS, SHORT_RUN_MOMENTUM = 1000, 2.0, 0.9
# Where such a run starts: 0.8 to 2.5 % fewer in one pass of 1 to 1.3 tokens per parameter, more bits at 4 epochs.
SHORT_RUN_START = "cooccurrence"
# Multi-token prediction: 0.6 to 2.6 % fewer bits per byte at 0.4M parameters, 0.1 to 0.7 % at 1M to 2.6M, from so many
# epochs on; not clear in one pass, and not measured between.
MTP_WEIGHT, MTP_EPOCHS = 0.5, 3.0
EMA_DECAY = 0.99  # an early end comes before the rate has decayed; the mean of the weights then stands in for that

SHAPE = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    "intermediate_size",
)

TimeStep = Callable[[ModelConfig], tuple[float, float]]  # seconds of a row's pass, and of an optimizer step


@dataclass(frozen=True, kw_only=True)
class Text:
    """What there is to learn from."""

    num_bytes: int
    min_vocab_size: int = 512

    @property
    def vocab_size(self) -> int:
        """A power of two: few ids for a diary, whose words are rare."""
        wanted = 1 << max(0, round(math.log2(max(1, self.num_bytes) / BYTES_PER_ID)))
        return min(4096, max(self.min_vocab_size, wanted))

    @property
    def tokens(self) -> float:
        """An estimate, within a tenth of 水浒传 and of novels by Charlotte Brontë."""
        return self.num_bytes / {512: 2.1, 1024: 2.65, 2048: 3.3, 4096: 3.6}[self.vocab_size]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A model, and the training that fits the seconds."""

    model: ModelConfig
    parameters: int
    rows: int  # of a step
    steps: int
    seconds: float  # of the training alone
    tokens: int
    epochs: float
    parameters_per_token: float  # of the text
    against: str = ""  # why not this one; empty: it may be taken


def sizes(text: Text) -> Iterator[ModelConfig]:
    """The models to choose from, smallest first."""
    for shape in SIZES:
        sizes: dict[str, Any] = dict(zip(SHAPE, (text.vocab_size, *shape), strict=True))
        yield ModelConfig(**{**ModelConfig.named("tiny"), **sizes})


def candidate(
    model: ModelConfig, text: Text, seconds: float, seq_len: int, row_and_step: tuple[float, float]
) -> Candidate:
    """The training of a model in `seconds`. row_and_step: see `TimeStep`."""
    row_seconds, optimizer_seconds = row_and_step
    size, rows, steps = parameters(model).total, 0, 0
    most_tokens = MOST_EPOCHS * text.tokens * (2 if NOISE_FROM <= size / text.tokens < TWICE_BELOW else 1)
    for rows in ROWS:
        step_seconds = rows * row_seconds + optimizer_seconds
        steps = max(1, int(TRAINING_SHARE * seconds / step_seconds))
        if steps >= LEAST_STEPS:
            break
    steps = max(1, min(steps, round(most_tokens / (rows * seq_len))))
    tokens = steps * rows * seq_len
    against = ""
    if tokens < TOKENS_PER_PARAMETER * size and tokens < 0.95 * most_tokens:
        against = f"sees {tokens / size:.1f} tokens per parameter in the time, and needs {TOKENS_PER_PARAMETER:g}"
    elif size > PARAMETERS_PER_BYTE * text.num_bytes:
        against = f"{size / text.num_bytes:.1f} parameters per byte would memorize the text"
    return Candidate(
        model=model,
        parameters=size,
        rows=rows,
        steps=steps,
        seconds=steps * step_seconds,
        tokens=tokens,
        epochs=tokens / text.tokens,
        parameters_per_token=size / text.tokens,
        against=against,
    )


def candidates(
    text: Text, seconds: float, seq_len: int, time_step: TimeStep, models: Iterable[ModelConfig]
) -> list[Candidate]:
    """Trainings of the models until one is too large; the one to take is `chosen`."""
    found: list[Candidate] = []
    for model in models:
        found.append(candidate(model, text, seconds, seq_len, time_step(model)))
        if found[-1].against:
            break
    return found


def chosen(found: list[Candidate]) -> Candidate:
    """The largest that nothing speaks against, else the smallest."""
    return next((one for one in reversed(found) if not one.against), found[0])


def settings_of(one: Candidate) -> dict[str, tuple[Any, str]]:
    """What follows from the choice: by setting its value, and why."""
    size = f"{units.count(one.parameters)} parameters: see the table"
    validation_rows = round(3 * VALIDATION_SHARE * one.steps * one.rows / VALIDATIONS)  # a pass forward takes a third
    share = f"{VALIDATIONS} validations in {VALIDATION_SHARE:.0%} of the time"
    many = (
        f"{one.parameters_per_token:.0f} parameters per token of the text and {one.epochs:.0f} epochs would memorize it"
    )
    noise: dict[str, float] = {}
    if one.parameters_per_token >= NOISE_FROM and one.epochs >= DECAY_EPOCHS:
        noise = NOISE if one.epochs >= NOISE_EPOCHS else DECAY
        noise = noise | BPE_NOISE if one.epochs >= BPE_EPOCHS else noise
    made: dict[str, tuple[Any, str]] = {name: (value, many) for name, value in noise.items()}
    if one.epochs >= MTP_EPOCHS:
        made["objective.mtp_weight"] = (MTP_WEIGHT, "the token after the next one teaches too")
    if one.epochs < SHORT_RUN_EPOCHS and one.steps <= SHORT_RUN_STEPS:
        made["optimizer.momentum"] = (SHORT_RUN_MOMENTUM, "learns faster in a short run")
        made["embedding_init"] = (SHORT_RUN_START, "the model starts from which tokens stand beside each other")
    return made | {
        "ema_decay": (EMA_DECAY, "an early end comes before the rate has decayed"),
        **{f"model.{name}": (getattr(one.model, name), size) for name in SHAPE},
        "batch.size": (one.rows, f"leaves {one.steps:,} steps"),
        "max_steps": (one.steps, f"{one.epochs:.1f} epochs in the time"),
        "eval.patience": (PATIENCE, "the run ends where held-out loss rises, and its best checkpoint is kept"),
        "eval.every": (max(1, one.steps // VALIDATIONS), share),
        "eval.sequences": (min(1024, max(8, validation_rows)), share),
    }
