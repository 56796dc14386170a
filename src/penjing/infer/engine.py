"""The engine: one model answers many requests at once, one token each per step.

Continuous batching (Orca, OSDI 2022): a step is one forward pass over the last token of every running answer. The same
pass also prefills a chunk of the new prompts (chunked prefill, arXiv:2308.16369). When an answer ends, the next one
takes its slot in the following step. Decoding and prefill are the same to the engine: an answer has known tokens, of
which the first are in the KV cache. A pass computes some of the others. When none is left, the next token is sampled.

A slot keeps its KV cache after its answer has ended (prefix caching). A new prompt reuses the longest prefix that any
slot holds, such as a system prompt or the conversation so far, and prefills only the remaining tokens. The least
recently used slot is overwritten first. Clients take turns for slots and for prefill.
"""

import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penjing.base.errors import UserError, is_out_of_memory
from penjing.infer.capacity import Capacity, in_parts
from penjing.infer.forward import Forward, Ints, ints, on_device
from penjing.infer.jobs import Answer, Job, JobQueue
from penjing.infer.requests import (
    Event,
    FinishReason,
    InjectedTokens,
    NotFiniteError,
    Request,
    Token,
    Turn,
    accept_token,
    allowed_tokens,
    check_request,
)
from penjing.infer.sampler import Sampler, SamplerOutput, score
from penjing.infer.scheduler import Pass, Scheduler
from penjing.infer.slots import Slots

Result = TypeVar("Result")


class Engine:
    """Answers requests. `submit` and `cancel` may be called from any thread, all other methods from one thread.

    prefill_chunk: prompt tokens of one step. recover: when a pass runs out of memory, use fewer slots for a while;
    without it the error is raised.
    """

    def __init__(self, forward: Forward, *, prefill_chunk: int = 256, recover: bool = True) -> None:
        self.forward, self.recover = forward, recover
        self.max_tokens = forward.max_tokens
        self.tokens_read = self.tokens_shared = self.tokens_written = self.steps = 0
        self._capacity = Capacity(forward.num_slots)
        self._slots = Slots(forward.num_slots, forward.max_tokens)
        self._sampler = Sampler(forward.num_slots, forward.max_tokens, forward.vocab_size, forward.device)
        self._request_ids = itertools.count()
        self._incoming: deque[Job] = deque()
        self._cancelled: deque[int] = deque()
        self._jobs: dict[int, Job] = {}
        self._queue = JobQueue()
        invariant = forward.batch_invariant
        self._scheduler = Scheduler(self._slots, self._queue, batch_invariant=invariant, prefill_chunk=prefill_chunk)
        self._events: list[Event] = []
        self._is_out_of_memory = False  # in this step

    # --- requests -----------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> int:
        """Queue a request; returns its request_id. Raises UserError if it cannot be answered."""
        check_request(request, self.max_tokens, self.forward.vocab_size)
        adapter = self._adapter(request.adapter)
        prompt = np.asarray(request.prompt, dtype=np.int32)
        job = Job(next(self._request_ids), request, prompt, adapter)
        job.waiting.extend(Answer(job, number, seed) for number, seed in enumerate(request.seeds))
        self._incoming.append(job)
        return job.request_id

    def _adapter(self, name: str | None) -> int:
        if name is None:
            return self.forward.active_adapter
        if name == "":
            return -1
        if name not in self.forward.adapters:
            raise UserError(
                f"no adapter is named {name!r}", where="adapter", wanted=", ".join(self.forward.adapters) or "none"
            )
        return self.forward.adapters.index(name)

    def cancel(self, request_id: int) -> None:
        """End a request; its slots are free in the next step. Does nothing if it has ended."""
        self._cancelled.append(request_id)

    def cancel_all(self) -> None:
        self._cancelled.extend([job.request_id for job in [*self._jobs.values(), *self._incoming]])

    def close(self) -> None:
        self.forward.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def capacity(self) -> int:
        return self._capacity.slots

    @property
    def idle(self) -> bool:
        """Whether a step would do nothing."""
        return not (self._incoming or self._jobs or self._events or self._cancelled)

    @property
    def num_waiting(self) -> int:
        """Requests with an answer that waits for a slot."""
        return len(self._incoming) + self._queue.size

    @property
    def num_active(self) -> int:
        return int(self._slots.is_active_S.sum())

    # --- a step -------------------------------------------------------------------------------------------------------

    def step(self) -> list[Event]:
        """One forward pass, and one new token for each answer whose tokens are all computed. Returns the events."""
        self.steps += 1
        self._take_incoming()
        if started := self._admit():
            slot_R = ints([answer.slot for answer in started])
            self._sample(slot_R, lambda rows: torch.cat([_logits_of(answer) for answer in started[rows]]))
            for answer in started:
                if not answer.job.waiting:
                    answer.job.logits_1V = None
        if planned := self._scheduler.plan():
            try:
                logits_RV = self.forward(*self._forward_args(planned))
            except Exception as error:
                if not self._can_recover(error):
                    raise
                self._is_out_of_memory = True
                if self.num_active == 1:
                    (answer,) = filter(None, self._slots.answers)
                    self._finish_job(answer.job, "error", error)
            else:
                self._capacity.on_success()
                self._finish_pass(planned, logits_RV)
        if self._is_out_of_memory:
            self._reduce_capacity()
        events, self._events = self._events, []
        return events

    def _take_incoming(self) -> None:
        while self._incoming:
            job = self._incoming.popleft()
            self._jobs[job.request_id] = job
            if not job.waiting:
                self._finish_job(job, "length")
                continue
            self._queue.add(job)
        while self._cancelled:
            if cancelled := self._jobs.get(self._cancelled.popleft()):
                self._finish_job(cancelled, "cancelled")

    # --- admission ----------------------------------------------------------------------------------------------------

    def _admit(self) -> list[Answer]:
        """Give free slots to waiting answers; returns those whose first token can be sampled at once."""
        started = []
        while (slot := self._slots.free_slot(self.capacity)) >= 0 and (answer := self._scheduler.next_answer()):
            answer.job.active.append(answer)
            if self._call(answer, partial(self._start, answer, slot)):
                started.append(answer)
        return [answer for answer in started if answer.slot >= 0]  # an error may have ended its request since

    def _start(self, answer: Answer, slot: int) -> bool:
        """Put an answer into a slot, reusing cached prefixes. Returns whether its next token can be sampled now."""
        job, slots = answer.job, self._slots
        ids = np.concatenate([job.prompt, np.asarray(answer.ids, np.int32)]) if answer.ids else job.prompt
        cached, _ = slots.prefix(ids, job.adapter)
        is_ready = job.logits_1V is not None and not answer.ids and cached.tokens == len(ids)
        cached_tokens = cached.tokens if is_ready else self._scheduler.reusable_tokens(cached.tokens, len(ids))
        if job.request.prompt_logprobs and not job.is_prefilled:
            cached_tokens = 0
        if cached_tokens and slots.can_reuse(cached.slot, cached_tokens):
            slot = cached.slot
        elif cached_tokens and not self._copy_prefix(cached.slot, slot, cached_tokens):
            cached_tokens, is_ready = 0, False
        slots.take(slot, ids, cached_tokens, job.adapter)
        self._init_slot(answer, slot)
        if not answer.ids:
            job.cached_tokens = cached_tokens if not job.is_prefilled else len(job.prompt)
        self.tokens_shared += cached_tokens
        return is_ready and answer.slot >= 0  # false if its grammar failed

    def _copy_prefix(self, source: int, target: int, tokens: int) -> bool:
        """Whether there was enough memory for it."""
        self._slots.forget(target)  # it may be overwritten in part
        try:
            self.forward.copy_prefix(source, target, tokens)
        except Exception as error:
            if not self._can_recover(error):
                raise
            return False
        return True

    def _init_slot(self, answer: Answer, slot: int) -> None:
        job, slots = answer.job, self._slots
        request, num_generated = job.request, len(answer.ids)
        limit = min(request.max_new_tokens, self.max_tokens - len(job.prompt))
        answer.slot, slots.answers[slot] = slot, answer
        slots.num_generated_S[slot], slots.max_new_tokens_S[slot] = num_generated, limit
        slots.is_scored_S[slot] = request.prompt_logprobs and not job.is_prefilled
        slots.set_stop(slot, request.stop)
        self._sampler.put(slot, request, answer.seed, limit, answer.ids)
        if request.grammar is not None and answer.grammar is None:
            answer.grammar = self._call(answer, request.grammar)

    def _forward_args(self, planned: Pass) -> tuple[Ints, Ints, Ints, Ints, Ints | None]:
        slots = self._slots
        adapter_N = slots.adapter_S[planned.slot_N] if self.forward.adapters else None
        id_N = slots.token_ST[planned.slot_N, planned.position_N].astype(np.int64)
        return planned.slot_N, planned.position_N, id_N, planned.logits_index_R, adapter_N

    def _finish_pass(self, planned: Pass, logits_RV: Tensor) -> None:
        """Record what the pass computed, and sample the next token of answers that are complete."""
        slots = self._slots
        slots.num_computed_S[planned.slot_B] += planned.count_B
        is_prefill_B = (planned.count_B > 1) | (slots.num_generated_S[planned.slot_B] == 0)  # not decoding
        self.tokens_read += int(planned.count_B[is_prefill_B].sum())
        for row in np.flatnonzero(slots.is_scored_S[planned.slot_B]).tolist():
            self._score_prompt(row, planned, logits_RV)
        slot_R, row_R = planned.slot_B[planned.is_complete_B], planned.logits_row_B[planned.is_complete_B]
        for row in np.flatnonzero(slots.num_generated_S[slot_R] == 0).tolist():
            answer = slots.answers[int(slot_R[row])]
            if answer is not None and not answer.job.is_prefilled:
                self._call(answer, partial(self._finish_prefill, answer.job, logits_RV[row_R[row]]))
        if not (is_active_R := slots.is_active_S[slot_R]).all():  # some requests ended with their prompt
            slot_R, row_R = slot_R[is_active_R], row_R[is_active_R]
        are_all = len(row_R) == len(logits_RV)
        if len(slot_R):
            self._sample(
                slot_R, lambda rows: logits_RV[rows] if are_all else logits_RV[on_device(row_R[rows], logits_RV.device)]
            )

    def _finish_prefill(self, job: Job, logits_V: Tensor) -> None:
        job.is_prefilled = True
        if job.request.max_new_tokens < 1:
            self._finish_job(job, "length")
            return
        if job.waiting:
            job.logits_1V = logits_V[None].clone()
            self._queue.add(job, at_front=True)

    def _score_prompt(self, row: int, planned: Pass, logits_RV: Tensor) -> None:
        """Log-probabilities of the prompt tokens that follow those of this pass."""
        slot, count = int(planned.slot_B[row]), int(planned.count_B[row])
        answer, end = self._slots.answer_in(slot), int(self._slots.num_computed_S[slot])
        job = answer.job
        if not job.prompt_logprobs:
            job.prompt_logprobs.append(Token(int(job.prompt[0]), float("nan")))
        if self._slots.num_computed_S[slot] == len(job.prompt):
            self._slots.is_scored_S[slot] = False
        next_ids = job.prompt[end - count + 1 : end + 1]
        if not len(next_ids):
            return
        # The pass returned logits for all rows of the chunk. The row after the last prompt token has no target.
        first = int(planned.logits_row_B[row]) - count + 1
        logits_NV = logits_RV[first : first + len(next_ids)]

        def score_part(part: slice) -> list[Token]:
            return score(logits_NV[part], next_ids[part], job.request)

        for _, tokens in in_parts(len(next_ids), score_part, self._can_recover):
            if isinstance(tokens, Exception):
                self._end_with_error(answer, tokens)
            elif not all(math.isfinite(token.logp) for token in tokens):
                self._end_with_error(answer, NotFiniteError())
            else:
                job.prompt_logprobs += tokens

    # --- sampling -----------------------------------------------------------------------------------------------------

    def _sample(self, slot_R: Ints, logits_of: Callable[[slice], Tensor]) -> None:
        """Sample one token for each of these slots. logits_of: the logits of some of the rows."""

        def sample(part: slice) -> SamplerOutput:
            part_R = slot_R[part]
            index_R = self._slots.num_generated_S[part_R]
            return self._sampler.sample(part_R, index_R, logits_of(part), self._masks(part_R))

        for part, output in in_parts(len(slot_R), sample, self._can_recover):
            self._is_out_of_memory |= part != slice(0, len(slot_R))
            if isinstance(output, Exception):
                self._end_with_error(self._slots.answers[slot_R[part.start]], output)
            else:
                self._take_tokens(slot_R[part], output)

    def _take_tokens(self, slot_R: Ints, output: SamplerOutput) -> None:
        """Record a sampled token of each of these slots, and end the answers that it completes."""
        slots = self._slots
        answers, id_R = [slots.answers[slot] for slot in slot_R.tolist()], output.id_R
        slots.token_ST[slot_R, slots.num_tokens_S[slot_R]] = id_R
        slots.num_tokens_S[slot_R] += 1
        slots.num_generated_S[slot_R] += 1
        self.tokens_written += len(slot_R)
        has_stopped_R = (slots.stop_SE[slot_R] == id_R[:, None]).any(axis=1)
        is_full_R = slots.num_generated_S[slot_R] >= slots.max_new_tokens_S[slot_R]
        is_finite_R = np.isfinite(output.logp_R) & np.isfinite(output.sampling_logp_R)
        for row in np.flatnonzero(~is_finite_R).tolist():
            self._end_with_error(answers[row], NotFiniteError())
        stopped = []
        tokens = map(Token, id_R.tolist(), output.logp_R.tolist(), output.sampling_logp_R.tolist(), output.top_logprobs)
        for answer, token, has_stopped, is_full in zip(
            answers, tokens, has_stopped_R.tolist(), is_full_R.tolist(), strict=True
        ):
            if answer is None or answer.slot < 0:  # its request has ended
                continue
            if has_stopped and answer.job.request.on_turn_end is not None:
                stopped.append((answer, token))
                continue
            self._emit_token(answer, token, "stop" if has_stopped else "length" if is_full else "")
        if stopped:
            self._end_turns(stopped)

    def _emit_token(self, answer: Answer, token: Token, finish_reason: FinishReason) -> None:
        """Report a new token; the request's `should_stop` or grammar may end the answer."""
        request = answer.job.request
        should_stop = request.should_stop
        if should_stop is not None and self._call(answer, partial(should_stop, answer.number, token.id)):
            finish_reason = "stop"
        grammar = answer.grammar if finish_reason != "stop" else None
        if grammar is not None and self._call(answer, partial(accept_token, grammar, token.id)):
            finish_reason = "stop"
        if answer.job.is_over:
            return
        self._emit(answer, token, finish_reason)
        if finish_reason:
            self._finish(answer)

    def _masks(self, slot_R: Ints) -> dict[int, NDArray[np.bool_]]:
        """By row, the ids that the grammar allows."""
        masks = {}
        for row, slot in enumerate(slot_R.tolist()):
            answer = self._slots.answers[slot]
            if answer is not None and answer.grammar is not None:
                allowed_V = self._call(answer, partial(allowed_tokens, answer.grammar, self.forward.vocab_size))
                if allowed_V is not None:
                    masks[row] = allowed_V
        return masks

    def _end_turns(self, stopped: list[tuple[Answer, Token]]) -> None:
        """Call `on_turn_end`, once for all answers with the same function, and continue or finish each answer."""
        while stopped:
            on_turn_end = stopped[0][0].job.request.on_turn_end
            group = [pair for pair in stopped if pair[0].job.request.on_turn_end is on_turn_end]
            stopped = [pair for pair in stopped if pair[0].job.request.on_turn_end is not on_turn_end]
            try:
                assert on_turn_end is not None
                injected = on_turn_end([self._turn(answer) for answer, _ in group])
                self._check_injected(injected, len(group))
            except Exception as error:  # in the caller's code: other requests go on
                for answer, _ in group:
                    self._finish_job(answer.job, "error", error)
                continue
            for (answer, token), next_ids in zip(group, injected, strict=True):
                self._inject(answer, token, next_ids)

    def _check_injected(self, injected: Sequence[InjectedTokens | None], turns: int) -> None:
        if len(injected) != turns:
            raise ValueError(f"on_turn_end returned {len(injected)} results for {turns} turns")
        for tokens in injected:
            if tokens is not None and not all(0 <= token_id < self.forward.vocab_size for token_id in tokens.ids):
                raise ValueError("on_turn_end returned an id outside the vocabulary")

    def _turn(self, answer: Answer) -> Turn:
        start = answer.turns[-1] if answer.turns else 0
        ids = self._slots.generated_ids(answer.slot, len(answer.job.prompt))
        return Turn(answer.job.request_id, answer.number, len(answer.turns) + 1, ids[start:])

    def _inject(self, answer: Answer, token: Token, injected: InjectedTokens | None) -> None:
        slots, slot = self._slots, answer.slot
        if injected is None or slots.num_generated_S[slot] + len(injected.ids) >= slots.max_new_tokens_S[slot]:
            self._emit(answer, token, "stop" if injected is None else "length")
            self._finish(answer)
            return
        slots.append(slot, injected.ids)
        answer.turns.append(int(slots.num_generated_S[slot]))
        self._emit(answer, token, "", injected)

    def _emit(
        self, answer: Answer, token: Token | None, finish_reason: FinishReason, injected: InjectedTokens | None = None
    ) -> None:
        job = answer.job
        prompt, cached_tokens = None, 0
        if not answer.is_reported:
            answer.is_reported = True
            cached_tokens = job.cached_tokens if answer.number == 0 else len(job.prompt)
            prompt = tuple(job.prompt_logprobs) if job.prompt_logprobs and answer.number == 0 else None
        self._events.append(Event(job.request_id, answer.number, token, finish_reason, prompt, cached_tokens, injected))

    # --- finish -------------------------------------------------------------------------------------------------------

    def _finish(self, answer: Answer) -> None:
        """Free the slot; its KV cache stays for prompts with the same prefix."""
        self._release_slot(answer)
        job = answer.job
        job.active.remove(answer)
        if not job.active and not job.waiting:
            job.is_over = True
            self._jobs.pop(job.request_id, None)

    def _release_slot(self, answer: Answer) -> None:
        if answer.slot >= 0:
            self._slots.release(answer.slot, self.steps)
            answer.slot = -1

    def _finish_job(self, job: Job, finish_reason: FinishReason, error: Exception | None = None) -> None:
        """End all answers of a request that have not ended."""
        if job.is_over:
            return
        job.is_over = True
        self._jobs.pop(job.request_id, None)
        self._queue.remove(job)
        for answer in [*job.active, *job.waiting]:
            prompt = tuple(job.prompt_logprobs) if job.prompt_logprobs and answer.number == 0 else None
            self._events.append(Event(job.request_id, answer.number, None, finish_reason, prompt, error=error))
            self._release_slot(answer)
        job.active.clear()
        job.waiting.clear()

    def fail(self, error: Exception) -> list[Event]:
        """End every request with this error."""
        self._take_incoming()
        for job in list(self._jobs.values()):
            self._finish_job(job, "error", error)
        events, self._events = self._events, []
        return events

    def _can_recover(self, error: Exception) -> bool:
        return self.recover and is_out_of_memory(error)

    def _end_with_error(self, answer: Answer | None, error: Exception) -> None:
        """End an answer's request, if it goes on. No other answer may begin with its cache, which may hold NaN."""
        if answer is None or answer.slot < 0:
            return
        slots = [one.slot for one in answer.job.active]
        self._finish_job(answer.job, "error", error)
        for slot in slots:
            self._slots.forget(slot)
            self.forward.clear(slot)

    def _reduce_capacity(self) -> None:
        """Use half as many slots; the newest answers wait and continue later."""
        self._is_out_of_memory = False
        active = sorted(filter(None, self._slots.answers), key=lambda answer: (answer.job.request_id, answer.number))
        if len(active) < 2:
            return
        self._capacity.on_out_of_memory(len(active))
        for answer in reversed(active[self.capacity :]):
            job = answer.job
            answer.ids = self._slots.generated_ids(answer.slot, len(job.prompt))
            job.prompt_logprobs = job.prompt_logprobs if job.is_prefilled else []
            self._release_slot(answer)
            job.active.remove(answer)
            job.waiting.appendleft(answer)
            self._queue.add(job, at_front=True)

    def _call(self, answer: Answer, function: Callable[[], Result]) -> Result | None:
        """Run a request's callback; an error in it ends only that request."""
        try:
            return function()
        except Exception as error:  # of any kind: other requests go on
            self._finish_job(answer.job, "error", error)
            return None


def _logits_of(answer: Answer) -> Tensor:
    assert answer.job.logits_1V is not None
    return answer.job.logits_1V
