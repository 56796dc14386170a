"""What a trial of decoding measures, alike for every contestant: when the tokens come.

No torch in here: llama.cpp's trial does without, and so does its memory.
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

from penjing.base.errors import UserError
from penjing.base.process_info import peak_resident_bytes, process_age_seconds
from penjing.bench.trial_spec import DecodeSpec

REPEAT_SECONDS, MOST_REPEATS = 0.4, 5  # short measurements are repeated, and the median counts
WARMUP_TOKENS = 8

OnTokens = Callable[[Collection[int]], bool]
"""Called with the sequences that got a token, as soon as they have it; True: no more tokens are needed."""


class Decoder:
    """A contestant: greedy text, however likely the token is that would end it."""

    options: Sequence[str] = ()  # for people: what it runs with
    batches: Sequence[int] | None = None  # sizes of batches it takes part with; None: all
    longest: float = math.inf  # tokens of prompt and answer

    def open(self, sequences: int, tokens: int) -> None:
        """Make room for so many sequences of so many tokens. Its time does not count."""

    def write(self, prompts: Sequence[Sequence[int]], new_tokens: int, on_tokens: OnTokens) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass

    def peak_bytes(self) -> int:
        return peak_resident_bytes()


@dataclass
class Watch:
    """Counts tokens of one measurement.

    The rate is that of the time when all sequences are being written: from the last one's first token to the first
    one's last. Prompts may be read one after another, and then the first sequences are ahead.
    """

    sequences: int
    new_tokens: int
    seconds: float  # of decoding, at most
    clock: Callable[[], float] = time.perf_counter
    began: float = 0.0
    all_begun: float = 0.0  # when the last sequence had its first token
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
            self.all_begun = self.last = now
        else:
            self.tokens += len(sequences)
            self.last = now
        return not self._waiting and (
            max(self._written) >= self.new_tokens or self.last - self.all_begun >= self.seconds
        )

    @property
    def first_token_seconds(self) -> float:
        if self._waiting:
            raise UserError("got no token", where="decoding", got=f"{len(self._waiting)} of {self.sequences} sequences")
        return self.all_begun - self.began

    @property
    def decode_seconds(self) -> float:
        return self.last - self.all_begun


def measure(spec: DecodeSpec, decoder: Decoder, imported_bytes: int) -> dict[str, Any]:
    """A trial's record, as the timer of training trials makes it: its step is a batch of one sequence.

    imported_bytes: peak memory with the libraries and nothing else.
    """
    draw = random.Random(spec.seed)

    def watched(batch: int, length: int, new_tokens: int, *, counted: int = 0, seconds: float = spec.seconds) -> Watch:
        # New prompts each time: one that was read before might not be read again.
        prompts = [[draw.randrange(*spec.ids) for _ in range(length)] for _ in range(batch)]
        watch = Watch(batch, counted or new_tokens, seconds)
        decoder.write(prompts, new_tokens, watch)
        return watch

    def repeated(batch: int, length: int, new_tokens: int) -> list[Watch]:
        decoder.open(batch, length + new_tokens)
        watches: list[Watch] = []
        while len(watches) < MOST_REPEATS and sum(each.last - each.began for each in watches) < REPEAT_SECONDS:
            watches.append(watched(batch, length, new_tokens))
        return watches

    startup = process_age_seconds()
    decoder.open(1, spec.prompt_tokens + spec.new_tokens)
    # However long it takes: something may be compiled for a second token, and again for a third.
    warmup = watched(1, spec.prompt_tokens, spec.new_tokens, counted=WARMUP_TOKENS, seconds=math.inf)
    cpu = time.process_time()
    figures: dict[str, float] = {}
    single: list[Watch] = []
    for batch in spec.batches:
        if decoder.batches is None or batch in decoder.batches:
            watches = repeated(batch, spec.prompt_tokens, spec.new_tokens)
            figures[f"rate_{batch}"] = statistics.median(each.tokens / each.decode_seconds for each in watches)
            figures[f"read_{batch}"] = statistics.median(each.first_token_seconds for each in watches)
            single = single or watches
    for length in (length for length in spec.first_token if length < decoder.longest):
        watches = repeated(1, length, 1)
        figures[f"first_token_{length}"] = statistics.median(each.first_token_seconds for each in watches)
    counted = sorted(single, key=lambda each: each.tokens / each.decode_seconds)[len(single) // 2]
    peak = decoder.peak_bytes()
    decoder.close()
    return {
        "startup_seconds": startup,
        "step_seconds": [warmup.decode_seconds, counted.decode_seconds],
        "step_cpu_seconds": [0.0, time.process_time() - cpu],
        "step_units": [warmup.tokens, counted.tokens],
        "figures": [{}, figures],
        "curve": [],
        "peak_bytes": peak,
        "peak_bytes_after_imports": imported_bytes,
        "options": list(decoder.options),
    }


def finish(spec: DecodeSpec, decoder: Decoder, imported_bytes: int) -> None:
    """Measure, and print the trial."""
    print(json.dumps(measure(spec, decoder, imported_bytes)))
