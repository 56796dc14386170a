"""What stands in the engine's slots: whose answer, its token ids, how many of them are read, and where it ends."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from penjing.infer.jobs import Answer

NO_TOKEN = -1


class Prefix(NamedTuple):
    """So many first tokens of a sequence stand in this slot."""

    slot: int
    tokens: int


class Slots:
    """The sequences in the slots, as arrays: a step's bookkeeping is a handful of operations however many there are.

    Of a slot's tokens the first `known` are known and of those the first `length` are read: their keys and values are
    there. Both stay when its answer has ended.
    """

    def __init__(self, num_slots: int, max_tokens: int) -> None:
        self.answers: list[Answer | None] = [None] * num_slots
        self.token_ST = np.full((num_slots, max_tokens), NO_TOKEN, dtype=np.int32)
        self.length_S = np.zeros(num_slots, dtype=np.int64)
        self.known_S = np.zeros(num_slots, dtype=np.int64)
        self.is_active_S = np.zeros(num_slots, dtype=bool)
        self.adapter_S = np.full(num_slots, NO_TOKEN, dtype=np.int64)
        self.last_used_S = np.full(num_slots, -1, dtype=np.int64)  # step in which its answer ended
        self.written_S = np.zeros(num_slots, dtype=np.int64)  # tokens after the prompt
        self.limit_S = np.zeros(num_slots, dtype=np.int64)  # most of them
        self.is_scored_S = np.zeros(num_slots, dtype=bool)  # the prompt is to be scored
        self.stop_SE = np.full((num_slots, 1), NO_TOKEN, dtype=np.int64)

    def at(self, slot: int) -> Answer:
        """The answer in a slot that has one."""
        answer = self.answers[slot]
        assert answer is not None
        return answer

    def pending(self, slot: int) -> int:
        """Tokens that are known and not read."""
        return int(self.known_S[slot] - self.length_S[slot])

    def oldest(self, capacity: int) -> int:
        """Of the free slots the one used longest ago; -1 where `capacity` are taken."""
        free = np.flatnonzero(~self.is_active_S)
        if len(self.is_active_S) - len(free) >= capacity:
            return -1
        return int(free[self.last_used_S[free].argmin()])

    def prefix(self, ids: Sequence[int] | np.ndarray, adapter: int) -> tuple[Prefix, Prefix]:
        """The longest beginning of `ids` that a slot holds now, and that one will when all it knows is read."""
        differs_ST = self.token_ST[:, : len(ids)] != np.asarray(ids)
        same_S = np.where(differs_ST.any(axis=1), differs_ST.argmax(axis=1), differs_ST.shape[1])
        same_S[self.adapter_S != adapter] = 0
        now_S = np.minimum(same_S, self.length_S)
        soon_S = np.minimum(same_S, self.known_S) * self.is_active_S
        now, soon = int(now_S.argmax()), int(soon_S.argmax())
        return Prefix(now, int(now_S[now])), Prefix(soon, int(soon_S[soon]))

    def may_go_on_in(self, slot: int, shared: int) -> bool:
        """Whether a sequence that shares so many tokens is to take the slot itself: it is free, and little is lost."""
        return not self.is_active_S[slot] and bool(2 * shared >= self.length_S[slot])

    def take(self, slot: int, ids: np.ndarray, shared: int, adapter: int) -> None:
        """A new sequence, of which the slot holds the first `shared` tokens."""
        self.token_ST[slot, : len(ids)] = ids
        self.known_S[slot], self.length_S[slot] = len(ids), shared
        self.adapter_S[slot], self.is_active_S[slot] = adapter, True

    def release(self, slot: int, step: int) -> None:
        self.answers[slot] = None
        self.is_active_S[slot] = self.is_scored_S[slot] = False
        self.last_used_S[slot] = step
        self.known_S[slot] = self.length_S[slot]

    def append(self, slot: int, ids: Sequence[int]) -> None:
        """Tokens that nobody drew."""
        known = int(self.known_S[slot])
        self.token_ST[slot, known : known + len(ids)] = ids
        self.known_S[slot] += len(ids)
        self.written_S[slot] += len(ids)

    def said(self, slot: int, prompt_tokens: int) -> list[int]:
        """The ids after the prompt."""
        ids: list[int] = self.token_ST[slot, prompt_tokens : int(self.known_S[slot])].tolist()
        return ids

    def set_stop(self, slot: int, stop: Collection[int]) -> None:
        more = len(stop) - self.stop_SE.shape[1]
        if more > 0:
            self.stop_SE = np.pad(self.stop_SE, ((0, 0), (0, more)), constant_values=NO_TOKEN)
        self.stop_SE[slot] = NO_TOKEN
        self.stop_SE[slot, : len(stop)] = sorted(stop)
