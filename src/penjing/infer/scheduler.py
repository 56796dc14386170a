"""Scheduling: which answer takes a free slot, and which tokens the next forward pass computes."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penjing.infer.forward import Ints, ints
from penjing.infer.jobs import Answer, Job, JobQueue
from penjing.infer.slots import Slots

MIN_CLIENT_TOKENS = 64  # of a pass: with fewer each, all of many clients would wait for the last one
MIN_PREFIX = 16  # tokens: a shorter prefix is faster to recompute than to copy


class Pass(NamedTuple):
    """The tokens of one forward pass: the next tokens of each slot, contiguous."""

    slot_B: Ints
    count_B: Ints  # tokens of each
    slot_N: Ints
    position_N: Ints
    logits_index_R: Ints  # rows whose logits are needed
    is_complete_B: NDArray[np.bool_]  # all known tokens are computed: the next can be sampled
    logits_row_B: Ints  # index in the returned logits of the slot's last token


class Scheduler:
    """Clients take turns for slots and for prefill. batch_invariant: see `Forward`. prefill_chunk: prompt tokens of one
    pass."""

    def __init__(self, slots: Slots, queue: JobQueue, *, batch_invariant: bool, prefill_chunk: int) -> None:
        self._slots, self._queue = slots, queue
        self._batch_invariant, self._chunk = batch_invariant, prefill_chunk
        self._turn = 0

    # --- admission ----------------------------------------------------------------------------------------------------

    def next_answer(self) -> Answer | None:
        """The next answer to take a free slot, removed from the queue."""
        if not self._queue.size:
            return None
        pending_tokens: dict[str, int] = {}  # by client, tokens in slots that are not computed
        for slot in np.flatnonzero(self._slots.num_tokens_S > self._slots.num_computed_S + 1).tolist():
            client = self._client(slot)
            pending_tokens[client] = pending_tokens.get(client, 0) + self._slots.pending(slot)
        return self._queue.pop(lambda job: self._can_start(job, pending_tokens))

    def _can_start(self, job: Job, pending_tokens: dict[str, int]) -> bool:
        """Whether a job gets a slot now. Not if a pass is already full, unless it is the client's first job, and not
        while another slot is prefilling a prefix of this prompt."""
        if job.is_prefilled:
            return True
        if job.client in pending_tokens and sum(pending_tokens.values()) >= self._chunk:
            return False
        if job.request.prompt_logprobs:
            return True
        cached, expected = self._slots.prefix(job.prompt, job.adapter)
        length = len(job.prompt)
        return self.reusable_tokens(expected.tokens, length) < self.reusable_tokens(cached.tokens, length) + MIN_PREFIX

    def reusable_tokens(self, tokens: int, length: int) -> int:
        """How many of `tokens` common tokens are reused. The last token of a sequence is always computed, for its
        logits. If results depend on how a prompt was cut into chunks, only whole chunks are reused."""
        tokens = min(tokens, length - 1)
        if not self._batch_invariant:
            tokens -= tokens % self._chunk
        return tokens if tokens >= MIN_PREFIX else 0

    # --- a forward pass -----------------------------------------------------------------------------------------------

    def plan(self) -> Pass | None:
        """The last token of every decoding answer, and chunks of the prompts that are being prefilled."""
        self._turn += 1
        slots = self._slots
        active_A = np.flatnonzero(slots.is_active_S)
        if not len(active_A):
            return None
        pending_A = slots.num_tokens_S[active_A] - slots.num_computed_S[active_A]
        slot_B, count_B = active_A[pending_A == 1], pending_A[pending_A == 1]
        if len(slot_B) < len(active_A):
            chunks = list(self._chunks(active_A[pending_A > 1].tolist()))
            slot_B = np.concatenate([slot_B, ints([slot for slot, _ in chunks])])
            count_B = np.concatenate([count_B, ints([count for _, count in chunks])])
        first_B = slots.num_computed_S[slot_B]
        is_complete_B = first_B + count_B == slots.num_tokens_S[slot_B]
        end_B = count_B.cumsum()
        slot_N = slot_B.repeat(count_B)
        position_N = (first_B - end_B + count_B).repeat(count_B) + np.arange(len(slot_N))
        needs_logits_N = np.zeros(len(slot_N), dtype=bool)
        needs_logits_N[end_B[is_complete_B] - 1] = True
        for row in np.flatnonzero(slots.is_scored_S[slot_B]).tolist():
            needs_logits_N[end_B[row] - count_B[row] : end_B[row]] = True
        logits_row_B = needs_logits_N.cumsum()[end_B - 1] - 1
        return Pass(slot_B, count_B, slot_N, position_N, np.flatnonzero(needs_logits_N), is_complete_B, logits_row_B)

    def _chunks(self, slots: list[int]) -> Iterator[tuple[int, int]]:
        """(slot, tokens) to prefill: about `prefill_chunk` tokens, divided equally between clients."""
        by_client: dict[str, list[int]] = {}
        for slot in sorted(slots, key=lambda slot: self._slots.answer_in(slot).job.request_id):
            by_client.setdefault(self._client(slot), []).append(slot)
        clients = sorted(by_client)
        first, remaining = self._turn % len(clients), self._chunk
        for number, client in enumerate(clients[first:] + clients[:first]):
            budget = min(remaining, max(MIN_CLIENT_TOKENS, -(-remaining // (len(clients) - number))))
            for slot in by_client[client]:
                if budget <= 0:
                    break
                count = self._slots.pending(slot)
                if self._batch_invariant:
                    count = min(count, budget)
                else:  # chunk borders must not depend on other requests
                    count = min(count, self._chunk - int(self._slots.num_computed_S[slot]) % self._chunk)
                budget, remaining = budget - count, remaining - count
                yield slot, count
            if remaining <= 0:
                return

    def _client(self, slot: int) -> str:
        return self._slots.answer_in(slot).job.client
