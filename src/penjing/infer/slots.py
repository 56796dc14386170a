"""The engine's slots: the answer, its token ids, how many of them are in the KV cache, and its limits."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from penjing.infer.jobs import Answer

NO_TOKEN = -1


class Prefix(NamedTuple):
    """The first `tokens` tokens of a sequence are in this slot."""

    slot: int
    tokens: int


class Slots:
    """The sequences in the slots, as arrays: a step's bookkeeping takes a few operations for any number of slots.

    A slot has `num_tokens` known tokens; the first `num_computed` of them are in the KV cache. Both stay after its
    answer has ended.
    """

    def __init__(self, num_slots: int, max_tokens: int) -> None:
        self.answers: list[Answer | None] = [None] * num_slots
        self.token_ST = np.full((num_slots, max_tokens), NO_TOKEN, dtype=np.int32)
        self.num_computed_S = np.zeros(num_slots, dtype=np.int64)
        self.num_tokens_S = np.zeros(num_slots, dtype=np.int64)
        self.is_active_S = np.zeros(num_slots, dtype=bool)
        self.adapter_S = np.full(num_slots, NO_TOKEN, dtype=np.int64)
        self.last_used_S = np.full(num_slots, -1, dtype=np.int64)  # step in which its answer ended
        self.num_generated_S = np.zeros(num_slots, dtype=np.int64)  # tokens after the prompt
        self.max_new_tokens_S = np.zeros(num_slots, dtype=np.int64)  # limit of num_generated
        self.is_scored_S = np.zeros(num_slots, dtype=bool)  # log-probabilities of the prompt are requested
        self.stop_SE = np.full((num_slots, 1), NO_TOKEN, dtype=np.int64)

    def answer_in(self, slot: int) -> Answer:
        answer = self.answers[slot]
        assert answer is not None
        return answer

    def pending(self, slot: int) -> int:
        """Tokens that are known but not computed."""
        return int(self.num_tokens_S[slot] - self.num_computed_S[slot])

    def free_slot(self, capacity: int) -> int:
        """The least recently used free slot; -1 if `capacity` slots are taken."""
        free = np.flatnonzero(~self.is_active_S)
        return -1 if len(self.is_active_S) - len(free) >= capacity else int(free[self.last_used_S[free].argmin()])

    def prefix(self, ids: Sequence[int] | np.ndarray, adapter: int) -> tuple[Prefix, Prefix]:
        """The longest prefix of `ids` that is cached in a slot now, and that will be after pending prefill."""
        differs_ST = self.token_ST[:, : len(ids)] != np.asarray(ids)
        common_S = np.where(differs_ST.any(axis=1), differs_ST.argmax(axis=1), differs_ST.shape[1])
        common_S[self.adapter_S != adapter] = 0
        cached_S = np.minimum(common_S, self.num_computed_S)
        expected_S = np.minimum(common_S, self.num_tokens_S) * self.is_active_S
        cached, expected = int(cached_S.argmax()), int(expected_S.argmax())
        return Prefix(cached, int(cached_S[cached])), Prefix(expected, int(expected_S[expected]))

    def can_reuse(self, slot: int, cached_tokens: int) -> bool:
        """Whether to continue in the slot itself, not a copy: it is free, and at least half of its cache is reused."""
        return not self.is_active_S[slot] and bool(2 * cached_tokens >= self.num_computed_S[slot])

    def take(self, slot: int, ids: np.ndarray, cached_tokens: int, adapter: int) -> None:
        """Put a new sequence into the slot, which has its first `cached_tokens` tokens cached."""
        self.token_ST[slot, : len(ids)] = ids
        self.num_tokens_S[slot], self.num_computed_S[slot] = len(ids), cached_tokens
        self.adapter_S[slot], self.is_active_S[slot] = adapter, True

    def release(self, slot: int, step: int) -> None:
        self.answers[slot] = None
        self.is_active_S[slot] = self.is_scored_S[slot] = False
        self.last_used_S[slot] = step
        self.num_tokens_S[slot] = self.num_computed_S[slot]

    def forget(self, slot: int) -> None:
        """The slot's cache is not valid any more."""
        self.num_tokens_S[slot] = self.num_computed_S[slot] = 0

    def append(self, slot: int, ids: Sequence[int]) -> None:
        """Append tokens that were not sampled."""
        num_tokens = int(self.num_tokens_S[slot])
        self.token_ST[slot, num_tokens : num_tokens + len(ids)] = ids
        self.num_tokens_S[slot] += len(ids)
        self.num_generated_S[slot] += len(ids)

    def generated_ids(self, slot: int, prompt_tokens: int) -> list[int]:
        ids: list[int] = self.token_ST[slot, prompt_tokens : int(self.num_tokens_S[slot])].tolist()
        return ids

    def set_stop(self, slot: int, stop: Collection[int]) -> None:
        extra = len(stop) - self.stop_SE.shape[1]
        if extra > 0:
            self.stop_SE = np.pad(self.stop_SE, ((0, 0), (0, extra)), constant_values=NO_TOKEN)
        self.stop_SE[slot] = NO_TOKEN
        self.stop_SE[slot, : len(stop)] = sorted(stop)
