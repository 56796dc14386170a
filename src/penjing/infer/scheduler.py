"""What the engine does next: which answer takes a free slot, and which tokens a pass of the model reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penjing.infer.forward import Ints, ints
from penjing.infer.jobs import Answer, Job, JobQueue
from penjing.infer.slots import Slots

SMALLEST_SHARE = 64  # tokens of a pass that a client is given: many who each get a few would all wait for the last
SHORTEST_PREFIX = 16  # tokens: fewer are read again sooner than found and copied


class Pass(NamedTuple):
    """The tokens that one pass reads: those of a slot side by side, each slot's next ones."""

    slot_B: Ints
    count_B: Ints  # tokens of each
    slot_N: Ints
    position_N: Ints
    at_R: Ints  # rows whose logits are wanted
    complete_B: NDArray[np.bool_]  # with them all that is known of the slot's sequence is read: the next can be drawn
    row_of_last_B: Ints  # where the logits after a slot's last token are among those that are wanted


class Scheduler:
    """Turns: of clients for slots and for the reading of prompts.

    exact: whether a pass gives a token the same values whatever else it reads. prefill_chunk: tokens of prompts that a
    pass reads.
    """

    def __init__(self, slots: Slots, queue: JobQueue, *, exact: bool, prefill_chunk: int) -> None:
        self._slots, self._queue = slots, queue
        self._exact, self._prefill_chunk = exact, prefill_chunk
        self._turn = 0

    # --- who gets a slot ---------------------------------------------------------------------------------------------

    def next_answer(self) -> Answer | None:
        """The next to take a free slot; taken from the queue."""
        if not self._queue.size:
            return None
        unread: dict[str, int] = {}  # tokens of each client's prompts that are in slots and still to be read
        for slot in np.flatnonzero(self._slots.known_S > self._slots.length_S + 1).tolist():
            client = self._client(slot)
            unread[client] = unread.get(client, 0) + self._slots.pending(slot)
        return self._queue.take(lambda job: self._may_begin(job, unread))

    def _may_begin(self, job: Job, unread: dict[str, int]) -> bool:
        """Whether it is worth a slot now: not where more is to be read than a pass takes, unless it is the client's
        first, nor where a slot is just reading what this prompt begins with."""
        if job.is_read:
            return True
        if job.client in unread and sum(unread.values()) >= self._prefill_chunk:
            return False
        if job.request.prompt_logprobs:
            return True
        now, soon = self._slots.prefix(job.prompt, job.adapter)
        length = len(job.prompt)
        return self.sharable(soon.tokens, length) < self.sharable(now.tokens, length) + SHORTEST_PREFIX

    def sharable(self, tokens: int, length: int) -> int:
        """Of so many tokens that a slot has in common with a sequence, how many are taken over: the last one is read,
        for what comes after it. Where values depend on how a prompt was cut into chunks, whole chunks only."""
        tokens = min(tokens, length - 1)
        if not self._exact:
            tokens -= tokens % self._prefill_chunk
        return tokens if tokens >= SHORTEST_PREFIX else 0

    # --- what a pass reads -------------------------------------------------------------------------------------------

    def plan(self) -> Pass | None:
        """The last token of every answer that is being written, and chunks of the others' tokens."""
        self._turn += 1
        slots = self._slots
        active_A = np.flatnonzero(slots.is_active_S)
        if not len(active_A):
            return None
        pending_A = slots.known_S[active_A] - slots.length_S[active_A]
        slot_B, count_B = active_A[pending_A == 1], pending_A[pending_A == 1]
        if len(slot_B) < len(active_A):
            chunks = list(self._chunks(active_A[pending_A > 1].tolist()))
            slot_B = np.concatenate([slot_B, ints([slot for slot, _ in chunks])])
            count_B = np.concatenate([count_B, ints([count for _, count in chunks])])
        first_B = slots.length_S[slot_B]
        complete_B = first_B + count_B == slots.known_S[slot_B]
        end_B = count_B.cumsum()
        slot_N = slot_B.repeat(count_B)
        position_N = (first_B - end_B + count_B).repeat(count_B) + np.arange(len(slot_N))
        is_wanted_N = np.zeros(len(slot_N), dtype=bool)
        is_wanted_N[end_B[complete_B] - 1] = True
        for place in np.flatnonzero(slots.is_scored_S[slot_B]).tolist():
            is_wanted_N[end_B[place] - count_B[place] : end_B[place]] = True
        row_of_last_B = is_wanted_N.cumsum()[end_B - 1] - 1
        return Pass(slot_B, count_B, slot_N, position_N, np.flatnonzero(is_wanted_N), complete_B, row_of_last_B)

    def _chunks(self, slots: list[int]) -> Iterator[tuple[int, int]]:
        """(slot, tokens) of what is read beside the answers, about `prefill_chunk` tokens, the same for each client."""
        by_client: dict[str, list[int]] = {}
        for slot in sorted(slots, key=lambda slot: self._slots.at(slot).job.ticket):
            by_client.setdefault(self._client(slot), []).append(slot)
        clients = sorted(by_client)
        first, left = self._turn % len(clients), self._prefill_chunk
        for number, client in enumerate(clients[first:] + clients[:first]):
            share = min(left, max(SMALLEST_SHARE, -(-left // (len(clients) - number))))
            for slot in by_client[client]:
                if share <= 0:
                    break
                count = self._slots.pending(slot)
                if self._exact:
                    count = min(count, share)
                else:  # a chunk ends where it always does, whoever else reads
                    count = min(count, self._prefill_chunk - int(self._slots.length_S[slot]) % self._prefill_chunk)
                share, left = share - count, left - count
                yield slot, count
            if left <= 0:
                return

    def _client(self, slot: int) -> str:
        return self._slots.at(slot).job.client
