"""Many answers to many prompts, fast: each prompt is read once for all its answers, and no slot stands empty.

Continuous batching: `slots` sequences are written at once; where one ends, the next waiting answer takes its place in
the same step, its prompt's keys and values copied from where they were read. The live model writes; no copy of its
weights is made.

Every answer draws from random numbers of its own, made from its seed alone: who else is in the batch, and in which
order, has no part in what it says; on a CPU to the last bit, elsewhere but for the rounding of another number of rows.

An answer may have several turns: where the model ends one, `follow` may give it more to read, such as the results of
tools, and it goes on in the same slot, with the keys and values of all that came before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from penjing.base.errors import UserError
from penjing.infer.requests import Completion, InjectedTokens, Request, Turn, draw
from penjing.infer.sample import Sampling
from penjing.model.cache import Cache
from penjing.model.cast_cache import cache_casted_weights
from penjing.model.transformer import Transformer

# Rows of a forward pass are a multiple of this. A CPU takes fewer than four rows, and the last few values of a tensor,
# by other kernels, which round otherwise: an answer's log-probabilities would depend on how many others are still being
# written.
ROW_MULTIPLE = {"cpu": 4}
SPAN_MULTIPLE = 32  # keys that attention goes over, rounded up: few different shapes
# Positions of prompts read in one pass, padding included, and sequences written at once. On a CPU a prompt is read
# alone, as the rounding of a pass depends on its size; and small passes stay in its cache: with 256 slots a 1M model
# wrote 2,700 tokens/s, with 64 slots 6,000.
PREFILL_TOKENS = {"cpu": 1}
SLOTS = {"cpu": 64}
PREFILL_TOKENS_ELSEWHERE, SLOTS_ELSEWHERE = 16384, 256


Follow = Callable[[Sequence[Turn]], Sequence[InjectedTokens | None]]
"""What follows each of some turns; None where the answer has ended."""


def default_slots(model: Transformer) -> int:
    """Sequences written at once on the model's device."""
    return SLOTS.get(model.embed.weight.device.type, SLOTS_ELSEWHERE)


def sample_batch(
    model: Transformer,
    requests: Sequence[Request],
    *,
    max_new_tokens: int,
    stop: Collection[int],
    sampling: Sampling,
    slots: int = 0,
    score_temperature: float = 1.0,
    follow: Follow | None = None,
) -> list[list[Completion]]:
    """The answers to every request, in the order of its seeds.

    An answer ends with a stop id, after `max_new_tokens`, or when prompt and answer hold `max_position_embeddings`.
    slots: how many are written at once; 0 = 64 on a CPU, else 256. score_temperature: of `Completion.logp`.
    follow: makes answers of several turns; what it gives counts to `max_new_tokens`, and where it leaves no space for
    one more token it is not read, and the answer has ended by its length. The token at place t of an answer is drawn
    with number t of its seed's, whichever turn it is in.
    Raises UserError for an empty prompt, or one that leaves no space.
    """
    answers: list[list[Completion | None]] = [[None] * len(request.seeds) for request in requests]
    waiting = [index for index, request in enumerate(requests) if request.seeds]
    if not waiting or max_new_tokens < 1:
        return [[Completion(ids=[], logp=[], drawn_logp=[], ended="length") for _ in given] for given in answers]
    longest = max(len(requests[index].prompt) for index in waiting)
    if any(not requests[index].prompt for index in waiting):
        raise UserError("nothing to go on from", where="prompt", wanted="at least one token")
    if longest >= model.config.max_position_embeddings:
        raise UserError(
            "too long", where="prompt", got=f"{longest} tokens", wanted=f"under {model.config.max_position_embeddings}"
        )
    # Prompts of like length are read together, the same prompt side by side, and the longest first, so that attention
    # has ever fewer keys to go over.
    waiting.sort(key=lambda index: (-len(requests[index].prompt), tuple(requests[index].prompt), index))
    with torch.no_grad(), _writing(model):
        table = _Slots(
            model,
            min(
                slots or default_slots(model),
                sum(len(requests[index].seeds) for index in waiting),
            ),
            max_new_tokens=max_new_tokens,
            longest_prompt=longest,
            stop=stop,
            sampling=sampling,
            score_temperature=score_temperature,
            follow=follow,
        )
        queue = _Queue(model, requests, waiting, table.num_slots)
        # The invariant: rows 0..table.active-1 are answers under way, and all others are free.
        free: list[int] = list(range(table.num_slots))
        while True:
            while free and (admitted := queue.take(len(free))):
                rows, free = free[: len(admitted)], free[len(admitted) :]
                free = sorted([*free, *table.admit(rows, admitted, answers)])
            table.close_up(free)
            if not table.active:
                break
            free = [*table.step(answers), *range(table.active, table.num_slots)]
    return [[answer for answer in given if answer is not None] for given in answers]


@contextmanager
def _writing(model: Transformer) -> Iterator[None]:
    """No dropout and no counting of experts while it writes, and weights cast once."""
    before = model.training
    model.eval()
    try:
        with cache_casted_weights(model):
            yield
    finally:
        model.train(before)


# --- prompts ---------------------------------------------------------------------------------------------------------


class _Read(NamedTuple):
    """Prompts that were read together."""

    cache: Cache
    logits_PV: Tensor  # after each prompt's last token
    prompt: list[Sequence[int]]


class _Waiting(NamedTuple):
    """An answer whose prompt has been read: row `place` of `read`."""

    read: _Read
    place: int
    request: int
    answer: int
    seed: int


class _Queue:
    """Hands out waiting answers; reads the next prompts when those that were read are used up."""

    def __init__(self, model: Transformer, requests: Sequence[Request], order: list[int], num_slots: int) -> None:
        self.model, self.requests, self.num_slots = model, requests, num_slots
        self.order = order
        self.next = 0
        self.ready: list[_Waiting] = []

    def take(self, most: int) -> list[_Waiting]:
        """Up to `most` answers; those of one reading at a time."""
        if not self.ready:
            self._read()
        taken, self.ready = self.ready[:most], self.ready[most:]
        return taken

    def _read(self) -> None:
        if self.next >= len(self.order):
            return
        longest = len(self.requests[self.order[self.next]].prompt)
        most = max(1, PREFILL_TOKENS.get(self.model.embed.weight.device.type, PREFILL_TOKENS_ELSEWHERE) // longest)
        place_of: dict[tuple[int, ...], int] = {}
        waiting: list[tuple[int, int, int, int]] = []
        while self.next < len(self.order):
            index = self.order[self.next]
            prompt = tuple(self.requests[index].prompt)
            if prompt not in place_of:
                if len(place_of) == most or len(waiting) >= self.num_slots:
                    break
                place_of[prompt] = len(place_of)
            for answer, seed in enumerate(self.requests[index].seeds):
                waiting.append((place_of[prompt], index, answer, seed))
            self.next += 1
        read = self._prefill(list(place_of))
        self.ready = [_Waiting(read, *each) for each in waiting]

    def _prefill(self, prompts: Sequence[Sequence[int]]) -> _Read:
        model = self.model
        device = model.embed.weight.device
        length_P = torch.tensor([len(prompt) for prompt in prompts])
        ids_PT = torch.zeros(len(prompts), int(length_P.max()), dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids_PT[row, : len(prompt)] = torch.tensor(prompt)
        dtype = model.compute_dtype or torch.float32
        cache = Cache(model.config, len(prompts), ids_PT.shape[1], device=device, dtype=dtype)
        hidden_PTD = model.hidden(ids_PT.to(device), cache=cache)
        last_PD = hidden_PTD[torch.arange(len(prompts), device=device), length_P.to(device) - 1]
        return _Read(cache, _logits(model, last_PD), list(prompts))


def _logits(model: Transformer, hidden_ND: Tensor) -> Tensor:
    """logits_NV, rounded as those of many rows are."""
    rows = len(hidden_ND)
    more = _rounded(rows, hidden_ND.device) - rows
    return model.logits(functional.pad(hidden_ND, (0, 0, 0, more)) if more else hidden_ND)[:rows]


def _rounded(rows: int, device: torch.device) -> int:
    """Rows of a forward pass that so many sequences take part in."""
    multiple = ROW_MULTIPLE.get(device.type, 1)
    return -(-rows // multiple) * multiple


# --- slots -----------------------------------------------------------------------------------------------------------


class _SlotCache(Cache):
    """A cache of which only the first rows and the first `span` positions are in use."""

    span = 0

    @property
    def max_tokens(self) -> int:
        return self.span

    def write(self, layer: int, position_BT: Tensor, key_BTGK: Tensor, value_BTGK: Tensor) -> tuple[Tensor, Tensor]:
        key_BGSK, value_BGSK = super().write(layer, position_BT, key_BTGK, value_BTGK)
        rows = position_BT.shape[0]
        return key_BGSK[:rows, :, : self.span], value_BGSK[:rows, :, : self.span]


@dataclass(slots=True)
class _Ended:
    """A row that said a stop id, or as much as it may."""

    row: int
    ids: list[int]
    logp: list[float]
    drawn_logp: list[float]
    stopped: bool


class _Slots:
    """The sequences under way, as rows of static tensors."""

    def __init__(
        self,
        model: Transformer,
        num_slots: int,
        *,
        max_new_tokens: int,
        longest_prompt: int,
        stop: Collection[int],
        sampling: Sampling,
        score_temperature: float,
        follow: Follow | None,
    ) -> None:
        self.model, self.num_slots, self.max_new_tokens = model, num_slots, max_new_tokens
        self.sampling, self.score_temperature = sampling, score_temperature
        device = model.embed.weight.device
        room = min(longest_prompt + max_new_tokens, model.config.max_position_embeddings)
        room = -(-room // SPAN_MULTIPLE) * SPAN_MULTIPLE
        self.max_cache_tokens = room
        rows = _rounded(num_slots, device)
        self.cache = _SlotCache(model.config, rows, room, device=device, dtype=model.compute_dtype or torch.float32)
        self.stop_E = torch.tensor(sorted(stop), dtype=torch.long, device=device)
        self.active = 0
        self.length_S = torch.zeros(rows, dtype=torch.long, device=device)  # positions in the cache
        self.written_S = torch.zeros_like(self.length_S)
        self.limit_S = torch.zeros_like(self.length_S)
        self.last_S = torch.zeros_like(self.length_S)
        self.id_ST = torch.zeros(rows, max_new_tokens, dtype=torch.long, device=device)
        self.logp_ST = torch.zeros(rows, max_new_tokens, device=device)
        self.drawn_logp_ST = torch.zeros_like(self.logp_ST)
        self.uniform_ST = torch.zeros_like(self.logp_ST)
        self.host_length = np.zeros(num_slots, dtype=np.int64)  # `length_S`, known without waiting for the device
        self.owner: list[tuple[int, int]] = [(-1, -1)] * num_slots
        self.follow = follow
        # where in the answer, and what
        self.given: list[list[tuple[int, InjectedTokens]]] = [[] for _ in range(num_slots)]

    def admit(self, rows: list[int], admitted: list[_Waiting], answers: list[list[Completion | None]]) -> list[int]:
        """Put answers into free rows and write their first tokens; returns the rows of those that ended with it."""
        device = self.length_S.device
        row_N = torch.tensor(rows, device=device)
        read = admitted[0].read
        place_N = torch.tensor([each.place for each in admitted], device=device)
        span = read.cache.max_tokens
        for mine, theirs in (
            (self.cache.key_LBGSK, read.cache.key_LBGSK),
            (self.cache.value_LBGSK, read.cache.value_LBGSK),
        ):
            mine[:, :, :, :span].index_copy_(1, row_N, theirs.index_select(1, place_N))
        lengths = [len(read.prompt[each.place]) for each in admitted]
        limits = [min(self.max_new_tokens, self.model.config.max_position_embeddings - length) for length in lengths]
        self.length_S[row_N] = torch.tensor(lengths, device=device)
        self.limit_S[row_N] = torch.tensor(limits, device=device)
        self.written_S[row_N] = 0
        self.host_length[rows] = lengths
        for row, each in zip(rows, admitted, strict=True):
            self.owner[row], self.given[row] = (each.request, each.answer), []
        if not self.sampling.is_greedy:
            drawn = [
                np.random.Generator(np.random.PCG64(each.seed)).random(self.max_new_tokens, dtype=np.float32)
                for each in admitted
            ]
            self.uniform_ST[row_N] = torch.from_numpy(np.stack(drawn)).to(device)
        self.active = max(self.active, rows[-1] + 1)
        return self._turns(self._say(row_N, read.logits_PV[place_N]), answers)

    def step(self, answers: list[list[Completion | None]]) -> list[int]:
        """One token for every active row; returns the rows that ended."""
        active = self.active
        rows = _rounded(active, self.length_S.device)
        self.length_S[active:rows] = 0  # of free ones that are taken along
        self.cache.span = min(
            self.max_cache_tokens, -(-(int(self.host_length[:active].max()) + 1) // SPAN_MULTIPLE) * SPAN_MULTIPLE
        )
        self.cache.length_B = self.length_S[:rows]  # a view: the model counts on in it
        hidden_BTD = self.model.hidden(self.last_S[:rows, None], cache=self.cache)
        self.host_length[:active] += 1
        row_N = torch.arange(active, device=self.length_S.device)
        return self._turns(self._say(row_N, _logits(self.model, hidden_BTD[:, -1])[:active]), answers)

    def _say(self, row_N: Tensor, logits_NV: Tensor) -> list[_Ended]:
        """One token for each of these rows; what stands in those that ended with it."""
        at_N = self.written_S[row_N]
        said = draw(logits_NV, self.uniform_ST[row_N, at_N], self.sampling, self.score_temperature)
        self.id_ST[row_N, at_N] = said.id_B
        self.logp_ST[row_N, at_N] = said.logp_B
        self.drawn_logp_ST[row_N, at_N] = said.drawn_logp_B
        self.last_S[row_N] = said.id_B
        self.written_S[row_N] = at_N + 1
        stopped_N = (said.id_B[:, None] == self.stop_E).any(dim=-1)
        ended_N = stopped_N | (at_N + 1 >= self.limit_S[row_N])
        if not bool(ended_N.any()):
            return []
        done_N = row_N[ended_N]
        done, stopped, lengths = done_N.tolist(), stopped_N[ended_N].tolist(), self.written_S[done_N].tolist()
        most = max(lengths)
        ids, logp = self.id_ST[done_N, :most].tolist(), self.logp_ST[done_N, :most].tolist()
        drawn_logp = self.drawn_logp_ST[done_N, :most].tolist()
        return [
            _Ended(row, ids[number][:length], logp[number][:length], drawn_logp[number][:length], stopped[number])
            for number, (row, length) in enumerate(zip(done, lengths, strict=True))
        ]

    def _turns(self, ended: list[_Ended], answers: list[list[Completion | None]]) -> list[int]:
        """Let those go on whose turn something follows, and write down the others; returns their rows."""
        free = []
        while ended:
            following: dict[int, Sequence[int]] = {}
            if self.follow is not None:
                following = self._following(ended, self.follow)
            for one in ended:
                if one.row not in following:
                    self._write_down(one, answers)
                    free.append(one.row)
            ended = [one for some in self._lots(following) for one in self._say(*self._read_on(some))]
        return free

    def _following(self, ended: Sequence[_Ended], follow: Follow) -> dict[int, Sequence[int]]:
        """By row, what the answers that go on are given to read."""
        stopped = [one for one in ended if one.stopped]
        turns = []
        for one in stopped:
            before = self.given[one.row]
            start = before[-1][0] + len(before[-1][1].ids) if before else 0
            turns.append(Turn(*self.owner[one.row], len(before) + 1, one.ids[start:]))
        limits = self.limit_S.tolist() if stopped else []
        following = {}
        for one, given in zip(stopped, follow(turns) if turns else (), strict=True):
            if given is None:
                continue
            if len(one.ids) + len(given.ids) < limits[one.row]:
                self.given[one.row].append((len(one.ids), given))
                following[one.row] = given.ids
            else:
                one.stopped = False
        return following

    def _lots(self, following: dict[int, Sequence[int]]) -> list[dict[int, Sequence[int]]]:
        """What is read in one pass: all together, but on a CPU each alone, as prompts are."""
        if self.length_S.device.type != "cpu":
            return [following] if following else []
        return [{row: ids} for row, ids in following.items()]

    def _read_on(self, following: dict[int, Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Read what was given into rows that go on, behind their last token; (row_N, logits_NV) after it.

        Their keys and values are copied out of the slots and back: the model reads rows that stand side by side.
        """
        device, rows = self.length_S.device, list(following)
        row_N = torch.tensor(rows, device=device)
        lengths = [len(following[row]) + 1 for row in rows]  # the token that ended the turn has not been read yet
        before, longest = int(self.host_length[rows].max()), max(lengths)
        ids_NT = torch.zeros(len(rows), longest, dtype=torch.long)
        for number, row in enumerate(rows):
            ids_NT[number, 1 : lengths[number]] = torch.tensor(following[row])
        ids_NT = ids_NT.to(device)
        ids_NT[:, 0] = self.last_S[row_N]
        span = -(-(before + longest) // SPAN_MULTIPLE) * SPAN_MULTIPLE
        dtype = self.cache.key_LBGSK.dtype
        cache = Cache(self.model.config, len(rows), span, device=device, dtype=dtype)
        shared = min(before, self.max_cache_tokens)
        pairs = ((self.cache.key_LBGSK, cache.key_LBGSK), (self.cache.value_LBGSK, cache.value_LBGSK))
        for mine, copied in pairs:
            copied[:, :, :, :shared] = mine[:, :, :, :shared].index_select(1, row_N)
        cache.length_B = self.length_S[row_N]
        hidden_NTD = self.model.hidden(ids_NT, cache=cache)
        first, last = int(self.host_length[rows].min()), min(span, self.max_cache_tokens)
        for mine, copied in pairs:
            mine[:, :, :, first:last].index_copy_(1, row_N, copied[:, :, :, first:last])
        length_N = torch.tensor(lengths, device=device)
        at_N = self.written_S[row_N]
        for number, row in enumerate(rows):
            self.id_ST[row, int(at_N[number]) : int(at_N[number]) + lengths[number] - 1] = ids_NT[
                number, 1 : lengths[number]
            ]
        self.length_S[row_N] += length_N
        self.written_S[row_N] += length_N - 1
        self.host_length[rows] += lengths
        last_ND = hidden_NTD[torch.arange(len(rows), device=device), length_N - 1]
        return row_N, _logits(self.model, last_ND)

    def _write_down(self, one: _Ended, answers: list[list[Completion | None]]) -> None:
        request, answer = self.owner[one.row]
        said: list[bool] | None = None
        if self.given[one.row]:
            said = [True] * len(one.ids)
            for start, given in self.given[one.row]:
                for place in range(start, start + len(given.ids)):
                    said[place], one.logp[place], one.drawn_logp[place] = False, 0.0, 0.0
        answers[request][answer] = Completion(
            ids=one.ids,
            logp=one.logp,
            drawn_logp=one.drawn_logp,
            ended="stop" if one.stopped else "length",
            said=said,
            notes=tuple(given.note for _, given in self.given[one.row]),
        )

    def close_up(self, free: list[int]) -> None:
        """Move the last active rows into the free ones before them, so that active rows stand first."""
        holes = sorted(row for row in free if row < self.active)
        left = self.active - len(holes)
        into = [row for row in holes if row < left]
        moved = [row for row in range(left, self.active) if row not in set(holes)]
        self.active = left
        if not into:
            return
        device = self.length_S.device
        into_N, moved_N = torch.tensor(into, device=device), torch.tensor(moved, device=device)
        span = int(self.host_length[moved].max())
        for block_LBGSK in (self.cache.key_LBGSK, self.cache.value_LBGSK):
            part = block_LBGSK[:, :, :, :span]
            part.index_copy_(1, into_N, part.index_select(1, moved_N))
        for tensor in (
            self.length_S,
            self.written_S,
            self.limit_S,
            self.last_S,
            self.id_ST,
            self.logp_ST,
            self.drawn_logp_ST,
            self.uniform_ST,
        ):
            tensor[into_N] = tensor[moved_N]
        self.host_length[into] = self.host_length[moved]
        for here, there in zip(into, moved, strict=True):
            self.owner[here], self.given[here] = self.owner[there], self.given[there]
