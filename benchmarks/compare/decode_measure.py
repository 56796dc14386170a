"""The measurement of a decoding trial, the same for every contestant: token arrival times.

This file does not import torch: llama.cpp's trial runs without it, and its memory is measured without it.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from compare.trial_spec import DecodeSpec
from penjing.base.errors import UserError
from penjing.base.process_info import peak_resident_bytes, process_age_seconds

REPEAT_SECONDS, MAX_REPEATS = 0.4, 5  # short measurements are repeated, and the median counts
WARMUP_TOKENS = 8

OnTokens = Callable[[Collection[int]], bool]
"""Called with the sequences that got a token, as soon as they have it. Returns True to stop."""


class Decoder:
    """A contestant: greedy decoding that ignores stop tokens."""

    options: Sequence[str] = ()  # configuration, for display
    batches: Sequence[int] | None = None  # supported batch sizes; None: all
    longest: float = math.inf  # maximum tokens of prompt and answer

    def open(self, sequences: int, tokens: int) -> None:
        """Allocate memory for the sequences. Not timed."""

    def write(self, prompts: Sequence[Sequence[int]], new_tokens: int, on_tokens: OnTokens) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass

    def peak_bytes(self) -> int:
        return peak_resident_bytes()


@dataclass
class TokenTimer:
    """Counts and times the tokens of one measurement.

    The rate covers the time in which all sequences decode: from the last first token to the first last token. An engine
    may prefill prompts one after another, so that the first sequences are ahead.
    """

    sequences: int
    new_tokens: int
    seconds: float  # of decoding, at most
    clock: Callable[[], float] = time.perf_counter
    began: float = 0.0
    all_started: float = 0.0  # when the last sequence got its first token
    last: float = 0.0
    tokens: int = 0  # since then
    _written: list[int] = field(default_factory=list)
    _waiting: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._written = [0] * self.sequences
        self._waiting = set(range(self.sequences))
        self.began = self.clock()

    def __call__(self, sequences: Collection[int]) -> bool:
        now = self.clock()
        for sequence in sequences:
            self._written[sequence] += 1
        if self._waiting:
            self._waiting.difference_update(sequences)
            self.all_started = self.last = now
        else:
            self.tokens += len(sequences)
            self.last = now
        return not self._waiting and (
            max(self._written) >= self.new_tokens or self.last - self.all_started >= self.seconds
        )

    @property
    def first_token_seconds(self) -> float:
        if self._waiting:
            raise UserError("got no token", where="decoding", got=f"{len(self._waiting)} of {self.sequences} sequences")
        return self.all_started - self.began

    @property
    def decode_seconds(self) -> float:
        return self.last - self.all_started


def measure(spec: DecodeSpec, decoder: Decoder, imported_bytes: int) -> dict[str, Any]:
    """A trial's record, in the format of `TrialTimer.result`: a step is a batch of one sequence.

    imported_bytes: peak memory after importing the libraries.
    """
    rng = random.Random(spec.seed)

    def run_once(
        batch: int, length: int, new_tokens: int, *, limit: int = 0, seconds: float = spec.seconds
    ) -> TokenTimer:
        # New prompts each time, because an engine may cache an earlier one.
        prompts = [[rng.randrange(*spec.ids) for _ in range(length)] for _ in range(batch)]
        timer = TokenTimer(batch, limit or new_tokens, seconds)
        decoder.write(prompts, new_tokens, timer)
        return timer

    def run_repeatedly(batch: int, length: int, new_tokens: int) -> list[TokenTimer]:
        decoder.open(batch, length + new_tokens)
        timers: list[TokenTimer] = []
        while len(timers) < MAX_REPEATS and sum(run.last - run.began for run in timers) < REPEAT_SECONDS:
            timers.append(run_once(batch, length, new_tokens))
        return timers

    startup = process_age_seconds()
    decoder.open(1, spec.prompt_tokens + spec.new_tokens)
    # No time limit: an engine may compile for the second token, and again for the third.
    warmup = run_once(1, spec.prompt_tokens, spec.new_tokens, limit=WARMUP_TOKENS, seconds=math.inf)
    cpu = time.process_time()
    figures: dict[str, float] = {}
    batch_1: list[TokenTimer] = []
    for batch in spec.batches:
        if decoder.batches is None or batch in decoder.batches:
            timers = run_repeatedly(batch, spec.prompt_tokens, spec.new_tokens)
            figures[f"rate_{batch}"] = statistics.median(run.tokens / run.decode_seconds for run in timers)
            figures[f"read_{batch}"] = statistics.median(run.first_token_seconds for run in timers)
            batch_1 = batch_1 or timers
    for length in (length for length in spec.first_token if length < decoder.longest):
        timers = run_repeatedly(1, length, 1)
        figures[f"first_token_{length}"] = statistics.median(run.first_token_seconds for run in timers)
    median_timer = sorted(batch_1, key=lambda run: run.tokens / run.decode_seconds)[len(batch_1) // 2]
    peak = decoder.peak_bytes()
    decoder.close()
    return {
        "startup_seconds": startup,
        "step_seconds": [warmup.decode_seconds, median_timer.decode_seconds],
        "step_cpu_seconds": [0.0, time.process_time() - cpu],
        "step_units": [warmup.tokens, median_timer.tokens],
        "figures": [{}, figures],
        "curve": [],
        "peak_bytes": peak,
        "peak_bytes_after_imports": imported_bytes,
        "options": list(decoder.options),
    }


def finish(spec: DecodeSpec, decoder: Decoder, imported_bytes: int) -> None:
    """Measure, and print the trial."""
    print(json.dumps(measure(spec, decoder, imported_bytes)))
