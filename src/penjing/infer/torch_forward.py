"""The model as it is trained, over a static cache: for accelerators, and for machines without a C compiler."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from penjing.infer.forward import Ints, bytes_per_slot
from penjing.model.cache import Cache
from penjing.model.cast_cache import cache_casted_weights
from penjing.model.lora import adapted, adapter_scope, names
from penjing.model.transformer import Transformer

# Rows of a decoding pass are a multiple of this. A CPU takes fewer than four rows, and the last few values of a tensor,
# by other kernels, which round otherwise: an answer's log-probabilities would depend on how many others are still being
# written. For the same reason a CPU reads every sequence's chunk alone.
ROW_MULTIPLE = {"cpu": 4}
SPAN_MULTIPLE = 32  # keys that attention goes over, rounded up: few different shapes


class TorchForward:
    """`Forward` by `Transformer.hidden`.

    Sequences of one token each are read together, as the first rows of the cache: slots are rows of the cache in an
    order of their own, in which those that are decoded come first.
    """

    exact = False

    def __init__(self, model: Transformer, *, num_slots: int, max_tokens: int) -> None:
        self.model, self.num_slots, self.max_tokens = model, num_slots, max_tokens
        self.vocab_size, self.device = model.config.vocab_size, model.embed.weight.device
        self.adapters = names(model)
        chosen = {layer.active for layer in adapted(model).values()} - {None}
        self.active = self.adapters.index(str(chosen.pop())) if chosen else -1
        dtype = model.compute_dtype or torch.float32
        self._multiple = ROW_MULTIPLE.get(self.device.type, 1)
        # Rows that fill up a pass are those of slots that nobody has.
        rows = num_slots + self._multiple - 1
        positions = _rounded(max_tokens, SPAN_MULTIPLE)
        self.bytes_per_slot = bytes_per_slot(model.config, positions, dtype)
        self._cache = Cache(model.config, rows, positions, device=self.device, dtype=dtype)
        self._row_S, self._slot_R = np.arange(rows), np.arange(rows)
        self._used_S = np.zeros(rows, dtype=np.int64)  # positions that were ever written
        self._leave = ExitStack()
        before = model.training
        self._leave.callback(lambda: model.train(before))
        model.eval()  # no dropout
        self._leave.enter_context(cache_casted_weights(model))

    def close(self) -> None:
        self._leave.close()
        del self._cache

    @torch.no_grad()
    def __call__(
        self, slot_N: Ints, position_N: Ints, id_N: Ints, logits_at_R: Ints, adapter_N: Ints | None = None
    ) -> Tensor:
        first_B = np.flatnonzero(np.diff(slot_N, prepend=-1))
        count_B = np.diff(first_B, append=len(slot_N))
        hidden_ND = torch.empty(len(slot_N), self.model.config.hidden_size, device=self.device)
        adapter_N = np.full(len(slot_N), self.active) if adapter_N is None else adapter_N
        for alike in self._passes(first_B, count_B):
            at_BT = first_B[alike][:, None] + np.arange(count_B[alike[0]])
            hidden_BTD = self._read(
                slot_N[first_B[alike]], position_N[first_B[alike]], id_N[at_BT], adapter_N[at_BT[:, 0]]
            )
            hidden_ND[torch.from_numpy(at_BT).to(self.device)] = hidden_BTD.float()
        return self._logits(hidden_ND[torch.from_numpy(logits_at_R).to(self.device)])

    def _passes(self, first_B: Ints, count_B: Ints) -> list[Ints]:
        """Sequences that are read together: those of one token, and of the others those of like length; where rounding
        depends on the pass, as on a CPU, each of them alone."""
        passes = [np.flatnonzero(count_B == 1)]
        longer = np.flatnonzero(count_B > 1)
        if self._multiple > 1:
            passes += [np.array([one]) for one in longer]
        else:
            passes += [np.flatnonzero(count_B == count) for count in np.unique(count_B[longer])]
        return [some for some in passes if len(some)]

    def _read(self, slot_B: Ints, position_B: Ints, id_BT: Ints, adapter_B: Ints) -> Tensor:
        """hidden_BTD of sequences that go on at their positions."""
        sequences, tokens = id_BT.shape
        fill = _rounded(sequences, self._multiple) - sequences if tokens == 1 else 0
        first = self._arrange([*slot_B.tolist(), *range(self.num_slots, self.num_slots + fill)])
        position_B, id_BT = np.pad(position_B, (0, fill)), np.pad(id_BT, ((0, fill), (0, 0)))
        self._used_S[slot_B] = position_B[:sequences] + tokens
        span = min(self._cache.max_tokens, _rounded(int(position_B.max()) + tokens, SPAN_MULTIPLE))
        cache = _Part(self._cache, first, sequences + fill, span, torch.from_numpy(position_B).to(self.device))
        with self._speaking(np.pad(adapter_B, (0, fill), constant_values=-1), sequences):
            hidden_BTD = self.model.hidden(torch.from_numpy(id_BT).to(self.device), cache=cache)
        return hidden_BTD[:sequences]

    def _speaking(self, adapter_B: Ints, real: int) -> AbstractContextManager[None]:
        mine = set(adapter_B[:real].tolist())
        if mine == {self.active} or not self.adapters:
            return nullcontext()
        named = [None if index < 0 else self.adapters[index] for index in adapter_B.tolist()]
        return adapter_scope(self.model, named[0] if len(mine) == 1 else named)

    def _arrange(self, slots: list[int]) -> int:
        """Make these slots rows of the cache that stand side by side, in this order; returns the first of them."""
        if len(slots) == 1:
            return int(self._row_S[slots[0]])
        for row, slot in enumerate(slots):
            if self._slot_R[row] != slot:
                self._swap(row, int(self._row_S[slot]))
        return 0

    def _swap(self, one: int, other: int) -> None:
        slots = self._slot_R[[one, other]]
        used = int(self._used_S[slots].max())
        for block_LBGSK in (self._cache.key_LBGSK, self._cache.value_LBGSK):
            here, there = block_LBGSK[:, one, :, :used], block_LBGSK[:, other, :, :used]
            kept = here.clone()
            here.copy_(there)
            there.copy_(kept)
        self._slot_R[[other, one]] = slots
        self._row_S[slots] = [other, one]

    def _logits(self, hidden_RD: Tensor) -> Tensor:
        rows = len(hidden_RD)
        more = _rounded(rows, self._multiple) - rows
        return self.model.logits(functional.pad(hidden_RD, (0, 0, 0, more)) if more else hidden_RD)[:rows]

    @torch.no_grad()
    def copy_prefix(self, source: int, target: int, tokens: int) -> None:
        here, there = self._row_S[source], self._row_S[target]
        for block_LBGSK in (self._cache.key_LBGSK, self._cache.value_LBGSK):
            block_LBGSK[:, there, :, :tokens] = block_LBGSK[:, here, :, :tokens]
        self._used_S[target] = tokens


class _Part(Cache):
    """Some rows of a cache, and of those the first `span` positions."""

    def __init__(self, whole: Cache, first: int, rows: int, span: int, length_B: Tensor) -> None:
        part = slice(first, first + rows)
        self.key_LBGSK, self.value_LBGSK = whole.key_LBGSK[:, part, :, :span], whole.value_LBGSK[:, part, :, :span]
        self.length_B = length_B


def _rounded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
